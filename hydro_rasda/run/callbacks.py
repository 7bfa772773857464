"""Callbacks: they receive the events of a run while it is in progress."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Protocol

from hydro_rasda.common.argument_checks import check_function, require
from hydro_rasda.run.events import Event


class Callback(Protocol):
    """An object that receives each event of a run, one after another, in the process that called `tune`.

    The run waits until `on_event` returns. A callback that raises gets no more events, and the run continues.
    """

    def on_event(self, event: Event) -> None:
        """Receive an event. It has happened, and the journal has recorded it."""
        ...


Listener = Callback | Callable[[Event], None]
"""An item of `tune(callbacks=...)`: a callback, or a function that takes an event."""


def check_callbacks(callbacks: Sequence[Listener]) -> None:
    """Raise if an item of `tune(callbacks=...)` is not a `Listener`."""
    rule = "a list of functions of an event, or of objects with a method `on_event`"
    require(isinstance(callbacks, (list, tuple)), "callbacks", callbacks, rule)
    for i, callback in enumerate(callbacks):
        rule = "a function of an event, or an object (no class) with a method `on_event`"
        listens = callback if isinstance(callback, type) else getattr(callback, "on_event", callback)
        check_function(f"callbacks[{i}]", listens, 1, rule=rule)


class Callbacks:
    """The callbacks of a run. Each event goes to all of them, in the order in which they were given."""

    def __init__(self, callbacks: Sequence[Listener] = ()) -> None:
        self._callbacks = list(callbacks)

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def notify(self, event: Event) -> None:
        """Give an event to all callbacks. If one raises, warn of it and give it no more events."""
        for callback in list(self._callbacks):
            try:
                _function(callback)(event)
            except Exception:
                self._callbacks = [other for other in self._callbacks if other is not callback]
                warnings.warn(
                    f"the callback {callback!r} raised at {type(event).__name__}, and is left out from now on; "
                    f"the run goes on:\n{traceback.format_exc()}",
                    stacklevel=2,
                )


def _function(callback: Listener) -> Callable[[Event], None]:
    if callable(callback) and not hasattr(callback, "on_event"):
        return callback
    return callback.on_event
