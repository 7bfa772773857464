"""The attributes and types that a module's signature leaves out, and the types that it describes by their `repr`."""

from __future__ import annotations

from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from threading import Lock, RLock
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fusion.structure.module_parts import HOOKS

# Attributes that are not walked: parameters, buffers and modules, which are walked separately; the mode, which may
# change at any time; and attributes that a copy does not need.
_NOT_STRUCTURE = {"_parameters", "_buffers", "_modules", "training", "_compiled_call_impl"}
_RECURRENT_CACHES = {"_flat_weights", "_flat_weight_refs"}
HOOK_ATTRIBUTES = {name for name in vars(nn.Module()) if "_hooks" in name}
# Leave out hooks on loading and saving: a fused model does both itself, so they never run.
_NOT_STRUCTURE |= {name for name in HOOK_ATTRIBUTES if "state_dict" in name} | {HOOKS}
# Leave out the settings from which peft made a LoRA adapter, because forward only reads the float `scaling`.
_LORA, _LORA_NOTES = "peft.tuners.lora.", {"lora_alpha", "r", "lora_dropout"}

PLAIN = {bool, int, str, bytes, type(None), type(...), type(NotImplemented)}
TEXTS = {complex, range, torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size}
TEXTS |= {torch._ops.OpOverload, torch._ops.OpOverloadPacket}
# Paths are described by their text. Their attributes are only caches, for example of the hash.
TEXTS |= {PosixPath, WindowsPath, PurePosixPath, PureWindowsPath}
# Objects without a state that affects results. A handle can only remove a hook; the hook itself is described.
STATELESS = {type(Lock()), type(RLock()), RemovableHandle}


def skipped_of_module(module: nn.Module) -> set[str]:
    """Return the names of a module's attributes that do not affect its computation."""
    if isinstance(module, nn.RNNBase):
        return _NOT_STRUCTURE | _RECURRENT_CACHES
    return _NOT_STRUCTURE | _LORA_NOTES if type(module).__module__.startswith(_LORA) else _NOT_STRUCTURE


def skipped_of(value: Any) -> set[str]:
    """Return the names of attributes, of a value that is no module, that do not affect its behavior."""
    return _LORA_NOTES if type(value).__module__.startswith(_LORA) else set()
