"""A training step that is recorded after a few batches and then replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fusion.argument_checks import check_flag, check_function, require
from fusion.graph.capture import Capture, Replay, capture_on
from fusion.graph.compiled import Inductor
from fusion.graph.trace import Trace
from fusion.members.attributes import plain_attributes
from fusion.members.fused_model import FusedModel
from fusion.optim import FusedOptimizer
from fusion.streams import states_beyond_torch
from fusion.structure.module_parts import copied
from fusion.warn import warn

Step = Callable[[Any], Any]

FIRST_CHECK = 64
"""Number of replays before the first check. This number doubles from each check to the next.

A check runs a step as it is written, and compares its operators with the recorded ones.
"""

_MOST_FORMS = 4
_PLAIN = (bool, int, float, str, type(None))


def can_record(device: torch.device) -> bool:
    """Return whether training steps on `device` can be recorded at all; this needs CUDA graphs."""
    return capture_on(device) is not None


class GraphWarning(UserWarning):
    """Warns that a step is not recorded. Its results are right, but the host launches each kernel separately."""


@dataclass
class _Form:
    """The trace or recording for batches of one form: equal nesting, shapes, dtypes and plain values.

    Attributes:
        spec: Nesting of the batches.
        leaves: Form of each tensor in the batch, and all other values.
        inputs: Tensors into which each batch is copied; the recording reads them.
        trace: Trace of the last traced step; None if there is none.
        compared: True once two traced steps have been compared.
        replay: Replays the recording; None if there is none.
        result: Tensors that the recorded step returned, into which each replay writes.
    """

    spec: Any
    leaves: list[Any]
    inputs: list[Any] | None = None
    trace: Trace | None = None
    compared: bool = False
    replay: Replay | None = None
    result: Any = None

    def is_like(self, spec: Any, leaves: Sequence[Any]) -> bool:
        """Return whether a batch is of this form."""
        return bool(spec == self.spec) and list(map(_form_of, leaves)) == self.leaves


class GraphedStep:
    """A training step that is recorded as a CUDA graph: one launch replaces hundreds.

    On other devices, the step runs as it is written, unless `compiled` is True.

    The first three batches also run as written, and the operators of the second and third are compared. A step cannot
    be recorded if it reads values from the device or changes attributes of the model. It cannot be recorded either if
    its numbers or tensors differ between the two batches. The fourth batch is recorded, and later batches of the same
    form are replayed. Batches of another form, such as an epoch's smaller last batch, run as written. If the step
    cannot be recorded, a `GraphWarning` says why, and all batches run as written. Results are equal up to rounding.

    The step is recorded anew after `keep`, `concat` and `load_state_dict` of a fused model or its optimizer, and after
    `schedule` for another number of steps. Call `reset` if tensors move for another reason, if you freeze parameters,
    or if you call `train()` or `eval()` on a part of the model. A recording does not see new values outside of the
    device's tensors, such as a counter in a closure or a setting of torch. To find such changes, one step runs as
    written after 64, 128, 256 replays and so on, and is compared. If it differs, later steps are not replayed.

    Args:
        step: Called with a batch (tensors in any nesting). It trains on the batch, and returns tensors in any nesting.
        model: The model that the step trains: a `FusedModel`, or an ordinary module.
        optimizer: The model's optimizer if it is a `FusedOptimizer`; else None.
        compiled: If True, the step is compiled on a CPU instead of being recorded. This needs a C++ compiler, and takes
            seconds to minutes. The step runs as written if it draws random numbers (dropout), or if compiled code
            returns other results. Compiling pays for small models that take thousands of steps.

    Attributes:
        refusal: The reason why the step is not recorded; empty if there is none.

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
        """Return whether the step has been recorded, so that batches of the same form replay it."""
        return self._recorded is not None

    def reset(self) -> None:
        """Discard the recording. The next steps are compared and recorded anew."""
        self._forms: list[_Form] = []
        self._recorded: _Form | None = None
        self._stood: tuple[Any, ...] = ()
        self._replays, self._check_at = 0, FIRST_CHECK

    def __call__(self, batch: Any) -> Any:
        """Train on a batch. Later steps do not overwrite the returned tensors."""
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
        """Return values that change if new tensors, another mode or other random streams make a recording outdated."""
        model, optimizer = self._model, self._optimizer
        changes = (model.changes, model.streams) if isinstance(model, FusedModel) else ()
        return (model.training, *changes, optimizer.changes if optimizer else 0)

    def _refuses(self, leaves: Sequence[Any]) -> str:
        """Return the reason why the step cannot be recorded, if its batch or the model shows one; else ""."""
        model = self._model
        if isinstance(model, FusedModel) and model.one_by_one and model.K > 1:
            return "its members train one after another"
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *_PLAIN)):
                return f"a batch has a {type(leaf).__name__}, which may change unseen"
            if isinstance(leaf, Tensor) and leaf.device != self._device:
                return f"a batch has a tensor on {leaf.device}, and the model is on {self._device}"
            if isinstance(leaf, Tensor) and (leaf.layout != torch.strided or leaf.requires_grad):
                return "a batch has a tensor that is sparse, or that needs gradients"
        return ""

    def _first(self, batch: Any, leaves: Sequence[Any], spec: Any) -> Any:
        """Run one of the steps before the first replay: as written, traced, or recorded."""
        assert self._capture is not None
        known = next((form for form in self._forms if form.is_like(spec, leaves)), None)
        if known is None or not self._stood:
            # Do not trace the first step. It may create tensors that later steps reuse, such as the optimizer's state.
            # Its operators then differ from those of later steps.
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
        return copied(known.result)  # a copy, because the next replay overwrites the result

    def _looked_at(self, form: _Form) -> Any:
        """Run a step as written, on the recording's stream, and compare its operators with the last traced step's."""
        assert self._capture is not None
        model = self._model
        module = model.template if isinstance(model, FusedModel) else model
        attributes, states = plain_attributes(module), states_beyond_torch()
        with Trace(self._device, form.trace) as trace:
            result = self._capture.aside(partial(self._run, form))
        # A single member has its own states of Python's and NumPy's generators, so the global states do not change.
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
        return copied(form.result)

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


def _changed(module: nn.Module, before: list[dict[str, Any]]) -> str:
    """Return the name of an attribute that differs from `before`; empty if there is none."""
    for (path, _), then, now in zip(module.named_modules(), before, plain_attributes(module)):
        for name in {**then, **now}:
            if name not in then or name not in now or then[name] != now[name]:
                return f"{path}.{name}" if path else name
    return ""


def _told(error: BaseException) -> str:
    """Describe the first error behind `error`, which made a capture fail. Later ones only say that it failed."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".partition("\n")[0]
