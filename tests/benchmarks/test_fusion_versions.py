"""Two versions of `fusion` take turns, each in a process of its own."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fusion_throughput import MIN_PAIRS
from benchmarks.fusion_versions import ROOT, Group, measure, summary


@pytest.mark.slow
def test_each_process_trains_with_its_own_version(tmp_path: Path) -> None:
    """One of the two cannot clip."""
    shutil.copytree(ROOT / "fusion", tmp_path / "fusion")
    with (tmp_path / "fusion" / "clip.py").open("a") as file:
        file.write("\n\ndef clip_grad_norm_(*of):\n    raise RuntimeError\n")
    raced = measure(tmp_path, [Group("mlp", 2), Group("mlp", 2, clipped=True)], seconds=0, threads=1)
    group, free = next(raced)
    assert group == ("mlp", 2, False)
    assert len(free["ratios"]) == len(free["cpu_ratios"]) == MIN_PAIRS
    with pytest.raises(RuntimeError, match="a version's process ended with exit status 1"):
        next(raced)


@pytest.mark.parametrize(
    ("rounds", "slower"),
    [
        ([[0.9, 0.95, 0.97, 0.99]], True),
        ([[0.9, 0.95, 0.97, 0.99], [0.8, 1.1, 1.2, 0.9]], False),
        ([[0.9, 0.95, 1.01, 1.02]], False),
        ([[1.1, 1.2, 1.3, 0.9]], False),
    ],
)
def test_slower_is_what_most_pairs_and_every_round_say(rounds: list[list[float]], slower: bool) -> None:
    def of(ratios: list[float]) -> dict[str, Any]:
        return {"ratios": ratios, "cpu_ratios": ratios, "ms_other": 1.0, "ms_this": 1.0}

    found = summary([of(ratios) for ratios in rounds])
    assert found["slower"] is slower
    assert found["pairs"] == sum(map(len, rounds))
