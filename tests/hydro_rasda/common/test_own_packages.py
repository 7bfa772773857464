"""Packages that are named as ours, planted where Python finds them first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hydro_rasda.common.own_packages import refuse_other_packages

ROOT = Path(__file__).parents[3]
RUNS = "raise SystemExit('it ran')"


def imported(*folders: Path, code: str = "import hydro_rasda") -> str:
    """The last line that importing the package prints where these folders come first; "" where it works."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT)))}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


BLOCKS = re.compile(r"^```py(?:thon)?\n(.*?)^```", re.DOTALL | re.MULTILINE)
ATTRIBUTES = re.compile(r"(?<![\w./])(?:hydro_rasda|fusion|surrogate)(?:\.[a-zA-Z]\w*)+")
EACH_ALONE = """
import os, sys
import hydro_rasda, fusion, surrogate
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            eval(name)
        except Exception as error:
            print(f"{name}: {error!r}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_an_attribute_that_a_page_shows_needs_no_other_import() -> None:
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "fusion/README.md",
        ROOT / "surrogate/README.md",
    ]
    blocks = [block for page in pages for block in BLOCKS.findall(page.read_text(encoding="utf-8"))]
    code = [line for block in blocks for line in block.splitlines() if not re.match(r" *(from|import) ", line)]
    shown = {name for line in code for name in ATTRIBUTES.findall(line)}
    assert {"hydro_rasda.load", "hydro_rasda.plots.learning_curves"} <= shown
    names = sorted(shown | {"hydro_rasda.bubbles.bubbles", "fusion.optim.optimizer", "surrogate.transfer"})
    done = subprocess.run(
        [sys.executable, "-c", EACH_ALONE, *names], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == ""
    assert "has no attribute 'nothing'" in imported(code="import hydro_rasda; hydro_rasda.nothing")


def plant(folder: Path, path: str, content: str = RUNS) -> Path:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    return file


@pytest.mark.parametrize("name", ["fusion", "surrogate"])
def test_another_distributions_package_is_named(tmp_path: Path, name: str) -> None:
    file = plant(tmp_path, f"{name}/__init__.py")
    plant(tmp_path, f"{name}-0.3.1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.3.1\n")
    plant(tmp_path, f"{name}-0.3.1.dist-info/top_level.txt", name)
    told = imported(tmp_path)
    assert told.startswith(f"ImportError: hydro_rasda comes with a package `{name}`, but Python finds another one")
    assert (
        f"{file} (of {name} 0.3.1). If you do not need that, run `pip uninstall {name}` and install hydro-rasda again,"
        in told
    )


@pytest.mark.parametrize("path", ["fusion.py", "surrogate/__init__.py"])
def test_a_file_of_the_users_is_named(tmp_path: Path, path: str) -> None:
    file = plant(tmp_path, path)
    told = imported(tmp_path)
    assert f"{file.resolve()}. If you do not need that" in told
    assert told.endswith("If the file is yours, rename it.")


def test_one_that_was_written_over_ours_is_noticed(tmp_path: Path) -> None:
    """Two distributions in one folder: the files that both have are those of the last."""
    for package in ("hydro_rasda", "surrogate"):
        (tmp_path / package).symlink_to(ROOT / package)
    (tmp_path / "fusion").mkdir()
    for file in (ROOT / "fusion").iterdir():
        (tmp_path / "fusion" / file.name).symlink_to(file)
    assert imported(tmp_path) == ""
    (tmp_path / "fusion" / "__init__.py").unlink()
    plant(tmp_path, "fusion/__init__.py")
    assert f"another one of this name: {tmp_path}/fusion/__init__.py" in imported(tmp_path)


def test_one_that_is_loaded_already_is_noticed(tmp_path: Path) -> None:
    plant(tmp_path / "theirs", "fusion.py", "")
    there = f"import sys; sys.path.insert(0, {str(tmp_path / 'theirs')!r}); import fusion; sys.path.pop(0)"
    assert "theirs/fusion.py. If" in imported(code=f"{there}; import hydro_rasda")
    by_hand = "import sys, types; sys.modules['fusion'] = types.ModuleType('fusion')"
    assert "comes with a package `fusion`" in imported(code=f"{by_hand}; import hydro_rasda")


def test_a_folder_of_that_name_without_code_is_no_conflict(tmp_path: Path) -> None:
    plant(tmp_path, "fusion/notes.txt", "")
    assert imported(tmp_path) == ""


def test_a_folder_without_code_in_the_place_of_ours_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, "only_a_folder/notes.txt", "")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=re.escape(f"another one of this name: {tmp_path / 'only_a_folder'}. If")):
        refuse_other_packages("only_a_folder")


def test_one_that_is_missing_is_named() -> None:
    with pytest.raises(
        ImportError, match="comes with a package `no_such_package`, which Python does not find: install hydro"
    ):
        refuse_other_packages("no_such_package")
