"""The parts of a script's CPU seconds are those that it spent."""

from pathlib import Path

import pytest

from benchmarks import fixed_costs

PROGRAM = """
import torch
import json
from hydro_rasda import loguniform, tune

x, y = torch.zeros(64, 4), torch.zeros(64, dtype=torch.int64)

def model_fn(config, width_ratio=1.0):
    return torch.nn.Sequential(torch.nn.Linear(4, int(16 * width_ratio)), torch.nn.Linear(int(16 * width_ratio), 2))

tune(model_fn, {"lr": loguniform(0.01, 0.1)}, train_data=(x, y), val_data=(x, y), num_samples=2, max_t=2)
"""


def test_a_script_is_measured_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    """Its children included."""
    spin = "import time\nwhile time.process_time() < 0.5: pass"
    assert fixed_costs._cpu_of(spin, str(tmp_path)) >= 0.5
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}])"
    assert fixed_costs._cpu_of(child, str(tmp_path)) >= 0.5
    assert "tune(" in fixed_costs.first_program()


@pytest.mark.slow
def test_the_parts_of_a_script_are_the_whole() -> None:
    """Epochs that a forked process trains count as training."""
    parts = fixed_costs._parts_of(PROGRAM)
    whole = parts.pop("s of CPU")
    assert parts["torch"] > 0.1
    assert parts["training"] > 0
    assert abs(sum(parts.values()) - whole) < 1e-6
