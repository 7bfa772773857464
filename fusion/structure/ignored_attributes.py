"""The attributes and types that a module's signature leaves out, and the types that it describes by their `repr`."""

from __future__ import annotations

from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from threading import Lock, RLock
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fusion.structure.module_parts import HOOKS

# Attributes that the description of a module leaves out. Parameters, buffers and modules are described separately. The
# mode may change at any time. The compiled call is not copied with the module.
_NOT_STRUCTURE = {"_parameters", "_buffers", "_modules", "training", "_compiled_call_impl"}
_RECURRENT_CACHES = {"_flat_weights", "_flat_weight_refs"}
HOOK_ATTRIBUTES = {name for name in vars(nn.Module()) if "_hooks" in name}
# Leave out hooks on loading and saving. A fused model loads and saves tensors itself, so these hooks never run.
_NOT_STRUCTURE |= {name for name in HOOK_ATTRIBUTES if "state_dict" in name} | {HOOKS}
# Leave out the settings from which peft made a LoRA adapter. Forward does not read them. It reads the float `scaling`.
_LORA, _LORA_NOTES = "peft.tuners.lora.", {"lora_alpha", "r", "lora_dropout"}

PLAIN = {bool, int, str, bytes, type(None), type(...), type(NotImplemented)}
TEXTS = {complex, range, torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size}
TEXTS |= {torch._ops.OpOverload, torch._ops.OpOverloadPacket}
# Paths are described by their text. Their attributes are only caches, for example of the hash.
TEXTS |= {PosixPath, WindowsPath, PurePosixPath, PureWindowsPath}
# Types of objects whose state does not affect results. A handle can only remove a hook, which is described separately.
STATELESS = {type(Lock()), type(RLock()), RemovableHandle}


def skipped_of_module(module: nn.Module) -> set[str]:
    """Return the names of the attributes that a module's signature skips.

    They do not affect its computation, are described separately (parameters), or may change at any time (the mode).
    """
    if isinstance(module, nn.RNNBase):
        return _NOT_STRUCTURE | _RECURRENT_CACHES
    return _NOT_STRUCTURE | _LORA_NOTES if type(module).__module__.startswith(_LORA) else _NOT_STRUCTURE


def skipped_of(value: Any) -> set[str]:
    """Return the names of attributes that a signature skips in an object that is no module: they have no effect."""
    return _LORA_NOTES if type(value).__module__.startswith(_LORA) else set()
