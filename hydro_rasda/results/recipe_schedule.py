"""A recipe's learning rates, as text: a function of the time, and the lines that call it at each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fusion.hyperparameters import is_read, read
from hydro_rasda.results.recipe_parts import Form


def moves(config: Mapping[str, Any]) -> bool:
    """Tell whether the learning rate changes."""
    return bool(read(config, "schedule") != "constant" or read(config, "warmup_epochs") or read(config, "warmup"))


def rates(config: Mapping[str, Any], data: Form, arguments: Mapping[str, str]) -> list[str]:
    """Return the lines that set a step's learning rates; none if they do not change.

    Args:
        data: The time within an epoch is unknown for a loader without a length.
        arguments: By key of the configuration, the name of the argument that holds its value.
    """
    if not moves(config):
        return []
    schedule = f", {arguments['schedule']}" if "schedule" in arguments else ""
    passed = "(i / steps if length else 0.0)" if data == "loaders" else "i / steps"
    return [
        "for group, lr in zip(optimizer.param_groups, base):",
        f'    group["lr"] = lr * lr_factor(epoch + {passed}, steps{schedule})',
    ]


def schedule_text(config: Mapping[str, Any]) -> list[str]:
    """Return the text of `lr_factor`, a function of the time; an empty list if the learning rate does not change."""
    if not moves(config):
        return []
    schedule, warmup = read(config, "schedule"), _warmup(config)
    named = isinstance(schedule, str)
    lines = ['"""Return the factor of the learning rate in the step after `time` epochs of `steps` steps."""']
    lines += [warmup] if warmup else []
    rise = "rise * " if warmup else ""
    if named and schedule in _BY_EPOCH:
        keys = {name: read(config, name) for name in ("gamma", "step_size") if is_read(name, config)}
        lines.append(f"return {rise}{_BY_EPOCH[schedule].format(**keys)}")
    else:
        lines.append("step, last = round(time * steps), round(MAX_T * steps)")
        before, factor = _by_step(config) if named else ([], "schedule(step, last)")
        lines += [*before, f"return {rise}{factor}"]
    takes = "time, steps" if named else "time, steps, schedule"
    return ["\n".join([f"def lr_factor({takes}):", *indented(lines)])]


_BY_EPOCH = {
    "constant": "1.0",
    "step": "{gamma!r} ** (int(time) // {step_size})",
    "exponential": "{gamma!r} ** int(time)",
}
_SHAPES = {"linear": "1 - done", "cosine": "(1 + math.cos(math.pi * done)) / 2", "wsd": "1 - math.sqrt(done)"}
_ONE_CYCLE = [
    "top, low, end = 0.3 * last - 1, 1 / 25, 1 / 25e4",
    "if step <= top:",
    "    factor = 1.0 + (low - 1.0) * (1 + math.cos(math.pi * step / top)) / 2",
    "else:",
    "    share = min(1.0, (step - top) / (last - 1 - top))",
    "    factor = end + (1.0 - end) * (1 + math.cos(math.pi * share)) / 2",
]


def _warmup(config: Mapping[str, Any]) -> str:
    """Return the line that computes the warm-up's factor; empty without a warm-up."""
    epochs, share = read(config, "warmup_epochs"), read(config, "warmup")
    lasts = f"{epochs!r}" if epochs else f"({share!r} * MAX_T)"
    return f"rise = min(1.0, (time + 1 / steps) / {lasts})  # warm-up" if epochs or share else ""


def _by_step(config: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return the lines that come before, and the factor, for a schedule that moves at each step."""
    schedule = read(config, "schedule")
    if schedule == "one_cycle":
        return _ONE_CYCLE, "factor"
    start, floor = read(config, "decay_start"), read(config, "floor")
    if start == 1:
        return [], "1.0"
    before = [
        f"start = {start!r} * last  # the step at which the decay begins",
        "done = max(0.0, step - start) / (last - start)",
    ]
    return before, f"({floor!r} + (1 - {floor!r}) * ({_SHAPES[schedule]}))"


def indented(lines: Iterable[str], by: int = 1) -> list[str]:
    """Return lines of code, so many levels deeper."""
    return [f"{'    ' * by}{line}" if line else line for line in lines]
