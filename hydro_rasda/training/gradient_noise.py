"""The gradient noise scale: the batch size beyond which each further example helps clearly less.

McCandlish et al., "An empirical model of large-batch training" (2018), section 2.2 and appendix A.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

HORIZON = 100
"""The running averages of the estimates forget a step after about this many steps."""

_AT_ONCE = 64
"""Norms of this many steps are read from the device at a time, because each reading waits for all work on a GPU."""


class _Step:
    """The squared norms of a step's gradients, one for each DDP bucket, still on the device.

    `own` has those of the mean gradient of `small` examples, times `weight` squared. `averaged` has those of the mean
    gradient of `big` examples.
    """

    def __init__(self, small: float, big: float, weight: float) -> None:
        self.small, self.big, self.weight = small, big, weight
        self.own: list[Tensor] = []
        self.averaged: list[Tensor] = []


class GradientNoise:
    """Measure the simple noise scale B = tr(Sigma) / |G|^2 of a training, in examples, while it runs.

    G is the expected gradient, and Sigma the covariance of one example's gradient. From the mean gradient g of b
    examples and the mean gradient h of B examples, unbiased estimates are (eqs. A.2 and A.3)

        |G|^2 ~ (B |h|^2 - b |g|^2) / (B - b),    tr(Sigma) ~ (|g|^2 - |h|^2) / (1 / b - 1 / B).

    Both estimates are averaged over the steps (exponentially, see `HORIZON`) before they are divided, because the
    quotient of a single step is biased. Under DDP, h is the average over the ranks, and g is a rank's own gradient. The
    estimates are linear in the squared norms, so that they can be averaged over the ranks once an epoch, see `settle`.
    On a single rank, g is the gradient of a micro-batch, see `after_backward`.

    Args:
        model: A model wrapped by DDP, without a communication hook; or a model on one rank.

    Attributes:
        unsized: True if DDP averaged gradients before `expect` told their number of examples.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._world = 1
        self._signal = self._noise = 0.0
        self._measured = False
        self._share: tuple[float, float] | None = None
        self._scale: Tensor | None = None
        self._multiplier: Tensor | None = None
        self.unsized = False
        self._steps: list[_Step] = []
        self._seen = 0.0
        self._first: tuple[Tensor, float] | None = None
        if isinstance(model, DistributedDataParallel):
            self._world = dist.get_world_size()
            # The hook is a lambda, which has no annotations, because DDP refuses a hook that annotates its arguments
            # with anything but the exact class.
            model.register_comm_hook(self, lambda noise, bucket: noise._average(bucket))

    @property
    def scale(self) -> float:
        """The noise scale B, in examples; inf if the estimate of |G|^2 is not positive, NaN before the first step.

        On several ranks, it is this rank's estimate until `settle` is called.
        """
        self._read()
        if not self._measured:
            return math.nan
        return max(0.0, self._noise) / self._signal if self._signal > 0 else math.inf

    def expect(
        self, examples: int, weight: float = 1.0, scale: Tensor | None = None, multiplier: Tensor | None = None
    ) -> None:
        """Describe the loss of this rank's next backward pass. Under DDP, call it whenever an argument changes.

        Args:
            examples: Number of examples whose mean loss is differentiated.
            weight: Factor of the loss: this rank's share of all examples, times the number of ranks. 0 if this rank has
                no example left.
            scale: A further factor, the same on all ranks, as a tensor on the device; None for 1.
            multiplier: If examples have unequal weights, the factor of the loss in place of `weight`, as a tensor on
                the device. `weight` then only describes this rank's share of the examples. None if examples have equal
                weights.
        """
        self._share, self._scale, self._multiplier = (float(examples), weight), scale, multiplier

    def add(self, small: float, of: float, big: float, out_of: float) -> None:
        """Add the estimates of one step to the running averages.

        Args:
            small: Squared norm of the mean gradient of `of` examples.
            big: Squared norm of the mean gradient of `out_of` examples, which include the `of` examples.
        """
        if not of < out_of or not math.isfinite(small + big):
            return
        signal = (out_of * big - of * small) / (out_of - of)
        noise = (small - big) / (1 / of - 1 / out_of)
        # Both averages begin at 0. Their quotient needs no correction for this, because both are too small by the same
        # factor.
        self._signal += (signal - self._signal) / HORIZON
        self._noise += (noise - self._noise) / HORIZON
        self._measured = True

    def after_backward(self, examples: int, out_of: int) -> None:
        """Record that a single rank has differentiated a micro-batch; on several ranks, do nothing.

        In a step with several micro-batches, g is the gradient of the first one. Such a step computes two more norms.

        Args:
            examples: Number of examples in the micro-batch.
            out_of: Number of examples in the step. A micro-batch's loss is the sum over its examples, divided by
                `out_of`.
        """
        if self._world > 1:
            return
        self._seen += examples
        if self._first is None and self._seen < out_of:
            self._first = self._squared() * (out_of / examples) ** 2, float(examples)
        if self._seen >= out_of:
            if self._first is not None:
                step = _Step(self._first[1], float(out_of), 1.0)
                step.own, step.averaged = [self._first[0]], [self._squared()]
                self._keep(step)
            self._seen, self._first = 0.0, None

    def settle(self, device: torch.device) -> None:
        """Average the measurements over all ranks. Each rank calls this method with its own device."""
        self._read()
        if self._world > 1:
            found = torch.tensor([self._signal, self._noise, self._measured], dtype=torch.float64, device=device)
            dist.all_reduce(found)
            signal, noise, measured = found.tolist()
            self._signal, self._noise, self._measured = signal / self._world, noise / self._world, measured > 0

    def state(self) -> dict[str, float]:
        """Return the running averages, which `load` accepts on any number of ranks. Call `settle` first."""
        return {"signal": self._signal, "noise": self._noise} if self._measured else {}

    def load(self, state: Mapping[str, Any]) -> None:
        if state:
            self._signal, self._noise, self._measured = state["signal"], state["noise"], True

    def _average(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average a bucket of gradients over the ranks as DDP would, and note its squared norms before and after.

        DDP calls this method as its communication hook.
        """
        own = bucket.buffer()
        if self._share is None:
            self.unsized = True
            return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]  # WORLD is None without a group
        if bucket.index() == 0:
            examples, weight = self._share
            self._keep(_Step(examples, examples * self._world / weight if weight else math.inf, weight))
        step = self._steps[-1]
        scale = self._scale
        step.own.append(_squared_norm(own, self._own_scale(step.weight)))

        def averaged(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            (mean,) = future.value()
            step.averaged.append(_squared_norm(mean, scale))
            return mean

        # This averages as `allreduce_hook` does. That hook has a callback of its own, so that each bucket would call
        # back into Python twice. Here, only `averaged` is called.
        reduced = dist.all_reduce(own.div_(self._world), async_op=True).get_future()
        result: torch.futures.Future[Tensor] = reduced.then(averaged)
        return result

    def _own_scale(self, weight: float) -> Tensor | None:
        """Return the factor besides `weight` by which this rank's gradient was multiplied; None for 1."""
        if self._multiplier is None or not weight:
            return self._scale
        own = self._multiplier / weight
        return own if self._scale is None else own * self._scale

    def _keep(self, step: _Step) -> None:
        if len(self._steps) >= _AT_ONCE:
            self._read()
        self._steps.append(step)

    def _read(self) -> None:
        steps, self._steps = [step for step in self._steps if step.weight], []
        if not steps:
            return
        pieces = [piece for step in steps for piece in (*step.own, *step.averaged)]
        values = iter(torch.stack(pieces).tolist())
        for step in steps:
            own, averaged = (sum(next(values) for _ in of) for of in (step.own, step.averaged))
            self.add(own / step.weight**2, step.small, averaged, step.big)

    def _squared(self) -> Tensor:
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients).square()


def _squared_norm(tensor: Tensor, scale: Tensor | None) -> Tensor:
    """Return the squared norm that a tensor had before it was multiplied by `scale`, computed in at least 32 bits."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    norm: Tensor = torch.linalg.vector_norm(values, dtype=dtype)
    return (norm if scale is None else norm / scale.squeeze()).square()
