"""Jobs as they are handed in."""

from __future__ import annotations

import math
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hydro_rasda.packing import Estimate, Task
from hydro_rasda.packing.tasks import LONGEST_WORD, tasks_of


def test_jobs_are_named_by_their_place_and_are_of_a_kind_by_what_they_run() -> None:
    tasks = tasks_of([["/usr/bin/python", "train.py", "--lr", "1"], Task(["true"], name="mine"), math.tau.hex])
    assert [task.name for task in tasks] == ["0", "mine", "2"]
    assert [task.kind for task in tasks] == ["python train.py", "true", "builtins.float.hex"]
    assert tasks_of([Task(["true"], kind="small")])[0].kind == "small"


def test_a_partial_is_told_from_others_by_its_plain_arguments() -> None:
    (task,) = tasks_of([partial(print, {"b": [1, None], "a": Path("x")}, object(), sep="-", end="x" * 2000)])
    name, settings, other, end, separator = task.what
    assert (task.kind, name, other, separator) == ("builtins.print", "builtins.print", "object", "sep='-'")
    assert settings == "{'a': PosixPath('x'), 'b': [1, None]}"
    assert len(end) < 100
    endless: list[Any] = []
    endless.append(endless)
    assert Task(partial(print, endless)).what == ["builtins.print", "[" * 9 + "list" + "]" * 9]


def test_a_name_that_leaves_no_room_for_those_of_files_is_refused() -> None:
    assert Task(["true"], name="x" * 200).name
    with pytest.raises(ValueError, match=r"`name` is .*, but must be a name of at most 200 bytes"):
        Task(["true"], name="x" * 201)


def test_two_jobs_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="`name` is '1'"):
        tasks_of([Task(["true"], name="1"), ["true"]])


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ("true", "`run` is 'true', but must be a function, or a list"),
        ([], "`run`"),
        (["sleep", 1], "`run`"),
        (None, "`run`"),
        ([""], "`run` is .*, but must be a program and its arguments"),
        (["echo", "a\0b"], r"`run\[1\]` is 'a\\x00b', but must be a text in UTF-8 without NUL bytes"),
        (["ec\0ho"], r"`run\[0\]`"),
        (["echo", "\ud800"], r"`run\[1\]` is '\\ud800', but must be a text in UTF-8"),
        (["echo", "x" * 3_000_000], r"`run\[1\]` is 'xx.*', but must be shorter than 131072 bytes"),
        (["echo", *["x" * 1000] * 7000], r"`len\(run\)` is 70\d+, but must be at most \d+ bytes in all"),
    ],
)
def test_what_cannot_be_run_is_refused(run: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told) as refusal:
        Task(run)
    assert len(str(refusal.value)) < 2000


def test_the_longest_argument_that_is_taken_is_run() -> None:
    command = ["echo", "x" * (LONGEST_WORD - 1)]
    assert Task(command).run == command
    assert subprocess.run(command, capture_output=True, check=True).stdout.decode() == f"{command[1]}\n"


def test_a_long_command_is_told_from_others_by_a_digest() -> None:
    one, other = (Task(["echo", "x" * 100_000 + end]).what for end in "ab")
    assert one != other
    assert len("".join(one)) < 100


def test_a_command_may_have_all_the_bytes_that_are_told() -> None:
    with pytest.raises(ValueError, match="at most") as refusal:
        Task(["x" * 1000] * 7000)
    most = int(str(refusal.value).partition("at most ")[2].split()[0])
    count, rest = divmod(most, 1000 + 9)  # the end of an argument and its address take 9 bytes
    words = ["x" * 1000] * (count - 1)
    assert Task([*words, "x" * 1000, "x" * (rest - 9)] if rest > 9 else [*words, "x" * (1000 + rest)]).run
    with pytest.raises(ValueError, match="at most"):
        Task([*words, "x" * 1000, "x" * (rest - 8)] if rest > 9 else [*words, "x" * (1001 + rest)])


@pytest.mark.parametrize("name", ["memory", "share", "seconds"])
def test_an_estimate_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` is 0"):
        Estimate(**{name: 0})


def test_a_list_of_jobs_says_which_of_them_cannot_be_run() -> None:
    with pytest.raises(ValueError, match=r"`jobs\[1\]`: `run` is 'true', but must be a function, or a list"):
        tasks_of([["true"], "true"])
