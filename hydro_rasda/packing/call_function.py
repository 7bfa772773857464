"""The program that runs a job given as a function: it calls the function and writes its value to a file.

python call_function.py FUNCTION VALUE
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # Python has put this folder there; its modules would hide others of the same name

import json
import os
import pickle
from typing import Any

MOST = 2**20
"""The most bytes of a value. There is a limit because the run's journal holds the values of all jobs."""

DEEPEST = 90
"""The most nested levels of a value. There is a limit because journals with deeper lines are not read."""


def main() -> None:
    """Call the pickled function, and write its value as JSON."""
    function, value = sys.argv[1:]
    with open(function, "rb") as file:
        called = pickle.load(file)
    text = json.dumps(plain(called()))
    if len(text) > MOST:
        raise ValueError(f"the value has {len(text)} bytes of JSON, but at most {MOST} are kept: write it to a file")
    with open(value, "w", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666)) as file:
        file.write(text)


def plain(value: Any, levels: int = DEEPEST) -> Any:
    """Return a value for JSON. Dict keys that JSON does not allow become strings, and sequences become lists.

    `of_array` converts arrays and other objects. Raise ValueError for more than `levels` nested levels.
    """
    if value is None or isinstance(value, (str, int, float)):
        return value
    if not levels:
        raise ValueError(f"the value is nested more than {DEEPEST} levels deep: write it to a file")
    if isinstance(value, dict):
        taken = (str, int, float, type(None))
        return {key if isinstance(key, taken) else str(key): plain(item, levels - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, levels - 1) for item in value]
    return plain(of_array(value), levels - 1)


def of_array(value: Any) -> Any:
    """Convert arrays and numbers of NumPy and torch to lists and numbers of Python; return `repr` of anything else."""
    try:
        found = value.tolist()
    except Exception:  # the value has no `tolist`, or is a tensor without data
        return repr(value)
    return repr(value) if type(found) is type(value) else found  # `tolist` of a NumPy longdouble returns a longdouble


if __name__ == "__main__":
    main()
