from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from hydro_rasda import load
from hydro_rasda.cli import main
from tests.hydro_rasda.cli.conftest import model_fn, search
from tests.hydro_rasda.conftest import Said
from tests.hydro_rasda.results.test_load import contents

LEFT = ("checkpoints/.race.trial-0.to-1.pt.0a.tmp", "checkpoints/race.trial-99.to-1.pt", ".run.json.1b.tmp")
"""What a process that is killed may leave behind; a sweep's checkpoint, too, once the sweep is over."""


@pytest.fixture
def copy(past: str, tmp_path: Path) -> Path:
    """The run, with what a process that was killed has left."""
    folder = tmp_path / "copy"
    shutil.copytree(past, folder)
    for name in (*LEFT, "checkpoints/sweep.to-1.from-0.group-0.pt"):
        (folder / name).write_bytes(b"x" * 1000)
    return folder


def answering(monkeypatch: pytest.MonkeyPatch, answer: bool) -> list[str]:
    asked: list[str] = []

    def confirm(text: str) -> bool:
        asked.append(text)
        return answer

    monkeypatch.setattr(typer, "confirm", confirm)
    return asked


def test_what_a_killed_process_left_goes_and_the_models_stay(
    copy: Path, past: str, monkeypatch: pytest.MonkeyPatch, said: Said, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(copy)
    asked = answering(monkeypatch, False)
    assert main(["clean", str(copy)]) == 1
    assert "4 files, 4 kB" in capsys.readouterr().out
    assert contents(copy) == before
    answering(monkeypatch, True)
    assert said("clean", copy).endswith("freed 4 kB\n")
    assert asked == ["remove them?"]
    assert contents(copy).keys() == {str(copy / Path(name).relative_to(past)) for name in contents(Path(past))}
    result = load(copy)
    for number in result._checkpoints:
        result.best_model(number, model_fn)
    assert "nothing to free: 3 files (" in said("clean", copy)
    search(copy.parent, "copy", resume="must")


def test_only_the_best_model_is_kept_where_that_is_asked(copy: Path, said: Said) -> None:
    told = json.loads(said("clean", copy, "--best-only", "--json"))
    assert (len(told["files"]), {file["removed"] for file in told["files"]}) == (6, {False})
    assert "the run can then not be extended, and other finalists' models are gone" in said(
        "clean", copy, "--best-only", "--yes"
    )
    assert [*copy.glob("checkpoints/*")] == [load(copy).best_checkpoint]
    again = said("clean", copy, "--best-only")
    assert again.startswith("nothing to free: 1 file (")
    assert "--best-only" not in again
    load(copy).best_model(model_fn=model_fn)
    with pytest.raises(FileNotFoundError, match="if it was cleaned, only the best model is left"):
        load(copy).best_model(next(n for n in load(copy)._checkpoints if n != load(copy).best_trial), model_fn)


def test_what_a_run_may_go_on_from_stays(part: str, said: Said, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(part) / "checkpoints"
    folder.mkdir()
    for name in (*LEFT[:2], "checkpoints/sweep.to-1.from-0.group-0.pt"):
        (Path(part) / name).write_bytes(b"x" * 1000)
    assert main(["clean", part, "--best-only", "--yes"]) == 2
    assert "must be a finished run, where only its best model is kept" in capsys.readouterr().err
    told = json.loads(said("clean", part, "--yes", "--json"))
    assert {Path(file["path"]).name for file in told["files"]} == {Path(name).name for name in LEFT[:2]}
    assert [path.name for path in folder.iterdir()] == ["sweep.to-1.from-0.group-0.pt"]


def test_a_folder_without_checkpoints(part: str, said: Said) -> None:
    assert said("clean", part) == "nothing to free: there are no checkpoints\n"


def test_no_question_is_asked_where_a_run_goes_on(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], holding: Callable[[Path], object]
) -> None:
    answering(monkeypatch, True)
    before = contents(copy)
    holding(copy)
    assert main(["clean", str(copy)]) == 2
    assert f"another process is working on the run in {copy}" in capsys.readouterr().err
    assert {name: contents(copy)[name] for name in before} == before


def test_nothing_is_removed_through_a_link(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As somebody may plant one who can write to the folder, or make the archive that it came in."""
    victim = tmp_path / "victim"
    victim.mkdir()
    for name in ("mine.pt", ".a.tmp"):
        (victim / name).write_text("precious")
    shutil.rmtree(copy / "checkpoints")
    (copy / "checkpoints").symlink_to(victim)
    for more in ([], ["--best-only"], ["--json"]):
        assert main(["clean", str(copy), "--yes", *more]) == 2
        assert "links in a run's folder are not followed" in capsys.readouterr().err
    assert {path.name for path in victim.iterdir()} == {"mine.pt", ".a.tmp"}


def test_nor_is_a_file_made_through_the_locks(copy: Path, tmp_path: Path) -> None:
    (copy / ".lock").unlink(missing_ok=True)
    (copy / ".lock").symlink_to(tmp_path / "made")
    assert main(["clean", str(copy), "--yes"]) == 2
    assert not (tmp_path / "made").exists()
