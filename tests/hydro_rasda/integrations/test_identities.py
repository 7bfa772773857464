"""A run of an integration is the same run in each process, whatever Python's hashes of text are there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "tests.hydro_rasda.integrations.identities"]


@pytest.mark.slow
def test_every_integration_asks_for_the_same_under_any_hash_seed() -> None:
    environments = [{**os.environ, "PYTHONHASHSEED": str(seed)} for seed in range(5)]
    processes = [
        subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=each)
        for each in environments
    ]
    found = [json.loads(process.communicate(timeout=1000)[0].splitlines()[-1]) for process in processes]
    assert len(found[0]) == 5
    assert all(asked["model_fn"] and asked["objective"] for asked in found[0].values())
    for other in found[1:]:
        assert other == found[0]
