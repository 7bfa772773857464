"""Pickling of results and functions, also of those that plain pickle or cloudpickle cannot take."""

from __future__ import annotations

import importlib
import pickle
import sys
from types import ModuleType
from typing import Any

import cloudpickle


def pickle_config_modules() -> None:
    """Make every pickler take torch's modules of settings by their names, as it takes other modules.

    Beside a function, cloudpickle pickles each loaded submodule whose dotted name the function's own names could spell.
    A function that reads `worker.config` and calls `torch.distributed` brings `torch.distributed.config`. That module
    is of torch's own subclass of the module type.
    """
    module = sys.modules.get("torch.utils._config_module")
    if module is not None:  # else torch is not loaded, and no such module is
        module.ConfigModule.__reduce__ = _by_name


def _by_name(module: ModuleType) -> tuple[Any, tuple[str]]:
    return importlib.import_module, (module.__name__,)


class Portable:
    """Base of objects that pickle takes to another process with functions that plain pickle cannot take."""

    def __reduce__(self) -> tuple[Any, ...]:
        pickle_config_modules()
        return _restored, (type(self), cloudpickle.dumps(self._packed()))

    def _packed(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def _unpacked(self, state: dict[str, Any]) -> dict[str, Any]:
        return state


def _restored(cls: type[Portable], packed: bytes) -> Portable:
    made = cls.__new__(cls)
    made.__dict__.update(made._unpacked(pickle.loads(packed)))
    return made


class Gone:
    """A stand-in for a function that could not come along with a pickled result."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            f"`{self._name}` did not come along when this result was loaded or pickled, or cannot be found here; "
            "`best_model(model_fn=...)` takes it"
        )


def check_has_functions(problem: object) -> None:
    """Refuse to measure a model without the functions of its run, which a loaded result does not have."""
    if gone := [name for name in ("model_fn", "objective") if isinstance(getattr(problem, name), Gone)]:
        told = f"this result was loaded or pickled without `{'` and `'.join(gone)}`, which `evaluate` needs"
        way = "or repeat the call of `tune`: it trains nothing again, and its result can evaluate"
        raise ValueError(f"{told}. Measure `best_model(model_fn=...)` yourself, {way}")


def dumped(function: Any) -> bytes | None:
    """Pickle a function; None if it holds a value that cannot be pickled."""
    try:
        packed: bytes = cloudpickle.dumps(function)
    except Exception:  # whatever a `__reduce__` raises: it holds an open file, say
        return None
    return packed


def loaded(name: str, packed: bytes | None) -> Any:
    """Unpickle a function; if that fails, return a stand-in of this name that raises when it is called."""
    try:
        return Gone(name) if packed is None else pickle.loads(packed)
    except (ImportError, AttributeError):  # its module is not there, or does not have it any more
        return Gone(name)
