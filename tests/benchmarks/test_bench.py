"""One command for all that waits for a GPU: it goes on where it was, and says what it leaves out."""

import importlib
import json
from pathlib import Path

import pytest

from benchmarks.bench import ON_GPU, STAND_IN, STEPS, Bench, resume

SOME = (Bench("a"), Bench("c", needs="c.txt"), Bench("d"))


def test_short_calls_do_what_a_long_one_does(tmp_path: Path) -> None:
    log, did = tmp_path / "gpu.json", list[str]()

    def call(device: str, most: int) -> list[str]:
        left = [most]

        def may_begin() -> bool:
            left[0] -= 1
            return left[0] >= 0

        def do(step: Bench) -> str:
            did.append(step.command)
            return "done"

        return resume(SOME, device, log, do, may_begin, lambda name: name == "c.txt")

    assert call("H100", 1) == ["c", "d"]
    assert call("H100", 9) == []
    assert did == ["a", "d"]
    ended = {name: entry["ended"] for name, entry in json.loads(log.read_text()).items()}
    assert ended == {
        "a": "done",
        "c": "left out: c.txt is missing",
        "d": "done",
    }
    assert call("H100", 9) == []
    assert did == ["a", "d"]
    call("H200", 9)
    assert did == ["a", "d", "a", "d"]


@pytest.mark.parametrize("step", [*STEPS, *ON_GPU, *STAND_IN], ids=lambda step: step.command)
def test_each_step_is_a_benchmark_that_there_is(step: Bench) -> None:
    module = step.command.split()[0]
    spec = importlib.util.find_spec(f"benchmarks.{module}")
    assert spec is not None
