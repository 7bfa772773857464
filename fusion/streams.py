"""Random number streams: each member draws the same numbers as if it ran alone with seeded global generators.

The global generators are torch's default ones (CPU, CUDA, MPS), Python's `random` and NumPy's.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch


def seed_generators(seed: int) -> None:
    """Seed all global generators, because models and data sets may draw from any of them."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    # `torch.manual_seed` would do this, too, but is slow: it records the call stack for each missing kind of device.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the states of the global generators at the end of this context."""
    beyond_torch = _beyond_torch()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            _set_beyond_torch(beyond_torch)


Exchange = Callable[[torch.Generator, torch.Generator], Callable[[bool], None]]
"""A function that makes a default generator continue the numbers of another generator.

Its arguments are the default generator and the member's generator `own`. It returns a function that ends the exchange.
That function takes True if `own` keeps its advanced state, and False if `own` returns to its old state.
"""


def by_state(default: torch.Generator, own: torch.Generator) -> Callable[[bool], None]:
    """Make `default` continue the numbers of `own` by copying states; return the function that ends the exchange.

    This works for all generators. `Exchange` describes the function.
    """
    before = default.get_state()
    default.set_state(own.get_state())

    def back(drawn: bool) -> None:
        if drawn:
            own.set_state(default.get_state())
        default.set_state(before)

    return back


_exchange: ContextVar[Exchange] = ContextVar("exchange", default=by_state)


@contextmanager
def exchanged(exchange: Exchange) -> Iterator[None]:
    """Make streams use another `Exchange` inside this context, such as that of a recorded step."""
    token = _exchange.set(exchange)
    try:
        yield
    finally:
        _exchange.reset(token)


class Stream:
    """The sequence of random numbers that the global generators give after `seed_generators(seed)`.

    A stream remembers how far it has been drawn.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._own_beyond_torch: tuple[Any, Any] | None = None

    def generator(self, device: torch.device) -> torch.Generator:
        """Return this stream's generator on `device`, which replaces torch's default generator there."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    def seed(self, seed: int) -> None:
        """Restart with a seed, but keep the generator objects."""
        self._seed, self._own_beyond_torch = seed, None
        for generator in self._generators.values():
            generator.manual_seed(seed)

    @contextmanager
    def drawn_from(self, *, beyond_torch: bool = True) -> Iterator[None]:
        """Make the global generators continue this stream, inside this context.

        After an error, the stream returns to the state that it had before the context.

        Args:
            beyond_torch: If True, include Python's and NumPy's generators, which takes 0.3 ms. If False, replace only
                torch's generators, which takes 5 us.
        """
        exchange, drawn = _exchange.get(), False
        backs = [exchange(default, self.generator(default.device)) for default in _defaults()]
        others = _beyond_torch() if beyond_torch else None
        if beyond_torch:
            _set_beyond_torch(self._own_beyond_torch or _seeded_beyond_torch(self._seed))
        try:
            yield
            drawn = True
            if beyond_torch:
                self._own_beyond_torch = _beyond_torch()
        finally:
            for back in backs:
                back(drawn)
            if others:
                _set_beyond_torch(others)

    def copy(self) -> Stream:
        """Return an independent stream that continues with the same numbers."""
        twin = Stream(self._seed)
        for device, generator in self._generators.items():
            twin.generator(device).set_state(generator.get_state())
        twin._own_beyond_torch = self._own_beyond_torch
        return twin

    def follow(self, other: Stream) -> None:
        """Continue with the same numbers as `other`, but keep the generators, because recorded steps draw from them."""
        self.seed(other._seed)
        for device, generator in other._generators.items():
            self.generator(device).set_state(generator.get_state())
        self._own_beyond_torch = other._own_beyond_torch

    def __deepcopy__(self, memo: dict[int, Any]) -> Stream:
        return self.copy()


class Streams:
    """One stream for each of K members.

    If members were never seeded, torch's default generator seeds them when they first draw together. Unseeded members
    that are evaluated one after another draw from the global generators, as ordinary code does.
    """

    def __init__(self, K: int, seeds: Sequence[int] | None = None) -> None:
        self.K = K
        self._members = None if seeds is None else [Stream(seed) for seed in seeds]
        self.look_again()

    def seed(self, seeds: Sequence[int]) -> None:
        """Restart with new seeds. Keep the members' generator objects, because recorded steps draw from them."""
        for k, seed in enumerate(seeds):
            self[k].seed(seed)
        self.look_again()

    def overwrite(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Make the members `targets` continue with the same numbers as `sources`, but with their own generators."""
        if self.seeded:
            for k, stream in zip(targets, [self[k].copy() for k in sources]):
                self[k].follow(stream)

    @property
    def draw_beyond_torch(self) -> bool:
        """Return whether members drew from Python's or NumPy's generators in their last run.

        Return True before the first run. If members are not seeded, always return False.
        """
        return self.seeded and self._beyond_torch

    def generators(self, device: torch.device) -> list[torch.Generator]:
        """Return the members' generators on a device; an empty list if members are not seeded."""
        return [member.generator(device) for member in self._members or ()]

    @property
    def seeded(self) -> bool:
        """Return whether the members have been seeded, explicitly or by their first draw."""
        return self._members is not None

    def __getitem__(self, k: int) -> Stream:
        if self._members is None:
            self._members = [Stream(seed) for seed in torch.randint(2**63 - 1, (self.K,)).tolist()]
        return self._members[k]

    def look_again(self) -> None:
        """Check again in the next run whether members draw from Python's or NumPy's generators.

        If they do not, later runs leave these generators alone, because exchanging them is slow.
        """
        self._beyond_torch, self._found = True, False

    @contextmanager
    def drawn_from(self, k: int) -> Iterator[None]:
        """Make the global generators continue member `k`'s stream, inside this context.

        Enter it for each member in turn, from the first to the last. After a round in which no member has drawn from
        Python's or NumPy's generators, these are not exchanged any more.
        """
        if not self.seeded:
            yield
            return
        with self[k].drawn_from(beyond_torch=self._beyond_torch):
            before = states_beyond_torch() if self._beyond_torch else None
            yield
            self._found = self._found or (self._beyond_torch and states_beyond_torch() != before)
        if k == self.K - 1:
            self._beyond_torch, self._found = self._found, False

    def joined(self, chosen: Sequence[int], other: Streams | None = None) -> Streams:
        """Return copies of the chosen members' streams, followed by copies of all streams of `other`."""
        others = other.K if other else 0
        whole = Streams(len(chosen) + others)
        if self.seeded or (other and other.seeded):
            whole._members = [self[k].copy() for k in chosen]
            whole._members += [other[k].copy() for k in range(others)] if other else []
        return whole


def global_states() -> list[Any]:
    """Return the states of the global generators. Two results are equal if nothing was drawn between the calls."""
    return [*(generator.get_state().tolist() for generator in _defaults()), *states_beyond_torch()]


def _defaults() -> list[torch.Generator]:
    found: list[torch.Generator] = [torch.default_generator]
    if torch.cuda.is_initialized():
        found += torch.cuda.default_generators
    if torch.backends.mps.is_available():
        found.append(torch.mps._get_default_mps_generator())
    return found


def _beyond_torch() -> tuple[Any, Any]:
    """Return the states of Python's and NumPy's generators; NumPy's is None if NumPy is not imported."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy else None


def states_beyond_torch() -> list[Any]:
    """Return the states of Python's and NumPy's generators in a form that can be compared, as in `global_states`."""
    python, numpy = _beyond_torch()
    return [python, None if numpy is None else [part.tolist() if hasattr(part, "tolist") else part for part in numpy]]


def _seeded_beyond_torch(seed: int) -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.Random(seed).getstate(), numpy.random.RandomState(seed % 2**32).get_state() if numpy else None


def _set_beyond_torch(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])
