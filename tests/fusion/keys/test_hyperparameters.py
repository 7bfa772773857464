"""The table of configuration keys, against torch and against what the pages say."""

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fusion
from fusion.keys import KEYS, OPTIMIZERS, SCHEDULES, check, default, is_read, read
from fusion.optim.optimizer_config import WRITTEN
from hydro_rasda import tune

TORCH = {cls.__name__.lower(): cls for cls in vars(torch.optim).values() if isinstance(cls, type)} | WRITTEN


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_defaults_are_those_of_torchs_optimizers(kind: str) -> None:
    theirs: dict[str, Any] = {name: p.default for name, p in inspect.signature(TORCH[kind]).parameters.items()}
    theirs |= dict(zip(("beta1", "beta2"), theirs.pop("betas", ())))
    if kind == "muon":  # beside AdamW, whose updates it matches in size
        theirs |= {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "adjust_lr_fn": "match_rms_adamw"}
    ours = {name for name, key in KEYS.items() if key.reader == "optimizer" and is_read(name, {"optimizer": kind})}
    assert ours - theirs.keys() == {"optimizer"} | ({"independent_weight_decay"} if kind == "adamw" else set())
    for name in ours & theirs.keys() - {"lr"}:
        assert default(name, {"optimizer": kind}) == theirs[name]


def test_every_default_keeps_its_rule() -> None:
    for name, key in KEYS.items():
        for value in key.defaults.values() if key.under else [key.default]:
            assert name == "lr" or (key.holds(value) and (value is None or type(key.kind(value)) is type(value))), name


def test_keys_are_read_under_values_that_exist() -> None:
    assert {key.under for key in KEYS.values()} == {None, "optimizer", "schedule"}
    for key in KEYS.values():
        assert key.defaults.keys() <= {*OPTIMIZERS, *SCHEDULES}
        assert bool(key.defaults) == (key.under is not None)


def test_values_become_plain_ones_of_the_keys_type() -> None:
    config = {"lr": np.float32(0.5), "batch_size": np.int64(8), "eps": torch.tensor(0.25), "warmup_epochs": 2}
    values = [read(config, name) for name in config]
    assert values == [0.5, 8, 0.25, 2.0]
    assert [type(value) for value in values] == [float, int, float, float]


def test_a_configuration_is_checked_where_it_is_read() -> None:
    check({"momentum": "x", "gamma": "rbf", "step_size": 0, "width": -1})
    with pytest.raises(ValueError, match="`grad_clip` is 0, but must be None or a norm > 0"):
        check({"grad_clip": 0})
    with pytest.raises(
        ValueError,
        match="`schedule` is 'poly', but must be one of constant, cosine, step, exponential",
    ):
        check({"schedule": "poly", "gamma": 1})
    check({"warmup": 0.1, "warmup_epochs": 0})
    with pytest.raises(ValueError, match=r"`warmup` is 0\.1, but must be 0 beside `warmup_epochs`, which is 2"):
        check({"warmup": 0.1, "warmup_epochs": 2})


def _named(text: str, first: str, last: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text[text.index(first) : text.index(last)]))


def test_the_pages_name_every_key() -> None:
    guide = (Path(fusion.__file__).parents[1] / "docs" / "guides" / "space.md").read_text(encoding="utf-8")
    assert _named(guide, "| `lr` |", "All keys reach") == set(KEYS)
    assert "`fusion.keys` lists all keys" in " ".join((inspect.getdoc(tune) or "").split())
