"""The attributes and the kinds of values that a module's signature leaves out, or takes by their `repr`."""

from __future__ import annotations

from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from threading import Lock, RLock
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fusion.structure.module_parts import HOOKS

# Attributes that are not walked: those that are walked by themselves, the mode, which train() and eval() set all the
# time, and those that a copy does not need.
_NOT_STRUCTURE = {"_parameters", "_buffers", "_modules", "training", "_compiled_call_impl"}
_RECURRENT_CACHES = {"_flat_weights", "_flat_weight_refs"}
HOOK_ATTRIBUTES = {name for name in vars(nn.Module()) if "_hooks" in name}
# Hooks on loading and saving never run: a fused model does both itself.
_NOT_STRUCTURE |= {name for name in HOOK_ATTRIBUTES if "state_dict" in name} | {HOOKS}
# Settings from which peft made a LoRA adapter, in layer and configuration; forward reads only `scaling`, a float.
_LORA, _LORA_NOTES = "peft.tuners.lora.", {"lora_alpha", "r", "lora_dropout"}

PLAIN = {bool, int, str, bytes, type(None), type(...), type(NotImplemented)}
TEXTS = {complex, range, torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size}
TEXTS |= {torch._ops.OpOverload, torch._ops.OpOverloadPacket}
# Their attributes are caches, such as one of their hash.
TEXTS |= {PosixPath, WindowsPath, PurePosixPath, PureWindowsPath}
# A handle removes a hook; what runs is the hook.
STATELESS = {type(Lock()), type(RLock()), RemovableHandle}


def skipped_of_module(module: nn.Module) -> set[str]:
    """Return the attributes of a module that do not steer its computation."""
    if isinstance(module, nn.RNNBase):
        return _NOT_STRUCTURE | _RECURRENT_CACHES
    return _NOT_STRUCTURE | _LORA_NOTES if type(module).__module__.startswith(_LORA) else _NOT_STRUCTURE


def skipped_of(value: Any) -> set[str]:
    """Return the attributes of a value, no module, that do not steer its behaviour."""
    return _LORA_NOTES if type(value).__module__.startswith(_LORA) else set()
