"""One command for all that waits for a GPU: it goes on where it was, and says what it leaves out."""

import importlib
import json
from pathlib import Path

import pytest

from benchmarks.bench_gpu import PIECES, STAND_IN, Piece, run

SOME = (Piece("a", "a"), Piece("b", "b", gpus=2), Piece("c", "c", needs="c.txt"), Piece("d", "d"))


def test_short_calls_do_what_a_long_one_does(tmp_path: Path) -> None:
    log, did = tmp_path / "gpu.json", list[str]()

    def call(device: str, most: int) -> list[str]:
        left = [most]

        def may_begin() -> bool:
            left[0] -= 1
            return left[0] >= 0

        def do(piece: Piece) -> str:
            did.append(piece.name)
            return "done"

        return run(SOME, device, 1, log, do, may_begin, lambda name: name == "c.txt")

    assert call("H100", 2) == ["c", "d"]
    assert call("H100", 9) == []
    assert did == ["a", "d"]
    ended = {name: entry["ended"] for name, entry in json.loads(log.read_text()).items()}
    assert ended == {
        "a": "done",
        "b": "left out: it needs 2 GPUs",
        "c": "left out: c.txt is missing",
        "d": "done",
    }
    assert call("H100", 9) == []
    assert did == ["a", "d"]
    call("H200", 9)
    assert did == ["a", "d", "a", "d"]


@pytest.mark.parametrize("piece", [*PIECES, *STAND_IN], ids=lambda piece: piece.name)
def test_each_piece_is_a_benchmark_that_there_is(piece: Piece) -> None:
    module = piece.command.split()[0]
    spec = importlib.util.find_spec(f"benchmarks.{module}")
    assert spec is not None
