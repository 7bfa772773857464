"""The jobs to run."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Number
from pathlib import Path, PurePath
from typing import Any

import cloudpickle

from hydro_rasda.common.argument_checks import check_function, check_name, check_number, is_text, require
from hydro_rasda.run.pickling import pickle_config_modules

Runnable = Sequence[str] | Callable[[], Any]
"""A command, as a list of its arguments, or a function without arguments."""


@dataclass(frozen=True)
class Estimate:
    """Expected needs of a job; None for a need that is unknown.

    Attributes:
        memory: Peak of bytes over all processes of the job.
        share: The share of a device that the job keeps busy: 0.4 if the job alone keeps a GPU, or one CPU core, 40 %
            busy.
        seconds: Run time of the job alone on a device.
    """

    memory: float | None = None
    share: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("memory", "share", "seconds"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0)
                require(getattr(self, name) < math.inf, name, getattr(self, name), "finite")


@dataclass(frozen=True)
class Task:
    """One job.

    Attributes:
        run: A command, as a list of its arguments (no shell reads them), or a function that cloudpickle can send to
            another process. A function's value is kept as JSON, of at most 1 MiB and 90 nested levels. NaN
            and infinities come back as None.
        kind: Jobs of one kind correct each other's estimates. By default, the kind is the program and its first
            argument, as in "python train.py", or the function's name.
        name: A name that no other job has, of at most 200 bytes; by default the job's place in the list.
    """

    run: Runnable
    estimate: Estimate = Estimate()
    kind: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        command = isinstance(self.run, Sequence) and not isinstance(self.run, str) and len(self.run) > 0
        fits = callable(self.run) or (command and all(isinstance(word, str) for word in self.run))
        require(fits, "run", self.run, "a function, or a list of strings: a program and its arguments")
        if callable(self.run):
            check_function("run", self.run, 0, rule="a function without arguments, or a list of strings")
        else:
            _check_words(self.run)
        require(isinstance(self.estimate, Estimate), "estimate", self.estimate, "an Estimate")
        require(isinstance(self.kind, str), "kind", self.kind, "a text")
        if not (isinstance(self.name, str) and self.name == ""):
            check_name("name", self.name)
            rule = f"a name of at most {LONGEST_NAME} bytes"
            require(len(self.name.encode()) <= LONGEST_NAME, "name", self.name, rule)

    @property
    def what(self) -> list[str]:
        """The job's identity: its command, or its function's name and `partial` arguments; long texts as digests."""
        if not callable(self.run):
            return list(map(_shortened, self.run))
        given: list[str] = []
        if isinstance(self.run, partial):
            given = [_text(value) for value in self.run.args]
            given += [f"{name}={_text(value)}" for name, value in sorted(self.run.keywords.items())]
        return [_name(self.run), *map(_shortened, given)]


LONGEST_NAME = 200
"""The most bytes of a job's name. The names of its files add a suffix, and Linux allows 255 bytes."""

LONGEST_WORD = 128 * 1024
"""Linux's limit for one argument of a program, in bytes, with the final NUL (MAX_ARG_STRLEN)."""

ROOM = 64 * 1024
"""Bytes of Linux's limit for all arguments that stay free for `run_job.py` and for the environment of a device."""


def _check_words(words: Sequence[str]) -> None:
    """Raise ValueError if the command `words` cannot start: an argument is no text, or arguments are too long."""
    require(words[0] != "", "run", words, "a program and its arguments, not one without a name")
    size = 0
    for i, word in enumerate(words):
        require(is_text(word), f"run[{i}]", word, "a text in UTF-8 without NUL bytes")
        length = len(word.encode()) + 1
        rule = f"shorter than {LONGEST_WORD} bytes, as the kernel allows for one argument: write it to a file"
        require(length <= LONGEST_WORD, f"run[{i}]", word, rule)
        size += length + 8  # the kernel also stores the address of each argument, in 8 bytes
    # The kernel accepts at most 6 MiB of arguments and environment, however large the stack may grow.
    most = (
        min(os.sysconf("SC_ARG_MAX"), 6 * 2**20)
        - ROOM
        - sum(len(name) + len(value) + 10 for name, value in os.environb.items())
    )
    rule = f"at most {most} bytes in all, beside the environment: write them to a file"
    require(size <= most, "len(run)", size, rule)


def tasks_of(jobs: Iterable[Task | Runnable]) -> list[Task]:
    """Return the jobs in their order, each with a name and a kind; ValueError if two have the same name."""
    listed = isinstance(jobs, Iterable) and not isinstance(jobs, str | bytes | Mapping)
    require(listed, "jobs", jobs, "a list of commands (lists of strings), functions and `Task`s")
    found: dict[str, Task] = {}
    for i, job in enumerate(jobs):
        try:
            task = job if isinstance(job, Task) else Task(job)
        except ValueError as error:
            raise ValueError(f"`jobs[{i}]`: {error}") from None
        name = task.name or str(i)
        require(name not in found, "name", name, "a name that no other job has")
        found[name] = replace(task, name=name, kind=task.kind or _kind(task))
    return list(found.values())


def pickled(task: Task) -> bytes:
    """Pickle a task's function; ValueError if it holds a value that cannot be pickled."""
    pickle_config_modules()
    try:
        found: bytes = cloudpickle.dumps(task.run)
    except Exception as error:  # a `__reduce__` may raise anything
        raise ValueError(f"`run` of the job {task.name!r} cannot be sent to another process: {error}") from error
    return found


def _kind(task: Task) -> str:
    if callable(task.run):
        return _name(task.run)
    program, *arguments = task.run
    return " ".join([Path(program).name, *arguments[:1]])


def _text(value: object, levels: int = 9) -> str:
    """Return an argument of a job's function as text that is the same in every process.

    Numbers, strings and collections of them are written out. For any other value, return the name of its type.
    """
    if value is None or isinstance(value, (str, bytes, Number, PurePath)):
        return repr(value)
    if levels and isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item, levels - 1) for item in value)}]"
    if levels and isinstance(value, dict):
        items = (f"{_text(key, levels - 1)}: {_text(item, levels - 1)}" for key, item in value.items())
        return f"{{{', '.join(sorted(items))}}}"
    return type(value).__qualname__


def _shortened(text: str) -> str:
    return text if len(text) <= 1000 else f"sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def _name(function: Callable[[], Any]) -> str:
    inner = getattr(function, "func", function)  # a `functools.partial` is named by its function
    names = ("__module__", "__qualname__")
    return ".".join(str(getattr(inner, name, None) or getattr(type(inner), name)) for name in names)
