"""The identity of a run: its settings, and short digests of its code and data. It is the same in every process."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fusion.warn import warn
from hydro_rasda.common.secret_masking import hide, secrets_of
from hydro_rasda.dry_run.dry_run_and_hints import Ready
from hydro_rasda.dry_run.request import Request
from hydro_rasda.problem.objective import ByPart
from hydro_rasda.problem.precision import as_given
from hydro_rasda.run.fingerprint import Content, are_tensors, content, data_digest, digest, parameters, unchanged
from hydro_rasda.run.run_json import determining
from hydro_rasda.settings.config import TuneConfig
from hydro_rasda.settings.objectives import functions_of
from hydro_rasda.space.domains import to_own
from hydro_rasda.space.space import describe

_DATA = ("train_data", "val_data")
_LATE = (*_DATA, "model", "parts", "environment", "code")
"""Keys of `run.json` that are known only after the dry run, or that are not part of a run's identity."""

_PIECES = 200
"""Largest number of a function's pieces (see `Content`) that are compared before the dry run; after it, all are."""


class Identity:
    """The identity of a requested run, recorded before any of the user's functions is called.

    Secrets of the space are hidden in its description, but count in its digest.
    """

    def __init__(self, request: Request) -> None:
        sweep, space = request.settings.sweep, request.space
        random = sweep.searcher in (None, "random")
        self._data, self._functions = request.data, request.functions
        self._named = {
            "space": describe(hide(space, secrets_of(space))),
            "searcher": None if random else _name_of(sweep.searcher),
            "sweep_rule": _name_of(sweep.rule),
        }
        self._made = {
            "space": content(to_own(space)),
            "searcher": parameters(None if random else sweep.searcher),
        }
        if not isinstance(sweep.rule, str):
            self._made["sweep_rule"] = parameters(sweep.rule)
        if callable(rule := request.settings.race.lr_rule):
            self._made["lr_rule"] = content(rule)
        if sweep.first:
            self._made["first"] = content([dict(config) for config in sweep.first])
        if constraints := functions_of(sweep.constraints):
            self._made["constraints"] = content([*constraints.items()])
        self._before = {name: content(function) for name, function in self._functions.items()}
        self._own: Mapping[str, str] = {}

    def known(self, settings: TuneConfig, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the identity as far as it is known before a dry run; take the rest from the existing run.

        `found` is the content of that run's `run.json`. For each function, it has the pieces that did not change when
        the function was called. A function that lacks one of these pieces is another function.
        """
        noted, digests = found.get("code", {}), found.get("digests", {})
        others = {name for name, of in self._before.items() if not noted.get(name, {}).items() <= _short(of).items()}
        others |= {name for name, of in self._data.items() if are_tensors(of) and data_digest(of) != digests.get(name)}
        early = {**determining(settings), "python": platform.python_version()}
        if found.get("surrogate") == 1:  # the dry run of that run may have set it for a pretrained model
            early["surrogate"] = 1
        late = {name: found[name] for name in _LATE if name in found}
        late["code"] = {**noted, **{name: _short(of) for name, of in self._before.items() if name in others}}
        same = {name: digests[name] for name in (*self._functions, *_DATA) if name in digests and name not in others}
        made = {name: digest(of) for name, of in self._made.items()}
        return {**late, **early, **self._named, "digests": {**made, **same, **dict.fromkeys(others, "another")}}

    def asked(self, ready: Ready, batch_size: int) -> dict[str, Any]:
        """Return what the user asked for, as the content of `run.json`, by which a later call recognizes the run."""
        # Leave out values that calls have changed, such as counters: they do not identify a function.
        after = {name: content(function) for name, function in self._functions.items()}
        stayed = {name: unchanged(self._before[name], found) for name, found in after.items()}
        for name in ("loss_fn", "objective"):
            _warn_of_state(name, self._before.get(name, {}), after.get(name, {}))
        problem, objective = ready.problem, as_given(ready.problem.objective)

        def of_data(given: Any) -> str:
            # Only the user's own loop knows how to read its data, so take the digest of the objects as they are.
            known = are_tensors(given) or not problem.is_own("sweep")
            return data_digest(given, batch_size) if known else _own_digest(given)

        digests = {name: digest(found) for name, found in (self._made | stayed).items()}
        of_each = {name: of_data(given) for name, given in self._data.items()}
        self._own = of_each if problem.is_own("sweep") else {}
        return {
            **determining(ready.settings),
            **self._named,
            "train_data": problem.train_data.describe(),
            "val_data": problem.val_data.describe() if problem.folds is None else problem.folds.words,
            "model": ready.parameters,
            **({"parts": [*objective.parts]} if isinstance(objective, ByPart) else {}),
            "python": platform.python_version(),
            "environment": environment(),
            "code": {name: dict([*_short(of).items()][:_PIECES]) for name, of in stayed.items()},
            "digests": digests | of_each,
        }

    def leave(self) -> None:
        """Note how a call leaves the data that the user's own loop has read, so that the same call recognizes them."""
        for name, before in self._own.items():
            with contextlib.suppress(Exception):  # neither data without weak references nor their state end a call
                _LEFT[self._data[name]] = before, digest(content(self._data[name]))


_LEFT: WeakKeyDictionary[Any, tuple[str, str]] = WeakKeyDictionary()
"""Maps data of own loops to their digests before and after the last call in this process: reading may change them."""


def _own_digest(given: Any) -> str:
    """Return the digest of data that the user's own loop reads, without the changes that an earlier call has made."""
    found = digest(content(given))
    with contextlib.suppress(TypeError):  # a list, for example, has no weak references
        before, after = _LEFT.get(given, (found, found))
        return before if after == found else found
    return found


def _warn_of_state(name: str, before: Content, after: Content) -> None:
    """Warn if calls of the function `name` have changed a number or a tensor that it keeps, such as a step counter."""
    numbers = [path for path, words in after.items() if words.startswith(("int ", "float ", "array "))]
    # A default of the class has been kept elsewhere. Items of other dicts may be those of a cache, which do no harm.
    there = [path for path in numbers if path in before or path.rpartition("/")[0].endswith("/state")]
    if changed := [path for path in there if before.get(path) != after[path]]:
        what = changed[0].rpartition("/")[2].removeprefix("global ").strip("'")
        told = f"calls of `{name}` change `{what}`, which it keeps, so that all trials share it"
        warn(f"{told}. If the loss depends on it, keep it in the model instead, by `register_buffer`")


def _short(found: Content) -> dict[str, str]:
    """Map the path of each piece of a function (see `Content`) to a short digest; the outermost pieces come first."""
    outermost = sorted(found, key=lambda path: (path.count("/"), path))
    return {path: hashlib.sha256(found[path].encode()).hexdigest()[:8] for path in outermost}


def _name_of(given: object) -> str:
    return given if isinstance(given, str) else type(given).__name__


def environment() -> dict[str, Any]:
    """Return the versions and the machine of a run. The run's page shows them; they are not part of its identity."""
    packages: dict[str, Any] = {}
    for name in ("hydro-rasda", "torch", "ray", "numpy"):
        with contextlib.suppress(PackageNotFoundError):  # for example in a checkout that is not installed
            packages[name] = version(name)
    # This call does not initialize CUDA, which would not survive a fork.
    gpus = torch.cuda.device_count()
    return {**packages, "system": platform.platform(terse=True), "cores": os.cpu_count(), "gpus": gpus}
