"""Scripts and data as a page embeds them: compressed into text, and named by a content security policy."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any


def packed(text: str) -> str:
    """Compress a text into characters that cannot end a script, for `packed.js` to unpack.

    It is gzip in the base 85 of `base64.b85encode`, with a comma for "<". In base 64, a page would exceed 2 MB.
    """
    return base64.b85encode(gzip.compress(text.encode(), 9, mtime=0)).decode().replace("<", ",")


def packed_figures(figures: Mapping[str, str]) -> str:
    """Compress figures, the JSON of each by its name; lists of values that several have are held once."""
    lists: dict[str, int] = {}

    def held(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: held(each) for name, each in value.items()}
        if not isinstance(value, list):
            return value
        if len(value) < _LONG or isinstance(value[0], (dict, list)):
            return [held(each) for each in value]
        return {"$list": lists.setdefault(_json(value), len(lists))}

    text = _json({name: held(json.loads(figure)) for name, figure in figures.items()})
    return packed(f"[[{','.join(lists)}],{_json(text)}]")


_LONG = 20


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


@cache
def packed_plotly() -> str:
    """Plotly's script, compressed once in a process."""
    return packed(plotly())


@cache
def plotly() -> str:
    """Plotly's script."""
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script


@cache
def digest(script: str) -> str:
    """A script as a policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def policy(scripts: Iterable[str], served: bool, forms: bool = False) -> str:
    """Return the content security policy of a page that runs `scripts` alone, and asks for nothing.

    Args:
        scripts: The text of each.
        served: True if a server's page may also ask that server for scripts and data.
        forms: True if the page may also send a form to that server.
    """
    own = "'self' " if served else ""
    rules = {
        "default-src": "'none'",
        # Plotly's parallel coordinates compile their WebGL program from text.
        "script-src": f"{own}'unsafe-eval' {' '.join(map(digest, scripts))}",
        "style-src": "'unsafe-inline'",  # Plotly sets styles
        "img-src": "data: blob:",  # of its button that saves a figure
        "base-uri": "'none'",
        "form-action": "'self'" if forms else "'none'",
    }
    rules |= {"connect-src": own} if served else {}
    return "; ".join(f"{name} {value.strip()}" for name, value in rules.items())
