"""A model from a configuration of hyperparameters: built by the user's function, or from a `PretrainedConfig`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn
from transformers import PretrainedConfig

from hydro_rasda.checks import require


@dataclass(frozen=True)
class FromInit:
    """`model_fn(config)` from `Trainer`'s `model_init`, which takes nothing, or a trial's hyperparameters."""

    init: Callable[..., nn.Module]
    use_cache: bool

    def __call__(self, config: Mapping[str, Any]) -> nn.Module:
        model = self.init(config) if inspect.signature(self.init).parameters else self.init()
        return _without_cache(model, self.use_cache)


@dataclass(frozen=True)
class FromConfig:
    """`model_fn(config)` that builds a model from a `PretrainedConfig`, some of whose attributes are hyperparameters.

    Attributes:
        base: The configuration; it is not changed.
        model_class: Of the model; one of the Auto classes will do.
        own: Names of its attributes that are taken from the hyperparameters.
    """

    base: PretrainedConfig
    model_class: Any
    own: tuple[str, ...]
    use_cache: bool

    def __call__(self, config: Mapping[str, Any]) -> nn.Module:
        changed = copy.deepcopy(self.base)
        for name in self.own:
            setattr(changed, name, config[name])
        automatic = self.model_class.__name__.startswith("Auto")
        model: nn.Module = self.model_class.from_config(changed) if automatic else self.model_class(changed)
        return _without_cache(model, self.use_cache)


def _without_cache(model: nn.Module, use_cache: bool) -> nn.Module:
    config = getattr(model, "config", None)
    if isinstance(config, PretrainedConfig):
        config.use_cache = use_cache
    return model


def model_function(model: Any, model_class: Any, own: tuple[str, ...], use_cache: bool) -> FromInit | FromConfig:
    """Return the function with which `tune` builds models.

    Args:
        model_class: Of a `PretrainedConfig`'s model; None: as its `architectures` say.
        own: Hyperparameters that are no training arguments.
    """
    if not isinstance(model, PretrainedConfig):
        callable_ = callable(model) and not isinstance(model, nn.Module)
        rule = "a function that makes a model (`model_init`), or a PretrainedConfig; a model itself serves one trial"
        require(callable_, "model", type(model).__name__, rule)
        require(model_class is None, "model_class", model_class, "left out, unless `model` is a PretrainedConfig")
        return FromInit(model, use_cache)
    if model_class is None:
        names = model.architectures or []
        model_class = getattr(transformers, names[0], None) if names else None
        rule = "given, such as AutoModelForCausalLM: the configuration's `architectures` name no class of transformers"
        require(model_class is not None, "model_class", None, rule)
    unknown = [name for name in own if not hasattr(model, name)]
    rule = f"names of TrainingArguments, or attributes of {type(model).__name__}"
    require(not unknown, "space", unknown, rule)
    return FromConfig(model, model_class, own, use_cache)
