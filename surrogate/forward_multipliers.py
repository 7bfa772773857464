"""muP's changes to the forward pass: hooks that multiply the inputs of readouts (output layers) and attention logits.

The hooks hold plain floats. They change neither parameter names nor module classes, run under
`torch.func.functional_call` and `torch.vmap`, survive `copy.deepcopy` and pickling, and compare by value. In contrast,
`mup.MuReadout` reads an attribute of its weight, which a copy loses and which vmap does not have.

If the head size is a width, muP divides attention logits by the head size, not by its square root. Relative to the
target (head size D), a surrogate with head size d must scale its logits by sqrt(D) / d. The model's own code scales
them by 1 / sqrt(d), so a factor of sqrt(D / d) is missing. If the number of heads shrinks instead and the head size
stays, no factor is missing. This is the better choice (Tensor Programs V, appendix D.4).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrizations import _Orthogonal, _SpectralNorm, _WeightNorm
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.rnn import PackedSequence

from surrogate.widths import ParamWidth, input_weight

UNIT_NORMS = (_SpectralNorm, _Orthogonal)
"""Parametrizations of a weight whose spectral norm is 1."""

_SCALE_ATTRIBUTES = ("scaling", "scale", "softmax_scale")


@dataclass(frozen=True)
class ScaleKey:
    """Forward-pre-hook that multiplies an `nn.MultiheadAttention`'s key by sqrt(target head size / head size).

    The layer adds its biases after the hook, so the product of a query and the key bias is not scaled. That product is
    the same for all keys, so softmax ignores it. If the query were scaled instead, the product of a key and the query
    bias would not be scaled, and softmax does not ignore that product. The layer's extra keys (`bias_k`,
    `add_zero_attn`) do not depend on the key input. If a layer has extra keys, the query is scaled.
    """

    factor: float

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs with the scaled key or query, whether it was passed by position or by name."""
        extra_keys = module.bias_k is not None or module.add_zero_attn
        place, name = (0, "query") if extra_keys else (1, "key")
        if len(args) > place:
            return (*args[:place], args[place] * self.factor, *args[place + 1 :]), kwargs
        return args, {**kwargs, name: kwargs[name] * self.factor}


def head_sizes(module: nn.Module) -> dict[str, int]:
    """Map each module that has an integer `head_dim` to that number, the size of an attention head."""
    sizes = {name: getattr(layer, "head_dim", None) for name, layer in module.named_modules()}
    return {name: size for name, size in sizes.items() if isinstance(size, int)}


def find_logit_scales(module: nn.Module, target_heads: Mapping[str, int]) -> dict[str, float]:
    """Map each module whose head size differs from the target's to the extra factor of its attention logits."""
    changed = {}
    for name, size in head_sizes(module).items():
        full = target_heads.get(name, size)
        layer = module.get_submodule(name)
        if full == size:
            continue
        if isinstance(layer, nn.MultiheadAttention) or _scale_attribute(layer, size):
            changed[name] = math.sqrt(full / size)
        elif _scale_attribute(layer, full):  # a resized copy keeps the scale of the target's head size
            changed[name] = full / size
    return changed


def scale_logits(module: nn.Module, logits: Mapping[str, float], target_heads: Mapping[str, int]) -> None:
    """Multiply attention logits by the factors in `logits`, in place."""
    for name, factor in logits.items():
        layer: Any = module.get_submodule(name)
        attribute = _scale_attribute(layer, layer.head_dim) or _scale_attribute(layer, target_heads[name])
        if attribute:
            setattr(layer, attribute, getattr(layer, attribute) * factor)
        else:
            layer.register_forward_pre_hook(ScaleKey(factor), with_kwargs=True)
    for encoder in module.modules():
        # In evaluation, torch's encoder packs padded sequences. Its attention layers take those only if query and key
        # are the same tensor.
        if isinstance(encoder, nn.TransformerEncoder) and any(map(_scales_key, encoder.modules())):
            encoder.use_nested_tensor = False


def _scales_key(layer: nn.Module) -> bool:
    return any(isinstance(hook, ScaleKey) for hook in layer._forward_pre_hooks.values())


def _scale_attribute(layer: nn.Module, head_size: int) -> str | None:
    """Return the name of the attribute in which a layer keeps 1 / sqrt(head size); None if it has none."""
    for attribute in _SCALE_ATTRIBUTES:
        value = getattr(layer, attribute, None)
        if isinstance(value, float) and math.isclose(value, head_size**-0.5):
            return attribute
    return None


@dataclass(frozen=True)
class ScaleInput:
    """Forward-pre-hook that multiplies a module's first positional input, for example a readout's by 1 / width_mult."""

    factor: float

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not args:
            raise ValueError(
                f"a readout ({type(module).__name__}) must be called with its input as first positional argument"
            )
        first = args[0]
        if isinstance(first, PackedSequence):
            return (PackedSequence(first.data * self.factor, *first[1:]), *args[1:])
        return (first * self.factor, *args[1:])


def find_readouts(module: nn.Module, params: Mapping[str, ParamWidth]) -> dict[str, float]:
    """Map each readout to the multiplier of its input, 1 / width_mult. A readout reads a width, but writes none.

    If a readout shares its weight with an embedding, only the input of the readout is scaled. If a parametrization
    fixes the norm of the weight, the multiplier is sqrt(1 / width_mult). The elements of the narrow weight, and their
    changes, are then already larger by the same factor.
    """
    readouts = {}
    for name, layer, width in _layers(module, params):
        if reads_and_writes(layer, width) == (True, False):
            factor = 1.0 / width.width_mult
            readouts[name] = math.sqrt(factor) if _has_fixed_norm(layer, name, params) else factor
    return readouts


def find_spectral_scales(module: nn.Module, params: Mapping[str, ParamWidth]) -> dict[str, float]:
    """Map layers that write a width, and whose weight has spectral norm 1, to the multiplier of their input.

    The multiplier is sqrt(width_mult of outputs / width_mult of inputs). This is the spectral norm, relative to the
    target's, that muP asks for (Yang et al. 2023, "A spectral condition").
    """
    scales = {}
    for name, layer, width in _layers(module, params):
        sides = reads_and_writes(layer, width)
        if sides is not None and sides[1] and is_computed_by(UNIT_NORMS, layer):
            fan_out, fan_in = width.infshape()[:2]
            scales[name] = math.sqrt(fan_out.width_mult() / fan_in.width_mult())
    return {name: scale for name, scale in scales.items() if scale != 1.0}


def _layers(module: nn.Module, params: Mapping[str, ParamWidth]) -> Iterator[tuple[str, nn.Module, ParamWidth]]:
    """Yield, for each layer with an input weight, its name, the layer, and the widths of that weight."""
    widths = {id(parameter): params[name] for name, parameter in module.named_parameters()}
    for name, layer in module.named_modules():
        weight = input_weight(layer)
        if weight is not None and id(weight) in widths:
            yield name, layer, widths[id(weight)]


def is_computed_by(kind: type[nn.Module] | tuple[type[nn.Module], ...], layer: nn.Module) -> bool:
    """Return whether a parametrization of this kind computes a layer's weight."""
    parametrizations: Any = layer.parametrizations if is_parametrized(layer, "weight") else {"weight": ()}
    return any(isinstance(own, kind) for own in parametrizations["weight"])


def _has_fixed_norm(layer: nn.Module, name: str, params: Mapping[str, ParamWidth]) -> bool:
    """Return whether the norm of a readout's weight, or of each of its rows, is the same at every width."""
    if not is_computed_by(_WeightNorm, layer):
        return is_computed_by(UNIT_NORMS, layer)
    norms = params[f"{name}.parametrizations.weight.original0".removeprefix(".")]
    return norms.shape == norms.target_shape


def reads_and_writes(layer: nn.Module, width: ParamWidth) -> tuple[bool, bool] | None:
    """Return (reads a width, writes a width) of a linear, recurrent or convolution layer; None for other layers."""
    if not isinstance(layer, nn.Linear | nn.Bilinear | nn.RNNBase | nn.RNNCellBase | _ConvNd):
        return None
    fan_out, fan_in = width.infshape()[:2]
    return bool(fan_in.isinf()), bool(fan_out.isinf())


def scale_inputs(module: nn.Module, factors: Mapping[str, float]) -> None:
    """Multiply the inputs of the named layers by their factors, in place."""
    for name, factor in factors.items():
        module.get_submodule(name).register_forward_pre_hook(ScaleInput(factor))
