"""Parts that the integrations share: loaders by batch size, the call of `tune`, and its result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from fusion.warn import warn
from hydro_rasda.common.argument_checks import check_is
from hydro_rasda.data import Batch
from hydro_rasda.results.result import TuneResult
from hydro_rasda.settings.config import RaceConfig, SweepConfig
from hydro_rasda.tuner import tune
from surrogate import shrink


def check_parts(sweep: object, race: object) -> None:
    """Refuse what `tune` does not take as `sweep` and `race`."""
    check_is("sweep", sweep, SweepConfig)
    check_is("race", race, RaceConfig)


def check_options(called: str, options: Mapping[str, object]) -> None:
    """Refuse arguments that `tune` does not have, before any work: TypeError."""
    known = inspect.signature(tune).parameters
    for name in options:
        if name not in known:
            raise TypeError(f"{called}() got an unexpected keyword argument {name!r}")


def unaveraged(race: RaceConfig) -> RaceConfig:
    """Average no weights, as other libraries' loops average none, unless `ema` is another than its default."""
    return replace(race, ema=0.0) if race.ema == RaceConfig.ema else race


def narrow_or_full(sweep: SweepConfig, model: nn.Module, example: Callable[[], Any]) -> SweepConfig:
    """The sweep that was asked for; one at full width, which is said, if the model cannot be made so narrow.

    `example()` is what the model is called with, as `shrink` takes it.
    """
    width = sweep.surrogate
    if width == 1:
        return sweep
    try:
        shrink(model, width, example())
    except Exception as error:
        told = (str(error) or type(error).__name__).splitlines()[0]
        warn(f"the model is swept at its full width (`sweep=SweepConfig(surrogate=1)`), not at {width:g}: {told}")
        return replace(sweep, surrogate=1)
    return sweep


Collator = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class TrainLoader:
    """`make_loader(batch_size)`, where a batch is what one update is made of: `parts` of another library's batches.

    With `drop_last`, the last part is left out where it is smaller; with `shuffle`, each epoch has an order of its own.
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
    """`make_loader(batch_size)`, whose batches are of one size, whatever it is asked for."""

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
    """A `TuneResult`, with what another library needs besides."""

    @property
    def tuned(self) -> TuneResult:
        """The same result, for scripts that ask for it by this name."""
        return self
