"""Real learning curves: YAHPO Gym's surrogate of LCBench, an ONNX model.

Zimmer et al., "Auto-PyTorch Tabular" (2021), trained 2,000 configurations of a funnel-shaped MLP on each of 34 data
sets; Pfisterer et al., "YAHPO Gym" (2022), fitted a network to their curves, wall time included.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from hydro_rasda.checks import check_int, require
from hydro_rasda.simulator.workload import Floats, Workload

EPOCHS = 52
DATA_VARIABLE = "HYDRO_RASDA_DATA"

_TIME, _VAL_CROSS_ENTROPY = 0, 2
_INPUTS = ("epoch", "batch_size", "learning_rate", "momentum", "weight_decay", "num_layers", "max_units", "max_dropout")


def lcbench_folder() -> Path:
    """Where the data lie: `$HYDRO_RASDA_DATA/lcbench`, by default `../shared/data/lcbench`."""
    return Path(os.environ.get(DATA_VARIABLE, "../shared/data")) / "lcbench"


def lcbench_tasks(folder: str | Path | None = None) -> tuple[str, ...]:
    """The OpenML task ids of LCBench's 34 data sets.

    Raises:
        FileNotFoundError: where `folder` lacks a file.
    """
    return tuple(_space(Path(folder) if folder is not None else lcbench_folder())["OpenML_task_id"]["choices"])


def lcbench(task: str, trials: int, seed: int, folder: str | Path | None = None) -> Workload:
    """Validation cross-entropy of random configurations of LCBench's own space over 52 epochs.

    Args:
        task: OpenML task id, such as "3945".
        folder: Holds `model.onnx`, `config_space.json` and `encoding.json`; None for `lcbench_folder`.

    Returns:
        Curves [N, 52], to be minimized; `work` is the mean seconds of an epoch over those of the median trial.

    Raises:
        FileNotFoundError: where `folder` lacks a file.
        ImportError: where `onnxruntime` is not installed.
        ValueError: where `task` is unknown.
    """
    check_int("trials", trials, at_least=1)
    where = Path(folder) if folder is not None else lcbench_folder()
    space = _space(where)
    tasks = space["OpenML_task_id"]["choices"]
    require(task in tasks, "task", task, f"one of {tasks}")
    rng = np.random.default_rng(seed)
    configs = {name: _sample(space[name], trials, rng) for name in _INPUTS if name != "epoch"}
    code = json.loads(_text(where, "encoding.json"))["OpenML_task_id"][task]
    outputs = _predict(where, configs, code, trials).reshape(trials, EPOCHS, -1)
    seconds = np.maximum(outputs[:, -1, _TIME], 1e-3) / EPOCHS
    return Workload(outputs[:, :, _VAL_CROSS_ENTROPY], seconds / np.median(seconds), "min")


def _space(folder: Path) -> dict[str, dict[str, Any]]:
    return {h["name"]: h for h in json.loads(_text(folder, "config_space.json"))["hyperparameters"]}


def _text(folder: Path, name: str) -> str:
    path = folder / name
    if not path.exists():
        raise FileNotFoundError(
            f"`folder` is {str(folder)!r}, but must hold {name}; set {DATA_VARIABLE} to the folder above lcbench"
        )
    return path.read_text()


def _sample(domain: dict[str, Any], trials: int, rng: np.random.Generator) -> Floats:
    low, high = domain["lower"], domain["upper"]
    if domain["log"]:
        values: Floats = np.exp(rng.uniform(np.log(low), np.log(high), trials))
    else:
        values = rng.uniform(low, high, trials)
    return values.round() if domain["type"] == "uniform_int" else values


def _predict(folder: Path, configs: dict[str, Floats], task: int, trials: int) -> Floats:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    epochs = np.tile(np.arange(1, EPOCHS + 1), trials)
    columns = [epochs if name == "epoch" else np.repeat(configs[name], EPOCHS) for name in _INPUTS]
    inputs = {
        "x_cat": np.full((trials * EPOCHS, 1), task, dtype=np.int32),
        "x_cont": np.stack(columns, axis=1).astype(np.float32),
    }
    return np.asarray(session.run(None, inputs)[0], dtype=np.float64)
