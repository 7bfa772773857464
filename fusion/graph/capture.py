"""Recording of a step: the interface that a device must offer, and CUDA's graphs."""

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
        """Run a step in the place (CUDA: stream) where it will be recorded; the caller need not synchronize."""
        ...

    def record(self, step: Callable[[], Result], generators: Iterable[torch.Generator]) -> tuple[Result, Replay]:
        """Run a step; return its result and a function that runs its operators again on the same tensors.

        Args:
            step: Reads no value, see `Trace`.
            generators: Generators that the step draws from, besides the device's default one. Each replay draws the
                next numbers of each of them.

        Raises:
            Exception: any error that prevents the recording. Then nothing has been computed.
        """
        ...


class CudaGraphs:
    """`torch.cuda.CUDAGraph`: all kernels of a step in one launch, in memory of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def _stream(self) -> torch.cuda.Stream:
        return _stream_of(self._device)

    def aside(self, step: Callable[[], Result]) -> Result:
        """Run a step on a separate stream: capturing needs one, and gradients accumulate on their first stream."""
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
        own = [generator for generator in generators if generator.device.type == "cuda"]
        for generator in own:
            graph.register_generator_state(generator)
        drawing = {*own, *torch.cuda.default_generators}
        states = {generator: generator.clone_state() for generator in drawing}
        gc.disable()  # the collector might free memory that must not be freed during a capture
        with torch.cuda.device(self._device):
            try:
                # By default, an allocation in any thread (that loads data, say) would spoil the capture.
                capture = torch.cuda.graph(graph, pool, self._stream, "thread_local")
                with exchanged(_by_reference), capture:
                    result = step()
            except BaseException:
                self._leave(pool)
                for generator, state in states.items():  # those of before would wait for the end of the capture
                    generator.graphsafe_set_state(state)
                raise
            finally:
                torch.cuda.set_stream(here)  # a capture that fails leaves its own
                if collects:
                    gc.enable()
            graph.replay()
        return result, graph.replay

    def _leave(self, pool: Any) -> None:
        """Tell the allocator that CUDA ended a capture by itself, because torch does not tell it."""
        index = torch.cuda.current_device()
        with suppress(RuntimeError):  # where torch did tell it
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all recordings: libraries keep a workspace for each stream that they have seen."""
    return torch.cuda.Stream(device)


def capture_on(device: torch.device) -> Capture | None:
    """Return an object that records steps on a device; None if there is none."""
    return CudaGraphs(device) if device.type == "cuda" else None


def _by_reference(default: torch.Generator, own: torch.Generator) -> Callable[[bool], None]:
    """Exchange generators by reference, as a graph needs it: replays would reuse copies of the first states."""
    if default.device.type != "cuda":
        return by_state(default, own)
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(own.graphsafe_get_state())

    def back(drawn: bool) -> None:
        default.graphsafe_set_state(before)

    return back
