from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from hydro_rasda.common.one_line_warnings import HeldBack, warnings_in_one_line, warns_in_one_line


def test_a_warning_is_one_line_without_source_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def before(*_: object) -> str:
        """Stands for Python's own, which other libraries of this process may have replaced."""
        return "with source code"

    before.__module__ = "warnings"
    monkeypatch.setattr(warnings, "formatwarning", before)
    with warnings_in_one_line():
        assert warnings.formatwarning("look out", UserWarning, "script.py", 3, "x = 1") == "warning: look out\n"
        told = warnings.formatwarning("old", DeprecationWarning, "script.py", 3, "x = 1")
        assert told == "warning: old (DeprecationWarning, script.py:3)\n"
    assert warnings.formatwarning is before

    @warns_in_one_line
    def of_another_library(**_: object) -> str:
        return warnings.formatwarning("look out", UserWarning, "script.py", 3, "x = 1")

    assert of_another_library() == of_another_library(progress=True) == "warning: look out\n"
    assert of_another_library(progress=False) == "with source code"
    assert warnings.formatwarning is before


def test_who_formats_warnings_goes_on_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*_: object) -> str:
        return "own"

    monkeypatch.setattr(warnings, "formatwarning", own)
    with warnings_in_one_line():
        assert warnings.formatwarning is own


def test_warnings_that_are_held_back_are_given_later_also_after_an_error() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with HeldBack() as held_back:
            with held_back.catching():
                warnings.warn("first", UserWarning, stacklevel=1)
            assert caught == []
            held_back.give()
            assert [str(one.message) for one in caught] == ["first"]
        assert len(caught) == 1

        def fail() -> None:
            with HeldBack() as held_back, held_back.catching():
                warnings.warn("second", UserWarning, stacklevel=1)
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert [str(one.message) for one in caught] == ["first", "second"]


SCRIPT = """
import sys
import torch
from torch import nn
from hydro_rasda import loguniform, tune

def model_fn(config, width_ratio=1.0):
    width = int(16 * width_ratio)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

x, y = torch.randn(64, 4), torch.randint(0, 2, (64,))
space = {"lr": loguniform(1e-3, 0.1), "weight_decay": loguniform(1e-5, 1e-2)}
tune(model_fn, space, train_data=(x, y), val_data=(x, y), num_samples=3, max_t=2, storage_path=sys.argv[1], name="run")
"""


def test_the_first_line_on_the_screen_is_no_warning(tmp_path: Path) -> None:
    asked = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(asked, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == f"Run folder: {tmp_path / 'run'}"
    assert any(
        line.startswith("warning: the best weight_decay at 1/8 of the width may not suit the full model")
        for line in lines
    )
    assert not any("tune(" in line for line in lines)
