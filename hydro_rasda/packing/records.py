"""Records of jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

State = Literal["pending", "running", "complete", "failed"]


@dataclass(frozen=True)
class JobRecord:
    """One job.

    Attributes:
        state: "pending", "running", "complete" or "failed".
        attempt: How often it was started.
        device: The device on which it ran last; "" if it never ran.
        alone: True if it has to have a device to itself: memory ran out beside others.
        exit: Exit status, negative for a signal; None where it has not ended by itself.
        error: Why it failed, in words; "" where it did not.
        seconds: That it ran, once it is over.
        memory: Peak of bytes, over all of its processes.
        share: Of its device, on average; on CPUs, of one core.
        value: The value of a function, as JSON has it.
    """

    name: str
    state: State = "pending"
    attempt: int = 0
    device: str = ""
    alone: bool = False
    exit: int | None = None
    error: str = ""
    seconds: float = 0.0
    memory: float = 0.0
    share: float = 0.0
    value: Any = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def over(self) -> bool:
        """Return whether nothing is left to do."""
        return self.state in ("complete", "failed")


@dataclass(frozen=True)
class PackResult:
    """The outcome of all jobs.

    Attributes:
        jobs: One record each, in the order in which they were handed in.
        path: The run's folder; `logs/NAME.log` has what a job wrote.
        seconds: Wall time, that of earlier, interrupted calls included.
    """

    jobs: Sequence[JobRecord]
    path: Path
    seconds: float

    @property
    def failed(self) -> Mapping[str, str]:
        """By the names of jobs that failed, why."""
        return {job.name: job.error for job in self.jobs if job.state == "failed"}

    @property
    def values(self) -> list[Any]:
        """Values of the functions, in their order; None for commands and for failed jobs."""
        return [job.value for job in self.jobs]
