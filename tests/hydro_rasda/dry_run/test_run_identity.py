from __future__ import annotations

import functools
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.tune.search.optuna import OptunaSearch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hydro_rasda import RaceConfig, RunExists, TuneResult, load
from hydro_rasda.run.fingerprint import BYTES, content, data_digest, digest, parameters, spread_indices, unchanged
from hydro_rasda.run.resume_rules import differences, scored_otherwise, set_aside
from tests.hydro_rasda.models import counted, mlp

pytestmark = pytest.mark.usefixtures("one_process")

Quick = Callable[..., TuneResult]
Pair = tuple[Tensor, Tensor]


def of(value: Any) -> str:
    return digest(content(value))


MODEL = '''
import torch
from torch import nn
WIDTH = {width}
def activation():
    return nn.{activation}()
class Block(nn.Module):
    """{doc}"""
    slope = {slope}
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, width), activation())  # {comment}
def outer(factor):
    def model_fn(config, width_ratio=1.0, depth={depth}):
        """{doc}"""
        return [Block(int(factor * WIDTH * width_ratio)) for _ in range(depth)], {{"a", "b", "c"}}
    return model_fn
model_fn = outer({factor})
'''
AS_IT_IS = {"width": 8, "activation": "ReLU", "slope": 0.1, "depth": 2, "factor": 2, "doc": "A", "comment": "B"}


def model_fn(**changes: Any) -> Any:
    module = types.ModuleType("users_module")
    exec(MODEL.format(**{**AS_IT_IS, **changes}), module.__dict__)
    return module.__dict__["model_fn"]


@pytest.mark.parametrize(
    "change", [{"width": 9}, {"activation": "Tanh"}, {"slope": 0.2}, {"depth": 3}, {"factor": 3}], ids=str
)
def test_a_function_is_all_that_it_names(change: dict[str, Any]) -> None:
    """A constant, a function named by a class, an attribute of it, a default, a value in the closure."""
    assert of(model_fn(**change)) != of(model_fn())


def test_a_function_is_not_its_comments() -> None:
    assert of(model_fn(doc="another", comment="another")) == of(model_fn())


def test_functions_of_a_users_module_are_followed() -> None:
    def naming(activation: str) -> Any:
        helpers = types.ModuleType("users_helpers")
        exec(f"from torch import nn\ndef act(): return nn.{activation}()\nunrelated = '{activation}'", helpers.__dict__)
        scope: dict[str, Any] = {"helpers": helpers}
        exec("def f(config): return helpers.act()\ndef g(config): return helpers", scope)
        return scope

    assert of(naming("ReLU")["f"]) != of(naming("Tanh")["f"])
    assert of(naming("ReLU")["g"]) == of(naming("Tanh")["g"])


class Loss:
    def __init__(self, weight: float, of: Tensor) -> None:
        self.weight, self.of = weight, of

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.weight * F.mse_loss(output, target)

    def doubled(self, output: Tensor, target: Tensor) -> Tensor:
        return 2 * self(output, target)


ONE, TWO = torch.ones(3), torch.tensor([1.0, 1.0, 2.0])


class Hashed:
    """As a `GenerationConfig` of transformers: it keeps a hash of its text, to see whether it was changed."""

    def __init__(self, text: str, num_hash: int = 2) -> None:
        self.text, self.num_hash = text, num_hash
        self._original_hash = hash(self)

    def __hash__(self) -> int:
        return hash(self.text)


def nested(value: Any, levels: int) -> Any:
    """Lists in lists."""
    return [nested(value, levels - 1)] if levels else value


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "library functions": (F.cross_entropy, F.mse_loss),
    "library classes": (nn.ReLU, nn.Tanh),
    "partials": (functools.partial(F.cross_entropy, label_smoothing=0.1), functools.partial(F.cross_entropy)),
    "callables with state": (Loss(1.0, ONE), Loss(2.0, ONE)),
    "tensors within": (Loss(1.0, ONE), Loss(1.0, TWO)),
    "bound methods": (Loss(1.0, ONE).doubled, Loss(1.0, TWO).doubled),
    "methods": (Loss(1.0, ONE).doubled, Loss(1.0, ONE).__call__),
    "lambdas on one line": (lambda x: x + 1, lambda x: x + 2),
    "arrays": (np.ones(3), np.ones(3, dtype=np.float32)),
    "lists": ([1, 2], [2, 1]),
    "dicts": ({"a": 1}, {"a": 2}),
    "objects with a hash": (Hashed("a"), Hashed("b")),
    "numbers of hashes": (Hashed("a"), Hashed("a", num_hash=3)),
    "large numbers of hashes": (Hashed("a", num_hash=2**20), Hashed("a", num_hash=2**21)),
    "numbers": (1, 1.0),
    "values deep within": (nested(1, 50), nested(2, 50)),
    "booleans": (1, True),
    "cached functions": (functools.lru_cache(lambda x: x + 1), functools.lru_cache(lambda x: x + 2)),
    "cached properties": (functools.cached_property(lambda x: x + 1), functools.cached_property(lambda x: x + 2)),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different_values_have_different_digests(kind: str) -> None:
    one, other = DIFFERENT[kind]
    assert of(one) != of(other)
    assert of(one) == of(one)


def test_sparse_tensors_differ_by_their_values_and_places() -> None:
    found = [digest(content(matrix.to_sparse())) for matrix in (torch.eye(3), 2 * torch.eye(3), torch.eye(3).flip(0))]
    assert len({*found}) == 3
    assert digest(content(torch.eye(3).to_sparse())) == found[0]


def test_what_does_not_decide_has_no_part() -> None:
    assert of({"a": 1, "b": 2}) == of({"b": 2, "a": 1})
    assert of(torch.Generator().manual_seed(1)) == of(torch.Generator().manual_seed(2))
    assert of(torch.device("cpu")) == of(torch.device("meta"))
    ring: list[Any] = [1]
    ring.append(ring)
    assert of(ring) == of(ring)


class Vectorizer:
    """As those of scikit-learn, which keep the address of their list of stop words."""

    def __init__(self, words: list[str]) -> None:
        self.words, self.words_id = words, id(words)


def test_addresses_and_the_environment_have_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ["a"], ["a"]
    assert of(Vectorizer(one)) == of(Vectorizer(other)) != of(Vectorizer(["b"]))
    before = of(os.environ)
    monkeypatch.setenv("SLURM_JOB_ID", "2")
    assert of(os.environ) == before


def test_what_calls_change_is_not_what_a_function_is() -> None:
    calls: list[bool] = []
    model_fn = counted(calls)
    first = content(model_fn)
    model_fn({}, 1.0)(torch.rand(2, 64))
    second = content(model_fn)
    assert calls
    assert first != second
    model_fn({}, 1.0)(torch.rand(2, 64))
    third = content(model_fn)
    assert unchanged(first, second) == unchanged(second, third)
    assert unchanged(first, second) != unchanged(content(mlp), content(mlp))


class Examples(Dataset[Tensor]):
    """Each is noise of a size, drawn anew whenever it is read."""

    def __init__(self, size: float, length: int = 100, own: bool = False) -> None:
        self.size, self.length = size, length
        self.rng = np.random.default_rng() if own else None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Tensor:
        noise = torch.rand(2) if self.rng is None else torch.tensor(self.rng.random(2))
        return self.size + i + noise


def loader(x: Tensor) -> Callable[[int], Iterable[Any]]:
    return lambda batch_size: DataLoader(TensorDataset(x), batch_size, shuffle=True)


def shuffled(x: Tensor) -> Callable[[int], Iterable[Any]]:
    generator = torch.Generator().manual_seed(0)
    return lambda batch_size: DataLoader(TensorDataset(x), batch_size, shuffle=True, generator=generator)


class Held:
    """Is in a set, and a key, of its own."""

    def __init__(self) -> None:
        self.among, self.at = {self}, {self: 1}


def test_what_holds_itself_is_followed_once() -> None:
    assert of(Held()) == of(Held())


def test_what_stands_beside_a_set_does_not_contain_its_items() -> None:
    one, other = (tuple(range(2)) for _ in range(2))
    assert of([one, {one}]) == of([other, {one}])


def test_data_are_their_content() -> None:
    x, y = torch.rand(100, 3), torch.arange(100)
    inverted = 1 - y
    assert data_digest((x, y), 8) == data_digest((x.clone(), y.clone()), 8) != data_digest((x, inverted), 8)
    assert data_digest((x, y), 8) != data_digest((x.double(), y), 8)
    assert data_digest(TensorDataset(x, y), 8) == data_digest(TensorDataset(x.clone(), y), 8)
    assert data_digest(TensorDataset(x, y), 8) != data_digest(TensorDataset(x, inverted), 8)
    one, other = ([{"x": a} for a in values] for values in (x, 2 * x))
    assert data_digest(one, 8) != data_digest(other, 8)  # type: ignore[arg-type]
    for read in (loader, shuffled):
        made = read(x)
        assert data_digest(made, 8) == data_digest(made, 8) == data_digest(read(x.clone()), 8)
        assert data_digest(made, 8) != data_digest(read(2 * x), 8)


def test_random_augmentation_does_not_tell_data_apart() -> None:
    state = torch.get_rng_state()
    assert data_digest(Examples(1.0), 8) == data_digest(Examples(1.0), 8) != data_digest(Examples(2.0), 8)
    assert data_digest(Examples(1.0, own=True), 8) == data_digest(Examples(1.0, own=True), 8)
    assert data_digest(Examples(1.0, own=True), 8) != data_digest(Examples(1.0, 101, own=True), 8)
    assert torch.equal(torch.get_rng_state(), state)


def test_huge_tensors_are_sampled() -> None:
    huge = torch.zeros(2 * BYTES // 1024, 1024, dtype=torch.uint8)
    other = huge.clone()
    other[-1] = 1
    assert of(huge) != of(other)
    assert of(huge) != of(huge[1:])


def test_a_searcher_is_what_it_was_made_with() -> None:
    assert digest(parameters(OptunaSearch(seed=0))) == digest(parameters(OptunaSearch(seed=0)))
    assert digest(parameters(OptunaSearch(seed=0))) != digest(parameters(OptunaSearch(seed=1)))
    told = OptunaSearch(seed=0)
    told.set_search_properties("loss", "min", {})
    assert digest(parameters(told)) == digest(parameters(OptunaSearch(seed=0)))


SCRIPT = """
import torch
from torch.nn import functional as F
from hydro_rasda import choice
from hydro_rasda.space.domains import to_own
from hydro_rasda.history.lines import jsonable
from hydro_rasda.space.space import describe
from tests.hydro_rasda.dry_run.test_run_identity import DIFFERENT, Examples, data_digest, model_fn, of
from tests.hydro_rasda.conftest import SPACE
print(of(model_fn()), of(to_own(SPACE)), of(frozenset("abcdef")), data_digest(Examples(1.0), 8))
print([of(one) for one, _ in DIFFERENT.values()])
modules = {"modules": choice([set("abc"), frozenset("xyz"), {"b": {"c", "d"}}]), "more": set("qrs")}
print(describe(modules), jsonable(modules["more"]))
"""


def test_two_processes_agree(capsys: pytest.CaptureFixture[str]) -> None:
    """This one, and one whose sets have another order."""
    other = {**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    told = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True, text=True, env=other).stdout
    exec(SCRIPT, {})
    assert capsys.readouterr().out == told


def test_differences_are_said_in_words() -> None:
    was = {
        "seed": 0,
        "num_samples": 8,
        "python": "3.11.1",
        "digests": {"space": "a", "model_fn": "a", "train_data": "a"},
    }
    assert differences(was, was) == ([], [])
    assert differences(was, was | {"num_samples": 9}) == ([], [])
    assert differences(was, was | {"num_samples": 7})[0] == ["num_samples was 8, now 7, but a run can only grow"]
    now = was | {"seed": 1, "digests": {"space": "b", "model_fn": "b", "train_data": "b"}}
    deciding, knowing = differences(was, now)
    assert deciding == ["seed was 0, now 1", "`space` has other values or functions than the run's"]
    assert knowing == [
        "`model_fn` is another function than the run's",
        "`train_data` has other content than the run's",
    ]
    bounded = {"constraints": {"params": [None, 9.0]}}
    told = "sweep.constraints was None, now {'params': [None, 9.0]}"
    assert differences({"constraints": None}, bounded) == ([told], [])
    newer = {"python": "3.12.1"}
    told = "functions look different under another version of Python: 3.11.1, now 3.12.1"
    assert differences(was, now | newer) == (deciding, [*knowing, told])
    assert differences(was, was | newer) == ([], [])


def test_of_two_models_the_parameters_that_differ_are_named() -> None:
    """A model of hundreds of parameters was told in full, twice."""
    was = {"model": {f"{n}.weight": "(2, 2) torch.float32" for n in range(300)}}
    wide = was["model"] | {f"{n}.weight": "(4, 2) torch.float32" for n in range(7)} | {"new": "(2,) torch.float32"}
    (told,), _ = differences(was, {"model": wide})
    assert told.startswith(
        "model['0.weight'] was '(2, 2) torch.float32', now '(4, 2) torch.float32'; model['1.weight']"
    )
    assert told.endswith(
        "model['4.weight'] was '(2, 2) torch.float32', now '(4, 2) torch.float32'; 3 more of `model` differ"
    )
    (told,), _ = differences({"model": {}}, {"model": {"new": "(2,)"}})
    assert told == "model['new'] was None, now '(2,)'"


LOG: list[float] = []


def logging(output: Tensor, target: Tensor) -> Tensor:
    LOG.append(1.0)
    return F.cross_entropy(output, target)


def test_a_global_value_that_has_changed_is_named(quick: Quick) -> None:
    quick(loss_fn=logging, num_samples=2, max_t=1, name="log")
    quick(loss_fn=logging, num_samples=2, max_t=1, name="log")  # its own calls in the dry run are no difference
    was = {"digests": {"train": "a"}, "code": {"train": {"": "c", "/global LOG": "d", "/global help/global LOG": "e"}}}
    for pieces, told in (
        ({"": "c", "/global LOG": "x", "/global help/global LOG": "y"}, "the value of `LOG`, which it uses, has"),
        ({"": "x", "/global LOG": "x"}, ""),
        ({"": "c", "/defaults": "x", "/global LOG": "d", "/global help/global LOG": "e"}, ""),
    ):
        _, (found,) = differences(was, {"digests": {"train": "b"}, "code": {"train": pieces}})
        assert found.removeprefix("`train` is another function than the run's").startswith(f": {told}" if told else "")
        assert found.endswith("by calls of `train` itself" if told else "than the run's")


class Annealed:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return min(1.0, self.calls / 100) * F.cross_entropy(output, target)


def test_a_loss_is_told_that_trials_share_what_it_keeps(quick: Quick) -> None:
    with pytest.warns(UserWarning, match="calls of `loss_fn` change `calls`, which it keeps, so that all trials share"):
        quick(loss_fn=Annealed(), num_samples=2, max_t=1)


def smooth(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, label_smoothing=0.1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"loss_fn": smooth}, "`loss_fn` is another function"),
        ({"model_fn": model_fn()}, "`model_fn` is another function"),
        ({"train_data": "inverted"}, "`train_data` has other content"),
        ({"val_data": "inverted"}, "`val_data` has other content"),
    ],
)
def test_another_run_is_not_taken_for_this_one(
    change: dict[str, Any], told: str, quick: Quick, digits: tuple[Pair, Pair], tmp_path: Path, capsys: Any
) -> None:
    inverted = {"train_data": (digits[0][0], 9 - digits[0][1]), "val_data": (digits[1][0], 9 - digits[1][1])}
    if "model_fn" in change:
        change = {"model_fn": functools.partial(mlp)}
    changed = {name: inverted.get(name, value) for name, value in change.items()}
    small = {"num_samples": 1, "max_t": 1}
    first = quick(**small)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for resume in ("auto", "must"):
        alike = not change.keys() & {"loss_fn", "val_data"}
        way = "goes on with it" if alike else "keeps it as 'run/before-N', and begins anew"
        way += ".*; another `name` begins a new run"
        with pytest.raises(RunExists, match=f"is another: {told}.*; .*`resume='changed'` {way}"):
            quick(**small, **changed, resume=resume)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    with pytest.raises(RunExists, match="seed was 0, now 1"):
        quick(**small, **changed, resume="changed", seed=1)
    on = quick(**small, **changed, resume="changed", progress=True)
    assert f"resuming all the same: {told}" in " ".join(capsys.readouterr().out.split())
    scored_alike = not changed.keys() & {"loss_fn", "val_data"}
    assert (on.best_metric == first.best_metric) is scored_alike
    assert (first.path / "before-1").exists() is not scored_alike
    quick(**small, **changed)
    with pytest.raises(RunExists, match=told):
        quick(**small)


def test_another_function_as_lr_rule_is_another_run(quick: Quick) -> None:
    small: dict[str, Any] = {"num_samples": 1, "max_t": 1}
    for _ in range(2):
        quick(**small, race=RaceConfig(lr_rule=lambda growth: growth))
    with pytest.raises(RunExists, match=r"`race\.lr_rule` has other values or functions than the run's"):
        quick(**small, race=RaceConfig(lr_rule=lambda growth: 1.0))


def test_scores_by_other_code_do_not_compete(quick: Quick) -> None:
    """They stay a run of their own, which goes on with its own code, and whose model is there."""
    small: dict[str, Any] = {"num_samples": 2, "max_t": 2, "race": RaceConfig(top_k=2)}
    first = quick(**small)
    weights = first.best_model().state_dict()
    on = quick(**small, loss_fn=smooth, resume="changed")
    apart = first.path / "before-1"
    assert any(f"is the run {str(apart)!r}" in message.text for message in on.messages)
    anew = quick(**small, loss_fn=smooth, name="anew")
    assert [trial.history for trial in on.trials] == [trial.history for trial in anew.trials]
    kept = load(apart)
    assert [trial.history for trial in kept.trials] == [trial.history for trial in first.trials]
    assert (kept.best_config, kept.best_metric) == (first.best_config, first.best_metric)
    again = quick(**small, storage_path=first.path, name="before-1", resume="must")
    assert again.best_metric == first.best_metric
    for name, value in again.best_model().state_dict().items():
        assert torch.equal(value, weights[name])
    # Back to the first loss: that is a change again.
    back = quick(**small, resume="changed")
    assert back.best_metric == first.best_metric
    assert load(first.path / "before-2").best_metric == on.best_metric


def test_who_is_killed_while_moving_a_run_loses_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "journal.jsonl").write_text("first")
    (tmp_path / "before-1").mkdir()  # killed after this and the checkpoints
    (tmp_path / "before-1" / "checkpoints").mkdir()
    (tmp_path / "before-1" / "checkpoints" / "a.pt").touch()
    (tmp_path / "checkpoints").mkdir()  # as the next process makes it when it claims the folder
    assert "before-1" in set_aside(tmp_path)
    assert (tmp_path / "before-1" / "checkpoints" / "a.pt").exists()
    assert (tmp_path / "before-1" / "journal.jsonl").read_text() == "first"
    assert set_aside(tmp_path) == ""
    (tmp_path / "journal.jsonl").write_text("second")
    assert "before-2" in set_aside(tmp_path)
    assert (tmp_path / "before-2" / "journal.jsonl").read_text() == "second"


def test_another_python_makes_functions_look_different() -> None:
    was: dict[str, Any] = {"python": "3.11.1", "digests": {"loss_fn": "a", "val_data": "a", "model_fn": "a"}}
    assert not scored_otherwise(was, was | {"digests": was["digests"] | {"model_fn": "b"}})
    assert scored_otherwise(was, was | {"digests": was["digests"] | {"loss_fn": "b"}})
    assert not scored_otherwise(was, {"python": "3.12.1", "digests": was["digests"] | {"loss_fn": "b"}})
    other = {"python": "3.12.1", "digests": was["digests"] | {"val_data": "b"}}
    assert scored_otherwise(was, other | {"val_data": "tensors (8, 64) float32"})
    assert scored_otherwise(was, other | {"val_data": "KFold(5)", "folds": 5})
    for made in ("loaders from make", "Mine of 8"):
        assert not scored_otherwise(was, other | {"val_data": made})
        assert scored_otherwise(was, other | {"val_data": made, "python": was["python"]})


def test_spread_indices_begin_with_the_first_and_end_with_the_last() -> None:
    found = [[*spread_indices(length, count)] for length, count in ((0, 5), (5, 5), (6, 5), (101, 5), (9, 2), (9, 1))]
    assert found == [[], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [0, 25, 50, 75, 100], [0, 8], [0]]
