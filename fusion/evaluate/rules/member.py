"""Tensors inside `torch.func.vmap`, as a rule sees them.

Under `vmap`, operators see tensors that hide the axis of the K members. A rule gets `Member(value, dim)` instead: the
whole value, and the position of its K axis (None if all members share the value). The rule runs below `vmap`, on whole
values. Autograd then records one operation for all members.

The public way to do this is a `torch.autograd.Function` with a `vmap` method. It costs about 0.15 ms for each operator,
more than the arithmetic of a small layer. Private functions of torch replace it; only this file calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_current_functorch_interpreter

# A rule is called as `rule(K, *args, **kwargs)`, with a `Member` for each tensor. It returns its results as
# `Member`, or `NotImplemented` if it does not apply.
Rule = Callable[..., Any]


class Member(NamedTuple):
    """A tensor of all K members: `dim` is the K axis of `value`, or None if all members share one value."""

    value: Tensor
    dim: int | None

    def lead(self, K: int) -> Tensor:
        """Return the value as [K, ...]; a shared value is expanded, not copied."""
        if self.dim is None:
            return self.value.expand(K, *self.value.shape)
        return self.value.movedim(self.dim, 0)

    def numbers(self) -> list[float]:
        """Return the K numbers of a tensor that is 0-dimensional in each member.

        Numbers that modules hold as floats keep Python's precision, even if the tensor is float32.
        """
        return vars(self.value).get("numbers") or [float(x) for x in self.value.tolist()]

    def at(self, K: int, dim: int) -> Tensor:
        """Return the value with its K axis at `dim`; a shared value is expanded, not copied."""
        return self.lead(K).movedim(0, dim)


def innermost_vmap() -> VmapInterpreter | None:
    """Return the `vmap` that surrounds the call; None if there is none, or if several transforms are nested."""
    stack = functorch.get_interpreter_stack()
    if stack is None or len(stack) != 1:
        return None
    interpreter = retrieve_current_functorch_interpreter()
    return interpreter if isinstance(interpreter, VmapInterpreter) else None


def fold(function: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], *, draws: bool = False) -> Any:
    """Call the rule `function` with the whole values of all members (`Member`), below `vmap`.

    Return `NotImplemented` if the rule does not apply.

    Args:
        draws: If True, the rule applies even if no argument has a K axis. For example, an operator that draws random
            numbers gives each member its own result.
    """
    vmap = innermost_vmap()
    if vmap is None:
        return NotImplemented
    level, has_K = vmap.level(), draws

    def opened(x: Any) -> Any:
        nonlocal has_K
        if isinstance(x, Tensor):
            value, dim = functorch._unwrap_batched(x, level)
            has_K = has_K or dim is not None
            return Member(value, dim)
        if isinstance(x, (tuple, list)) and any(isinstance(item, Tensor) for item in x):
            return [opened(item) for item in x]
        return x

    def closed(x: Any) -> Any:
        if isinstance(x, Member):
            return x.value if x.dim is None else functorch._add_batch_dim(x.value, x.dim, level)
        return tuple(closed(item) for item in x) if isinstance(x, (tuple, list)) else x

    args, kwargs = tuple(map(opened, args)), {name: opened(x) for name, x in kwargs.items()}
    if not has_K:
        return NotImplemented
    with vmap.lower():
        result = function(vmap.batch_size(), *args, **kwargs)
    return result if result is NotImplemented else closed(result)


@contextmanager
def no_warnings_of_loops() -> Iterator[None]:
    """Silence torch's warning that `vmap` loops over the members in an operator without a rule, inside this context."""
    functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)  # type: ignore[attr-defined]
