"""Find the keys of a configuration that nothing reads.

Most of these keys are misspelled. They change nothing, but the best configuration would still show them.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from fusion.keys import KEYS, configs_of_parts, is_of_part, is_read, own_arguments
from fusion.warn import warn
from hydro_rasda.problem.read_keys import Notes, paths
from hydro_rasda.space.space import ALIASES

Unread = dict[str, str | None]
"""Maps each key that was not read (`net.depth` if nested) to the key that was probably meant, or to None."""


def unread_of(notes: Notes | None, config: Mapping[str, Any]) -> Unread:
    """Return the keys of a configuration that neither the library nor `model_fn` nor the objective reads.

    `notes` has the keys that `model_fn` and the objective read. If `notes` is None, these are unknown, and the result
    is empty.
    """
    if notes is None:
        return {}
    unread = [path for path in paths(config) if path not in notes.read]
    configs = configs_of_parts(config).values()
    ours = {key for own in configs for key in (*own_arguments(own), *(name for name in KEYS if is_read(name, own)))}
    left = [path for path in unread if not (is_of_part(path) or path in ours)]
    known = frozenset((notes.asked | KEYS.keys()) - set(paths(config)) if left else ())
    return {path: ALIASES[path] if ALIASES.get(path) in known else _closest(path, known) for path in left}


def warn_of_unread(unread: Unread) -> None:
    """Warn of keys that no trial's model or objective read."""
    names = [_told(key, meant) for key, meant in unread.items()]
    if names:
        warn(
            f"neither `model_fn` nor the library reads {', '.join(names)}: what `space` says there changes nothing, "
            "though the best configuration will name it"
        )


def _told(key: str, meant: str | None) -> str:
    if key in KEYS:
        return f"`{key}` (read where `{KEYS[key].under}` is {' or '.join(KEYS[key].defaults)})"
    return f"`{key}`" if meant is None else f"`{key}` (did you mean `{meant}`?)"


@lru_cache(maxsize=256)
def _closest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that is most like `name`, whatever the order of the words; None if no name is close.

    >>> [_closest(name, ("weight_decay", "grad_clip")) for name in ("weight_deacy", "clip_grad", "width")]
    ['weight_decay', 'grad_clip', None]
    """
    by_words = {_words(other): other for other in sorted(known)}
    found = difflib.get_close_matches(_words(name), by_words, n=1, cutoff=0.75)
    return by_words[found[0]] if found else None


def _words(name: str) -> str:
    return "_".join(sorted(name.lower().split("_")))
