"""Every code block of the pages that users read is run: a page is a module, and its blocks share their names.

```python is run. The first block of `PROGRAMS` runs as a reader runs it: alone, as a file. ```py is compiled alone: it
needs a cluster, a GPU, or what the reader has. Of ```console, the lines after a `$ ` that call `hydro-rasda` are run,
and each must succeed. ```sh is looked at by `bash -n`.
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

# Where several processes have a thread for each core, those that wait would spin on cores that others need: the same
# steps took 35 times as long beside each other. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Ray's workers are nice by default: beside a process that computes, they would hardly ever run.
os.environ.setdefault("RAY_worker_niceness", "0")
# Many tests compare two equal trainings to the last digit, and on a GPU torch's own kernels differ in that. `make
# test-gpu` runs the tests for a GPU.
if "HYDRO_RASDA_TEST_GPU" not in os.environ and any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

PROGRAMS = ("README.md", "fusion/README.md", "surrogate/README.md")
"""Pages whose first example is a whole program."""

SLOW = (*PROGRAMS[1:], "docs/start.md", "docs/guides/runs.md", "docs/guides/laptop.md")
"""Pages that train for over 10 s, as these do on two cores; README's program is in `make test`."""

collect_ignore = ["docs/doctests.py"]
"""`make docs` alone installs the package that this file imports."""

_python = PythonEvaluator()


def _run(example: Example) -> None:
    """Run a block with the names of those before it; a page's first program without, pasted into an empty file."""
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
    """A folder of its own for what a page writes, and names as in a script of the reader's."""
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
    # The site's first page has the program of README.
    excludes=["docs/fusion/*", "docs/surrogate/*", "docs/benchmarks/**", "benchmarks/**", "docs/index.md"],
    setup=_enter,
    teardown=_leave,
).pytest()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the pages that take long."""
    for item in items:
        if item.path.suffix == ".md" and _page(item.path).startswith(SLOW):
            item.add_marker(pytest.mark.slow)
