from __future__ import annotations

import copy
import json
import os
import random
import stat
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hydro_rasda.run.checkpoints import DamagedCheckpoint, load_checkpoint, save_checkpoint
from hydro_rasda.run.files import (
    Unsafe,
    append_to,
    matching,
    open_to_write,
    parse_json,
    read_file,
    remove,
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
        status = os.fstat(descriptor)
        done.append("folder" if stat.S_ISDIR(status.st_mode) else f"file of {status.st_size} bytes")
        fsync(descriptor)

    def noting_replace(source: str, target: str, **folders: int) -> None:
        done.append("named")
        replace(source, target, **folders)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "replace", noting_replace)
    write_atomically(tmp_path / "a", b"content")
    assert done == ["file of 7 bytes", "named", "folder"]


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


def test_an_archive_that_is_larger_inside_is_refused(tmp_path: Path) -> None:
    """A bomb of 3 MB took 35 s: its parts were unpacked to look at their checksums. Torch compresses nothing."""
    save_checkpoint(tmp_path / "a.pt", {"x": torch.zeros(100_000)})
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as plain,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for part in plain.infolist():
            small.writestr(part.filename, plain.read(part))
    assert torch.load(tmp_path / "b.pt", weights_only=True)["x"].sum() == 0
    with pytest.raises(DamagedCheckpoint, match="its parts are compressed, or overlap"):
        load_checkpoint(tmp_path / "b.pt")


def test_an_archive_whose_parts_overlap_is_refused(tmp_path: Path) -> None:
    """Many names of the same bytes: unpacked, each counts."""
    save_checkpoint(tmp_path / "a.pt", {"x": torch.zeros(100_000)})
    with zipfile.ZipFile(tmp_path / "a.pt", "a") as archive:
        large = max(archive.infolist(), key=lambda part: part.file_size)
        for i in range(3):
            again = copy.copy(large)
            again.filename = f"{large.filename}-{i}"
            archive.filelist.append(again)
        archive.writestr("last", b"")  # has the directory written again
    with pytest.raises(DamagedCheckpoint, match="its parts are compressed, or overlap"):
        load_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"[" * 100_000 + b"]" * 100_000, "nested more than 100 levels deep"),
        (b"[" * 101 + b"]" * 101, "nested more than 100 levels deep"),
        (b"[" * 101 + b"1" + b"]" * 101, "nested more than 100 levels deep"),
        (b'{"a": ' * 500 + b"1" + b"}" * 500, "nested more than 100 levels deep"),
        (b'{"at": NaN}', "NaN is no number of JSON's"),
        (b"[-Infinity]", "-Infinity is no number of JSON's"),
        (b"[1e999]", "1e999 is no number of JSON's"),
        (b"\xff", "utf-8"),
        (b"1" * 5000, "Exceeds the limit"),
    ],
)
def test_json_that_a_reader_could_stumble_over_is_refused(raw: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_json(raw)


def test_all_else_is_read_as_json_has_it() -> None:
    value: Any
    for value in (None, True, 3, -0.5, 1e300, "[" * 200, [[]] * 300, {"a": [{"b": {}}]}, [0.1 + 0.2]):
        assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(b"[" * 100 + b"]" * 100)
    assert parse_json(b"[" * 100 + b"1" + b"]" * 100)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 11)
    assert read_file(tmp_path / "a", most=11) == b"x" * 11
    with pytest.raises(Unsafe, match="has more than 10 bytes"):
        read_file(tmp_path / "a", most=10)


def test_no_name_on_the_way_inside_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "a").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "victim")
    path = tmp_path / "run" / "checkpoints" / "a"
    for act in (
        lambda: read_file(path, inside=2),
        lambda: append_to(path, inside=2),
        lambda: open_to_write(path, inside=2),
        lambda: matching(path.parent, "*", inside=1),
        lambda: remove(path, inside=2),
        lambda: save_checkpoint(path, {}),
    ):
        with pytest.raises(Unsafe, match="checkpoints is a link to"):
            act()
    assert [(p.name, p.read_text()) for p in (tmp_path / "victim").iterdir()] == [("a", "precious")]
    assert read_file(path, inside=1) == b"precious"
