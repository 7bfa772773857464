"""Recording of a training step: the interface for devices, and its implementation with CUDA graphs."""

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
    """Records training steps on one kind of device."""

    def aside(self, step: Callable[[], Result]) -> Result:
        """Run a step without recording it, in the place where steps are recorded, such as on a separate CUDA stream.

        The caller need not synchronize.
        """
        ...

    def record(self, step: Callable[[], Result], generators: Iterable[torch.Generator]) -> tuple[Result, Replay]:
        """Run a step; return its result, and a function that runs the step's operators again on the same tensors.

        Args:
            step: A step that reads no values from the device. `Trace` detects such reads.
            generators: Generators that the step draws from, besides the device's default one. Each replay draws the
                next numbers from each generator.

        Raises:
            Exception: any error that prevents the recording. The step has then changed nothing.
        """
        ...


class CudaGraphs:
    """Records steps as `torch.cuda.CUDAGraph`: one launch runs all kernels, in a memory pool of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def _stream(self) -> torch.cuda.Stream:
        return _stream_of(self._device)

    def aside(self, step: Callable[[], Result]) -> Result:
        """Run a step on a separate stream.

        Capturing needs such a stream. Autograd accumulates gradients on the stream of the first step, so that step must
        use it, too.
        """
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            result = step()
        here.wait_stream(self._stream)
        return result

    def record(self, step: Callable[[], Result], generators: Iterable[torch.Generator]) -> tuple[Result, Replay]:
        """Record the step, then replay it once, because recording computes nothing."""
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
                # Use "thread_local". By default, the capture would fail if any other thread, such as a data loader's,
                # allocates memory.
                capture = torch.cuda.graph(graph, pool, self._stream, "thread_local")
                with exchanged(_by_reference), capture:
                    result = step()
            except BaseException:
                self._leave(pool)
                # A failed capture may leave generators in capture mode, in which any draw outside a capture raises.
                for generator, state in states.items():
                    generator.graphsafe_set_state(state)
                raise
            finally:
                torch.cuda.set_stream(here)  # a failed capture would leave its own stream set
                if collects:
                    gc.enable()
            graph.replay()
        return result, graph.replay

    def _leave(self, pool: Any) -> None:
        """Tell torch's allocator that the capture into `pool` has failed. Torch does not do so if CUDA ended it."""
        index = torch.cuda.current_device()
        with suppress(RuntimeError):  # raised if the allocator already knows
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all recordings on a device. There is only one, because libraries keep memory per stream."""
    return torch.cuda.Stream(device)


def capture_on(device: torch.device) -> Capture | None:
    """Return an object that records steps on `device`; None if steps cannot be recorded there."""
    return CudaGraphs(device) if device.type == "cuda" else None


def _by_reference(default: torch.Generator, own: torch.Generator) -> Callable[[bool], None]:
    """Make `default` continue the numbers of `own` by reference; return the function that ends the exchange.

    With copied states, as in `by_state`, each replay of a graph would draw the same numbers.
    """
    if default.device.type != "cuda":
        return by_state(default, own)
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(own.graphsafe_get_state())

    def back(drawn: bool) -> None:
        default.graphsafe_set_state(before)

    return back
