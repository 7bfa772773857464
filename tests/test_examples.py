"""Test that the examples do what they promise, by running them as a user does."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from filelock import FileLock

from hydro_rasda.backends.ray import read_journal
from hydro_rasda.schedulers import RASDA

EXAMPLES = Path(__file__).parent.parent / "examples"

pytestmark = pytest.mark.slow


def run(folder: Path, example: str | Path, *arguments: str, **environ: str) -> str:
    """Run an example in a folder, and return all its output."""
    command, environment = [sys.executable, str(EXAMPLES / example), *arguments], {**os.environ, **environ}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    said = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, said
    return said


def found(pattern: str, said: str) -> re.Match[str]:
    """Return the match of a pattern at the start of a line of the output; fail if there is none."""
    match = re.search(f"^{pattern}", said, re.MULTILINE)
    assert match, said
    return match


def changed(folder: Path, example: str, old: str, new: str) -> Path:
    """Write an example with `new` in place of `old`, as a user edits it, and return its path."""
    text = (EXAMPLES / example).read_text()
    assert text.count(old) == 1
    (folder / example).write_text(text.replace(old, new))
    return folder / example


def digits(folder: Path, arguments: str) -> str:
    """Run the example with more arguments of `tune`; return its lines on the best configuration and its accuracy."""
    said = run(folder, changed(folder, "digits.py", "max_t=27", f"max_t=27, {arguments}"), OMP_NUM_THREADS="1")
    assert not re.search("^(warning|hint):", said, re.MULTILINE), said
    return "\n".join(found(pattern, said)[0] for pattern in (r"Best configuration .*", r"Test accuracy: [\d.]+"))


@pytest.fixture
def first_seed(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return `digits` of seed 0. Two tests need it and may run in two processes, so it is kept in a file."""
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with FileLock(shared / "digits.lock"):
        if not (said := shared / "digits.txt").exists():
            said.write_text(digits(tmp_path, "seed=0"))
    return said.read_text()


def test_digits_reaches_97_percent(first_seed: str, tmp_path: Path) -> None:
    """Average over seeds, because a single one of the 297 test examples makes a difference of 0.3 %."""
    said = [first_seed, *(digits(tmp_path, f"seed={seed}") for seed in (1, 2))]
    accuracies = [float(each.rpartition(" ")[2]) for each in said]
    assert fmean(accuracies) >= 0.97
    assert min(accuracies) >= 0.96


def test_digits_on_ray_ends_with_the_same_model(first_seed: str, tmp_path: Path) -> None:
    assert digits(tmp_path, 'backend="ray"') == first_seed


def test_the_same_search_without_the_library(tmp_path: Path) -> None:
    shorter = changed(tmp_path, "random_search.py", "epochs=27) for _ in range(128)", "epochs=9) for _ in range(4)")
    said = run(tmp_path, shorter, OMP_NUM_THREADS="1")
    assert float(found(r"Test accuracy: ([\d.]+)", said)[1]) >= 0.9, said


def test_the_ray_script_doubles_the_workers_of_survivors(tmp_path: Path) -> None:
    # Switch off Ray's warnings of slow steps, because any step may take half a second on a busy machine.
    patient = {"TUNE_WARN_THRESHOLD_S": "inf", "TUNE_WARN_SLOW_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "inf"}
    arguments = ("--storage", str(tmp_path), "--trials", "2")
    said = run(tmp_path, "ray_script.py", *arguments, OMP_NUM_THREADS="1", **patient)
    assert "Traceback" not in said, said
    warnings = [line for line in said.splitlines() if "WARN" in line or "Warning" in line]
    assert [line for line in warnings if "Token authentication" not in line] == [], said  # that warning is Ray's own
    trials = re.findall(r"^\w+: [\d.]+((?: \d)+)$", said, re.MULTILINE)
    assert len(trials) == 2, said
    assert " 1 2 4 4 8 8 8 8" in trials, said
    # The order in which scores arrive decides which trials are stopped. If each score is better than the one before,
    # none is stopped. So each decision is compared with that of the rule for the same order.
    (history,) = (read_journal(str(folder)) for folder in tmp_path.glob("train_*"))
    rule = RASDA(max_t=8, mode="max")
    state = rule.init()
    for entry in history:
        assert entry.score is not None
        state, decision = rule.report(state, entry.trial, entry.t, entry.score)
        assert entry.workers == rule.workers_at(entry.t - 1), entry
        assert entry.t == 8 or entry.decision == decision.value, entry
    assert float(found(r"best: .*accuracy ([\d.]+) with 8 workers", said)[1]) >= 0.9, said


def test_packed_trainings_share_the_cores(tmp_path: Path) -> None:
    said = run(tmp_path, "packing.py", "--lr", "0.03", "0.1")
    assert float(found(r"best (\S+): accuracy ([\d.]+)", said)[2]) > 0.9, said
    assert "6 of 6 jobs complete" in said, said


def test_a_sweep_in_bubbles_and_its_host(tmp_path: Path) -> None:
    fewer = changed(tmp_path, "bubbles.py", "num_samples=16,\n        max_t=9", "num_samples=4,\n        max_t=3")
    said = run(tmp_path, fewer, "--runs", str(tmp_path / "runs"))
    assert len(re.findall(r"^rank [01]: \d+ steps; \d+ s of bubbles", said, re.MULTILINE)) == 2, said
    assert (tmp_path / "runs" / "bubbles" / "run.json").exists(), said


def test_training_arguments_of_transformers(tmp_path: Path) -> None:
    said = run(tmp_path, "trainer.py", "--runs", str(tmp_path / "runs"))
    assert float(found(r"best learning rate \S+: validation loss ([\d.]+)", said)[1]) < 2.5, said


def test_adapters_over_one_base(tmp_path: Path) -> None:
    said = run(tmp_path, "adapters.py", "--runs", str(tmp_path / "runs"))
    rank, parameters, loss = found(r"best rank (\d), (\d+) parameters: validation loss ([\d.]+)", said).groups()
    assert int(parameters) == int(rank) * 2 * (2 * (64 + 64) + 2 * (64 + 128)), said
    assert float(loss) < 1, said


def test_a_lightning_module_as_it_is(tmp_path: Path) -> None:
    said = run(tmp_path, "lightning_digits.py", "--runs", str(tmp_path / "runs"))
    assert float(found(r"best learning rate \S+: validation accuracy ([\d.]+)", said)[1]) > 0.9, said


OWN_LOOPS = {
    "ppo": ("EPOCHS, STEPS, ENVS = 9, 512, 8", "EPOCHS, STEPS, ENVS = 2, 64, 4", r"mean return ([\d.]+)"),
    "gan": ("EPOCHS, NOISE = 27, 16", "EPOCHS, NOISE = 2, 16", r"Frechet distance ([\d.]+)"),
    "contrastive": ("EPOCHS = 27", "EPOCHS = 2", r"retrieval accuracy ([\d.]+)"),
    "trainer_subclass": ("num_train_epochs=9", "num_train_epochs=2", r"eval(?:uation |_)loss\W+([\d.]+)"),
}
"""Maps each example to its line with the epochs, the line with fewer epochs, and the pattern of its printed scores."""


@pytest.mark.parametrize("name", OWN_LOOPS)
def test_a_loop_of_the_users_without_and_with_tune_here_and_on_ray(name: str, tmp_path: Path) -> None:
    old, new, score = OWN_LOOPS[name]

    def scores(script: str, more: str = "") -> list[str]:
        (text := (EXAMPLES / "own_loop" / script).read_text()).index(old)
        few = re.sub(r"num_samples=\d+", f"num_samples=4{more}", text.replace(old, new))
        if more:
            few = re.sub(r"\n +backend=LocalBackend.*", "", few)
        (tmp_path / script).write_text(few)
        said = run(tmp_path, tmp_path / script, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        there = re.findall(score, said)
        assert there, said
        return there

    assert scores(f"{name}.py")
    assert scores(f"{name}_tune.py") == scores(f"{name}_tune.py", ', backend="ray"')


@pytest.mark.parametrize("name", OWN_LOOPS)
def test_tune_takes_few_lines_of_a_loop_away(name: str) -> None:
    plain, tuned = ((EXAMPLES / "own_loop" / f"{name}{end}.py").read_text().splitlines() for end in ("", "_tune"))
    taken = [line for line in difflib.ndiff(plain, tuned) if line.startswith("- ")]
    assert len(taken) <= 12, taken
