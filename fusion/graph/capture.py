"""How a step is recorded: what a device must offer for that, and CUDA's graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import Any, Protocol, TypeVar

import torch

from fusion.streams import by_state, exchanged

Result = TypeVar("Result")
Replay = Callable[[], None]


class Capture(Protocol):
    """Records steps."""

    def aside(self, step: Callable[[], Result]) -> Result:
        """Run a step in the place (CUDA: stream) where it will be recorded; nothing else needs to be waited for."""
        ...

    def record(self, step: Callable[[], Result], generators: Iterable[torch.Generator]) -> tuple[Result, Replay]:
        """Run a step, and return its result with what runs its operators again on the tensors that it had then.

        Args:
            step: Reads no value, see `Trace`.
            generators: What it draws random numbers from, besides the device's default generator: when it is run again,
                it draws what comes next in each of them.

        Raises:
            Exception: whatever stands in the way. Then nothing has been computed.
        """
        ...


class CudaGraphs:
    """`torch.cuda.CUDAGraph`: all kernels of a step in one launch, in memory of their own.

    Args:
        device: Of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def _stream(self) -> torch.cuda.Stream:
        return _stream_of(self._device)

    def aside(self, step: Callable[[], Result]) -> Result:
        """On a stream of its own: capturing needs one, and gradients are accumulated where they first were."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            result = step()
        here.wait_stream(self._stream)
        return result

    def record(self, step: Callable[[], Result], generators: Iterable[torch.Generator]) -> tuple[Result, Replay]:
        """Record, which computes nothing, then run the recording once."""
        graph, here, collects = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device), gc.isenabled()
        pool = torch.cuda.graph_pool_handle()
        for generator in generators:
            if generator.device.type == "cuda":
                graph.register_generator_state(generator)
        gc.disable()  # what it would free may be nothing that can be freed during a capture
        with torch.cuda.device(self._device):
            try:
                # By default, an allocation in any thread (that loads data, say) would spoil the capture.
                capture = torch.cuda.graph(graph, pool, self._stream, "thread_local")
                with exchanged(_by_reference), capture:
                    result = step()
            except BaseException:
                self._leave(pool)
                raise
            finally:
                torch.cuda.set_stream(here)  # a capture that fails leaves its own
                if collects:
                    gc.enable()
            graph.replay()
        return result, graph.replay

    def _leave(self, pool: Any) -> None:
        """Have the allocator know that a capture is over that CUDA ended by itself, which torch does not tell it."""
        index = torch.cuda.current_device()
        with suppress(RuntimeError):  # where torch did tell it
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """One for all: libraries keep a workspace for each stream that they have seen."""
    return torch.cuda.Stream(device)


def capture_on(device: torch.device) -> Capture | None:
    """What records steps on a device; None where nothing does."""
    return CudaGraphs(device) if device.type == "cuda" else None


def _by_reference(default: torch.Generator, own: torch.Generator) -> Callable[[bool], None]:
    """The exchange of generators that a graph can follow: no copies, which would be those of the first time."""
    if default.device.type != "cuda":
        return by_state(default, own)
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(own.graphsafe_get_state())

    def back(drawn: bool) -> None:
        default.graphsafe_set_state(before)

    return back
