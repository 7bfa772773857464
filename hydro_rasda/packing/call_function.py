"""Calls one function, and keeps what it returns: a file of its own, started for each job that is a function.

python call_function.py FUNCTION VALUE
"""

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules have names that others have, too

import json
import os
import pickle
from typing import Any

MOST = 2**20
"""Most bytes of a value: the run's journal has the values of all jobs."""


def main() -> None:
    """Call it."""
    function, value = sys.argv[1:]
    with open(function, "rb") as file:
        called = pickle.load(file)
    text = json.dumps(plain(called()), default=of_array)
    if len(text) > MOST:
        raise ValueError(f"the value has {len(text)} bytes of JSON, but at most {MOST} are kept: write it to a file")
    with open(value, "w", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666)) as file:
        file.write(text)


def plain(value: Any) -> Any:
    """Return a value with keys that JSON takes: others are the keys' texts."""
    if isinstance(value, dict):
        taken = (str, int, float, type(None))
        return {key if isinstance(key, taken) else str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def of_array(value: Any) -> Any:
    """Return the numbers of NumPy and torch as Python's; of anything else, the text that shows it."""
    try:
        found = value.tolist()
    except Exception:  # it has none, or is a tensor without data
        return repr(value)
    return repr(value) if type(found) is type(value) else found  # as NumPy's longdouble


if __name__ == "__main__":
    main()
