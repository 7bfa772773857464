"""A recipe's optimizer and learning rates, as lines of a plain torch loop."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fusion.keys import (
    KEYS,
    OWN,
    VECTORIZED,
    configs_of_parts,
    is_rate,
    is_read,
    keys_of,
    optimizer_name,
    optimizer_names,
    own_arguments,
    read,
)
from fusion.optim import Hyperparameters
from fusion.optim.optimizer_config import WRITTEN
from hydro_rasda.common.secret_masking import HIDDEN
from hydro_rasda.space.domains import plain


def moves(config: Mapping[str, Any]) -> bool:
    """Tell whether the learning rate changes during the training."""
    return bool(read(config, "schedule") != "constant" or read(config, "warmup_epochs") or read(config, "warmup"))


def schedule_text(config: Mapping[str, Any]) -> list[str]:
    """Return the text of the function `lr_factor(time, steps)`; an empty list if the learning rate does not change."""
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
    """Return the line of code that computes the learning rate's factor in the warm-up; empty without a warm-up."""
    epochs, share = read(config, "warmup_epochs"), read(config, "warmup")
    lasts = f"{epochs!r}" if epochs else f"({share!r} * MAX_T)"
    return f"rise = min(1.0, (time + 1 / steps) / {lasts})  # warm-up" if epochs or share else ""


def _by_step(config: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return the code of a schedule that changes at each step: its first lines, and the expression of the factor."""
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
    """Indent lines of code by `by` levels of four spaces."""
    return [f"{'    ' * by}{line}" if line else line for line in lines]


def literal(value: Any) -> str | None:
    """Write a value as Python code; None if that is impossible, as for a function.

    >>> import numpy as np
    >>> literal({"a": [1, np.float64(0.5), "x"]}), literal(float("inf")), literal(len), literal("(hidden)")
    ("{'a': [1, 0.5, 'x']}", None, None, None)
    >>> literal(np.zeros(1))  # another value than 0.0
    """
    value = plain(value)
    if isinstance(value, type) and value in _CLASSES.values():
        return f"torch.optim.{value.__name__}"
    text = repr(value)
    try:
        holds = ast.literal_eval(text) == value and HIDDEN not in text
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return text if holds else None


def optimizer_lines(config: Mapping[str, Any]) -> list[str]:
    """Return the lines of code that make the optimizer."""
    base = ['base = [group["lr"] for group in optimizer.param_groups]'] if moves(config) else []
    configs, rates = configs_of_parts(config), {key: config[key] for key in config if is_rate(key)}
    if len(configs) == 1:
        return [*_lines_of({**configs[""], **rates}, config), *base]
    lines = [
        f"parts = {[part for part in configs if part]!r}  # of the model, with optimizers of their own",
        "def part_of(name):",
        '    own = [part for part in parts if f"{name}.".startswith(f"{part}.")]',
        '    return max(own, key=len, default="")',
        "optimizers = []",
    ]
    for part, own in configs.items():
        lines.append(f"if any(p.requires_grad and part_of(name) == {part!r} for name, p in model.named_parameters()):")
        of_part = _lines_of({**own, **rates}, config, part)
        lines += indented([*of_part, "optimizers.append(optimizer)"])
    return [*lines, "optimizer = Several(optimizers)", *base]


def _lines_of(own: Mapping[str, Any], config: Mapping[str, Any], part: str | None = None) -> list[str]:
    """Return the lines that make the optimizer of one `part` of the model, or of the whole model if it is None.

    `own` has the settings of the part, and `config` is the whole configuration.
    """
    if optimizer_name(own) == "muon":
        return _muon_lines(own, part)
    lr = read(own, "lr")
    parts = {key.partition(".")[2]: literal(own[key]) for key in own if is_rate(key)}
    kind, options = optimizer_name(own), _options(own)
    among = "" if part is None else f" and part_of(name) == {part!r}"
    if parts:
        factor = f', "lr_factor": rate(name) / {lr!r}' if kind == "prodigy" else ""
        rates = ", ".join(f"{part!r}: {rate}" for part, rate in parts.items())
        lines = [
            f"rates = {{{rates}}}  # of parts of the model, by the longest of their names",
            "def rate(name):",
            '    own = [part for part in rates if f"{name}.".startswith(f"{part}.")]',
            f"    return rates[max(own, key=len)] if own else {lr!r}",
            f"named = [(name, p) for name, p in model.named_parameters() if p.requires_grad{among}]",
            f'groups = [{{"params": [p], "lr": rate(name){factor}}} for name, p in named]',
        ]
    else:
        named = "p in model.parameters()" if part is None else "name, p in model.named_parameters()"
        lines = [f'groups = [{{"params": [p for {named} if p.requires_grad{among}], "lr": {lr!r}}}]']
    if options.pop("independent_weight_decay", False):
        lines += ["for group in groups:", f'    group["weight_decay"] = {options.pop("weight_decay")!r} / group["lr"]']
    if kind == OWN:
        keys = {name: next(filter(config.__contains__, keys_of(name, part or ""))) for name in own_arguments(own)}
        called = f"config[{next(filter(config.__contains__, keys_of('optimizer', part or '')))!r}]"
        told = [f"{name}=config[{key!r}]" for name, key in keys.items()]
    else:
        called, told = (
            WRITTEN[kind].__name__ if kind in WRITTEN else f"torch.optim.{_CLASSES[kind].__name__}",
            [f"{name}={value!r}" for name, value in options.items()],
        )
    if kind in ("adam", "adamw"):
        told.append('fused=device.type in ("cpu", "cuda")')
    return [*lines, f"optimizer = {called}(", *indented(f"{of}," for of in ("groups", f"lr={lr!r}", *told)), ")"]


def _muon_lines(config: Mapping[str, Any], part: str | None) -> list[str]:
    own = {"lr": read(config, "lr"), **{key: config[key] for key in config if is_rate(key)}, **_options(config)}
    settings = indented(f"{name!r}: {value!r}," for name, value in own.items())
    if part is None:
        return ["optimizer = muon_with_adamw(model, **{", *settings, "})"]
    among = f"among = [name for name, p in model.named_parameters() if part_of(name) == {part!r}]"
    return [among, "optimizer = muon_with_adamw(model, among=among, **{", *settings, "})"]


_SEVERAL = '''
class Several:
    """Several optimizers, which are used like one. Each updates some of the model's parameters."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def train(self):
        for optimizer in self.optimizers:
            if hasattr(optimizer, "train"):
                optimizer.train()

    def eval(self):
        for optimizer in self.optimizers:
            if hasattr(optimizer, "eval"):
                optimizer.eval()
'''


_MUON = '''
def muon_with_adamw(model, lr, momentum, nesterov, weight_decay, adjust_lr_fn, betas, eps, among=None, **rates):
    """Return one optimizer: torch's Muon for hidden matrices, and AdamW for the other parameters."""
    learning = [(n, p) for n, p in model.named_parameters() if p.requires_grad and (among is None or n in among)]
    matrices = hidden_matrices(model, dict(learning))
    optimizers = []
    for by_muon in (True, False):
        groups = []
        for name, p in learning:
            if (name in matrices) == by_muon:
                path = f"lr.{name}"
                own = [part for part in rates if f"{path}.".startswith(f"{part}.")]
                rate = lr if by_muon else rates.get("lr.adamw", lr)
                groups.append({"params": [p], "lr": rates[max(own, key=len)] if own else rate})
        if groups and by_muon:
            settings = {"momentum": momentum, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
            optimizers.append(torch.optim.Muon(groups, lr, weight_decay, **settings))
        elif groups:
            optimizers.append(torch.optim.AdamW(groups, lr, betas, eps, weight_decay))
    return Several(optimizers)


def hidden_matrices(model, learning):
    """Return the names of real 2-D parameters, except those of embeddings and of the last module that has one.

    If a parameter has the attribute `use_muon`, the attribute decides.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    fits = {name for name, p in learning.items() if p.dim() == 2 and p.is_floating_point()}
    found, apart, last = set(), set(), set()
    for part in model.modules():
        own = {names[id(p)] for p in part.parameters(recurse=False)} & fits
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            apart |= own
        elif own:
            found, last = found | own, own
    asked = {name: p.use_muon for name, p in learning.items() if hasattr(p, "use_muon")}
    return {n for n in found | set(asked) if asked.get(n, n not in apart | last)}
'''


def optimizer_classes(config: Mapping[str, Any]) -> list[str]:
    """Return the source of optimizers that torch lacks, and of a wrapper of torch's Muon, which takes only matrices."""
    names = optimizer_names(config)
    classes = [cls for name in WRITTEN if name in names for cls in reversed(WRITTEN[name].__mro__)]
    own = [inspect.getsource(cls) for cls in dict.fromkeys(classes) if cls.__module__.startswith("fusion.")]
    texts = [re.sub("  # type: ignore.*", "", text) for text in own]
    muon = "muon" in names
    return [*texts, *([_MUON] if muon else []), *([_SEVERAL] if muon or len(names) > 1 else [])]


_CLASSES = {name.lower(): value for name, value in vars(torch.optim).items() if isinstance(value, type)}


def _options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a torch optimizer by torch's names, without the learning rate.

    Keys that the configuration lacks have the library's defaults, so that the recipe does not depend on torch's
    defaults.
    """
    kind = optimizer_name(config)
    if kind == OWN:
        return {}
    if kind not in VECTORIZED:
        return dict(Hyperparameters.from_config(config).options)
    names = [name for name, key in KEYS.items() if key.under == "optimizer" and is_read(name, config)]
    values = {name: read(config, name) for name in names}
    if "beta1" in values:
        values["betas"] = values.pop("beta1"), values.pop("beta2")
    return values
