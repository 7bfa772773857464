"""The learner of K models that train as one; `single_learner.SingleLearner` trains one model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any

from torch import Tensor, nn

from fusion import FusedModel, clip_grad_norm_, fuse, fused_optimizer, lr_factor
from fusion.evaluate.microbatch import backward
from fusion.keys import read
from fusion.streams import Streams, seed_generators
from fusion.structure.module_parts import copied
from hydro_rasda.data import ALONE, Batch, Share
from hydro_rasda.data.batch_splits import num_parts
from hydro_rasda.problem.lr_roles import by_parameter, roles_of
from hydro_rasda.problem.objective import Objective, joined, moving, scalars
from hydro_rasda.problem.precision import loss_scale, turns
from hydro_rasda.problem.problem import Problem
from hydro_rasda.training.cuda_graphs import recorded, records
from hydro_rasda.training.folds_and_repeats import members_first, stacked
from hydro_rasda.training.lr_and_decay_by_parameter import multipliers, optimizer_settings
from hydro_rasda.training.single_learner import evaluate_parts, weights_of

State = dict[str, Any]


class FusedLearner:
    """K fused models, each with its own hyperparameters.

    Args:
        models: Number of models of each trial; a trial's models stand next to each other in `modules`. If a trial has
            several, each of them trains on its own batch.

    Attributes:
        micro_batches: Number of parts of each batch. Parts are computed one after the other, to take less memory.
    """

    shard = ALONE

    def __init__(
        self,
        modules: Sequence[nn.Module],
        configs: Sequence[Mapping[str, Any]],
        problem: Problem,
        models: int = 1,
    ) -> None:
        self.fused: FusedModel = fuse(modules)
        self._models = models
        settings = [optimizer_settings(problem.objective, *of) for of in zip(modules, configs)]
        self._configs = [own.config for own in settings]
        self._roles = roles_of(modules[0])
        self.micro_batches: int = read(self._configs[0], "accumulate")
        self._batch_size: int = read(configs[0], "batch_size")
        self._factors = multipliers(settings[0], modules[0], problem.settings.sweep.surrogate)
        self.optimizer = fused_optimizer(self.fused, self._configs, **self._factors)
        self._objective, self._turns = problem.objective, turns(problem.objective)
        self._scale = loss_scale(problem.settings.precision, self.fused.K, problem.device)
        self._max_t, self._time = problem.settings.max_t, problem.schedule_time
        self._scheduled: tuple[int, float] | None = None
        self._recordable = self.optimizer.can_be_recorded and len(self._turns) == 1
        graph = records(problem) and self._recordable
        self._graph = recorded(self._update, self.fused, self.optimizer) if graph else None

    def compile(self) -> None:
        """Compile training steps, see `fusion.GraphedStep`; steps that cannot be compiled run as they are written."""
        if self._recordable:
            self._graph = recorded(self._update, self.fused, self.optimizer, compiled=True)

    def seed(self, seeds: Sequence[int]) -> None:
        if self.fused.K == 1:
            # A single member draws from the global generators, as any model does, so that none need to be swapped.
            if self.fused.streams.seeded:  # if the member was one of several before
                self.fused.streams = Streams(1)
            seed_generators(seeds[0])
        else:
            self.fused.seed(seeds)

    def train_mode(self, training: bool) -> None:
        self.fused.train(training)

    @property
    def averages(self) -> bool:
        return False

    @contextmanager
    def evaluating(self, averaged: bool = True) -> Iterator[None]:
        self.train_mode(False)
        with self.optimizer.evaluating():
            yield

    def step(self, share: Share, epoch: float, steps: float) -> Mapping[str, Tensor]:
        self._schedule(epoch, steps)
        batch = share.batch if self._models == 1 else self.side_by_side(share.batch)
        if batch is None:
            # The models' batches differ in shape, so members train one after another, each on its own batch.
            before, given = self.fused.one_by_one, cycle(share.batch)
            self.fused.one_by_one = True
            try:
                return self._update(None, given)
            finally:
                self.fused.one_by_one = before
        return self._update(batch) if self._graph is None else self._graph(batch)

    def side_by_side(self, batches: Sequence[Batch]) -> Batch | None:
        """Join the batches of a trial's models into one batch [N, K, ...] for all K members.

        Return None if the batches cannot be joined, for example because their shapes differ; see `stacked`.
        """
        return stacked(batches, self.fused.K // self._models)

    def _update(self, batch: Batch, given: Iterator[Batch] | None = None) -> Mapping[str, Tensor]:
        """Update the members by each part of the objective in turn.

        Members train on `batch`. If `given` is not None, each member trains on the next batch of `given` instead.
        """
        metrics = dict[str, Mapping[str, Tensor]]()
        scale, norms = self._scale, [read(config, "grad_clip") for config in self._configs]
        for part, objective in self._turns.items():
            self.optimizer.zero_grad()
            scaled = None if scale is None else scale.apply
            of_each, parts = partial(self._metrics, objective), 1 if given is not None else self.parts_of(batch)
            if given is not None:
                of_each = partial(self._of, partial(_of_next, objective, given))
            with moving(part, self.fused.template, self.fused.stacked):
                metrics[part] = backward(of_each, batch, parts, scaled=scaled, gradients=self._gradients)
            takes = None if scale is None else scale.unscale(self.fused)
            if any(norms):
                clip_grad_norm_(self.fused, [norm or math.inf for norm in norms])
            self.optimizer.step(takes)
            if scale is not None and takes is not None:
                scale.update(takes)
        return joined(metrics)

    def parts_of(self, batch: Batch) -> int:
        """Return the number of micro-batches of a training batch."""
        return num_parts(batch, self._batch_size, self.micro_batches)

    def _gradients(self) -> Iterator[Tensor | None]:
        return (parameter.grad for parameter in self.fused.stacked.values())

    def _schedule(self, epoch: float, steps: float) -> None:
        """At an epoch's first step, give the optimizer the learning rate factors of all steps of the epoch."""
        whole = math.floor(epoch)
        if self._scheduled == (whole, steps):
            return
        first = round((epoch - whole) * steps)
        coming = range(first, max(first + 1, math.ceil(steps)))
        self.optimizer.schedule(
            [
                [lr_factor(c, self._time(whole + i / steps), self._max_t, steps) for c in self._configs]
                for i in coming
                for _ in self._turns
            ]
        )
        self._scheduled = (whole, steps)

    def evaluate(self, batch: Batch) -> Mapping[str, Tensor]:
        return evaluate_parts(partial(self.fused.map, self._objective), batch, self.micro_batches, 1)

    def evaluate_apart(self, batches: Sequence[Batch | None]) -> list[Mapping[str, Tensor] | None]:
        """Evaluate model `i` of each trial on `batches[i]`, because the models validate on different examples.

        Args:
            batches: A batch for each model of a trial; None for a model that has no batch left.

        Returns:
            For each model of a trial, the metrics [T] of T trials; None if the model had no batch.
        """
        found: list[Mapping[str, Tensor] | None] = []
        given = [batch for batch in batches if batch is not None]
        alike = self.side_by_side(given) if len(given) == len(batches) else None
        if alike is not None:
            own = partial(self._on_own, self._objective)
            of_all = evaluate_parts(own, alike, self.micro_batches, 1)
            return [{name: value[at :: self._models] for name, value in of_all.items()} for at in range(self._models)]
        for at, batch in enumerate(batches):
            metrics = {} if batch is None else self.evaluate(batch)
            found.append({name: value[at :: self._models] for name, value in metrics.items()} or None)
        return found

    def _metrics(self, objective: Objective, batch: Batch) -> Mapping[str, Tensor]:
        return scalars(self._on_own(objective, batch) if self._models > 1 else self._of(objective, batch))

    def _of(self, objective: Objective, batch: Batch) -> Mapping[str, Tensor]:
        found: Mapping[str, Tensor] = self.fused.map(objective, batch)
        return found

    def _on_own(self, objective: Objective, batch: Batch) -> Mapping[str, Tensor]:
        """Return the metrics of K members on a batch [N, K, ...], each on its own samples."""
        found: Mapping[str, Tensor] = self.fused.map(objective, members_first(batch), own_data=True)
        return found

    def state(self) -> State:
        """Return weights, buffers and optimizer state of all members; in float16, also their loss scales."""
        scale = {} if self._scale is None else {"loss_scale": self._scale.state_dict()}
        written = sorted(self.fused.written)
        also = {"written": written, **scale}
        return {"model": self.fused.state_dict(), "optimizer": self.optimizer.state_dict(), **also}

    def load(
        self, state: Mapping[str, Any], positions: Sequence[int] | None = None, hyperparameters: bool = True
    ) -> None:
        """Load a state that `state` returned.

        Args:
            positions: The members of `state` to load; None for all.
            hyperparameters: True to load the hyperparameters of `state`, too; False to keep those with which this
                learner was made.
        """
        self.fused.load_state_dict(state["model"], members=positions)
        self.fused.written |= frozenset(state["written"])
        self.optimizer.load_state_dict(state["optimizer"], members=positions, hyperparameters=hyperparameters)
        if self._scale is not None:
            self._scale.load_state_dict(state["loss_scale"], members=positions)
        self._scheduled = None

    def member_state(self, position: int) -> State:
        """Return one member's weights, buffers and optimizer state, in the form that `SingleLearner` loads."""
        module = self.fused.unfuse(position)
        optimizer = self.optimizer.unfuse(position, module)
        state: State = {**weights_of(module, optimizer), "optimizer": optimizer.state_dict()}
        if self._scale is not None:
            state["loss_scale"] = {name: of_K[[position]] for name, of_K in self._scale.state_dict().items()}
        return state

    @property
    def _parts(self) -> list[Any]:
        return [part for part in (self.fused, self.optimizer, self._scale) if part is not None]

    def keep(self, positions: Sequence[int]) -> None:
        if list(positions) != list(range(len(self._configs))):
            for part in self._parts:
                part.keep(positions)
            self._configs = [self._configs[p] for p in positions]

    def copy(self, sources: Mapping[int, int]) -> None:
        """Overwrite each member `k` by member `sources[k]`: weights, buffers, optimizer state and loss scale."""
        for part in self._parts:
            part.copy(sources)

    def go_on(self, configs: Sequence[Mapping[str, Any]], modules: Mapping[int, nn.Module]) -> None:
        """Continue with new configurations, as if a learner made with `configs` had loaded this learner's state.

        Args:
            modules: Map the position of each member whose floats (such as a dropout rate) change to a newly built
                module.
        """
        if modules:
            self.fused.set_floats(modules)
        configs = [by_parameter(config, self._roles) for config in configs]
        if configs != list(self._configs):
            self._configs = configs
            self.optimizer.take_hyperparameters(fused_optimizer(self.fused, configs, **self._factors))
        self._scheduled = None
        if self._graph is not None:
            self._graph.reset()

    def concat(self, other: FusedLearner) -> None:
        """Append the members of another learner."""
        for own, theirs in zip(self._parts, other._parts, strict=True):
            own.concat(theirs)
        self._scheduled = None
        self._configs += other._configs


def _of_next(objective: Objective, given: Iterator[Batch], model: nn.Module, _: Batch) -> Mapping[str, Tensor]:
    """Return a model's metrics on the next batch of `given`."""
    return objective(model, copied(next(given)))
