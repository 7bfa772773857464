"""Parts that the integrations share: loaders by batch size, the call of `tune`, and its result."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from fusion.warn import warn
from hydro_rasda.common.argument_checks import check_is, require
from hydro_rasda.data import Batch
from hydro_rasda.results.result import TuneResult
from hydro_rasda.schedulers.named_rules import POPULATION
from hydro_rasda.schedulers.population import PopulationBasedTraining
from hydro_rasda.settings.config import RaceConfig, SweepConfig
from hydro_rasda.tuner import tune
from surrogate import shrink

M = TypeVar("M")


def check_parts(sweep: object, race: object) -> None:
    """Raise ValueError unless the values are a SweepConfig and a RaceConfig."""
    check_is("sweep", sweep, SweepConfig)
    check_is("race", race, RaceConfig)


def check_options(called: str, options: Mapping[str, object]) -> None:
    """Raise a TypeError, in the name of the function `called`, for options that are no arguments of `tune`."""
    known = inspect.signature(tune).parameters
    for name in options:
        if name not in known:
            raise TypeError(f"{called}() got an unexpected keyword argument {name!r}")


def without_default_ema(race: RaceConfig) -> RaceConfig:
    """Set `ema` to 0 unless the user changed its default, because the loops of other libraries average no weights."""
    return replace(race, ema=0.0) if race.ema == RaceConfig.ema else race


def narrow_or_full(sweep: SweepConfig, model: nn.Module, example: Callable[[], Any]) -> SweepConfig:
    """Return the sweep settings. If `shrink` cannot make the model narrow, warn, and return settings at full width.

    `example()` returns the example input of `shrink`.
    """
    width = sweep.surrogate
    if width == 1:
        return sweep
    try:
        shrink(model, width, example())
    except Exception as error:
        told = (str(error) or type(error).__name__).splitlines()[0]
        return at_full_width(sweep, f"at {width:g}", told)
    return sweep


def at_full_width(sweep: SweepConfig, instead_of: str, why: str, what: str = "model") -> SweepConfig:
    """Return the sweep settings at full width, and warn of it.

    The warning says that `what` is not swept `instead_of`, such as "narrower", and `why`.
    """
    warn(f"the {what} is swept at its full width (`sweep=SweepConfig(surrogate=1)`), not {instead_of}: {why}")
    return replace(sweep, surrogate=1)


def first_model(argument: str, make: Callable[[], object], config: Mapping[str, Any], kind: type[M], what: str) -> M:
    """Return the model that `make` makes for `config`; a ValueError names `argument` if it fails or makes no `kind`."""
    try:
        model = make()
    except Exception as error:
        raise ValueError(f"`{argument}` fails for {dict(config)!r} with {type(error).__name__}: {error}") from error
    require(isinstance(model, kind), argument, type(model).__name__, f"one that makes a {what}")
    assert isinstance(model, kind)
    return model


def check_rule(sweep: SweepConfig) -> None:
    """Raise ValueError for population based training where a trainer is run, which would undo what a copy changes."""
    copies = sweep.rule == POPULATION or isinstance(sweep.rule, PopulationBasedTraining)
    rule = (
        "another one where a trainer is run: it resumes with the learning rates of its checkpoint, not those of a copy"
    )
    require(not copies, "sweep.rule", sweep.rule, rule)


def with_fresh_callbacks(make: Callable[..., M], but: tuple[type, ...] = ()) -> Callable[..., M]:
    """Return a function that makes a trainer, with copies of the callbacks that a `functools.partial` holds.

    A callback has a state, such as its patience, which a trial must not inherit from another trial. Callbacks of the
    classes `but` are left out.
    """
    given = make.keywords.get("callbacks") if isinstance(make, partial) else None
    if not given:
        return make
    listed = given if isinstance(given, list | tuple) else [given]
    return partial(make, callbacks=[_copied(each) for each in listed if not isinstance(each, but)])


def _copied(callback: Any) -> Any:
    try:
        return copy.deepcopy(callback)
    except Exception:  # the callback holds a part that cannot be copied, such as a connection, so all trials share it
        return callback


Collator = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class TrainLoader:
    """`make_loader(batch_size)` for training.

    The other library accumulates gradients over `parts` batches before an update. Here, these batches are the parts of
    a single batch. If `drop_last` is True, a last part with fewer examples is left out. If `shuffle` is True, each
    epoch has its own random order.
    """

    dataset: Any
    collate: Collator
    parts: int
    drop_last: bool
    shuffle: bool
    workers: int

    def __call__(self, batch_size: int) -> DataLoader[Batch]:
        most = len(self.dataset)
        if self.drop_last:
            most -= most % (batch_size // self.parts)
        batches = _Batches(len(self.dataset), most, batch_size, self.shuffle)
        return DataLoader(self.dataset, batch_sampler=batches, collate_fn=self.collate, num_workers=self.workers)


@dataclass(frozen=True)
class EvalLoader:
    """`make_loader(batch_size)` for validation. It ignores its argument; batches always have `size` examples."""

    dataset: Any
    collate: Collator
    size: int
    workers: int

    def __call__(self, batch_size: int) -> DataLoader[Batch]:
        return DataLoader(self.dataset, self.size, collate_fn=self.collate, num_workers=self.workers)


class _Batches(Sampler[list[int]]):
    def __init__(self, length: int, most: int, size: int, shuffle: bool) -> None:
        self._length, self._most, self._size, self._shuffle = length, most, size, shuffle

    def __len__(self) -> int:
        return -(-self._most // self._size)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self._length).tolist() if self._shuffle else [*range(self._length)]
        return (order[i : min(i + self._size, self._most)] for i in range(0, self._most, self._size))


class LibraryResult(TuneResult):
    """A `TuneResult` with more attributes for users of another library."""

    @property
    def tuned(self) -> TuneResult:
        """The same result, for scripts that ask for it by this name."""
        return self
