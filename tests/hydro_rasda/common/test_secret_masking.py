"""Secrets among a space's constants: models get them, and nothing that is kept, printed or sent shows them."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.tune.search.optuna import OptunaSearch
from torch import nn

from hydro_rasda import RunExists, SweepConfig, TuneResult, choice, grid_search, load, loguniform, secret, uniform
from hydro_rasda.cli import main
from hydro_rasda.common.secret_masking import (
    HIDDEN,
    described_secrets,
    hide,
    restore,
    scrubbed,
    secrets_of,
)
from hydro_rasda.history.unkept_values import withholding
from hydro_rasda.schedulers import Move, SweepRule, SweepState
from hydro_rasda.space.space import describe
from tests.hydro_rasda.models import mlp

Quick = Callable[..., TuneResult]

TOKEN, KEY = "hf_JgK2mmm1token", "sk-93ujds-key"
SPACE: dict[str, Any] = {
    "lr": loguniform(1e-3, 1.0),
    "optimizer": choice(["sgd", "adamw"]),
    "hf_token": secret(TOKEN),
    "hub": {"api_key": secret(KEY), "name": "digits"},
}


def model_fn(config: dict[str, Any], width_ratio: float = 1.0) -> nn.Module:
    """A model for which one has to log in."""
    if (config["hf_token"], config["hub"]["api_key"]) != (TOKEN, KEY):
        raise PermissionError("wrong password")
    if config["lr"] > 0.7:
        raise RuntimeError(f"401 for {config['hf_token']}")
    return mlp({}, width_ratio)


def kept(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_models_get_them_and_nothing_keeps_them(
    quick: Quick, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[Any] = []
    first = [{"lr": 0.9}, {"lr": 0.1}]
    given: dict[str, Any] = {"model_fn": model_fn, "space": SPACE, "sweep": SweepConfig(first=first)}
    result = quick(**given, num_samples=6, progress=True, callbacks=[told.append])
    assert result.trials[0].status == "failed"
    # What is handed back is the user's own.
    assert result.best_config["hf_token"] == TOKEN
    assert result.best_config["hub"] == {"api_key": KEY, "name": "digits"}
    before = result.best_model().state_dict()
    result.report(tmp_path / "run" / "report.html")
    result.save_model(tmp_path / "run" / "best")
    again = quick(**given, num_samples=9)  # goes on with what the journal has
    assert again.trials[1].history == result.trials[1].history
    seen = [repr(result), result._repr_html_(), repr(told), capsys.readouterr().out]
    assert main(["show", str(result.path)]) + main(["trials", str(result.path), "--json"]) == 0
    seen += [capsys.readouterr().out]
    for own in (TOKEN, KEY):
        assert not any(own in text for text in seen)
        assert not [name for name, content in kept(tmp_path / "run").items() if own.encode() in content]
    written = json.loads((tmp_path / "run" / "best" / "config.json").read_text())
    assert (written["hf_token"], written["hub"]) == (HIDDEN, {"api_key": HIDDEN, "name": "digits"})
    assert f"401 for {HIDDEN}" in str(load(tmp_path / "run").trials[0].error)

    loaded = load(tmp_path / "run")
    number = result.best_trial
    with pytest.raises(ValueError, match=r"`config\['hf_token'\]` is a secret, .*give it again"):
        loaded.best_model(number, model_fn)
    after = loaded.best_model(
        number, lambda config, width_ratio: model_fn({**config, "hf_token": TOKEN, "hub": SPACE["hub"]}, width_ratio)
    )
    if again.best_trial == number:
        assert all(torch.equal(before[name], value) for name, value in after.state_dict().items())
    loaded.best_model(number, mlp)  # which reads no secret


def test_an_error_shows_none(quick: Quick) -> None:
    def fails(config: dict[str, Any], width_ratio: float = 1.0) -> nn.Module:
        raise RuntimeError("no network")

    with pytest.raises(ValueError, match="no network") as raised:
        quick(model_fn=fails, space=SPACE)
    assert HIDDEN in str(raised.value)
    assert TOKEN not in str(raised.value)
    assert KEY not in str(raised.value)


class Refused(SweepRule):
    """Asks a server that knows no such token."""

    def decide(self, sweep: SweepState) -> dict[int, Move]:
        raise PermissionError(f"401 for {TOKEN}")


def test_a_callback_is_told_none_by_the_error_that_ends_the_run(quick: Quick) -> None:
    told: list[Any] = []
    with pytest.raises(PermissionError):
        quick(model_fn=model_fn, space=SPACE, sweep=SweepConfig(rule=Refused()), num_samples=2, callbacks=[told.append])
    assert told[-1].error == f"PermissionError: 401 for {HIDDEN}"


@pytest.mark.parametrize(
    "arguments",
    [
        {"space": {"hf_token": secret(TOKEN), "lr": 0.1}},
        {"sweep": SweepConfig(constraints=lambda config: config["depth"] < 3)},
        {"sweep": SweepConfig(constraints=lambda config: False, first=[{"hf_token": TOKEN}])},
        {"sweep": SweepConfig(first=[{"hf_token": TOKEN, "depth": 3}])},
    ],
)
def test_a_refused_configuration_or_space_shows_none(arguments: dict[str, Any], quick: Quick) -> None:
    with pytest.raises(ValueError, match=re.escape(HIDDEN)) as raised:
        quick(**{"model_fn": model_fn, "space": SPACE, **arguments})
    assert TOKEN not in str(raised.value)


@pytest.mark.usefixtures("one_process")
def test_another_secret_is_another_run(quick: Quick) -> None:
    """As another value of any other constant is."""
    quick(space=SPACE, num_samples=2, max_t=1)
    with pytest.raises(RunExists, match="`space` has other values or functions than the run's"):
        quick(space={**SPACE, "hf_token": secret("another")}, num_samples=2, max_t=1)


@pytest.mark.usefixtures("one_process")
def test_searchers_go_on_with_them(quick: Quick, tmp_path: Path) -> None:
    space = {
        "lr": loguniform(1e-3, 0.5),
        "hf_token": secret(TOKEN),
        "hub": {"api_key": secret(KEY)},
        "dropout": uniform(0, 0.5),
    }
    given: dict[str, Any] = {"model_fn": model_fn, "space": space, "max_t": 1}
    few = quick(**given, sweep=SweepConfig(searcher=OptunaSearch(seed=0)), num_samples=4)
    many = quick(
        **given, sweep=SweepConfig(searcher=OptunaSearch(seed=0)), num_samples=6
    )  # warns where it does not find its own again
    assert [trial.config for trial in many.trials[:4]] == [trial.config for trial in few.trials]
    assert TOKEN.encode() not in (tmp_path / "run" / "journal.jsonl").read_bytes()


def test_a_space_as_run_json_has_it_tells_where_secrets_are() -> None:
    space = {"token": "cls", "a": secret("x"), "hub": {"key": secret("y"), "name": "z"}, "lr": loguniform(0.1, 1)}
    found = {("a",), ("hub", "key")}
    assert secrets_of(space) == found
    assert described_secrets(describe(hide(space, found))) == found
    assert described_secrets(["no", "space"]) == set()


@pytest.mark.parametrize(
    "value", [[secret("a")], choice([secret("a"), "b"]), choice([{"key": secret("a")}, {}]), grid_search([secret("a")])]
)
def test_a_secret_is_a_constant(value: Any, quick: Quick) -> None:
    """Values that are searched have to be known afterwards."""
    with pytest.raises(
        ValueError, match=r"`space\['keys'\]` has a secret in a list or a choice, but must have it as a"
    ):
        quick(space={**SPACE, "keys": value})


@pytest.mark.parametrize("value", [b"abc", 3, None, ""])
def test_a_secret_is_a_text(value: Any) -> None:
    with pytest.raises(ValueError, match=r"`value` is .* must be a text of at least one character"):
        secret(value)


def test_a_copy_of_a_secret_shows_nothing_either() -> None:
    for again in (copy.deepcopy(secret("abc")), pickle.loads(pickle.dumps(secret("abc")))):
        assert (again, repr([again])) == ("abc", "['(hidden)']")


def test_what_is_hidden_can_be_put_back() -> None:
    config = {"a": 1, "hub": {"token": secret(TOKEN), "b": 2}, "password": secret("p")}
    places = secrets_of({**config, "other": secret("not in the configuration")})
    shown = hide(config, places)
    assert shown == {"a": 1, "hub": {"token": HIDDEN, "b": 2}, "password": HIDDEN}
    assert restore(shown, places, config) == config
    assert config["hub"] == {"token": TOKEN, "b": 2}
    assert scrubbed(f"no {TOKEN}, p", places, config) == f"no {HIDDEN}, p"
    lines = "-----BEGIN\nkey\\-----"
    assert scrubbed(str(KeyError(lines)), [("key",)], {"key": secret(lines)}) == f"'{HIDDEN}'", "which has escapes"


def test_what_is_withheld_is_asked_for_by_its_name() -> None:
    read = withholding(lambda config, name: config[name])
    get = withholding(lambda config, name: config.get(name))
    nested = withholding(lambda config: config["hub"]["token"])
    config = {"lr": 0.1, "token": HIDDEN, "hub": {"token": HIDDEN}}
    assert read(config, "lr") == get(config, "lr") == 0.1
    assert get(config, "none") is None
    for asked in (lambda: read(config, "token"), lambda: get(config, "token")):
        with pytest.raises(ValueError, match=r"`config\['token'\]` is a secret"):
            asked()
    with pytest.raises(ValueError, match=r"`config\['hub'\]\['token'\]` is a secret"):
        nested(config)
