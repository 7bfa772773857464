"""What survivors are due beyond the nodes that are up, asked of Ray's autoscaler, and how long they wait for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from ray.autoscaler.sdk import request_resources

logger = logging.getLogger(__name__)


class NodeRequests:
    """Asks for nodes, within a bound on the wait for each size.

    Ray's placement groups would ask by themselves, but wait for ever where no autoscaler runs or it may start no more.

    Args:
        worker: Resources of one worker.
        wait_s: How long trials wait for a size that the nodes do not hold; 0 to ask for nothing.
    """

    def __init__(self, worker: Mapping[str, float], wait_s: float) -> None:
        self._worker, self._wait_s = dict(worker), wait_s
        self._until: dict[int, float] = {}
        self._had = 0
        self._asked = 0

    def ask(self, due: int, held: int, count: int) -> None:
        """Ask for the nodes that a trial lacks.

        Args:
            due: Workers that the trial is due.
            held: Workers that other trials hold.
            count: Workers that the nodes hold now.
        """
        if not self._wait_s or due <= count:
            return
        self._note(count)
        if due in self._until:
            return
        self._until[due] = time.monotonic() + self._wait_s
        self._asked = max(self._asked, held + due)
        logger.warning(
            f"A trial is due {due} workers, and the nodes hold {count}: Ray's autoscaler is asked for more, and the "
            f"trial waits {self._wait_s:g} s at most."
        )
        request_resources(bundles=[self._worker] * self._asked)

    def awaited(self, due: int, count: int) -> bool:
        """Whether trials that are due so many workers still wait for nodes."""
        self._note(count)
        return due > count and time.monotonic() < self._until.get(due, 0.0)

    def settle(self, count: int) -> None:
        """Ask for nothing any more, once nobody waits; nodes that trials use stay."""
        if self._asked and not any(self.awaited(due, count) for due in list(self._until)):
            self._asked = 0
            request_resources(bundles=[])

    def _note(self, count: int) -> None:
        """Where nodes came, more may come: sizes that are still too large get their time again."""
        if count > self._had:
            self._until = {due: time.monotonic() + self._wait_s for due in self._until if due > count}
        self._had = count
