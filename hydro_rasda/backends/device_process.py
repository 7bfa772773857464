"""The process of a device, as a pool asks it: by the methods of the `Trainer` in it."""

from __future__ import annotations

from typing import Any, Protocol


class DeviceDied(Exception):
    """The process of a device ended without an answer; says what ended it."""


class Answer(Protocol):
    """The coming answer of a device's process."""

    def result(self) -> Any:
        """Wait for it; DeviceDied if there will be none."""
        ...


class DeviceProcess(Protocol):
    """A process with a `Trainer`, which does one thing after another."""

    def ask(self, method: str, *arguments: Any) -> Answer:
        """Have it call a method of its trainer; returns at once."""
        ...

    def end(self) -> None:
        """End it, whatever it does."""
        ...
