"""Each of torch's operators, on the inputs that torch tests it with: folded, members get what each gets alone.

Run by itself, as `python -m tests.fusion.evaluate.rules.test_torch_operators PART OF`, it prints the operators that
differ. Torch's list is private, and importing it changes settings of torch, so the test runs it in processes of their
own.
"""

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fusion.evaluate.rules import folded
from fusion.streams import Streams

K = 3
PARTS = 2
FIRST, MOST = 40, 8  # of so many inputs of an operator, so many are compared
LEFT_OUT = {
    "as_strided": "reads memory, in which members' tensors lie otherwise",
    "as_strided_copy": "likewise",
    "as_strided_scatter": "likewise",
    "empty_like": "returns what memory holds",
    "new_empty": "likewise",
    "new_empty_strided": "likewise",
    "roll": "moves a tensor without dimensions along the members",
    "nn.functional.linear_cross_entropy.chunked_none": "has no gradient by class weights when alone",
}
Call = Callable[..., list[Tensor]]


def differing(leaves: Sequence[Any]) -> Iterator[list[int]]:
    """Yield which tensors differ between members: all of them, only the first, all but the first."""
    found = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.dtype == torch.float64]
    yield from ([found, found[:1], found[1:]] if len(found) > 1 else [found])


def of_members(x: Tensor) -> Tensor:
    return torch.stack([x, x * 0.9 + 0.01, x.flip(0) if x.ndim else x * 0.8]).detach().requires_grad_()


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return those of a sum in which each element counts differently; zeros where an input has none."""
    drawn = torch.Generator().manual_seed(0)
    weighed = [(out, torch.randn(out.shape, generator=drawn, dtype=out.dtype)) for out in outputs]
    terms = [(out * weight).sum() for out, weight in weighed if out.requires_grad]
    found = torch.autograd.grad(terms, list(inputs), allow_unused=True) if terms else [None] * len(inputs)
    return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(found, inputs)]


def alone(call: Call, inputs_K: Sequence[Tensor]) -> list[Tensor]:
    found = []
    for k in range(K):
        torch.manual_seed(k)
        found.append(call(*(x[k] for x in inputs_K)))
    return [torch.stack(of_output) for of_output in zip(*found)]


def called(op: Any, leaves: Sequence[Any], spec: Any, places: Sequence[int]) -> Call:
    """Return the operator as a function of the tensors at these places."""

    def call(*own: Tensor) -> list[Tensor]:
        values = list(leaves)
        for i, x in zip(places, own):
            values[i] = x
        input, args, kwargs = tree_unflatten(values, spec)
        outputs = tree_flatten(op.op(input, *args, **kwargs))[0]
        return [x for x in outputs if isinstance(x, Tensor) and x.dtype == torch.float64]

    return call


def draws(op: Any) -> bool:
    """Return whether torch seeds its generator around the operator: members have streams of their own."""
    return "wrapper_set_seed" in getattr(getattr(op.op, "__code__", None), "co_names", ())


def close(found: Sequence[Tensor], expected: Sequence[Tensor], rtol: float) -> bool:
    return all(torch.allclose(a, b, rtol=rtol, atol=rtol / 100, equal_nan=True) for a, b in zip(found, expected))


def compare(op: Any) -> Iterator[str]:
    """Yield a line for each input that was compared: "" where members get what they get alone.

    Operators that fail under `vmap` are no matter: their members train one after another.
    """
    samples = list(enumerate(op.sample_inputs("cpu", torch.float64, requires_grad=False)))[:FIRST]
    for number, sample in samples[:: -(-len(samples) // MOST) or 1]:
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        if any(isinstance(x, Tensor) and x.layout is not torch.strided for x in leaves):
            continue
        for places in differing(leaves):
            inputs_K, call = [of_members(leaves[i]) for i in places], called(op, leaves, spec, places)
            try:
                expected = alone(call, inputs_K)
                expected_gradients = gradients(expected, inputs_K)
                with folded(Streams(K, range(K))):
                    found = torch.func.vmap(call, randomness="error")(*inputs_K) if expected else []
                found_gradients = gradients(found, inputs_K)
            except Exception:
                continue
            told = f"{op.formatted_name}, input {number}, where members differ in {places}"
            if not close(found, expected, 1e-6):
                yield told
            else:
                yield "" if close(found_gradients, expected_gradients, 1e-5) else f"{told}: gradients"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_members_get_what_each_gets_alone(part: int) -> None:
    command = [sys.executable, "-m", __name__, str(part), str(PARTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

    torch.set_num_threads(1)
    first, step = map(int, sys.argv[1:])
    asked = compared = 0
    for op in op_db[first::step]:
        names = {op.name, f"{op.name}.{op.variant_test_name}"}
        if op.supports_autograd and torch.float64 in op.dtypes and not names & LEFT_OUT.keys() and not draws(op):
            lines = list(compare(op))
            asked, compared = asked + 1, compared + bool(lines)
            print("".join(f"{line}\n" for line in lines if line), end="", flush=True)
    if compared < 0.8 * asked:
        sys.exit(f"of {asked} operators, only {compared} run under vmap")
