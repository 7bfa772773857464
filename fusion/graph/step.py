"""A training step that is recorded after a few batches and then replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fusion.attributes import plain_attributes
from fusion.checks import check_flag, check_function, require
from fusion.graph.capture import Capture, Replay, capture_on
from fusion.graph.compiled import Inductor
from fusion.graph.trace import Trace
from fusion.model import FusedModel
from fusion.optim import FusedOptimizer
from fusion.streams import states_beyond_torch
from fusion.warn import warn

Step = Callable[[Any], Any]

FIRST_CHECK = 64
"""Replays after which a step is run as it is written and compared; then after twice as many, and so on."""

_MOST_FORMS = 4
_PLAIN = (bool, int, float, str, type(None))


def can_record(device: torch.device) -> bool:
    """Whether steps on a device can be recorded at all."""
    return capture_on(device) is not None


class GraphWarning(UserWarning):
    """A step runs as it is written: right, but each of its kernels waits for the host."""


@dataclass
class _Form:
    """Batches of one form, on models that stand as they did.

    Attributes:
        spec: How their tensors are nested.
        leaves: Form of each tensor, and what else is in them.
        inputs: Where each batch is copied to; the recording reads them there.
        trace: Of the last step that was run as it is written, if any was looked at.
    """

    spec: Any
    leaves: list[Any]
    inputs: list[Any] | None = None
    trace: Trace | None = None
    compared: bool = False
    replay: Replay | None = None
    result: Any = None

    def is_like(self, spec: Any, leaves: Sequence[Any]) -> bool:
        """Whether a batch is of this form."""
        return bool(spec == self.spec) and list(map(_form_of, leaves)) == self.leaves


class GraphedStep:
    """A training step as a CUDA graph: one launch in the place of hundreds. Elsewhere it is the step itself, unless
    it is to be compiled.

    The first batch is trained on as the step is written, the next two are, too, and what they call is compared: a step
    that reads values of the device, that takes other numbers or tensors from one batch to the next, or that changes
    attributes of the model cannot be recorded. The fourth is recorded, all later ones of its form replayed; those of
    another form (an epoch's last, smaller batch) run as the step is written. So does everything where recording is
    refused, which a `GraphWarning` explains. Results are the same up to rounding.

    It is recorded anew after `keep`, `concat`, `load_state_dict`, and `schedule` for another number of steps, of a
    fused model and its optimizer; after other changes of where tensors lie, call `reset`. What a step reads elsewhere
    than in tensors of the device (a counter in a closure, torch's settings) stays what it was when the step was
    recorded: after 64 replays, 128, 256 and so on, one step is run as it is written and compared, and where it differs,
    none is replayed any more.

    Args:
        step: Called with a batch (tensors in any nesting): trains on it, and returns tensors in any nesting.
        model: What it trains: the `FusedModel`, or an ordinary module.
        optimizer: That updates it, where it is this package's.
        compiled: Whether, on a CPU, the step is compiled in the place of being recorded. That takes seconds to
            minutes, and a C++ compiler; what draws random numbers (dropout), or returns something else when it is
            compiled, runs as it is written. It pays for small models that take thousands of steps.

    Attributes:
        refusal: Why the step is not recorded, in words; empty as long as nothing stands in the way.

    Example:
        >>> def step(batch):
        ...     optimizer.zero_grad()
        ...     loss_K = fused.map(objective, batch)
        ...     loss_K.sum().backward()
        ...     optimizer.step()
        ...     return loss_K.detach()
        >>> step = GraphedStep(step, fused, optimizer)  # doctest: +SKIP
        >>> losses = [step(batch) for batch in loader]  # doctest: +SKIP
    """

    def __init__(
        self, step: Step, model: nn.Module, optimizer: FusedOptimizer | None = None, *, compiled: bool = False
    ) -> None:
        check_function("step", step, 1)
        require(isinstance(model, nn.Module), "model", model, "a torch.nn.Module")
        if optimizer is not None:
            require(isinstance(optimizer, FusedOptimizer), "optimizer", optimizer, "None or a FusedOptimizer")
        check_flag("compiled", compiled)
        self.refusal = ""
        self._step, self._model, self._optimizer = step, model, optimizer
        first = next(model.parameters(), None)
        self._device = torch.device("cpu") if first is None else first.device
        on_cpu = compiled and self._device.type == "cpu"
        self._capture: Capture | None = Inductor() if on_cpu else capture_on(self._device)
        if on_cpu and isinstance(model, FusedModel):
            model.updated_in_turn = False
        self.reset()

    @property
    def recorded(self) -> bool:
        """Whether a recording is at hand."""
        return self._recorded is not None

    def reset(self) -> None:
        """Forget the recording: the next steps are looked at anew."""
        self._forms: list[_Form] = []
        self._recorded: _Form | None = None
        self._stood: tuple[Any, ...] = ()
        self._replays, self._check_at = 0, FIRST_CHECK

    def __call__(self, batch: Any) -> Any:
        """Train on a batch; what is returned is the caller's, and stays."""
        if self._capture is None or self.refusal:
            return self._step(batch)
        leaves, spec = tree_flatten(batch)
        stand = self._stand()
        if stand != self._stood:
            self.reset()
        elif self._recorded is not None:
            is_like = self._recorded.is_like(spec, leaves)
            return self._replayed(self._recorded, leaves) if is_like else self._step(batch)
        if refusal := self._refuses(leaves):
            self._refuse(refusal)
            return self._step(batch)
        return self._first(batch, leaves, spec)

    def _stand(self) -> tuple[Any, ...]:
        """What is another once tensors lie elsewhere, or the model runs in another way."""
        model, optimizer = self._model, self._optimizer
        changes = (model.changes, model.streams) if isinstance(model, FusedModel) else ()
        return (model.training, *changes, optimizer.changes if optimizer else 0)

    def _refuses(self, leaves: Sequence[Any]) -> str:
        """What can be said against a recording before a step is run."""
        model = self._model
        if isinstance(model, FusedModel) and model.one_by_one and model.K > 1:
            return "its members train one after another"
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *_PLAIN)):
                return f"a batch has a {type(leaf).__name__}, of which nobody knows whether it changes"
            if isinstance(leaf, Tensor) and leaf.device != self._device:
                return f"a batch has a tensor on {leaf.device}, and the model is on {self._device}"
            if isinstance(leaf, Tensor) and (leaf.layout != torch.strided or leaf.requires_grad):
                return "a batch has a tensor that is sparse, or that needs gradients"
        return ""

    def _first(self, batch: Any, leaves: Sequence[Any], spec: Any) -> Any:
        """A step as long as nothing is recorded."""
        assert self._capture is not None
        known = next((form for form in self._forms if form.is_like(spec, leaves)), None)
        if known is None or not self._stood:
            # This step makes what is made once, such as the optimizer's state: only after it does the model stand.
            result = self._capture.aside(lambda: self._step(batch))
            if known is None:
                self._forms = [*self._forms[1 - _MOST_FORMS :], _Form(spec, list(map(_form_of, leaves)))]
            self._stood = self._stand()
            return result
        if known.inputs is None:
            known.inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        _fill(known.inputs, leaves)
        if not known.compared:
            return self._looked_at(known)
        try:
            known.result, known.replay = self._capture.record(partial(self._run, known), self._generators(known))
        except Exception as error:
            self._refuse(_told(error))
            return self._step(batch)
        self._recorded, self._forms = known, []
        return tree_map(_own, known.result)

    def _looked_at(self, form: _Form) -> Any:
        """Run a step as it is written, where the recording runs, and compare what it calls with what the last did."""
        assert self._capture is not None
        model = self._model
        module = model.template if isinstance(model, FusedModel) else model
        attributes, states = plain_attributes(module), states_beyond_torch()
        with Trace(self._device, form.trace) as trace:
            result = self._capture.aside(partial(self._run, form))
        # A member alone draws from its own, which are put in the place of Python's and taken away again.
        draws = isinstance(model, FusedModel) and model.K == 1 and model.streams.draw_beyond_torch
        if obstacle := trace.finish():
            self._refuse(obstacle)
        elif draws or states_beyond_torch() != states:
            self._refuse("it draws from Python's or NumPy's generator")
        elif changed := _changed(module, attributes):
            self._refuse(f"it changes `{changed}`, an attribute of the model")
        form.compared = form.trace is not None
        form.trace = trace
        return result

    def _replayed(self, form: _Form, leaves: Sequence[Any]) -> Any:
        assert form.inputs is not None
        assert form.replay is not None
        _fill(form.inputs, leaves)
        self._replays += 1
        if self._replays == self._check_at:
            self._check_at *= 2
            return self._looked_at(form)
        form.replay()
        return tree_map(_own, form.result)

    def _run(self, form: _Form) -> Any:
        assert form.inputs is not None
        return self._step(tree_unflatten(form.inputs, form.spec))

    def _generators(self, form: _Form) -> set[torch.Generator]:
        assert form.trace is not None
        streams = self._model.streams if isinstance(self._model, FusedModel) else None
        return form.trace.generators.union(streams.generators(self._device) if streams else ())

    def _refuse(self, why: str) -> None:
        self.reset()
        self.refusal = why
        if isinstance(self._model, FusedModel):
            self._model.updated_in_turn = True
        warn(f"a training step is not recorded, {why}", GraphWarning)


def _form_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
    return (type(leaf), leaf)


def _fill(inputs: Sequence[Any], leaves: Sequence[Any]) -> None:
    pairs = [(to, leaf) for to, leaf in zip(inputs, leaves, strict=True) if isinstance(leaf, Tensor)]
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [leaf for _, leaf in pairs])


def _own(leaf: Any) -> Any:
    """A copy of what the next replay writes over."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _changed(module: nn.Module, before: list[dict[str, Any]]) -> str:
    """The name of an attribute that is not what it was; empty if there is none."""
    for (path, _), then, now in zip(module.named_modules(), before, plain_attributes(module)):
        for name in {**then, **now}:
            if name not in then or name not in now or then[name] != now[name]:
                return f"{path}.{name}" if path else name
    return ""


def _told(error: BaseException) -> str:
    """What ended a capture, rather than that it has ended badly."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".partition("\n")[0]
