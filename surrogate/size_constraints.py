"""Find constraints between the sizes of a module, with torch's own symbolic shape inference.

Every dimension of every parameter and buffer, and every integer attribute that could be a size, becomes a symbol. The
input's sizes stay numbers. One forward pass without data (on fake tensors) then collects the constraints,
because torch's operators state them as equations. Examples are residual sums, concatenations, flattening before a
linear layer, grouped convolutions and attention heads. This module has no rules for single operators. To "fix" a size
means to replace its symbol by a number, so that the size stays in the narrow copy.
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv, IntTrueDiv, Mod, PythonMod

from surrogate.output_sizes import batch_at, call_model, record_calls, run_for_shapes
from surrogate.resize import AttributeKey
from surrogate.symbolic_functions import SymbolicFunctions, ValuesRead

_SIZES_OF_ATTENTION = {"d_model", "embed_dim", "kdim", "vdim", "num_heads", "head_dim"}
_SIZES_OF_TORCH_LAYERS = _SIZES_OF_ATTENTION | {"input_size", "hidden_size", "proj_size"}


@dataclass(frozen=True)
class SizeTrace:
    """Sizes of a module as expressions in free symbols, in which solved equations are already substituted.

    Attributes:
        tensors: Parameter or buffer name -> one expression for each dimension.
        seeds: The free symbols that may be scaled: widths, and factors of widths.
        attributes: (Module name, attribute name) -> one expression for each size that the attribute holds.
        sizes: Symbol -> its value in the module.
        equations: Further constraints that must stay true, e.g. that the number of heads divides a width.
        kept: One line, with the reason, for each fixed size of a matrix whose sizes are all fixed. Sizes that are fixed
            by the model's input or output are left out.
        stacks: Parameters of three or more dimensions that belong to no convolution or bilinear layer. Their rows may
            be whole matrices.
    """

    tensors: dict[str, tuple[sympy.Expr, ...]]
    seeds: frozenset[sympy.Symbol]
    attributes: dict[AttributeKey, tuple[sympy.Expr, ...]]
    sizes: dict[sympy.Symbol, int]
    equations: tuple[sympy.Basic, ...]
    kept: tuple[str, ...] = ()
    stacks: frozenset[str] = frozenset()


def trace_sizes(module: nn.Module, example_input: Any) -> SizeTrace:
    """Run a copy of `module` once on symbolic sizes, and return the constraints between them.

    The module must run on fake tensors. If it reads values from tensors, it gets the values of one run with data.
    Because it may branch on these values, a ValueError is raised if the run does not use all parameters. If the module
    fails, a ValueError names the innermost module that was running.
    """
    try:
        return _Tracer(module).trace(example_input)
    except ValueError:
        read = ValuesRead()
        run_for_shapes(module, example_input, read)
        if not read.values:
            raise
        tracer = _Tracer(module, read.values)
        trace = tracer.trace(example_input)
        if tracer.unmet:
            raise ValueError(
                f"the forward pass may branch by values that it reads: on `example_input` it does not use "
                f"{tracer.unmet[0]!r}; give the model a `width_ratio` argument and use make_surrogate"
            ) from None
        return trace


class _Tracer:
    def __init__(self, module: nn.Module, values: Sequence[tuple[str, Any]] = ()) -> None:
        self.module, self.values = copy.deepcopy(module), values
        self.unmet: list[str] = []
        self.shape_env = ShapeEnv(duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self.shape_env, allow_non_fake_inputs=True)
        self.mode.cache_enabled = False  # it seldom helps: a module seldom repeats a call with the same symbols
        self.fresh = itertools.count()
        self.sizes: dict[sympy.Symbol, int] = {}
        self.symbols: dict[sympy.Symbol, Any] = {}
        self.running: list[str] = []
        self.fixes = _Fixes(self.shape_env)

    def trace(self, example_input: Any) -> SizeTrace:
        attributes = {key: self._symbolize(*key) for key in _size_attributes(self.module)}
        named = itertools.chain(self.module.named_parameters(), self.module.named_buffers())
        fakes = {name: self._fake(name, tensor) for name, tensor in named}
        raw = {name: tuple(map(self._raw, fake.shape)) for name, fake in fakes.items()}
        self._run(fakes, example_input)
        tensors = {name: self._expressions(fake.shape) for name, fake in fakes.items()}
        guards = [self.shape_env.simplify(guard.expr) for guard in self.shape_env.guards]
        return SizeTrace(
            tensors=tensors,
            seeds=_seeds(self.module, tensors),
            attributes={key: self._expressions(value) for key, value in attributes.items()},
            sizes=self.sizes,
            equations=tuple(_cancelled(guard) for guard in guards if isinstance(guard, sympy.Eq)),
            kept=self.fixes.reasons(raw, {name: tensors[name] for name, _ in self.module.named_parameters()}),
            stacks=_stacks(self.module, tensors),
        )

    def _source(self) -> ConstantSource:
        return ConstantSource(f"size{next(self.fresh)}")

    def _fake(self, name: str, tensor: Tensor) -> Tensor:
        dynamic = [DimDynamic.DYNAMIC] * tensor.dim()
        layer = self.module.get_submodule(_layer_of(name))
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and tensor.dim() > 1:
            dynamic[0] = DimDynamic.STATIC  # one row for each index: this is a vocabulary, not a width
        if isinstance(layer, _ConvNd):
            dynamic[2:] = [DimDynamic.STATIC] * len(dynamic[2:])
        if not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() and int(tensor.max()) > 1:
            # Keep the sizes of a tensor of indices, because some of its values would be too large for narrow sizes.
            dynamic = [DimDynamic.STATIC] * tensor.dim()
        context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
        fake = self.mode.from_tensor(tensor.detach(), symbolic_context=context, source=self._source())
        for size, value in zip(fake.shape, tensor.shape):
            self._remember(size, value)
        return fake

    def _symbolize(self, name: str, attribute: str) -> tuple[Any, ...]:
        layer = self.module.get_submodule(name)
        value = getattr(layer, attribute)
        sizes = tuple(map(self._symbol, value if isinstance(value, tuple) else (value,)))
        setattr(layer, attribute, sizes if isinstance(value, tuple) else sizes[0])
        return sizes

    def _symbol(self, value: int) -> Any:
        source = self._source()
        symbol = self.shape_env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
        size = self.shape_env.create_symintnode(symbol, hint=value, source=source)
        self._remember(size, value)
        return size

    def _remember(self, size: Any, value: int) -> None:
        if isinstance(size, torch.SymInt):
            self.sizes[size.node.expr], self.symbols[size.node.expr] = value, size

    def _raw(self, size: Any) -> sympy.Expr:
        return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)

    def _expressions(self, sizes: Any) -> tuple[sympy.Expr, ...]:
        return tuple(self.shape_env.simplify(self._raw(size)) for size in sizes)

    def _fix_divisors(self, arguments: Sequence[Any]) -> None:
        """Fix sizes by which a plain number is divided: turn them into numbers.

        An example is the size of a window that divides a picture's height.
        """
        for leaf in arguments:
            if isinstance(leaf, torch.SymInt):
                for division in leaf.node.expr.atoms(FloorDiv, IntTrueDiv, Mod, PythonMod):
                    if division.args[0].is_number:
                        _ = [int(self.symbols[symbol]) for symbol in division.free_symbols]

    def _called(self, function: str) -> None:
        self.fixes.note(f"`{function}` in module {self.running[-1] if self.running else type(self.module).__name__!r}")

    def _run(self, fakes: dict[str, Tensor], example_input: Any) -> None:
        running = self.running
        # Replace the forward pass of group norms. `group_norm` takes the number of groups as a plain number, which
        # would fix it.
        for layer in self.module.modules():
            if isinstance(layer, nn.GroupNorm):
                layer.forward = functools.partial(_affine, layer)  # type: ignore[method-assign]
        record_calls(self.module, running)
        example = batch_at(next((fake.device for fake in fakes.values()), None), example_input)
        batch = pytree.tree_map_only(Tensor, lambda tensor: self.mode.from_tensor(tensor, static_shapes=True), example)
        inputs = _Inputs(self.module, batch)
        functions = SymbolicFunctions(self._fix_divisors, self._called, self.values)
        try:
            with self.mode, functions, torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings of slow kernels do not matter without data
                output = torch.func.functional_call(inputs, {f"module.{name}": f for name, f in fakes.items()}, ())
                # Fix the sizes of the model's outputs. A symbolic size is fixed when it is converted to a number.
                for leaf in pytree.tree_leaves(output):
                    if isinstance(leaf, Tensor):
                        _ = [int(size) for size in leaf.shape]
                self.fixes.note("the output")
            # Fix unused parameters, too, such as those of a network that only a loss uses to compare features.
            self.unmet = [name for name, _ in self.module.named_parameters() if id(fakes[name]) not in functions.met]
            _ = [int(size) for name in self.unmet for size in fakes[name].shape]
            self.fixes.note("its absence from the forward pass")
        except Exception as error:
            where = running[-1] if running else type(self.module).__name__
            told = (str(error).splitlines() or [""])[0]  # without torch's stack
            raise ValueError(
                f"module {where!r} cannot be followed on symbolic sizes: {type(error).__name__}: {told}; "
                "give the model a `width_ratio` argument and use make_surrogate"
            ) from error


_OWN_INPUT = re.compile("the output|`(linear|conv|embedding)")
"""Causes that are not reported, because a layer reads the model's input or writes its output."""


class _Fixes:
    """Records which function fixed each symbolic size, that is, turned it into a number."""

    def __init__(self, shape_env: ShapeEnv) -> None:
        self._known: dict[sympy.Symbol, Any] = shape_env.replacements
        self._seen = 0
        self._by: dict[sympy.Symbol, str] = {}

    def note(self, cause: str) -> None:
        """Record `cause` for the sizes that have become numbers since the last call."""
        if len(self._known) == self._seen:
            return
        self._seen = len(self._known)
        for symbol in self._known.keys() - self._by.keys():
            if self._number(symbol):
                self._by[symbol] = cause

    def _number(self, expression: Any) -> bool:
        while expression in self._known:
            expression = self._known[expression]
        return bool(expression.is_Integer)

    def reasons(
        self, raw: Mapping[str, tuple[sympy.Expr, ...]], tensors: Mapping[str, tuple[sympy.Expr, ...]]
    ) -> tuple[str, ...]:
        """Return a line with the reason for each fixed size of a matrix, for matrices in which all sizes are fixed.

        `raw` has the sizes of each tensor as symbols, `tensors` as expressions after the run.
        """
        lines: dict[tuple[Any, str], str] = {}
        for name, sizes in tensors.items():
            if len(sizes) < 2 or any(size.free_symbols for size in sizes):
                continue
            for symbol, size in zip(raw[name], sizes):
                if symbol in self._by and not _OWN_INPUT.match(self._by[symbol]):
                    told = f"{size} of {name} stays, as {self._by[symbol]} fixes it"
                    lines.setdefault((size, self._by[symbol]), told)
        return tuple(lines.values())


class _Inputs(nn.Module):
    """A module together with its batch, because `functional_call` wants a module."""

    def __init__(self, module: nn.Module, batch: Any) -> None:
        super().__init__()
        self.module = module
        self.batch = batch

    def forward(self) -> Any:
        return call_model(self.module, self.batch)


def _cancelled(equation: sympy.Eq) -> sympy.Eq:
    """Divide an equation by the symbols that are factors of both sides: it does not restrict them.

    An example is the number of queries in an attention, as a factor of the number of all elements.
    """
    common = set.intersection(*({*sympy.Mul.make_args(side)} for side in equation.args))
    factor = sympy.Mul(*(symbol for symbol in common if symbol.is_Symbol))
    return sympy.Eq(*(side / factor for side in equation.args), evaluate=False)


def _layer_of(name: str) -> str:
    """Return the name of the layer of a parameter, or of the layer whose weight is computed from the parameter."""
    layer, parametrized, _ = name.partition("parametrizations.")
    return layer.removesuffix(".") if parametrized else name.rpartition(".")[0]


def _stacks(module: nn.Module, tensors: Mapping[str, tuple[sympy.Expr, ...]]) -> frozenset[str]:
    other = (_ConvNd, nn.Bilinear)
    named = {name: module.get_submodule(_layer_of(name)) for name, sizes in tensors.items() if len(sizes) > 2}
    return frozenset(name for name, layer in named.items() if not isinstance(layer, other))


def _seeds(module: nn.Module, tensors: Mapping[str, tuple[sympy.Expr, ...]]) -> frozenset[sympy.Symbol]:
    """Return the sizes that are widths, because a linear or convolution layer has them, or two parameters share them.

    If a size belongs to a single parameter of any other layer, it is no width. The number of positions of an embedding
    is an example.
    """
    contracting = (nn.Linear, nn.Bilinear, _ConvNd, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
    layers = {name for name, layer in module.named_modules() if isinstance(layer, contracting)}
    symbols = {name: {s for dim in tensors[name] for s in dim.free_symbols} for name, _ in module.named_parameters()}
    holders = Counter(itertools.chain.from_iterable(symbols.values()))
    of_layers = {s for name, own in symbols.items() if _layer_of(name) in layers for s in own}
    return frozenset(of_layers | {symbol for symbol, count in holders.items() if count > 1})


def _size_attributes(module: nn.Module) -> list[AttributeKey]:
    """Return integer attributes that the forward pass may use as sizes: they divide a dimension of a tensor."""
    return [
        (name, attribute)
        for name, layer in module.named_modules()
        for attribute, value in vars(layer).items()
        if _may_be_size(layer, attribute, value)
    ]


def _may_be_size(layer: nn.Module, attribute: str, value: Any) -> bool:
    if attribute == "normalized_shape":
        return True
    if type(value) is not int or value < 2:
        return False
    if attribute == "num_channels" and isinstance(layer, nn.GroupNorm) and not layer.affine:
        return True
    if attribute == "num_features" and isinstance(layer, _InstanceNorm):
        return True
    if type(layer).__module__.startswith("torch.nn."):
        depthwise = isinstance(layer, _ConvNd) and attribute == "groups" and value == layer.in_channels
        return depthwise or attribute in _SIZES_OF_TORCH_LAYERS
    grouped = {own.groups for own in layer.modules() if isinstance(own, _ConvNd) and own.groups < own.in_channels}
    if value in grouped and "head" not in attribute:
        return False  # it shuffles the channels of these groups, whose number stays
    tensors = itertools.chain(layer.parameters(), layer.buffers())
    return any(size % value == 0 for tensor in tensors for size in tensor.shape)


def _affine(layer: nn.GroupNorm, x: Tensor) -> Tensor:
    per_channel = (-1, *(1 for _ in x.shape[2:]))
    weights: list[Tensor] = [weight for weight in (layer.weight, layer.bias) if weight is not None]
    for weight in weights or [x.new_ones(layer.num_channels)]:
        x = x * weight.view(per_channel)
    return x
