"""Messages about epochs and warnings, from the actors of a pool to the tuner while they train. Needs no torch.

A call of an actor answers only once, at its end. Earlier messages go through a small actor on the tuner's node.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hydro_rasda.history.lines import EpochTold

_EVERY_S = 0.1
"""Minimum number of seconds between two messages about epochs. Epochs in between are reported together."""


class _Board:
    def __init__(self) -> None:
        self._messages: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()

    async def write(self, device: int, message: bytes) -> None:
        await self._messages.put((device, message))

    async def read(self) -> list[tuple[int, bytes]]:
        """Return all messages that have arrived; if there are none, wait for one."""
        found = [await self._messages.get()]
        while not self._messages.empty():
            found.append(self._messages.get_nowait())
        return found


class Bulletin:
    """The tuner's side of the messages: it reads the epochs and warnings that actors send.

    `coming` is Ray's future of the next messages.
    """

    def __init__(self) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": here}
        self.board = ray.remote(**options)(_Board).remote()
        self.coming = self.board.read.remote()

    def read(self) -> list[tuple[int, str, Any]]:
        """Return the messages that have arrived: device, kind and content."""
        found: list[tuple[int, bytes]] = []
        try:
            found = ray.get(self.coming)
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError):
            time.sleep(_EVERY_S)  # wait while Ray restarts the actor
        self.coming = self.board.read.remote()
        return [(device, *cloudpickle.loads(message)) for device, message in found]

    def close(self) -> None:
        ray.kill(self.board)


class Reporter:
    """An actor's side of the messages: it sends epochs to the tuner while the actor trains, and warnings at the end."""

    def __init__(self, board: Any, device: int) -> None:
        self._board, self._device = board, device
        self._epochs, self._told = 0, 0.0
        self._metrics: Mapping[str, list[float]] = {}
        self._of_models: list[EpochTold] = []

    def notify(self, epochs: int, metrics: Mapping[str, list[float]], told: Sequence[EpochTold] = ()) -> None:
        """Send epochs, the metrics after them and entries for the journal to the tuner, now or with later epochs."""
        self._epochs, self._metrics = self._epochs + epochs, metrics
        self._of_models += told
        if time.monotonic() - self._told >= _EVERY_S:
            self._tell_epochs()

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Collect the warnings of a training within the context; at its end, report them and the last epochs."""
        with warnings.catch_warnings(record=True) as caught:
            yield
        self._tell_epochs()
        if caught:
            from hydro_rasda.processes.forks import plain_warning  # imported only here, where torch is already loaded

            self._write("warned", [plain_warning(warning) for warning in caught])

    def _tell_epochs(self) -> None:
        if self._epochs:
            self._write("notified", (self._epochs, self._metrics, self._of_models))
            self._epochs, self._of_models, self._told = 0, [], time.monotonic()

    def _write(self, kind: str, content: Any) -> None:
        self._board.write.remote(self._device, cloudpickle.dumps((kind, content)))
