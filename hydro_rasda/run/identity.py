"""What a run is: its settings, its code and its data as short digests, the same in every process."""

from __future__ import annotations

import contextlib
import inspect
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from hydro_rasda.config import TuneConfig
from hydro_rasda.data import Data
from hydro_rasda.problem import Problem
from hydro_rasda.run.data_fingerprint import data_digest
from hydro_rasda.run.fingerprint import Content, content, digest, unchanged
from hydro_rasda.schedulers.named_rules import HALVING
from hydro_rasda.secret_masking import hide, secrets_of
from hydro_rasda.space import describe


class Identity:
    """What a run is asked to be, taken down before anything of the user's is called.

    Args:
        searcher: A searcher of Ray Tune's, or None for random sampling.
        sweep_rule: A name, or the user's own.
        functions: The user's, by argument: "model_fn", and "loss_fn" or "objective".
        first: Configurations that are tried first.
    """

    def __init__(
        self,
        space: Mapping[str, Any],
        searcher: Any,
        sweep_rule: Any,
        functions: Mapping[str, Callable[..., Any]],
        first: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._named = {
            "space": describe(hide(space, secrets_of(space))),  # by their digest, they count
            "searcher": type(searcher).__name__ if searcher else None,
            "sweep_rule": None if sweep_rule == HALVING else _name_of(sweep_rule),
        }
        self._made = {"space": content(space), "searcher": parameters(searcher)}
        if not isinstance(sweep_rule, str):
            self._made["sweep_rule"] = parameters(sweep_rule)
        if first:
            self._made["first"] = content([dict(config) for config in first])
        self._functions = functions
        self._before = {name: content(function) for name, function in functions.items()}

    def asked(
        self,
        settings: TuneConfig,
        problem: Problem,
        model: Mapping[str, str],
        data: Mapping[str, Data],
        batch_size: int,
    ) -> dict[str, Any]:
        """What the run's `run.json` says, by which it is known again.

        Args:
            settings: The arguments of `tune`.
            model: Name, shape and type of each parameter of the full-size model.
            data: The user's, by argument.
            batch_size: What functions that make loaders are asked for.
        """
        # What a call of the functions changed, such as a counter, is not what they are.
        stayed = {name: unchanged(self._before[name], content(function)) for name, function in self._functions.items()}
        digests = {name: digest(found) for name, found in (self._made | stayed).items()}
        return {
            **settings.determining(),
            **self._named,
            "train_data": problem.train_data.describe(),
            "val_data": problem.val_data.describe(),
            "model": model,
            "python": platform.python_version(),
            "environment": environment(),
            "digests": digests | {name: data_digest(given, batch_size) for name, given in data.items()},
        }


def _name_of(rule: object) -> str:
    return rule if isinstance(rule, str) else type(rule).__name__


def environment() -> dict[str, Any]:
    """Where a run is made, and with which versions: told on its page, and no part of what it is."""
    packages: dict[str, Any] = {}
    for name in ("hydro-rasda", "torch", "ray", "numpy"):
        with contextlib.suppress(PackageNotFoundError):  # as of a checkout that is not installed
            packages[name] = version(name)
    # Counted without CUDA, which would not outlive a fork.
    gpus = torch.cuda.device_count()
    return {**packages, "system": platform.platform(terse=True), "cores": os.cpu_count(), "gpus": gpus}


def parameters(made: object) -> Content:
    """A searcher's or rule's class and what it was made with, as far as it remembers; not what it has learned."""
    if made is None or isinstance(made, str):
        return content(made)
    cls = type(made)
    names = [name for name in inspect.signature(cls).parameters if name not in ("space", "metric", "mode")]
    found = {name: getattr(made, at) for name in names for at in (name, f"_{name}") if hasattr(made, at)}
    return content((cls, found))
