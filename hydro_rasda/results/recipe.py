"""Write a trial's full-size training as the text of a plain torch loop, which needs only torch and NumPy.

The loop computes the same numbers as the package `training`; `tests/hydro_rasda/results/test_recipe.py` runs it. For a
training that no plain loop can repeat, ValueError is raised.
"""

from __future__ import annotations

import builtins
import keyword
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fusion.keys import OPTIMIZERS, SCHEDULES, configs_of_parts, read, split_key
from fusion.optim import Hyperparameters
from hydro_rasda.common.console import one_line
from hydro_rasda.common.secret_masking import hide
from hydro_rasda.common.short_values import show
from hydro_rasda.common.trial import Trial
from hydro_rasda.history.lines import Unit
from hydro_rasda.problem.lr_roles import asked_roles, by_parameter, roles_of
from hydro_rasda.problem.objective import ByPart, Supervised, Written
from hydro_rasda.problem.precision import as_given
from hydro_rasda.problem.problem import Problem
from hydro_rasda.problem.width_argument import WidthForm, width_form
from hydro_rasda.records.records import RunRecord, TrialRecord
from hydro_rasda.records.report import chosen_line, sentence
from hydro_rasda.records.summary import averages, keeps_averages, swept_epochs
from hydro_rasda.results.export import checkpoint_of, unkept_of
from hydro_rasda.results.recipe_optimizer import (
    indented,
    literal,
    moves,
    optimizer_classes,
    optimizer_lines,
    schedule_text,
)
from hydro_rasda.run.pickling import Gone
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.run_json import read_asked
from hydro_rasda.settings.config import GLOBAL_BATCH, TuneConfig

Form = Literal["tensors", "dataset", "loaders"]
"""The form in which `tune` received the training data."""


def recipe_of(record: RunRecord, problem: Problem, trial: int | None) -> str:
    """Write a trial's recipe: see `TuneResult.recipe`."""
    number, checkpoint = checkpoint_of(record, trial)
    once_more = checkpoint.name.startswith("race.refit-")
    found = record.shown().trials[number]
    asked, objective, settings = read_asked(record.path), as_given(problem.objective), problem.settings
    if "train" in asked["digests"]:
        raise _cannot(number, "`train` trained it: that function is the recipe, with `best_config`")
    if getattr(objective, "optimizer_settings", None) is not None:
        raise _cannot(number, "its objective says by itself how parameters are updated (`optimizer_settings`)")
    models = settings.models("race")
    if models > 1 and not (once_more or (settings.race.refit and not settings.folds)):
        raise _cannot(
            number, f"it is {models} models, whose mean counts; `race=RaceConfig(refit=True)` makes one of the winner"
        )
    # With folds, the winner trains once more on all examples, from its initial weights. Then no epoch is the sweep's.
    swept = 0 if once_more else swept_epochs(found, settings.sweep.surrogate)
    _check_own_weights(number, swept, Store.read(record.path).units())
    workers = _workers(found)
    kept = hide(found.config, unkept_of(record, number))
    config = _as_asked(_by_parameter(problem, number, kept, asked["model"]), number)
    title = [f"Trains trial {number} of the run {record.path.name!r} again, as it was trained at full size."]
    title += [f"There {record.metric} was {show(found.metric, 6)} after epoch {found.kept_epoch} of {found.epochs}."]
    title += map(sentence, chosen_line(record) if number == record.best_trial else [])
    if workers > 1:
        title.append(f"{workers} workers shared each batch: with dropout or BatchNorm, one worker's numbers differ.")
    return written(
        Recipe(
            title=title,
            config=config,
            trial=number,
            epochs=int(found.kept_epoch),
            settings=settings,
            averaged_from=swept if averages(settings, config) and keeps_averages(settings, found) else None,
            data=_form(asked["train_data"]),
            objective="objective" in asked["digests"],
            by_part=bool(asked.get("parts")),
            configured=objective.configured if isinstance(objective, (Supervised, Written, ByPart)) else None,
            width="unknown" if isinstance(problem.model_fn, Gone) else width_form(problem.model_fn),
            copied=problem.copied,
        )
    )


def _cannot(number: int, why: str) -> ValueError:
    return ValueError(f"no plain loop trains trial {number} again: {why}")


def _workers(trial: TrialRecord) -> int:
    """Return the number of workers on which a trial trained.

    Raise ValueError if workers were added in training, and this changed the batch size or the learning rate.
    """
    lines = [line for line in trial.history if line["heat"] == "race" and line["epoch"] <= trial.kept_epoch]
    batches = list(dict.fromkeys(line[GLOBAL_BATCH] for line in lines if GLOBAL_BATCH in line))
    multipliers = {line.get("lr_multiplier", 1.0) for line in lines} - {1.0}
    if {*batches} - {read(trial.config, "batch_size")} or multipliers:
        told = " and then ".join(map(str, batches))
        why = f"workers were added in training, which its batch ({told} examples) and its learning rate followed"
        raise _cannot(trial.trial, f"{why}; `RaceConfig(max_workers=...)` of as many as `workers` adds none")
    return max((int(line.get("workers", 1)) for line in lines), default=1)


def _check_own_weights(number: int, swept: int, units: Mapping[str, Unit]) -> None:
    """Refuse a trial that continued with another trial's weights, or with other hyperparameters than it began with."""
    own = re.compile(rf"race/trial-{number}/to-\d+")
    values = {key: unit.value for key, unit in units.items() if isinstance(unit.value, Mapping)}
    changed = any("origin" in value or "mutable" in value for key, value in values.items() if own.fullmatch(key))
    copied = swept and any(str(number) in value.get("copies", ()) for key, value in values.items() if "/group-" in key)
    if changed or copied:
        raise _cannot(number, "it went on from another trial's weights, or its hyperparameters changed in training")


def _by_parameter(problem: Problem, number: int, config: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Turn learning rates by role into learning rates by parameter; ValueError if there is no model to tell the roles.

    Args:
        names: Names of the parameters of one of the run's models. A key such as "lr.hidden" is no role if the model has
            a part of that name.
    """
    if isinstance(problem.model_fn, Gone):
        if not asked_roles(config, names):
            return config
        why = "its model alone tells which parameters have learning rates by role"
        raise _cannot(number, f"{why}; the result that `tune` returned has it")
    return by_parameter(config, roles_of(problem.target(Trial(number, config))))


def _as_asked(config: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """Return the configuration unchanged; ValueError if its optimizer or schedule is a function known only by name."""
    of_parts = [(key, OPTIMIZERS) for key in config if split_key(key)[0] == "optimizer"]
    for key, known in (*of_parts, ("schedule", SCHEDULES)):
        named = config.get(key)
        if isinstance(named, str) and named not in known:
            why = f"`{key}` is a function, of which a loaded run knows the name alone ({named})"
            raise _cannot(number, f"{why}; the result that `tune` returned has it")
    return config


def _form(described: str) -> Form:
    """Read the form of the training data from the text that `Batches.describe` wrote."""
    if described.startswith("tensors ("):
        return "tensors"
    return "loaders" if described.startswith("loaders from ") else "dataset"


@dataclass(frozen=True)
class Recipe:
    """A full-size training.

    Attributes:
        title: Sentences about the training, for the first comment.
        config: The configuration, without secrets.
        averaged_from: The epoch from which weights are averaged; None if they are not.
        objective: True if the user's objective computes the loss; False if a `loss_fn` does.
        by_part: True if each part of the model has its own objective. The objectives take turns in each step.
        configured: True if the objective or `loss_fn` also takes the configuration; None if only the function's
            signature can tell.
        width: How the model function takes the width ratio; "unknown" if only the function's signature can tell.
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
        _PARTS if read(recipe.config, "accumulate") > 1 else "",
        _DATA[recipe.data],
        _ROWS if recipe.data != "loaders" else "",
        _APART if recipe.data != "tensors" else "",
        _SEEDS,
    ]
    body = "\n\n".join(part.strip("\n") + "\n" for part in parts if part)
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
    """Map keys whose values cannot be written as code (functions, secrets) to names of arguments of the loop's `train`.

    >>> given({"lr": 0.1, "schedule": max, "hub token": "(hidden)", "class": object})
    {'schedule': 'schedule', 'hub token': 'hub_token', 'class': 'class_'}
    """
    names: dict[str, str] = {}
    taken = {*_TAKEN, *_FUNCTIONS, *_MODULES, *dir(builtins)}
    for key in (key for key, value in config.items() if literal(value) is None):
        name = re.sub(r"\W", "_", str(key))
        while not name.isidentifier() or keyword.iskeyword(name) or name in taken | {*names.values()}:
            name = f"{name}_" if name[:1].isidentifier() else f"_{name}"
        names[key] = name
    return names


_FUNCTIONS = ("batches_of", "derived", "length_of", "lr_factor", "parts_of", "rows_of", "seed_all")
"""Names of functions of the recipe that its `train` calls."""

_TAKEN = ("model_fn", "train_data", "loss_fn", "objective", "device", "config", "model", "torch", "np")


def _constants(recipe: Recipe, arguments: Mapping[str, str]) -> str:
    config = {key: text for key, value in recipe.config.items() if (text := literal(value)) and key not in arguments}
    settings = recipe.settings
    lines = ["CONFIG = {", *(f"    {key!r}: {text}," for key, text in config.items()), "}"]
    if arguments:
        lines.append(f"# Arguments of `train`, as they cannot be written here: {', '.join(arguments.values())}.")
    lines += [f"SEED, TRIAL = {settings.seed}, {recipe.trial}", f"BATCH_SIZE = {read(recipe.config, 'batch_size')}"]
    lines.append(f"MAX_T = {settings.max_t}  # epochs, the horizon of schedules and averages")
    lines.append(f"EPOCHS = {recipe.epochs}  # to train; the weights after the last one count")
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
        *_BEFORE[recipe.data],
        *(_AVERAGES if recipe.averaged_from is not None else []),
    ]
    epoch = ['seed_all(derived(SEED, "trial", TRIAL, epoch))', "model.train()"]
    step = [*_rates(recipe.config, recipe.data, arguments), *_step(recipe), *_average(recipe)]
    loop = [*indented(epoch), f"    for i, batch in enumerate({_BATCHES[recipe.data]}):", *indented(step, 2)]
    after = _WRITE_AVERAGES if recipe.averaged_from is not None else []
    if any(Hyperparameters.from_config(own).has_modes for own in configs_of_parts(config).values()):
        before, after = [*before, "optimizer.train()"], ["optimizer.eval()  # switches to the weights that count"]
    whole = [*before, "for epoch in range(EPOCHS):", *loop, *after]
    return "\n".join(
        [f"def train({', '.join(takes)}):", *indented([*_docstring(recipe, arguments), *whole, "return model.eval()"])]
    )


def _docstring(recipe: Recipe, arguments: Mapping[str, str]) -> list[str]:
    objective = 'objective: `objective(model, batch) -> {"loss": ..., ...}`, the objective of the run.'
    if recipe.by_part:
        objective = "objective: The objectives of the run by part of the model, in the order of their turns."
    return [
        '"""Train the model from the initial weights of its seed, and return it in evaluation mode.',
        "",
        "model_fn: Makes the full-size model of a configuration, as for the run.",
        f"train_data: The training data of the run, as {_KINDS[recipe.data]}.",
        objective if recipe.objective else "loss_fn: `loss_fn(output, target)`, the loss of the run.",
        *(f"{name}: The value of {key!r} in the run's configuration." for key, name in arguments.items()),
        "device: The device that trains; by default a GPU, if there is one.",
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
        limit = repr(max_norm) if max_norm < math.inf else 'float("inf")'
        lines.append(f"torch.nn.utils.clip_grad_norm_(model.parameters(), {limit})")
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
    # The sweep trained the epochs before `begun`. It does not average weights.
    return [f"if epoch >= {begun}:", *indented(lines)] if begun else lines


def _rates(config: Mapping[str, Any], data: Form, arguments: Mapping[str, str]) -> list[str]:
    """Return the lines that set a step's learning rates; none if they do not change.

    Args:
        data: The form of the training data. If a loader has no length, the time within an epoch is unknown.
        arguments: Maps a key of the configuration to the argument of `train` that holds its value.
    """
    if not moves(config):
        return []
    schedule = f", {arguments['schedule']}" if "schedule" in arguments else ""
    passed = "(i / steps if length else 0.0)" if data == "loaders" else "i / steps"
    return [
        "for group, lr in zip(optimizer.param_groups, base):",
        f'    group["lr"] = lr * lr_factor(epoch + {passed}, steps{schedule})',
    ]


_BEFORE: Mapping[Form, list[str]] = {
    "tensors": [
        "data = [torch.as_tensor(t).to(device) for t in train_data]",
        "steps = len(rows_of(len(data[0]), 0))",
    ],
    "dataset": ["steps = len(rows_of(len(train_data), 0))"],
    "loaders": ["length = length_of(train_data(BATCH_SIZE))", "steps = length or 1"],
}
_BATCHES: Mapping[Form, str] = {
    "tensors": "batches_of(data, epoch)",
    "dataset": "batches_of(train_data, epoch, device)",
    "loaders": "batches_of(train_data, epoch, device)",
}
_DATA: Mapping[Form, str] = {
    "tensors": '''
def batches_of(data, epoch):
    """Yield the batches of an epoch, in the order of the run."""
    for rows in rows_of(len(data[0]), epoch):
        yield tuple(t.detach()[rows.to(t.device)].requires_grad_(t.requires_grad) for t in data)
''',
    "dataset": '''
def batches_of(dataset, epoch, device):
    """Yield the batches of an epoch, in the order of the run. Each is loaded with its own random numbers."""
    seed = derived(SEED, "load", epoch)
    for number, rows in enumerate(rows_of(len(dataset), epoch)):
        with Apart(derived(seed, number)):
            several = getattr(dataset, "__getitems__", None)
            batch = default_collate(several(rows.tolist()) if several else [dataset[row] for row in rows.tolist()])
        yield tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)
''',
    "loaders": '''
def batches_of(make_loader, epoch, device):
    """Yield the batches of an epoch. The loader draws its own random numbers, as in the run."""
    numbers = Apart(derived(SEED, "shuffle", epoch))
    with numbers:
        loader = make_loader(BATCH_SIZE)
        batches = iter(loader)
    length = length_of(loader)
    for _ in itertools.count() if length is None else range(length):
        with numbers:
            batch = next(batches, numbers)
        if batch is numbers:
            return
        yield tree_map(lambda leaf: leaf.to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf, batch)


def length_of(loader):
    """Return the number of a loader's batches; None if the loader has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
''',
}
_ROWS = '''
def rows_of(length, epoch):
    """Return the rows of each batch of an epoch; a single row that is left over joins the batch before it."""
    generator = torch.Generator().manual_seed(derived(SEED, "shuffle", epoch))
    chunks = list(torch.randperm(length, generator=generator).split(BATCH_SIZE))
    if len(chunks) > 1 and len(chunks[-1]) == 1 and BATCH_SIZE > 1:
        chunks[-2:] = [torch.cat(chunks[-2:])]
    return chunks
'''
_PARTS = '''
def parts_of(batch, parts):
    """Split a batch; yield each part and its share of the batch's examples. The parts are trained on in turn.

    If the parts of a full batch have several examples each, a smaller batch is not split into single examples, either.
    """
    leaves, spec = tree_flatten(batch)
    rows = [isinstance(leaf, torch.Tensor) and leaf.ndim > 0 for leaf in leaves]
    length = next(len(leaf) for leaf, has_rows in zip(leaves, rows) if has_rows)
    parts = max(1, min(parts, length // (2 if BATCH_SIZE >= 2 * parts else 1)))
    split = [leaf.tensor_split(parts) if has_rows else [leaf] * parts for leaf, has_rows in zip(leaves, rows)]
    for part in zip(*split):
        examples = next(len(leaf) for leaf, has_rows in zip(part, rows) if has_rows)
        yield tree_unflatten(list(part), spec), examples / length
'''
_APART = '''
class Apart:
    """Within this context, data are loaded with other random numbers, so that the model's do not change."""

    def __init__(self, seed):
        self.seed, self.states = seed, None

    def __enter__(self):
        self.before = self.now()
        if self.states is None:
            random.seed(self.seed)
            np.random.seed(self.seed % 2**32)
            torch.default_generator.manual_seed(self.seed)
        else:
            self.go_on(*self.states)

    def __exit__(self, *error):
        self.states = self.now()
        self.go_on(*self.before)

    def now(self):
        return random.getstate(), np.random.get_state(), torch.get_rng_state()

    def go_on(self, python, numpy, torchs):
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torchs)
'''
_SEEDS = '''
def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def derived(*parts):
    """Return a seed for one purpose. It is the same on every machine."""
    entropy = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in parts]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))
'''
