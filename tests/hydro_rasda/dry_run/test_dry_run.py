"""A batch is tried before any training, and what cannot be trained is told, naming the argument."""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from hydro_rasda import SweepConfig
from hydro_rasda.dry_run.dry_run import _is_pretrained, dry_run
from hydro_rasda.problem.dry_run_of_batches import run_batch
from hydro_rasda.problem.objective import as_objective, supervised
from hydro_rasda.problem.problem import OwnLoop, Problem
from tests.hydro_rasda.models import Config, mlp, refuses_some, regressor, stumbles_in_some
from tests.hydro_rasda.problems import LABELS, X, problem, trials


@pytest.mark.parametrize("target", [X[:, :1], LABELS % 2])
def test_a_forgotten_loss_is_found_in_the_dry_run(target: Tensor) -> None:
    with pytest.raises(ValueError, match=r"is cross_entropy \(the default\), but an output of shape \(4, 1\)"):
        dry_run(problem(regressor, (X, target)), trials())


def test_metrics_of_both_data_sets_are_known() -> None:
    for metric in ("val_loss", "val_accuracy", "train_loss", "train_accuracy"):
        dry_run(problem(metric=metric), trials())
    with pytest.raises(ValueError, match=r"`metric` is 'accuracy', but must be one of \['train_acc.*'val_loss'\]"):
        dry_run(problem(metric="accuracy"), trials())


def test_a_metric_of_a_name_that_the_library_gives_to_averages_is_refused() -> None:
    told = "`metric` is 'val_top', but must be one beside which nothing reports val_top_averaged: `race.ema` does"
    reported = also(top=lambda output, target: output.max(), top_averaged=lambda output, target: output.mean())
    with pytest.raises(ValueError, match=told):
        dry_run(problem(objective=as_objective(reported, F.cross_entropy), metric="val_top"), trials())


def test_what_an_epoch_takes_is_reckoned_from_a_batch() -> None:
    assert 0 < dry_run(problem(), trials()).epoch_seconds < math.inf


def test_a_first_step_that_sets_something_up_is_not_taken_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of each data set is run, then a step twice on one thread."""
    calls = [0]

    def slow(*args: Any) -> Any:
        calls[0] += 1
        time.sleep(0.2 if calls[0] < 4 else 0.0)
        return run_batch(*args)

    for module in ("dry_run.dry_run", "problem.model_costs"):
        monkeypatch.setattr(f"hydro_rasda.{module}.run_batch", slow)
    found = dry_run(problem(), trials())
    assert calls == [4]
    assert found.steady_epoch_seconds < found.epoch_seconds / 2


def test_nothing_is_left_on_the_model_or_its_gradients() -> None:
    built: list[nn.Module] = []

    def remembers(config: Config, width_ratio: float = 1.0) -> nn.Module:
        built.append(mlp(config, width_ratio))
        return built[-1]

    dry_run(problem(remembers), trials())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in built)


@pytest.mark.parametrize("model_fn", [refuses_some, stumbles_in_some])
def test_a_configuration_that_fails_alone_does_not_refuse_the_run(model_fn: Any) -> None:
    bad = {"bad": True, "stumbles": 1.0}
    dry_run(problem(model_fn), trials(bad, bad, {}))
    with pytest.raises(ValueError, match=r"this .* cannot be ") as caught:
        dry_run(problem(model_fn), trials(bad, bad))
    assert "cannot be" in str(caught.value.__cause__)


class Forgetful(nn.Module):
    """A copy would go on with a part of the model that was copied: a layer it calls, a weight it reads, or a buffer
    whose memory another one shares."""

    steps: Tensor
    last: Tensor

    def __init__(self, by: str, width: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        parts, weight = [self.body], self.body.weight
        self.call = (lambda x: parts[0](x)) if by == "closure" else torch.tanh
        if by == "hook":
            weight.register_hook(lambda grad: grad + weight.detach())
        steps = torch.zeros(4)
        self.register_buffer("steps", steps)
        self.register_buffer("last", steps[1:] if by == "view" else torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        out: Tensor = self.head(self.body(x) + self.call(x).mean(1, keepdim=True)) * (1 + self.last.mean())
        return out


@pytest.mark.parametrize("surrogate", [0.5, 1])
@pytest.mark.parametrize(
    ("by", "match"),
    [
        ("closure", "differ in .*gradient"),
        ("hook", "hook on a parameter"),
        ("view", "forward writes to `steps`, which shares memory"),
    ],
)
def test_a_model_that_a_copy_would_train_otherwise_is_refused(by: str, match: str, surrogate: float) -> None:
    def model_fn(config: Config, width_ratio: float = 1.0) -> nn.Module:
        return Forgetful(by, int(32 * width_ratio))

    asked = problem(model_fn).with_settings(sweep=SweepConfig(surrogate=surrogate))
    with pytest.raises(
        ValueError, match=rf"`model_fn` makes a model that trains otherwise where it is copied.*{match}"
    ):
        dry_run(asked, trials())


def ignores_width(config: Config, width_ratio: float = 1.0) -> nn.Module:
    return mlp(config)


def lazy(config: Config) -> nn.Module:
    return nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(10))


def on_meta(config: Config) -> nn.Module:
    return nn.Linear(64, 10, device="meta")


def other_names(config: Config, width_ratio: float = 1.0) -> nn.Module:
    return mlp(config) if width_ratio == 1 else nn.Sequential(mlp(config, width_ratio))


def detached(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"loss": F.cross_entropy(model(batch[0]), batch[1]).detach()}


def takes_a_tensor(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"loss": model(batch.flatten(1)).square().mean()}


def weight_normed(config: Config, width_ratio: float = 1.0) -> nn.Module:
    width = round(32 * width_ratio)
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(64, width)), nn.ReLU(), nn.Linear(width, 10))


def pruned(config: Config, width_ratio: float = 1.0) -> nn.Module:
    model = mlp(config, width_ratio)
    prune.random_unstructured(model.get_submodule("0"), "weight", 0.5)
    return model


def scripted(config: Config, width_ratio: float = 1.0) -> nn.Module:
    model: nn.Module = torch.jit.script(mlp(config, width_ratio))
    return model


def scripted_in_part(config: Config, width_ratio: float = 1.0) -> nn.Module:
    width = round(32 * width_ratio)
    return nn.Sequential(torch.jit.script(nn.Linear(64, width)), nn.ReLU(), nn.Linear(width, 10))


def frozen(config: Config, width_ratio: float = 1.0) -> nn.Module:
    return mlp(config, width_ratio).requires_grad_(False)


class Remembers(nn.Linear):
    """Its buffer grows with each batch."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.mean()[None]])
        return super().forward(x)


def nameless(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
    return {"nll": F.cross_entropy(model(batch[0]), batch[1])}


@pytest.mark.filterwarnings(r"ignore:.*(weight_norm|torch\.jit).* is deprecated")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_fn": lambda config: 1 / 0}, "`model_fn` fails for every configuration, for .*'lr': 0.1"),
        ({"model_fn": lambda config: None}, "`model_fn` returned a NoneType, but must return a torch.nn"),
        ({"model_fn": lazy}, "`model_fn` returned a Sequential whose '0.weight' is lazy: it has no shape"),
        ({"model_fn": lazy, "surrogate": 1}, "`model_fn` .* '0.weight' is lazy"),
        ({"model_fn": on_meta}, "`model_fn` returned a Linear whose 'weight' lies on the device 'meta'"),
        ({"data": (X.to("meta"), LABELS)}, r"`train_data\[0\].device` is 'meta', but must be one where"),
        ({"model_fn": ignores_width}, "model_fn.*width_ratio"),
        ({"model_fn": other_names}, "model_fn.*width_ratio"),
        ({"data": (X[:, :9], LABELS)}, r"the model cannot take a batch \[\(4, 9\) float32, .*`train_data`"),
        ({"data": (X, LABELS + 9)}, r"`loss_fn` .*cannot take the model's output \[\(4, 10\) float32\]"),
        ({"data": (X, LABELS[:, None])}, r"`loss_fn` .* with a batch \[\(4, 64\) .*\(4, 1\) int64\]"),
        ({"model_fn": regressor, "data": (X, X[:, 0])}, "must have the output's shape"),
        ({"objective": detached}, "the loss of a batch .* cannot be differentiated"),
        ({"model_fn": frozen}, "`model_fn` makes a model whose parameters are all frozen .*for {'lr': 0.1"),
        ({"model_fn": lambda config: nn.Flatten()}, "`model_fn` makes a model without parameters for"),
        ({"model_fn": weight_normed}, "module 0 has torch.nn.utils.weight_norm, .* use torch.nn.uti"),
        ({"model_fn": weight_normed, "surrogate": 1}, "module 0 has torch.nn.utils.weight_norm"),
        ({"model_fn": pruned}, "module 0 is pruned"),
        ({"model_fn": scripted}, "module itself is a program of torch.jit, .* pass the module from before"),
        ({"model_fn": scripted, "surrogate": 1}, "module itself is a program of torch.jit"),
        ({"model_fn": scripted_in_part}, "module 0 is a program of torch.jit"),
        ({"data": (X.double(), LABELS)}, r"cannot take a batch .*\. The data are float64 and the model is float32"),
        ({"data": ((16 * X).byte(), LABELS)}, "cannot take a batch .* The data are uint8 and the model is float32"),
        ({"data": (X, LABELS.double())}, r"such as by output.squeeze\(-1\)$"),
        (
            {"data": (X, F.one_hot(LABELS)), "objective": supervised(F.binary_cross_entropy_with_logits)},
            "cannot take the model's output .* The data are int64 and the model is float32",
        ),
        (
            {"model_fn": lambda config: Remembers(), "surrogate": 1},
            r"buffers change in training, [^|]* mismatch for seen",
        ),
        (
            {"objective": takes_a_tensor, "data": (X,)},
            "the model cannot take .*a batch of one tensor is a tuple of it: take `batch\\[0\\]`",
        ),
        ({"objective": nameless}, r"`objective` returned \['nll'\], but must return a \"loss\""),
    ],
)
def test_bad_input(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dry_run(problem(**arguments), trials())


@pytest.mark.filterwarnings(r"ignore:.*weight_norm.* is deprecated")
def test_a_configuration_whose_model_has_a_wrapper_fails_alone() -> None:
    made = problem(lambda config, width_ratio=1.0: (weight_normed if config["old"] else mlp)(config, width_ratio))
    found = dry_run(made, trials({"old": True}, {"old": False}))
    assert "0.weight" in found.parameters


def widens_its_output(config: Config, width_ratio: float = 1.0) -> nn.Module:
    width = int(32 * width_ratio)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width))


def test_an_output_that_depends_on_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"output.*\(4, 16\).*\(4, 32\)|output.*width"):
        dry_run(problem(widens_its_output), trials())


def test_a_target_that_torch_would_broadcast_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`loss_fn` \(or `objective`\) cannot take the model's output \[\(4, 1\)"):
        dry_run(problem(regressor, (X, LABELS), supervised(F.mse_loss)), trials())


def summed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="sum")}


def contrasted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Each example against all others."""
    output = F.normalize(model(batch[0]), dim=1)
    return {"loss": F.cross_entropy(output @ output.T, torch.arange(len(output)))}


def test_an_objective_that_sums_over_the_batch_is_warned_of() -> None:
    big = trials({"batch_size": 12})
    with pytest.warns(UserWarning, match=r"`objective` returns a loss of .* for 6 examples, .*as a sum does"):
        dry_run(problem(objective=as_objective(summed, F.cross_entropy)), big)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dry_run(problem(objective=as_objective(contrasted, F.cross_entropy)), big)


@pytest.mark.filterwarnings("ignore:`train_data` was asked for batches of 4 examples")
def test_examples_that_no_loader_stacked_are_named() -> None:
    def examples(batch_size: int) -> list[tuple[Tensor, Tensor]]:
        return list(zip(X, LABELS))

    with pytest.raises(ValueError, match=r"is this an example rather than a batch\? A DataLoader stacks examples"):
        dry_run(problem(data=examples), trials())


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"loss": (model(batch[0]) - batch[1]).square().mean()}


def squeezed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"loss": (model(batch[0]).squeeze(1) - batch[1]).square().mean()}


@pytest.mark.parametrize("targets", [X.sum(1), LABELS], ids=["floats", "integers"])
def test_an_objective_that_broadcasts_its_targets_is_warned_of(targets: Tensor) -> None:
    def asked(objective: Any) -> Problem:
        return problem(regressor, (X, targets), objective=as_objective(objective, F.mse_loss))

    with pytest.warns(UserWarning, match=r"each output of shape \(4, 1\) with all targets \(4,\): .*squeeze"):
        dry_run(asked(squared), trials())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dry_run(asked(squeezed), trials())
    with pytest.raises(ValueError, match=r"same size; bring output and target to one shape, such as by `output.sq"):
        dry_run(asked(lambda model, batch: {"loss": F.mse_loss(model(batch[0]), batch[1])}), trials())


def also(**metrics: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Return an objective with further metrics of outputs and targets."""

    def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        output, target = model(batch[0]), batch[1]
        return {"loss": F.cross_entropy(output, target), **{n: of(output, target) for n, of in metrics.items()}}

    return objective


def hits(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) % 2) == target % 2


COUNTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "count": lambda output, target: hits(output, target).sum(),
    "norm": lambda output, target: output.square().sum().sqrt(),
    "penalized": lambda output, target: F.cross_entropy(output, target) + output.square().sum(),
    "rare": lambda output, target: (target == 5).sum(),  # none in the first batch
}
MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "accuracy": lambda output, target: hits(output, target).float().mean(),
    "in_batch": lambda output, target: F.cross_entropy(output @ output.T, torch.arange(len(output))),
    "retrieved": lambda output, target: (output @ output.T).argmax(1).eq(torch.arange(len(output))).float().mean(),
    "spread": lambda output, target: output.std(),
    "largest": lambda output, target: output.max(),
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("compared", ["metric", "several", "constraint", "part"])
def test_a_metric_that_grows_with_the_batch_is_named(name: str, compared: str) -> None:
    own, seen = also(**COUNTS), f"val_{name}"
    asked = problem(objective=as_objective({"0": own} if compared == "part" else own, F.cross_entropy))
    if compared == "metric":
        asked = asked.with_settings(metric=seen)
    elif compared == "several":
        asked = asked.with_settings(objectives=(("val_loss", "min"), (seen, "max")))
    elif compared == "constraint":
        asked = asked.with_settings(sweep=replace(asked.settings.sweep, constraints={seen: (None, 1e6)}))
    else:
        name = f"0_{name}"
        asked = asked.with_settings(metric=f"val_{name}")
    with pytest.warns(UserWarning, match=f"`objective` returns '{name}' as .* Return the mean") as warned:
        dry_run(asked, trials())
    assert len(warned) == 1


@pytest.mark.parametrize("name", MEANS)
def test_a_metric_that_is_no_sum_is_not_named(name: str) -> None:
    asked = problem(objective=as_objective(also(**COUNTS, **MEANS), F.cross_entropy))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dry_run(asked.with_settings(metric=f"val_{name}"), trials())


def takes_out(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    target = batch.pop("y")
    batch["more"] = target
    return {"loss": F.cross_entropy(model(batch["x"]), target)}


class Named(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": X[i], "y": LABELS[i]}


@pytest.mark.parametrize("by_part", [False, True])
def test_an_objective_may_take_something_out_of_its_batch(by_part: bool) -> None:
    objective: Any = {"0": takes_out, "2": takes_out} if by_part else takes_out
    asked = problem(data=Named(), objective=as_objective(objective, F.cross_entropy))
    found = dry_run(asked, trials())
    batch = next(asked.val_data.in_order(4))
    asked.objective(asked.target(trials()[0]), batch)
    assert math.isfinite(found.metrics["val_loss"])
    assert batch.keys() == {"x", "y"}


def test_a_model_may_take_something_out_of_its_inputs() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.layer(inputs.pop("x"))
            return out

    batch = {"x": X[:4]}, LABELS[:4]
    supervised()(Takes(), batch)
    assert "x" in batch[0]


class Holds(nn.Module):
    """Its first layer's parameters lie in a plain attribute, too; others lie only there."""

    def __init__(self, width_ratio: float, hold: Callable[[nn.Linear], Any]) -> None:
        super().__init__()
        width = int(32 * width_ratio)
        self.first, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.held = hold(self.first)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.first(x).relu())
        return out


def decayed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    held = [leaf for leaf in tree_leaves(model.held) if isinstance(leaf, Tensor)]
    return {"loss": F.cross_entropy(model(batch[0]), batch[1]) + sum(leaf.square().mean() for leaf in held)}


LOOSE: dict[str, Callable[[nn.Linear], Any]] = {
    "[0]": lambda layer: (layer.weight,),
    "['a'][1]": lambda layer: {"a": (3, layer.weight)},
    "": lambda layer: torch.ones(3, requires_grad=True),
    "['new']": lambda layer: {"new": nn.Parameter(torch.ones(3))},
}


@pytest.mark.parametrize("place", LOOSE)
@pytest.mark.parametrize("surrogate", [0.5, 1.0])
def test_parameters_in_plain_attributes_are_named_if_the_loss_depends_on_them(place: str, surrogate: float) -> None:
    def model_fn(config: Config, width_ratio: float = 1.0) -> nn.Module:
        return Holds(width_ratio, LOOSE[place])

    told = re.escape(f"`held{place}`") + ".*`nn.ParameterList`"
    with pytest.raises(ValueError, match=told):
        dry_run(problem(model_fn, objective=as_objective(decayed, F.cross_entropy), surrogate=surrogate), trials())
    dry_run(problem(model_fn, surrogate=surrogate), trials())


def centred(centres: nn.Module | Tensor) -> Any:
    def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        output = model(batch[0])
        own = centres(batch[1]) if isinstance(centres, nn.Module) else centres[batch[1]]
        return {"loss": (output - own).square().mean()}

    return objective


def test_a_loss_with_parameters_of_its_own_is_refused_wherever_it_keeps_them() -> None:
    for centres in (nn.Embedding(10, 10), torch.randn(10, 10, requires_grad=True)):
        asked = problem(objective=as_objective(centred(centres), F.cross_entropy))
        with pytest.raises(
            ValueError, match=r"a tensor \[\(10, 10\) float32\] that .* nothing trains it, .* in the model"
        ):
            dry_run(asked, trials())
        centres.requires_grad_(False)
        dry_run(asked, trials())


def test_tensors_that_need_gradients_for_other_reasons_are_let_through() -> None:
    """Those of the batch, and those that each call makes anew, as for a penalty of gradients."""

    def penalized(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x = batch[0].detach().clone().requires_grad_()
        with torch.enable_grad():
            output = model(x)
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return {"loss": F.cross_entropy(model(batch[0]) + 0 * output, batch[1]) + slope.square().mean()}

    given = X.clone().requires_grad_(), LABELS
    dry_run(problem(data=given, objective=as_objective(penalized, F.cross_entropy)), trials())


def gradients_inside(model: nn.Module, batch: tuple[Tensor]) -> dict[str, Tensor]:
    x = batch[0].requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return {"loss": slope.square().mean()}


def test_the_way_to_a_single_tensor_is_told_only_where_it_is_the_cause() -> None:
    with pytest.raises(ValueError, match="does not require grad") as told:
        dry_run(problem(data=(X,), objective=as_objective(gradients_inside, F.cross_entropy)), trials())
    assert "batch[0]" not in str(told.value)
    for forgets in (lambda m, b: {"loss": m(b).mean()}, lambda m, b: {"loss": m(b.flatten(1)).mean()}):
        with pytest.raises(ValueError, match=r"take `batch\[0\]`"):
            dry_run(problem(data=(X,), objective=as_objective(forgets, F.cross_entropy)), trials())


def test_a_batch_is_tried_in_the_parts_that_training_takes() -> None:
    """As there may be no memory for more; and what cannot be split is told before any training."""
    seen: list[int] = []

    def noting(config: Config, width_ratio: float = 1.0) -> nn.Module:
        model = mlp(config, width_ratio)
        model.register_forward_pre_hook(lambda module, given: seen.append(len(given[0])))
        return model

    dry_run(problem(noting), trials({"accumulate": 5, "batch_size": 10}))
    assert max(seen) == 2


class Adjacent(nn.Module):
    """A graph convolution by a matrix of neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        out: Tensor = self.head(matrix @ self.first(x).relu())
        return out


def test_rows_of_a_graph_are_not_taken_for_examples() -> None:
    def loss(model: Any, batch: Any) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(model(batch[0], batch[1]), batch[2])}

    batch = torch.randn(12, 3), torch.eye(12), LABELS
    found = dry_run(
        problem(lambda config: Adjacent(), lambda size: [batch], as_objective(loss, F.cross_entropy)),
        trials({"batch_size": 12}),
    )
    assert found.narrowed is not None
    assert found.narrowed.summary == "3 of 4 parameters are narrower"


class Graph(nn.Module):
    """Sums over the nodes of each graph, after a sum over each node's neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]])
        out: Tensor = self.head(hidden.new_zeros(int(batch.max()) + 1, hidden.size(1)).index_add(0, batch, hidden))
        return out


def test_a_batch_of_graphs_is_narrowed_whole_and_has_no_length() -> None:
    """Rows cannot be taken of it: edges name nodes. Its nodes are no examples, so that no batch size is missed."""
    nodes, graphs = torch.arange(20), torch.arange(4).repeat_interleave(5)
    batch = {
        "x": torch.randn(20, 3),
        "edges": torch.stack([nodes, nodes.flip(0)]),
        "batch": graphs,
        "y": torch.arange(4),
    }

    def loss(model: Any, batch: Any) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(model(batch["x"], batch["edges"], batch["batch"]), batch["y"])}

    found = dry_run(
        problem(lambda config: Graph(), lambda size: [batch], as_objective(loss, F.cross_entropy)), trials()
    )
    assert found.narrowed is not None
    assert found.narrowed.summary == "3 of 4 parameters are narrower"
    assert len(found.example_input[0]) == 20


class Complex(nn.Module):
    """A weight of complex numbers, as of a spectral convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 16), nn.Linear(16, 10)
        self.waves = nn.Parameter(torch.randn(16, 16, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head((self.first(x).to(torch.cfloat) @ self.waves).real)
        return out


def test_weights_may_be_complex() -> None:
    assert not dry_run(problem(lambda config: Complex()), trials()).pretrained


def test_constants_and_identities_do_not_make_a_model_pretrained() -> None:
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Linear(2, 3)
        model.mixing, model.unused = nn.Parameter(torch.eye(64)), nn.Parameter(torch.zeros(0))
        return model

    assert not _is_pretrained(made(0), made(1))
    assert _is_pretrained(made(0), made(0))


def test_a_sparse_buffer_is_refused_by_its_name_unless_a_function_of_the_user_trains() -> None:
    def with_graph(config: Config) -> nn.Module:
        model = mlp(config)
        model.register_buffer("graph", torch.eye(3).to_sparse())
        return model

    with pytest.raises(ValueError, match=r"a model whose `graph` has the layout torch.sparse_coo, but buffers must be"):
        dry_run(problem(with_graph), trials())
    dry_run(
        replace(problem(with_graph, surrogate=1), own_loop=OwnLoop(lambda worker: None, None, sweeps=True)), trials()
    )
