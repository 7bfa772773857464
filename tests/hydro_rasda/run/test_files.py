from __future__ import annotations

import os
import random
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hydro_rasda.run.files import (
    DamagedCheckpoint,
    load_checkpoint,
    save_checkpoint,
    write_atomically,
)


def test_a_file_can_be_written_by_many_at_once(tmp_path: Path) -> None:
    """As two runs write the cache of one machine: with one name for what is half written, most of these fail."""
    target = tmp_path / "cache.json"
    texts = [str(i).encode() * 50_000 for i in range(4)]

    def write(text: bytes) -> None:
        for _ in range(10):
            write_atomically(target, text)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, texts))
    assert target.read_bytes() in texts
    assert [p.name for p in tmp_path.iterdir()] == ["cache.json"]


def test_the_name_of_a_file_outlasts_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the file itself and its new name, the folder is synced, too."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noting_fsync(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def noting_replace(source: Path, target: Path) -> None:
        done.append("named")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "replace", noting_replace)
    write_atomically(tmp_path / "a", b"content")
    assert done == ["file", "named", "folder"]


def test_no_flipped_bit_gets_past(tmp_path: Path) -> None:
    """Each is found, or changes nothing."""
    generator, path = random.Random(0), tmp_path / "a.pt"
    weights = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    written = {"model": {"weight": weights}, "optimizer": {"state": {0: {"step": 3}}, "lr": [0.1, 0.2]}}
    save_checkpoint(path, written)
    whole = path.read_bytes()
    found = 0
    for bit in generator.sample(range(8 * len(whole)), 600):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            loaded: dict[str, Any] = load_checkpoint(path)
        except DamagedCheckpoint:
            found += 1
            continue
        assert torch.equal(loaded["model"].pop("weight"), weights)
        assert loaded == {**written, "model": {}}
    assert found > 300


@pytest.mark.parametrize("content", [None, b"", b"no archive"])
def test_what_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.pt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"the checkpoint .*a\.pt cannot be read"):
        load_checkpoint(path)
