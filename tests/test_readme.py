"""Test that the pages that a newcomer reads first show the program and the commands as they are."""

import difflib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = (ROOT / "examples" / "digits.py").read_text()


def blocks(page: str) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_program_of_a_front_page_is_the_example(page: str) -> None:
    assert blocks(page) == [PROGRAM]


def test_the_walk_through_shows_the_example_part_by_part() -> None:
    parts = blocks("docs/start.md")
    shown = "".join(parts[:4])
    assert [line for line in shown.splitlines() if line] == [line for line in PROGRAM.splitlines() if line]


def test_the_difference_to_a_plain_loop_is_shown() -> None:
    plain = (ROOT / "examples" / "random_search.py").read_text()
    _, _, _, *lines = difflib.unified_diff(plain.splitlines(), PROGRAM.splitlines(), n=99, lineterm="")
    assert "```diff\n" + "\n".join(lines) + "\n```\n" in (ROOT / "docs" / "start.md").read_text()


def named(readme: Path) -> "subprocess.CompletedProcess[str]":
    command = [str(ROOT / ".ci" / "commands"), str(readme)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_commands_of_readme_are_those_that_ci_runs_first() -> None:
    done = named(ROOT / "README.md")
    assert (done.returncode, done.stdout) == (0, "make demo\nmake test\n"), done.stderr


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("make demo  # a target\npip install x", "names `pip install x`, which is no target of the Makefile"),
        ("make demos", "names `make demos`, which is no target"),
        ("make demo test", "names `make demo test`, which is no target"),
        ("# nothing", "has no block of commands"),
    ],
)
def test_other_commands_are_refused(block: str, message: str, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"<!-- .ci/run runs the commands of this block. -->\n```sh\n{block}\n```\n")
    done = named(readme)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stdout == ""
