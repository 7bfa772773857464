"""The distribution (law) from which a constructor draws each parameter, found without memory for the parameters.

The constructor runs on the meta device, where tensors have shapes but no values. Each of its operations is repeated on
a small sample that stands for the tensor's elements, and the sample's random numbers are the same in every run. Two
widths can therefore be compared exactly: if a uniform law has half the bound of another, each element of its sample is
half as large.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_COUNT = 1024
_COPIES = {"clone", "_to_copy", "repeat", "_unsafe_view", "_reshape_copy", "lift_fresh", "lift_fresh_copy"}
_COPIES |= {"t_", "transpose_", "squeeze_", "unsqueeze_"}
_WRITES_PLACES = {"index_put_", "_index_put_impl_", "index_fill_", "masked_fill_", "fill_diagonal_"}
_WRITES = {"copy_"} | _WRITES_PLACES
_ZEROS, _ONES = {"zeros", "zero", "empty", "empty_strided", "empty_permuted"}, {"ones"}
_GIVEN = {"full", "fill", "scalar_tensor"}
_OF_VALUES = {torch.tensor, torch.as_tensor, Tensor.new_tensor, torch.linspace}
"""Functions that make tensors of given values. They run on the CPU, because constructors read such values, for
example a drop rate for each layer."""
_IS_META, _DEVICE = Tensor.is_meta.__get__, Tensor.device.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Law:
    """Distribution of a tensor's elements.

    Attributes:
        sample: Elements drawn from the law, [n]; None if the operations alone do not determine the law.
        random: True if the elements depend on random numbers, or may depend on them.
    """

    sample: Tensor | None
    random: bool

    @property
    def size(self) -> float | None:
        """Root mean square of the elements; None if the law is unknown."""
        return None if self.sample is None else float(self.sample.double().square().mean().sqrt())

    @property
    def constant(self) -> bool:
        """Return whether all elements are known to be equal."""
        return self.sample is not None and bool((self.sample == self.sample[0]).all())


_UNKNOWN = Law(None, random=True)


def initial_laws(build: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, Law]]:
    """Build a model to find its shapes and the laws (distributions) of its initial weights.

    Args:
        build: Makes the model. It is called again, with memory for the parameters, if its constructor reads values that
            do not exist without memory.

    Returns:
        The model, whose parameters may have no values, and the law of each parameter by name.
    """
    # Ignore errors of this attempt. If the constructor itself has an error, the plain call at the end raises it again.
    with contextlib.suppress(Exception):
        with torch.device("meta"), _HideMeta(), _Follow() as follow:
            model = build()
        return model, follow.laws(model)
    with contextlib.suppress(Exception):  # if this fails, too, the laws are unknown, and weights are measured
        with _Follow() as follow:
            model = build()
        return model, follow.laws(model)
    model = build()
    return model, {name: _UNKNOWN for name, _ in model.named_parameters()}


class _HideMeta(TorchFunctionMode):
    """Makes tensors on the meta device seem to be on the CPU, because initializers skip tensors on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == _IS_META:
            return False
        if func == _DEVICE:
            return torch.device("cpu")
        if func in _OF_VALUES:
            made = func(*args, **{**kwargs, "device": "cpu"})
            return made if made.dim() == 0 or func is torch.linspace else made.to("meta")
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        if func is Tensor.to:
            args = tuple("meta" if isinstance(value, str | torch.device) else value for value in args)
        return func(*args, **kwargs)


class _Follow(TorchDispatchMode):
    """Within the context, tracks the law of every tensor that is made or written to."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise, torch would import its compiler, which takes seconds."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._contents: dict[StorageWeakRef, _Content] = {}
        self._generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func.namespace == "prim":  # a view has its source's law
            return func(*args, **kwargs)
        read = {key: value for key, value in kwargs.items() if key != "out"}
        with torch._C.DisableTorchFunction():  # `_HideMeta` must not change the operations of this method
            given = _tensors([*args, *read.values()])
            inputs = [self._read(tensor) for tensor in given]
            if _name(func) == "_local_scalar_dense":
                return _value(func, args, inputs[0])
            law = self._law(func, args, read, inputs)
            out = func(*args, **kwargs)
            sources = {_storage(tensor) for tensor in given}
            for place, tensor in enumerate(_tensors([out])):
                if func._schema.is_mutable or _storage(tensor) not in sources:  # otherwise, it has an input's law
                    self._write(func, tensor, law if place == 0 else Law(None, law.random))
        return out

    def laws(self, module: nn.Module) -> dict[str, Law]:
        """Map every name of `named_parameters()` to the law of that parameter."""
        return {name: self._read(parameter) for name, parameter in module.named_parameters()}

    def _law(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: list[Law]) -> Law:
        """Return the law (distribution) of the first output of the operation `func`."""
        name = _name(func)
        stem = name.removeprefix("new_").removesuffix("_").removesuffix("_like")
        if stem in _ZEROS | _ONES:
            return _constant(float(stem in _ONES))
        if stem in _GIVEN or name in _WRITES:
            return inputs[-1] if isinstance(args[-1], Tensor) else _constant(float(args[-1]))
        if name in _COPIES:
            return inputs[0]
        random = torch.Tag.nondeterministic_seeded in func.tags or any(law.random for law in inputs)
        # An operation may fail on samples in place of its tensors. Its law is then unknown.
        with contextlib.suppress(Exception):
            return Law(self._sample(func, args, kwargs, inputs), random)
        return Law(None, random)

    def _sample(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: list[Law]) -> Tensor | None:
        name = _name(func)
        if name == "sign":  # random signs count as ones, because factors of -1 do not change the size of other values
            return _constant(1.0).sample
        if name == "linalg_qr":  # columns have norm 1, so their elements have this root mean square
            return _constant(args[0].shape[-2] ** -0.5).sample
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(func, args, kwargs)
        if name in ("any", "all") and len(args) == 1:
            return _mapped(func, args, kwargs, inputs).expand(_COUNT)
        if name == "where" or torch.Tag.pointwise in func.tags:
            return _mapped(func, args, kwargs, inputs)
        return None

    def _draw(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return a sample of the law from which an operation draws; None unless plain numbers describe the law.

        The sample is spread evenly over the law, so that few elements suffice to compute its size.
        """
        spread = (torch.randperm(_COUNT, generator=self._generator, device="cpu").double() + 0.5) / _COUNT
        name = _name(func)
        stem = name.removesuffix("_").removesuffix("_like")
        parameters = args if name == stem else args[1:]  # leave out the tensor that `uniform_` or `rand_like` takes
        if any(isinstance(value, Tensor) for value in parameters):
            return None
        numbers: list[float] = [value for value in parameters if isinstance(value, float | int)]
        first, second = [*numbers, *(0.0, 1.0)[len(numbers) :]]  # torch leaves out trailing defaults
        if stem in ("rand", "uniform"):
            return first + (second - first) * spread
        if stem in ("randn", "normal"):
            return first + second * 2**0.5 * torch.erfinv(2 * spread - 1)
        if func._schema.is_mutable:
            drawn: Tensor = func(spread, *args[1:], **{**kwargs, "generator": self._generator})
            return drawn
        return None

    def _read(self, tensor: Tensor) -> Law:
        content = self._contents.get(_storage(tensor))
        if content is None:  # no tracked operation made the tensor, so it is a plain number, or data of unknown law
            number = tensor.numel() == 1 and tensor.device.type != "meta"
            return _constant(float(tensor.detach())) if number else _UNKNOWN
        region = _region(tensor)
        if not content.parts:
            return content.whole
        return content.mixture(tensor.numel()) if region is None else content.parts.get(region, (0, _UNKNOWN))[1]

    def _write(self, func: Any, tensor: Tensor, law: Law) -> None:
        region, everywhere = _region(tensor), _name(func) not in _WRITES_PLACES
        if region is None and everywhere:
            self._contents[_storage(tensor)] = _Content(law, {})
            return
        content = self._contents.setdefault(_storage(tensor), _Content(_UNKNOWN, {}))
        if not everywhere and (law.random or not law.constant):
            content.whole, content.parts = _UNKNOWN, {}
        elif law.random or not law.constant:
            content.parts[region] = (tensor.numel(), law)
        elif not content.whole.random and content.whole.size != law.size:
            # A part of a constant gets another value, such as ones in zeros. This makes a pattern, whose scale is
            # unknown. A constant part of random weights, such as zeros in a padding row, does not change their scale.
            content.whole = Law(None, False)


@dataclass
class _Content:
    """Laws of the values in one storage.

    Attributes:
        whole: The law with which the whole storage was filled.
        parts: Region -> number of elements and law, for parts that were overwritten later.
    """

    whole: Law
    parts: dict[Any, tuple[int, Law]]

    def mixture(self, count: int) -> Law:
        """Return the law of the whole storage, which has `count` elements, from the laws of its parts."""
        rest = count - sum(own for own, _ in self.parts.values())
        laws = list(self.parts.values()) + ([(rest, self.whole)] if rest else [])
        squares = [(own, law.size**2) for own, law in laws if law.size is not None]
        if rest < 0 or len(squares) < len(laws):
            return _UNKNOWN
        return replace(_constant((sum(own * square for own, square in squares) / count) ** 0.5), random=True)


def _name(func: Any) -> str:
    return str(func.overloadpacket.__name__)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among an operation's inputs or outputs, which may be lists of tensors."""
    lists = [value if isinstance(value, list | tuple) else (value,) for value in values]
    return [value for own in lists for value in own if isinstance(value, Tensor) and value.layout == torch.strided]


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _region(tensor: Tensor) -> Any:
    """Return the part of the storage that a tensor covers; None if it covers the whole storage."""
    if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
        return None
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


@functools.lru_cache
def _constant(value: float) -> Law:
    return Law(torch.full((_COUNT,), value, dtype=torch.float64, device="cpu"), False)


def _mapped(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: list[Law]) -> Tensor:
    samples = iter([law.sample.clone() for law in inputs if law.sample is not None])
    args, kwargs = pytree.tree_map_only(Tensor, lambda _: next(samples), (args, dict(kwargs)))
    mapped: Tensor = func(*args, **kwargs)
    return mapped


def _value(func: Any, args: Sequence[Any], law: Law) -> Any:
    """Return the number in a one-element tensor. If the tensor has no data, return the value of its constant law."""
    try:
        return func(*args)
    except Exception:
        if law.sample is None or not law.constant:
            raise
        return law.sample[0].item()
