"""Pickle results and functions, even if plain pickle or cloudpickle alone cannot."""

from __future__ import annotations

import importlib
import pickle
import sys
from types import ModuleType
from typing import Any

import cloudpickle


def pickle_config_modules() -> None:
    """Let every pickler pickle torch's config modules by name, as it does with other modules.

    With a function, cloudpickle also pickles each loaded submodule whose dotted name could be made of names in the
    function. For example, a function that reads `worker.config` and calls `torch.distributed` brings
    `torch.distributed.config`. That module is an instance of torch's own subclass of the module type, which cloudpickle
    cannot pickle.
    """
    module = sys.modules.get("torch.utils._config_module")
    if module is not None:  # otherwise torch is not loaded, and there are no such modules
        module.ConfigModule.__reduce__ = _by_name


def _by_name(module: ModuleType) -> tuple[Any, tuple[str]]:
    return importlib.import_module, (module.__name__,)


class Portable:
    """Base class of objects that can be pickled although they hold functions that plain pickle cannot handle."""

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
    """A stand-in for a function that could not be pickled with a result, or could not be loaded."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            f"`{self._name}` did not come along when this result was loaded or pickled, or cannot be found here; "
            "`best_model(model_fn=...)` takes it"
        )


def check_has_functions(problem: object) -> None:
    """Raise ValueError if `model_fn` or `objective` is missing, as in a loaded result. Measuring a model needs both."""
    if gone := [name for name in ("model_fn", "objective") if isinstance(getattr(problem, name), Gone)]:
        told = f"this result was loaded or pickled without `{'` and `'.join(gone)}`, which `evaluate` needs"
        way = "or repeat the call of `tune`: it trains nothing again, and its result can evaluate"
        raise ValueError(f"{told}. Measure `best_model(model_fn=...)` yourself, {way}")


def dumped(function: Any) -> bytes | None:
    """Pickle a function; return None if it cannot be pickled."""
    try:
        packed: bytes = cloudpickle.dumps(function)
    except Exception:  # a `__reduce__` may raise anything, for example because of an open file
        return None
    return packed


def loaded(name: str, packed: bytes | None) -> Any:
    """Unpickle a function; if that fails, return a stand-in that raises when it is called and names the function."""
    try:
        return Gone(name) if packed is None else pickle.loads(packed)
    except (ImportError, AttributeError):  # the function's module is missing, or no longer has the function
        return Gone(name)
