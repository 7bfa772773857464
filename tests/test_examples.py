"""The examples do what they promise, run as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_digits_reaches_97_percent(seed: int, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "digits.py"), "--seed", str(seed)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r"test accuracy ([\d.]+)", done.stdout)
    assert accuracy, done.stdout
    assert float(accuracy[1]) >= 0.97
