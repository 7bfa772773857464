"""Each check lets through what holds, and names argument, value and rule where it does not."""

import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fusion.argument_checks
import surrogate.argument_checks
from hydro_rasda.common import argument_checks
from hydro_rasda.common.argument_checks import (
    check_choice,
    check_folder,
    check_function,
    check_int,
    check_is,
    check_mode,
    check_name,
    check_number,
    check_path,
    check_text,
)


def test_what_holds_passes() -> None:
    check_int("workers", 2, at_least=2)
    check_number("latency", 0)
    check_number("bandwidth", math.inf, above=0.0)
    check_int("max_workers", None, at_least=1, optional=True)
    check_mode("min")
    check_mode("max")


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: check_int("workers", 1, at_least=2), "`workers` is 1, but must be an integer >= 2"),
        (lambda: check_int("workers", 2.0, at_least=2), "`workers` is 2.0, but must be an integer >= 2"),
        (lambda: check_int("workers", True, at_least=1), "`workers` is True, but must be an integer >= 1"),
        (lambda: check_int("workers", None, at_least=1), "`workers` is None, but must be an integer >= 1"),
        (lambda: check_int("most", 0, at_least=1, optional=True), "`most` is 0, but must be None or an integer >= 1"),
        (lambda: check_number("latency", -0.5), "`latency` is -0.5, but must be a number >= 0"),
        (lambda: check_number("speed", 0, above=0.0), "`speed` is 0, but must be a number > 0"),
        (lambda: check_number("speed", math.nan), "`speed` is nan, but must be a number >= 0"),
        (lambda: check_number("speed", "2"), "`speed` is '2', but must be a number >= 0"),
        (lambda: check_number("speed", True), "`speed` is True, but must be a number >= 0"),
        (
            lambda: check_name("name", "\ud800"),
            "`name` is '\\ud800', but must be a folder's name of at most 255 bytes, without '/'",
        ),
        (lambda: check_mode("best"), "`mode` is 'best', but must be 'min' or 'max'"),
        (lambda: check_mode(["min"]), "`mode` is ['min'], but must be 'min' or 'max'"),
        (
            lambda: check_folder("storage_path", "s3://bucket/runs"),
            "`storage_path` is 's3://bucket/runs', but must be a folder, such as one at which the store is mounted (on "
            "each node of a cluster), not a store's address",
        ),
    ],
)
def test_a_wrong_type_and_a_wrong_value_are_refused_alike(check: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check()


RULE = "a function of one argument or three"
VALUES: list[tuple[Callable[[Any], object], list[Any], list[Any], str]] = [
    (lambda v: check_int("x", v, 1, at_most=3), [1, 3], [0, 4, None, 2.0], "an integer from 1 to 3"),
    (lambda v: check_int("x", v, 1, optional=True), [None, 1, 10**9], [0, False], "None or an integer >= 1"),
    (lambda v: check_number("x", v), [0, 0.0, math.inf], [-1e-9, None], "a number >= 0"),
    (lambda v: check_number("x", v, above=0.5), [0.51, 1], [0.5, 0], "a number > 0.5"),
    (lambda v: check_is("x", v, str), ["", "a"], [b"a", None, ["a"]], "of the class str"),
    (lambda v: check_is("x", v, str, several=True), [[], ["a"], ("a", "b")], ["a", {"a"}, None], "a list of strs"),
    (lambda v: check_path("x", v), ["a", Path("a"), "a" * 4095], [b"a", 3, "a\0", "a" * 4096], "a path"),
    (lambda v: check_choice("x", v, ["a", "b"]), ["a", "b"], ["c", "", ["a"], None], "one of ('a', 'b')"),
    (lambda v: check_text("x", v), ["a"], ["", None, 3], "a text"),
    (lambda v: check_text("x", v, optional=True), ["a", None], ["", 3, b"a"], "None or a text"),
    (
        lambda v: check_name("x", v),
        ["a", "...", "ä" * 127, "a" * 255],
        ["", ".", "..", "a/b", "a\0", 3, "ä" * 128, "a" * 256],
        "a folder's name of at most 255 bytes, without '/'",
    ),
    (
        lambda v: check_function("x", v, 1, 3, rule=RULE),
        [len, lambda a: a, lambda a, b, c: a, lambda *a: a, lambda a, b=0: a],
        [lambda: 0, lambda a, b: a, lambda a, b, c, d: a, int, type("Of", (), {}), 3, None],
        RULE,
    ),
    (
        lambda v: check_function("x", v, 1, rule=RULE, or_class=True),
        [len, type("Of", (), {"__init__": lambda self, a: None})],
        [type("Of", (), {}), lambda a, b: a],
        RULE,
    ),
]


@pytest.mark.parametrize(("check", "right", "wrong", "rule"), VALUES)
def test_each_rule_says_what_holds(
    check: Callable[[Any], object], right: list[Any], wrong: list[Any], rule: str
) -> None:
    for value in right:
        check(value)
    for value in wrong:
        with pytest.raises(ValueError, match=f"^`x` is .*, but must be {re.escape(rule)}"):
            check(value)


def test_an_item_of_a_wrong_class_is_named() -> None:
    with pytest.raises(ValueError, match=r"^`x\[1\]` is 3, but must be of the class str"):
        check_is("x", ["a", 3], str, several=True)


def test_a_link_that_leads_to_nothing_is_named(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    for folder in (link, link / "runs"):
        with pytest.raises(ValueError, match=rf"or can be made: the link {re.escape(str(link))} leads to nothing$"):
            check_folder("storage_path", folder)
    (tmp_path / "gone").mkdir()
    assert check_folder("storage_path", link / "runs") == link / "runs"


@pytest.mark.parametrize("package", [argument_checks, fusion.argument_checks, surrogate.argument_checks])
def test_a_scalar_of_numpy_or_torch_is_told_what_makes_it_a_number(package: Any) -> None:
    for value in (np.int64(3), torch.tensor(3)):
        with pytest.raises(ValueError, match=r"but must be an integer >= 1; `\.item\(\)` makes Python's own of it$"):
            package.check_int("most", value, 1)
    for plain in (np.float64(0.5), "3", 0, np.zeros(3)):
        with pytest.raises(ValueError, match=r"but must be an integer >= 1$"):
            package.check_int("most", plain, 1)


@pytest.mark.parametrize("value", [0, -1.5, 10**400, math.inf, -math.inf, math.nan, True, "1", None, 1j])
def test_a_number_and_a_metric_are_the_same_in_all_packages(value: object) -> None:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    finite = real and abs(value) <= sys.float_info.max  # type: ignore[arg-type]
    assert argument_checks.is_number(value) == fusion.argument_checks.is_number(value) == finite
    assert argument_checks.is_metric(value) == surrogate.argument_checks.is_metric(value) == real


def test_a_folder_is_there_or_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert check_folder("path", tmp_path / "a" / "b") == tmp_path / "a" / "b"
    refused = {
        tmp_path / "file": r"can be made$",
        tmp_path / ("x" * 300): r"can be made \(File name too long\)$",
        Path("~no user of this name"): r"can be made \(Could not determine home directory\.\)$",
    }
    for path, told in refused.items():
        with pytest.raises(ValueError, match=told):
            check_folder("path", path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert check_folder("path", tmp_path) == tmp_path, "it may be read only"
    with pytest.raises(ValueError, match=r"can be made$"):
        check_folder("path", tmp_path / "a")
