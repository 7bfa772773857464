"""The learner of one ordinary module, on one rank or several; `fused_learner.FusedLearner` trains K models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusion import GraphedStep, LossScale, lr_factor
from fusion.evaluate.microbatch import backward, evaluate
from fusion.keys import ONE_PASS, OWN, configs_of_parts, optimizer_name, own_arguments, own_parts, read
from fusion.members.rows import make_dense
from fusion.optim import optimizer
from fusion.optim.learned import LEARNED
from fusion.optim.parts import PART, keep_averages
from fusion.optim.schedule_free import evaluating, has_modes
from fusion.optim.torch_optimizer import as_written, let_skip, made_recordable, step_if
from fusion.streams import seed_generators
from fusion.structure.module_parts import copied
from hydro_rasda.data import ALONE, Batch, Shard, Share, batch_length
from hydro_rasda.data.batch_splits import num_parts
from hydro_rasda.problem.objective import OUTPUTS, TARGETS, Objective, joined, moving, scalars
from hydro_rasda.problem.precision import turns
from hydro_rasda.settings.config import UNSPLIT, Mode, check_unsplit
from hydro_rasda.training.best_weights import Average, bettered, epochs_since, trained_tensors
from hydro_rasda.training.cuda_graphs import recorded
from hydro_rasda.training.distributed import Joint, apart, average_statistics, split, split_like, whole
from hydro_rasda.training.gradient_noise import GradientNoise
from hydro_rasda.training.lr_and_decay_by_parameter import multipliers, optimizer_settings


class Learner(Protocol):
    """K models in training.

    Attributes:
        shard: The rank of this learner, and the number of ranks that train the model.
    """

    shard: Shard

    def seed(self, seeds: Sequence[int]) -> None:
        """Seed the random numbers (dropout) of the K models."""
        ...

    def train_mode(self, training: bool) -> None:
        """Switch the models between training and evaluation mode, as `nn.Module.train` does."""
        ...

    @property
    def averages(self) -> bool:
        """Tell whether the learner also has averaged weights."""
        ...

    def evaluating(self, averaged: bool = True) -> AbstractContextManager[None]:
        """Return a context for calls of `evaluate`: evaluation mode, with averaged weights if wanted and available."""
        ...

    def step(self, share: Share, epoch: float, steps: float) -> Mapping[str, Tensor]:
        """Take one training step: forward, backward, update.

        Args:
            epoch: The time since the start of the training in epochs, with a fraction.
            steps: Number of steps in an epoch; 1 if it is unknown.

        Returns:
            The metrics [K] before the update.
        """
        ...

    def evaluate(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return metrics [K] without gradients, and "outputs" and "targets" [K, n, ...] if the objective has them."""
        ...


class SingleLearner:
    """An ordinary module with an ordinary torch optimizer, on one rank or several.

    Args:
        model: On its device, with the same weights on all ranks.
        max_t: Epochs of a full training; the horizon of schedules.
        ema: Horizon of the weights' average, as a share of a full training's steps. Averaged weights are evaluated and
            remembered. 0 for the last step's weights. Nothing is averaged if the optimizer has its own weights for
            evaluation.
        graph: If true, steps are recorded, which the device must support. Steps on several ranks are never recorded,
            nor are steps of optimizers other than SGD, Adam and AdamW.
        scale: Factor of the loss, if the objective computes in float16.
        sharded: If true, several ranks split the model (FSDP, see `distributed.split`); otherwise each rank has the
            whole model (DDP).

    Attributes:
        noise: The gradient noise of `joint`, if it is measured.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Mapping[str, Any],
        objective: Objective,
        max_t: int,
        shard: Shard = ALONE,
        ema: float = 0.0,
        *,
        graph: bool = False,
        scale: LossScale | None = None,
        sharded: bool = False,
    ) -> None:
        self.model, self.shard, self._scale = model, shard, scale
        settings = optimizer_settings(objective, model, config)
        self.sharded = sharded and shard.world > 1
        self._joint: DistributedDataParallel | Joint | None = None
        if self.sharded:
            # Settings are checked again, because an objective's own `optimizer_settings` may set these keys, too.
            for own in configs_of_parts(settings.config).values():
                for key in UNSPLIT:
                    check_unsplit(key, key, read(own, key))
            self._joint = Joint(model, objective)
            split(self._joint, shard.world, next(model.parameters()).device)
        elif shard.world > 1:
            # DDP must look for unused parameters, because a step may leave out layers, as with stochastic depth.
            self._joint = DistributedDataParallel(Joint(model, objective), find_unused_parameters=True)
        self._weight = 1.0
        if self._joint is not None:
            average_statistics(self._joint, lambda: self._weight)
        self.optimizer = optimizer(model, settings.config, **multipliers(settings, model, 1))
        of_ours = optimizer_name(settings.config) in ONE_PASS and not own_parts(settings.config)
        if scale is not None and of_ours:
            let_skip(self.optimizer)
        self._base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self._graph: GraphedStep | None = None
        self._turns = turns(objective)
        if graph and of_ours and shard.world == 1 and _is_dense(model) and len(self._turns) == 1:
            made_recordable(self.optimizer)
            self._graph = recorded(self._update, model)
        self._config, self._objective, self._max_t = settings.config, objective, max_t
        self._best: dict[str, Any] | None = None
        self._ema = ema
        self._average = Average(partial(trained_tensors, model)) if ema and not has_modes(self.optimizer) else None
        self.noise: GradientNoise | None = None
        self._parts: int = read(self._config, "accumulate")
        self._batch_size: int = read(config, "batch_size")

    @property
    def joint(self) -> nn.Module:
        """The module that averages gradients over several ranks; on one rank, the model."""
        return self.model if self._joint is None else self._joint

    def seed(self, seeds: Sequence[int]) -> None:
        """Seed the global generators, from which one model draws its random numbers."""
        (seed,) = seeds
        seed_generators(seed)

    def train_mode(self, training: bool) -> None:
        self.model.train(training)
        if self._joint is not None and not training:
            # All ranks evaluate with rank 0's buffers, because these are saved.
            for buffer in self.model.buffers():
                whole = buffer.contiguous()
                dist.broadcast(whole, 0)
                buffer.copy_(whole)

    def step(self, share: Share, epoch: float, steps: float) -> Mapping[str, Tensor]:
        factor = lr_factor(self._config, epoch, self._max_t, steps)
        for group, base in zip(self.optimizer.param_groups, self._base_lrs):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor
        metrics = self._update(share.batch, share.weight) if self._graph is None else self._graph(share.batch)
        if self._average is not None:
            self._average.update(self._ema * steps * self._max_t)
        return metrics

    def _update(self, batch: Batch, weight: float = 1.0) -> dict[str, Tensor]:
        return _as_vectors(joined({part: self._take_turn(part, batch, weight) for part in self._turns}))

    def _take_turn(self, part: str, batch: Batch, weight: float) -> dict[str, Tensor]:
        with moving(part, self.model, dict(self.model.named_parameters()) if part else {}):
            metrics = self._backward(part, batch, weight)
        make_dense(self.model.parameters())  # because few optimizers take sparse gradients; fused groups do the same
        scale = self._scale
        takes = None if scale is None else scale.unscale_module(self.model)
        max_norm = read(self._config, "grad_clip")
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        if scale is None or takes is None:
            self.optimizer.step()
        else:
            step_if(takes, self.optimizer)
            scale.update(takes)
        return metrics

    def _backward(self, part: str, batch: Batch, weight: float) -> dict[str, Tensor]:
        scale = self._scale
        self.optimizer.zero_grad(set_to_none=True)
        scaled, parts = None if scale is None else scale.apply, num_parts(batch, self._batch_size, self._parts)
        if self._joint is None:
            own = partial(self._metrics, self._turns[part])
            return backward(own, batch, parts, scaled=scaled, gradients=self._gradients)
        self._weight = weight
        expect = partial(self._expect, batch_length(batch), weight)
        expect()

        def over_ranks(own: Tensor) -> Tensor:
            everywhere = own.clone()
            dist.all_reduce(everywhere)
            expect(own, mean := everywhere / self.shard.world)
            return mean

        joint = partial(self._joint, part=part)
        return backward(joint, batch, parts, weight, self._apart, scaled, self._gradients, over_ranks)

    def _gradients(self) -> Iterator[Tensor | None]:
        return (parameter.grad for parameter in self.joint.parameters())

    def _expect(self, examples: int, weight: float, own: Tensor | None = None, mean: Tensor | None = None) -> None:
        """Describe the next gradients to the measurement of gradient noise.

        Args:
            own: This rank's sum of example weights; None if all examples have the same weight.
            mean: The mean of these sums over the ranks; None if `own` is None.
        """
        if self.noise is not None:
            scale = None if self._scale is None else self._scale.scale_K
            share = None if own is None or mean is None else own / mean
            self.noise.expect(examples, weight, scale, share)

    def evaluate(self, batch: Batch) -> Mapping[str, Tensor]:
        joint = self._joint
        objective = partial(joint, whole=True) if isinstance(joint, Joint) else partial(self._objective, self.model)
        return _as_vectors(evaluate_parts(objective, batch, self._parts, 0))

    def _apart(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are not averaged over the ranks."""
        assert self._joint is not None
        return apart(self._joint) if isinstance(self._joint, Joint) else self._joint.no_sync()

    def _metrics(self, objective: Objective, batch: Batch) -> Mapping[str, Tensor]:
        return scalars(objective(self.model, batch))

    @property
    def averages(self) -> bool:
        return self._average is not None

    @contextmanager
    def evaluating(self, averaged: bool = True) -> Iterator[None]:
        """See `Learner`; all ranks must enter the context."""
        self.train_mode(False)
        if averaged and self._average is not None and self._average.differs:
            with self._average.in_place():
                self.train_mode(False)
                yield
            return
        with evaluating(self.optimizer):
            yield

    def epochs_since_best(self, epoch: int) -> int:
        """Return the number of epochs from the best one to `epoch`; 0 if no epoch is remembered."""
        return epochs_since(self._best, epoch)

    def remember(self, epoch: int, score: float, mode: Mode, *, averaged: bool = True) -> None:
        """Keep a copy of the weights as "best" of `state`, if `bettered` chooses this epoch; all ranks must call it.

        Args:
            averaged: True to keep averaged weights if there are any; False for the last step's weights.
        """

        def evaluated() -> Mapping[str, Any]:
            with self.evaluating(averaged):
                return copy.deepcopy(cast(dict[str, Any], self._whole(self.model.state_dict())))

        self._best = bettered(self._best, epoch, score, mode, evaluated)

    def state(self) -> dict[str, Any]:
        """Return weights, buffers and optimizer state.

        They are the same on all ranks; after an evaluation, all ranks have the buffers of rank 0. If the model is
        split, all ranks must call this method together, and only rank 0 gets the tensors.

        "model" has the last step's weights, or those that the optimizer evaluates with; see `weights_of`. If an epoch
        was remembered, "best" is its entry; see `bettered`. If weights are averaged, "average" is the state of the
        average.
        """
        more: dict[str, Any] = {} if self._best is None else {"best": self._best}
        if self._average is not None:
            more["average"] = self._whole(self._average.state())
        if self._scale is not None:
            more["loss_scale"] = self._scale.state_dict()
        weights = {name: self._whole(of) for name, of in weights_of(self.model, self.optimizer).items()}
        return {**weights, "optimizer": self._whole(as_written(self.optimizer.state_dict())), **more}

    def _whole(self, state: Any) -> Any:
        return whole(state, self.shard.rank == 0) if self.sharded else state

    def _split_like(self, values: Mapping[Any, Any], tensors: Mapping[Any, Tensor]) -> Mapping[Any, Any]:
        return split_like(values, tensors) if self.sharded else values

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state` returned, but keep the hyperparameters with which this learner was made."""
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        self.model.load_state_dict(self._split_like({**state["model"], **state.get("trained", {})}, named))
        self._best = state.get("best")
        if self._average is not None and "average" in state:
            average = state["average"]
            self._average.load({**average, "means": self._split_like(average["means"], named)})
        if self._scale is not None:
            self._scale.load_state_dict(state["loss_scale"])
        groups, configs = self.optimizer.state_dict()["param_groups"], configs_of_parts(self._config)
        before = state["optimizer"]["param_groups"]
        own = [_continued(g, was, configs[g.get(PART, "")]) for g, was in zip(groups, before, strict=True)]
        updated = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        moments = {
            i: self._split_like(of, dict.fromkeys(of, updated[i])) for i, of in state["optimizer"]["state"].items()
        }
        self.optimizer.load_state_dict({"state": moments, "param_groups": own})
        keep_averages(self.optimizer, before)
        if self._graph is not None:
            self._graph.reset()


def weights_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return a dict with the weights for evaluation under the key "model".

    An optimizer such as Schedule-Free trains other weights than it evaluates. The trained weights are added under the
    key "trained".
    """
    if not has_modes(optimizer):
        return {"model": model.state_dict()}
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    with evaluating(optimizer):
        return {"model": copied(dict(model.state_dict())), "trained": trained}


def evaluate_parts(
    objective: Callable[[Batch], Mapping[str, Tensor]], batch: Batch, parts: int, dim: int
) -> dict[str, Tensor]:
    """Evaluate a batch in `parts` parts, as `fusion`'s `evaluate` does; join outputs and targets along `dim`."""
    collected: dict[str, list[Tensor]] = {}

    def means(part: Batch) -> Mapping[str, Tensor]:
        metrics = objective(part)
        for name in metrics.keys() & {OUTPUTS, TARGETS}:
            collected.setdefault(name, []).append(metrics[name])
        return scalars(metrics)

    return evaluate(means, batch, parts) | {name: torch.cat(of, dim) for name, of in collected.items()}


def _continued(group: Mapping[str, Any], before: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return this learner's parameter group `group`, with the learned values of the saved group `before`.

    Some optimizers, such as Prodigy, keep learned values in their parameter groups.
    """
    if (name := optimizer_name(config)) == OWN:
        given = {"params", "lr", "weight_decay", *own_arguments(config)}
        return {**before, **{key: value for key, value in group.items() if key in given}}
    return {**group, **{key: before[key] for key in LEARNED.get(name, ())}}


def _is_dense(model: nn.Module) -> bool:
    """Tell whether all parameters are real floats with dense gradients, which recorded optimizers require."""
    floats = all(parameter.is_floating_point() for parameter in model.parameters())
    return floats and not any(getattr(module, "sparse", False) for module in model.modules())


def _as_vectors(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().unsqueeze(0) for name, value in metrics.items()}
