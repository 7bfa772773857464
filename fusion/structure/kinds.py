"""The attributes and the kinds of values that a module's signature leaves out, or takes by what they print."""

from __future__ import annotations

from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from threading import Lock, RLock
from typing import Any

import torch
from torch import nn

from fusion.tensors import HOOKS

# Not among the attributes to walk: what is walked by itself; the mode, which train() and eval() set all the time; and
# what a copy does without.
_NOT_STRUCTURE = {"_parameters", "_buffers", "_modules", "training", "_compiled_call_impl"}
_RECURRENT_CACHES = {"_flat_weights", "_flat_weight_refs"}
HOOK_ATTRIBUTES = {name for name in vars(nn.Module()) if "_hooks" in name}
# Hooks on loading and saving never run: a fused model does both itself.
_NOT_STRUCTURE |= {name for name in HOOK_ATTRIBUTES if "state_dict" in name} | {HOOKS}
# How peft made a LoRA adapter, in layer and configuration; what forward reads of it, `scaling`, is a float.
_LORA, _LORA_NOTES = "peft.tuners.lora.", {"lora_alpha", "r", "lora_dropout"}

PLAIN = {bool, int, str, bytes, type(None), type(...), type(NotImplemented)}
TEXTS = {complex, range, torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size}
TEXTS |= {torch._ops.OpOverload, torch._ops.OpOverloadPacket}
# They keep what was once asked of them, such as their hash.
TEXTS |= {PosixPath, WindowsPath, PurePosixPath, PureWindowsPath}
STATELESS = {type(Lock()), type(RLock())}


def skipped_of_module(module: nn.Module) -> set[str]:
    """The attributes of a module that do not steer what it computes."""
    if isinstance(module, nn.RNNBase):
        return _NOT_STRUCTURE | _RECURRENT_CACHES
    return _NOT_STRUCTURE | _LORA_NOTES if type(module).__module__.startswith(_LORA) else _NOT_STRUCTURE


def skipped_of(value: Any) -> set[str]:
    """The attributes of a value that is no module which do not steer what it does."""
    return _LORA_NOTES if type(value).__module__.startswith(_LORA) else set()
