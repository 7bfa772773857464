"""A training as the text of a plain torch loop, which needs torch and numpy alone.

The text repeats what `training` does, number by number: `tests/hydro_rasda/results/test_recipe.py` runs it.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fusion.keys import configs_of_parts, read
from fusion.optim import Hyperparameters
from hydro_rasda.common.console import one_line
from hydro_rasda.problem.width_argument import WidthForm
from hydro_rasda.results.recipe_data_and_seeds import APART, BATCHES, BEFORE, DATA, PARTS, ROWS, SEEDS, Form
from hydro_rasda.results.recipe_optimizer import (
    indented,
    literal,
    optimizer_classes,
    optimizer_lines,
    rates,
    schedule_text,
)
from hydro_rasda.settings.config import TuneConfig


@dataclass(frozen=True)
class Recipe:
    """A full-size training.

    Attributes:
        title: Sentences that describe the training.
        config: The configuration, without secrets.
        trial: The trial's number, from which seeds follow.
        averaged_from: The epoch from which weights are averaged; None if they are not.
        objective: True if an objective of the user's makes the loss; False if a `loss_fn` does.
        by_part: True if each part of the model has an objective of its own. These take turns in each step.
        configured: True if the objective or `loss_fn` also takes the configuration; None if only the function can tell.
        width: How the model function takes the width ratio; "unknown" if only the function can tell.
        copied: True if the model function may return a module that it keeps, so that the loop trains a copy.
    """

    title: Sequence[str]
    config: Mapping[str, Any]
    trial: int
    epochs: int
    settings: TuneConfig
    averaged_from: int | None
    data: Form
    objective: bool
    by_part: bool
    configured: bool | None
    width: WidthForm | Literal["unknown"] | None
    copied: bool

    @property
    def loss(self) -> str:
        return "objective" if self.objective else "loss_fn"


def written(recipe: Recipe) -> str:
    """Return the text of the recipe: the configuration, then a function `train` and everything that it needs."""
    arguments, classes = given(recipe.config), optimizer_classes(recipe.config)
    parts = [
        _constants(recipe, arguments),
        _train(recipe, arguments),
        *schedule_text(recipe.config),
        *classes,
        *(PARTS if read(recipe.config, "accumulate") > 1 else []),
        DATA[recipe.data],
        *(ROWS if recipe.data != "loaders" else []),
        *(APART if recipe.data != "tensors" else []),
        SEEDS,
    ]
    body = "\n\n".join(part.strip("\n") + "\n" for part in parts)
    modules = [name for name in _MODULES if re.search(rf"\b{name}\.", body)]
    imports = ["from __future__ import annotations"] if classes else []
    imports += [f"import {_ALIASES.get(name, name)}" for name in modules]
    imports += [line for line in _FROM if re.search(rf"\b{line.split()[-1]}\(", body)]
    call = ", ".join(["model_fn", "train_data", recipe.loss, *(f"{name}={name}" for name in arguments.values())])
    usage = f"This file trains nothing by itself: import it, and call `model = train({call})`."
    title = "".join(f"# {one_line(line)}\n" for line in (*recipe.title, usage))
    return f"{title}\n" + "\n".join(imports) + f"\n\n{body}"


_MODULES = ("copy", "functools", "inspect", "itertools", "math", "random", "zlib", "np", "torch")
_ALIASES = {"np": "numpy as np"}
_FROM = (
    "from torch.utils._pytree import tree_flatten",
    "from torch.utils._pytree import tree_map",
    "from torch.utils._pytree import tree_unflatten",
    "from torch.utils.data import default_collate",
)


def given(config: Mapping[str, Any]) -> dict[str, str]:
    """Name arguments for values that cannot be written down, such as functions and secrets.

    >>> given({"lr": 0.1, "schedule": max, "hub token": "(hidden)", "class": object})
    {'schedule': 'schedule', 'hub token': 'hub_token', 'class': 'class_'}
    """
    names: dict[str, str] = {}
    for key in (key for key, value in config.items() if literal(value) is None):
        name = re.sub(r"\W", "_", str(key))
        while not name.isidentifier() or keyword.iskeyword(name) or name in {*_TAKEN, *names.values()}:
            name = f"{name}_" if name[:1].isidentifier() else f"_{name}"
        names[key] = name
    return names


_TAKEN = ("model_fn", "train_data", "loss_fn", "objective", "device", "config", "model", "torch", "np")


def _constants(recipe: Recipe, arguments: Mapping[str, str]) -> str:
    config = {key: text for key, value in recipe.config.items() if (text := literal(value)) and key not in arguments}
    settings = recipe.settings
    lines = ["CONFIG = {", *(f"    {key!r}: {text}," for key, text in config.items()), "}"]
    if arguments:
        lines.append(f"# Arguments of `train`, as they cannot be written here: {', '.join(arguments.values())}.")
    lines += [f"SEED, TRIAL = {settings.seed}, {recipe.trial}", f"BATCH_SIZE = {read(recipe.config, 'batch_size')}"]
    lines.append(f"MAX_T = {settings.max_t}  # epochs, the horizon of schedules and averages")
    lines.append(f"EPOCHS = {recipe.epochs}  # trained, after which the weights count")
    return "\n".join(lines)


def _train(recipe: Recipe, arguments: Mapping[str, str]) -> str:
    config, of = recipe.config, arguments.values()
    takes = ["model_fn", "train_data", recipe.loss, *(["*", *of] if of else []), "device=None"]
    before = [
        'device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))',
        f"config = {{**CONFIG{''.join(f', {key!r}: {name}' for key, name in arguments.items())}}}",
        *_asks(recipe),
        *_TF32.get(recipe.settings.precision, []),
        'seed_all(derived(SEED, "weights", TRIAL))',
        f"model = {_model(recipe)}.to(device)",
        *(_OTHERS if recipe.by_part else []),
        *optimizer_lines(config),
        *(["scaler = torch.amp.GradScaler(device.type)"] if recipe.settings.precision == "fp16" else []),
        *BEFORE[recipe.data],
        *(_AVERAGES if recipe.averaged_from is not None else []),
    ]
    epoch = ['seed_all(derived(SEED, "trial", TRIAL, epoch))', "model.train()"]
    step = [*rates(recipe.config, recipe.data, arguments), *_step(recipe), *_average(recipe)]
    loop = [*indented(epoch), f"    for i, batch in enumerate({BATCHES[recipe.data]}):", *indented(step, 2)]
    after = _WRITE_AVERAGES if recipe.averaged_from is not None else []
    if any(Hyperparameters.from_config(own).has_modes for own in configs_of_parts(config).values()):
        before, after = [*before, "optimizer.train()"], ["optimizer.eval()  # whose weights count"]
    whole = [*before, "for epoch in range(EPOCHS):", *loop, *after]
    return "\n".join(
        [f"def train({', '.join(takes)}):", *indented([*_docstring(recipe, arguments), *whole, "return model.eval()"])]
    )


def _docstring(recipe: Recipe, arguments: Mapping[str, str]) -> list[str]:
    objective = 'objective: `objective(model, batch) -> {"loss": ..., ...}`, the objective of the run.'
    if recipe.by_part:
        objective = "objective: The objectives of the run by part of the model, in the order of their turns."
    return [
        '"""Train the model from the initial weights that its seed draws; returns it in evaluation mode.',
        "",
        "model_fn: Makes the full-size model of a configuration, as for the run.",
        f"train_data: The training data of the run, as {_KINDS[recipe.data]}.",
        objective if recipe.objective else "loss_fn: `loss_fn(output, target)`, the loss of the run.",
        *(f"{name}: The value of {key!r} in the run's configuration." for key, name in arguments.items()),
        "device: Where to train; by default a GPU, if there is one.",
        '"""',
    ]


_KINDS = {
    "tensors": "tensors (inputs, target)",
    "dataset": "a map-style Dataset",
    "loaders": "a function of the batch size that makes a loader",
}


def _asks(recipe: Recipe) -> list[str]:
    """Return lines that inspect the signatures of the recipe's functions if a loaded run does not know them."""
    lines = []
    for name, argument, value, unknown in (
        ("model_fn", "width_ratio", "1.0", recipe.width == "unknown"),
        (recipe.loss, "config", "config", recipe.configured is None and not recipe.by_part),
    ):
        if unknown:
            lines.append(f'if "{argument}" in inspect.signature({name}).parameters:')
            lines.append(f"    {name} = functools.partial({name}, {argument}={value})")
    return [*lines, *(_CONFIGURED if recipe.by_part and recipe.configured is not False else [])]


_CONFIGURED = [
    "for turn, own in objective.items():",
    '    if "config" in inspect.signature(own).parameters:',
    "        objective = {**objective, turn: functools.partial(own, config=config)}",
]
_OTHERS = [
    "# While the objective of a part learns, the other parts are frozen.",
    "own = {turn: {id(p) for p in model.get_submodule(turn).parameters()} for turn in objective}",
    "others = {turn: [p for p in model.parameters() if p.requires_grad and id(p) not in own[turn]] for turn in own}",
]


def _model(recipe: Recipe) -> str:
    ratio = {"named": ", width_ratio=1.0", "second": ", 1.0"}.get(str(recipe.width), "")
    made = f"model_fn(copy.deepcopy(config){ratio})"
    return f"copy.deepcopy({made})" if recipe.copied else made


_TF32 = {"tf32": ["torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True"]}


def _step(recipe: Recipe) -> list[str]:
    """Return the lines of one step: gradients, clipping, update."""
    config, precision = recipe.config, recipe.settings.precision
    parts = read(config, "accumulate") > 1
    batch = "part" if parts else "batch"
    told = ", config=config" if recipe.configured else ""
    if recipe.by_part:
        loss = [f'loss = objective[turn](model, {batch})["loss"]']
    elif recipe.objective:
        loss = [f'loss = objective(model, {batch}{told})["loss"]']
    else:
        loss = [f"inputs, target = {batch}", f"loss = loss_fn(model(inputs), target{told})"]
    if precision in ("bf16", "fp16"):
        dtype = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]
        loss = [f"with torch.autocast(device.type, {dtype}):", *indented(loss), "loss = loss.float()"]
    summand = "loss * share" if parts else "loss"
    scaled = precision == "fp16"
    backward = f"scaler.scale({summand}).backward()" if scaled else f"{f'({summand})' if parts else 'loss'}.backward()"
    lines = [*loss, backward]
    if parts:
        lines = [f"for part, share in parts_of(batch, {read(config, 'accumulate')}):", *indented(lines)]
    max_norm = read(config, "grad_clip")
    if max_norm is not None:
        lines += ["scaler.unscale_(optimizer)"] if scaled else []
        lines.append(f"torch.nn.utils.clip_grad_norm_(model.parameters(), {max_norm!r})")
    update = ["scaler.step(optimizer)", "scaler.update()"] if scaled else ["optimizer.step()"]
    if not recipe.by_part:
        return ["optimizer.zero_grad()", *lines, *update]
    frozen = ["for p in others[turn]:", "    p.requires_grad_(False)"]
    whole = ["optimizer.zero_grad()", *frozen, *lines, "for p in others[turn]:", "    p.requires_grad_()", *update]
    return ["for turn in objective:", *indented(whole)]


_AVERAGES = [
    "# Weights that learn, and running statistics, are averaged beside training: the averages count.",
    "def tensors():",
    "    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}",
    '    statistics = ("running_mean", "running_var")',
    '    running = {name: b for name, b in model.named_buffers() if name.rpartition(".")[2] in statistics}',
    "    found = {**learning, **running}",
    "    return {name: t for name, t in found.items() if t.is_floating_point() or t.is_complex()}",
    "held = {name: t.detach() for name, t in tensors().items()}",
    "means = {name: t.to(torch.promote_types(t.dtype, torch.float32), copy=True) for name, t in held.items()}",
    "averaged = 0",
]
_WRITE_AVERAGES = [
    "now = tensors()",
    "for name, mean in means.items():",
    "    now[name].data.copy_(mean)",
]


def _average(recipe: Recipe) -> list[str]:
    begun = recipe.averaged_from
    if begun is None:
        return []
    lines = [
        "averaged += 1",
        f"weight = max(1 / averaged, 1 / max(1.0, {recipe.settings.race.ema!r} * steps * MAX_T))",
        "now = tensors()",
        "for name, mean in means.items():",
        "    mean.lerp_(now[name].detach().to(mean.dtype), weight)",
    ]
    # The sweep, which trained the epochs before, averages nothing.
    return [f"if epoch >= {begun}:", *indented(lines)] if begun else lines
