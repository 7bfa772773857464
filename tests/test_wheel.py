"""Test that the wheel has only the three packages with their data, and that pages state the project's versions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PACKAGES = ("fusion", "hydro_rasda", "surrogate")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel without network, from a copy of the sources, which has no files of earlier builds."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "tests").mkdir()
    (source / "tests" / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(built), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = built.glob("*.whl")
    return found


def _files(package: str) -> set[str]:
    """Return the files of a package that belong in the wheel: all except Markdown pages and Python's caches."""
    files = (path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in files if path.suffix != ".md"}


@pytest.mark.slow
def test_the_wheel_holds_the_three_packages_and_no_more(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {name for package in PACKAGES for name in _files(package)}
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


@pytest.mark.slow
def test_an_index_would_take_it(wheel: Path) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_it_tunes_and_reports_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = """
import torch, hydro_rasda, fusion, surrogate
from pathlib import Path
from hydro_rasda import loguniform, tune
for package in (hydro_rasda, fusion, surrogate):
    assert Path(package.__file__).is_relative_to(Path("site").resolve()), package.__file__
x, y = torch.randn(64, 4), torch.randint(0, 2, (64,))
build = lambda config, width_ratio=1.0: torch.nn.Sequential(
    torch.nn.Linear(4, int(32 * width_ratio)), torch.nn.ReLU(), torch.nn.Linear(int(32 * width_ratio), 2))
space = {"lr": loguniform(1e-3, 0.1)}
result = tune(build, space, train_data=(x, y), val_data=(x, y), num_samples=3, max_t=3, progress=False)
result.report("page.html")
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "HYDRO_RASDA_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "plotly" in (tmp_path / "page.html").read_text(encoding="utf-8").lower()


def test_the_versions_that_the_page_states_are_those_of_the_project() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    table = {name.lower(): rest for name, *rest in re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+)", page, re.MULTILINE)}
    required = {need.name: need.specifier for need in map(Requirement, asked["project"]["dependencies"])}
    oldest = {name: str(required[name]).removeprefix(">=") for name in ("torch", "ray", "mup")}
    assert {name: old for name, (old, _) in table.items()} == {
        **oldest,
        "python": asked["project"]["requires-python"].removeprefix(">="),
    }
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert {name: new for name, (_, new) in table.items()} == {
        **{name: pinned[name] for name in oldest},
        "python": asked["tool"]["mypy"]["python_version"],
    }
