"""Export the best model of a run: its weights as safetensors, and its configuration as JSON."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from fusion.keys import KEYS
from hydro_rasda.common.argument_checks import is_int, require
from hydro_rasda.common.secret_masking import Place
from hydro_rasda.history.lines import jsonable
from hydro_rasda.records.records import RunRecord
from hydro_rasda.run.checkpoints import load_checkpoint
from hydro_rasda.run.files import write_atomically
from hydro_rasda.run.run_json import run_id
from hydro_rasda.space.domains import plain

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def unkept_of(record: RunRecord, number: int) -> list[Place]:
    """Return the places in a trial's configuration whose values JSON cannot hold, without keys of the library."""
    return [place for place in record._unkept.get(number, ()) if place[0] not in KEYS]


def checkpoint_of(record: RunRecord, trial: int | None) -> tuple[int, Path]:
    """Return the number of a finalist, and the checkpoint of its training; `trial` is None for the best one."""
    if not record._checkpoints:
        told = "no trial of the run in {} has trained at full size, so that there is no model yet"
        raise ValueError(told.format(record.path))
    number = record.best_trial if trial is None else plain(trial)  # a number from a table of trials is a NumPy number
    rule = f"one of the finalists {sorted(record._checkpoints)}"
    require(is_int(number) and number in record._checkpoints, "trial", number, rule)
    checkpoint = record._checkpoints[number]
    if not record.path.exists():
        told = f"the run's folder {record.path} is gone: if it was moved, `hydro_rasda.load` opens it at its new place"
        raise FileNotFoundError(told)
    if not checkpoint.exists():
        raise FileNotFoundError(
            f"{checkpoint} is gone: if the run has gone on since it was loaded, load it again; "
            "if it was cleaned, only the best model is left"
        )
    return number, checkpoint


def weights_of(record: RunRecord, checkpoint: Path, device: Any = "cpu") -> list[dict[str, Any]]:
    """Return the state dict of each model in a finalist's checkpoint, from the best epoch if the checkpoint has it.

    Loading the file cannot run code. Raises DamagedCheckpoint if the file is not the one that the run wrote.
    """
    state = load_checkpoint(checkpoint, device, run_id(record.path))
    return [own.get("best", own)["model"] for own in state.get("models", [state])]


def save_model(record: RunRecord, path: str | Path, trial: int | None = None, takes_first: bool = False) -> Path:
    """Write a finalist's model, or the first of several with `takes_first`; see `TuneResult.save_model`."""
    import torch  # imported here, because listing the trials of a run does not need it
    from safetensors.torch import save_file

    number, checkpoint = checkpoint_of(record, trial)
    weights, *others = weights_of(record, checkpoint)
    if others and not takes_first:
        told = f"trial {number} is {1 + len(others)} models, whose mean counts, but one model is written"
        raise ValueError(f"{told}: `best_model().models` are all of them, and `race=RaceConfig(refit=True)` makes one")
    strange = [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]
    if strange:
        raise ValueError(f"the model's state has {strange}, but safetensors hold tensors alone: {checkpoint} has all")
    folder = Path(path).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    found = record.shown().trials[number]
    facts = {"trial": number, "epoch": found.kept_epoch, record.metric: found.metric, "run": record.path.name}
    # Tied weights are written once for each name, so that `load_state_dict` finds all of them.
    each = {name: value.clone(memory_format=torch.contiguous_format) for name, value in weights.items()}
    # transformers requires the entry "format".
    try:
        save_file(each, folder / WEIGHTS, {"format": "pt", **{name: str(value) for name, value in facts.items()}})
    except KeyError as error:
        raise ValueError(f"safetensors hold no tensors of {error.args[0]}, but {checkpoint} has all") from error
    write_atomically(folder / CONFIG, (json.dumps(jsonable(found.config), indent=2) + "\n").encode())
    # safetensors writes a file that no other user can read. Give it the permissions of the configuration's file.
    (folder / WEIGHTS).chmod(stat.S_IMODE((folder / CONFIG).stat().st_mode))
    return folder
