"""The tuner's side: `tune(backend=BubbleBackend(source))` trains in the bubbles of the hosts that come there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from hydro_rasda.backends.process_pool import PROBLEM, write_shared
from hydro_rasda.bubbles.devices import BubbleDevices
from hydro_rasda.checks import check_int, check_number, require
from hydro_rasda.config import Graph, check_steps
from hydro_rasda.contracts import Devices
from hydro_rasda.processes.child_count import can_be_shared
from hydro_rasda.run.files import refuse_open_to_others
from hydro_rasda.run.state import Run


class BubbleBackend:
    """Trains where hosts wait for their neighbours; see `hydro_rasda.bubbles`.

    To the sweep, all hosts together are one device with `groups` cores, whoever of them is there: which trials train
    together, and who goes on, does not depend on that. The answer is that of the same sweep on this machine alone, to
    the last digit. Two conditions hold for this: as many threads (`torch.set_num_threads(groups)`), and fused groups of
    the same width (`sweep.fusion`, or the widths that were measured on this machine lately).

    Hosts may come and go before, while and after `tune` runs; while there is none, it waits, within its time budget.
    Training that a host's end interrupts goes on in another bubble from the last checkpoint.

    Args:
        source: A folder that the tuner and its hosts both see, as they must the run's.
        groups: How many groups, or full-size models, train at the same time: as many as there are ranks of hosts, say.
        checkpoint_s: Seconds of wall time after which a guest ends its epoch and leaves a checkpoint, which takes some.
        loader_workers: As for `LocalBackend`.
        graph: As for `LocalBackend`.

    Raises:
        ValueError: for an argument that cannot be.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        source: str | Path,
        groups: int = 2,
        checkpoint_s: float = 120.0,
        loader_workers: int | None = None,
        graph: Graph = "auto",
    ) -> None:
        check_int("groups", groups, at_least=1)
        check_number("checkpoint_s", checkpoint_s)
        check_steps(graph, loader_workers)
        self.loader_workers, self.graph = loader_workers, graph
        self._source, self._groups, self._checkpoint_s = Path(source).absolute(), groups, checkpoint_s

    @contextlib.contextmanager
    def open(self, run: Run) -> Iterator[Devices]:
        """See `Backend.open`."""
        refuse_open_to_others(run.store.path)
        rule = "anything but a `BubbleBackend` for what holds an open file or a connection, which no other process has"
        require(can_be_shared(run.problem), "backend", self, rule)
        shared = run.store.path / PROBLEM
        try:
            write_shared(shared, run.problem)
            with contextlib.closing(BubbleDevices(run, self._source, shared, self._groups, self._checkpoint_s)) as all_:
                yield all_
        finally:
            shared.unlink(missing_ok=True)
