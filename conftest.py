"""Test the code blocks of the pages that users read. The blocks of a page share their names, as in one module.

A ```python block is run. The first block of a page in `PROGRAMS` runs as a reader runs it: alone, as a file. A ```py
block is only compiled, because it needs a cluster, a GPU, or things that only a reader has. In a ```console block, each
line that begins with `$ hydro-rasda` is run and must succeed. A ```sh block is checked by `bash -n`.
"""

from __future__ import annotations

import os
import runpy
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

# Let waiting threads sleep. If several processes have a thread for each core, threads that spin while they wait take
# the cores from others, and the same steps took 35 times as long. Torch's import reads this variable.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# By default, Ray's workers have a low priority. Beside a process that computes, they would hardly ever run.
os.environ.setdefault("RAY_worker_niceness", "0")
# Hide the GPUs from most tests. Many tests compare two equal trainings to the last digit, which torch's GPU kernels do
# not reproduce. `make test-gpu` runs the tests for a GPU.
if "HYDRO_RASDA_TEST_GPU" not in os.environ and any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

PROGRAMS = ("README.md", "fusion/README.md", "surrogate/README.md")
"""Pages whose first example is a whole program."""

SLOW = (*PROGRAMS[1:], "docs/start.md", "docs/guides/runs.md", "docs/guides/laptop.md")
"""Pages that train for more than 10 s on two cores. README is not among them, so that `make test` runs its program."""

collect_ignore = ["docs/doctests.py"]
"""This file imports a package that only `make docs` installs."""

_python = PythonEvaluator()


def _run(example: Example) -> None:
    """Run a block with the names of earlier blocks; run the first shown block of a page of `PROGRAMS` alone."""
    names, shown = example.namespace, example.document.text.startswith("```", example.start)
    if not shown or "__file__" in names or _page(Path(example.path)) not in PROGRAMS:
        _python(example)
    else:
        Path("program.py").write_text(example.parsed, encoding="utf-8")
        names.update(runpy.run_path("program.py", run_name="__main__"))


def _page(path: Path) -> str:
    return path.relative_to(Path(__file__).parent).as_posix()


def _compiled(example: Example) -> None:
    compile(example.parsed, example.path, "exec")


def _called(example: Example) -> None:
    for line in example.parsed.splitlines():
        if line.startswith("$ hydro-rasda "):
            command = [str(Path(sys.executable).with_name("hydro-rasda")), *shlex.split(line[14:], comments=True)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"


def _parsed(example: Example) -> None:
    subprocess.run(["bash", "-n"], input=example.parsed, text=True, check=True)


def _enter(names: dict[str, Any]) -> None:
    """Enter a new folder, into which the page writes its files, and set names as in a reader's script."""
    names["__name__"] = "__main__"
    names["_left"] = os.getcwd(), os.environ.get("HYDRO_RASDA_CACHE"), tempfile.TemporaryDirectory()
    os.chdir(names["_left"][2].name)
    os.environ["HYDRO_RASDA_CACHE"] = "cache"


def _leave(names: dict[str, Any]) -> None:
    folder, cache, made = names["_left"]
    os.chdir(folder)
    del os.environ["HYDRO_RASDA_CACHE"]
    if cache is not None:
        os.environ["HYDRO_RASDA_CACHE"] = cache
    made.cleanup()


pytest_collect_file = Sybil(
    parsers=[
        CodeBlockParser("python", _run),
        CodeBlockParser("py", _compiled),
        CodeBlockParser("console", _called),
        CodeBlockParser("sh", _parsed),
    ],
    patterns=["*.md"],
    # docs/index.md is left out, because it has README's program.
    excludes=["docs/fusion/*", "docs/surrogate/*", "docs/benchmarks/**", "benchmarks/**", "docs/index.md"],
    setup=_enter,
    teardown=_leave,
).pytest()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the pages that take long as slow tests."""
    for item in items:
        if item.path.suffix == ".md" and _page(item.path).startswith(SLOW):
            item.add_marker(pytest.mark.slow)
