"""Every code block of the pages that users read is run: a page is a module, and its blocks share their names.

```python is run. ```py is compiled alone: it needs a cluster, a GPU, or what the reader has. Of ```console, the lines
after a `$ ` that call `hydro-rasda` are run, and each must succeed. ```sh is looked at by `bash -n`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

# Where several processes have a thread for each core, those that wait would spin on cores that others need: the same
# steps took 35 times as long beside each other. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Ray's workers are nice by default: beside a process that computes, they would hardly ever run.
os.environ.setdefault("RAY_worker_niceness", "0")

SLOW = (
    "README.md",
    "fusion/README.md",
    "surrogate/README.md",
    "docs/start.md",
    "docs/guides/runs.md",
    "docs/guides/laptop.md",
)
"""Pages that train for over 10 s, as these do on two cores."""


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
        PythonCodeBlockParser(),
        CodeBlockParser("py", _compiled),
        CodeBlockParser("console", _called),
        CodeBlockParser("sh", _parsed),
    ],
    patterns=["*.md"],
    excludes=["docs/fusion/*", "docs/surrogate/*", "docs/benchmarks/**", "benchmarks/**"],
    setup=_enter,
    teardown=_leave,
).pytest()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the pages that take long."""
    for item in items:
        page = item.path.relative_to(config.rootpath).as_posix()
        if page.endswith(".md") and page.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
