"""Show values in a few characters, and sort them. Imports only modules that load fast."""

from __future__ import annotations

import re
from typing import Any

from hydro_rasda.common.secret_masking import HIDDEN, Secret

_POWERS = 1e6
"""Numbers of at least this size are shown with a power of ten."""


def show(value: Any, digits: int = 3) -> str:
    """Return a value in a few characters; floats have `digits` significant digits.

    >>> [show(value, 2) for value in (0.351, 4.24, 142.0, 2.5e6, 1e-5)]
    ['0.35', '4.2', '140', '2.5e+06', '1e-05']
    """
    if value is None:
        return ""
    if isinstance(value, Secret):
        return HIDDEN
    if isinstance(value, float):
        if 1 <= abs(value) < _POWERS:
            return f"{float(f'{value:.{digits - 1}e}'):.15g}"
        return f"{value:.{digits}g}"
    return str(getattr(value, "__name__", value))


def without_address(value: object) -> str:
    """Return the `repr` of a value without memory addresses, so that it is the same in every process.

    >>> without_address([1, object()])
    '[1, <object object>]'
    """
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def error_line(told: str | None) -> str:
    """Return the line of a traceback that names the error, or the last line of another text.

    The message of an error may have several lines, of which the last ones are often advice. Only the first one is
    returned.

    >>> error_line('Traceback:\\n  File "a.py", line 1, in f\\n    g()\\nRuntimeError: no memory\\nTry this.\\n')
    'RuntimeError: no memory'
    """
    _, frame, below = (told or "").strip().rpartition('\n  File "')
    last = next(iter(below.splitlines()[::-1]), "")
    return next((line for line in below.splitlines()[1:] if frame and not line.startswith(" ")), last)


def counted(count: float, name: str) -> str:
    """Return a count and a name; the name is in the plural unless the count is 1. Floats have two digits.

    >>> counted(1, "epoch"), counted(0, "epoch"), counted(1.04, "full training"), counted(2.5, "full training")
    ('1 epoch', '0 epochs', '1 full training', '2.5 full trainings')
    """
    told = show(count, 2)
    return f"{told} {name}{'s' * (told != '1')}"


def all_of(count: int, name: str) -> str:
    """Return words for all of several things.

    >>> all_of(1, "trial"), all_of(3, "trial")
    ('the only trial', 'all 3 trials')
    """
    return f"the only {name}" if count == 1 else f"all {count} {name}s"


def numbers_first(value: Any) -> tuple[int, float, str]:
    """Return a sort key for values of different types: numbers come before texts.

    >>> sorted(["b", 3, "a", 0.5, True], key=numbers_first)
    [0.5, True, 3, 'a', 'b']
    """
    return (0, value, "") if isinstance(value, (int, float)) else (1, 0.0, str(value))
