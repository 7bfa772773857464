"""The check of English, on texts whose faults are known."""

import ast
from pathlib import Path

import pytest

from docs.sentences import ROOT, broken_rule, comments, files, findings, of_docstring, paragraphs, prose


def _page(folder: Path, text: str) -> list[str]:
    path = folder / "page.md"
    path.write_text(text, encoding="utf-8")
    return [f"{each.line} {each.rule}" for each in findings([path], folder)]


def _code(text: str) -> list[str]:
    return [text for _, text in prose(ast.parse(text))]


@pytest.mark.parametrize(
    "text",
    [
        "What reports nothing for an hour is taken to hang.\n",
        "It ends. **Whether it fits** is measured.\n",
        "- Which trial wins is decided at the end.\n",
        "| a | b |\n|---|---|\n| x | where runs are kept |\n",
    ],
)
def test_a_headless_clause_on_a_page_is_found(tmp_path: Path, text: str) -> None:
    (found,) = _page(tmp_path, text)
    assert found.endswith("headless clause")


@pytest.mark.parametrize(
    "text",
    [
        "# Where results are kept\n",
        "Which trial wins? The best one.\n",
        "```py\nWhat = 'is code'\n```\n",
        "| what | where |\n|---|---|\n| x | y |\n",
        "Whatsoever is another word.\n",
        "<!-- What is hidden -->\n",
    ],
)
def test_headings_questions_and_code_are_allowed(tmp_path: Path, text: str) -> None:
    assert _page(tmp_path, text) == []


@pytest.mark.parametrize(
    "text",
    [
        "Of five runs, four agree.\n",
        "It ends. Those that fail are named.\n",
        "- Equal weights are held once.\n",
        "| a |\n|---|\n| Whose turn it is counts. |\n",
        "By kind of machine.\n",
    ],
)
def test_a_sentence_of_a_page_begins_with_an_actor(tmp_path: Path, text: str) -> None:
    (found,) = _page(tmp_path, text)
    assert found.endswith("no actor")


@pytest.mark.parametrize(
    "text",
    ["By default, `tune` halves.\n", "Whose turn is it?\n", "# Of all\n", "| a |\n|---|\n| of five |\n", "Often.\n"],
)
def test_an_actor_may_follow_a_comma(tmp_path: Path, text: str) -> None:
    assert _page(tmp_path, text) == []


def test_a_paragraph_of_a_guide_has_at_most_four_numbers(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    many, few = "From 1 to 2, from 3 to 4, 1/8.", "From 1 to 2, from 3 to 4, in 2026 under torch 2.13, `5`, ResNet-18."
    page = tmp_path / "docs" / "page.md"
    page.write_text(f"# 1 2 3 4 5\n\n{few}\n\n- {many}\n\n| a |\n|---|\n| {many} |\n", encoding="utf-8")
    (found,) = findings([page], tmp_path)
    assert (found.line, found.rule) == (5, "5 numbers")
    assert _page(tmp_path, many) == []  # a page of measurements


def test_words_are_counted_to_the_end_of_a_sentence(tmp_path: Path) -> None:
    assert _page(tmp_path, f"# A\n\nShort one. W{'ord w' * 30}ord.\n") == ["3 31 words"]
    assert _page(tmp_path, f"Ten {'word ' * 20}here. Then {'word ' * 20}again.\n") == []
    assert _page(tmp_path, f"{'word ' * 29}`a call(of, several)`\n") == []


def test_code_stands_as_one_word() -> None:
    assert [text for _, text in paragraphs("Call `f(a, b)` [here](there.md).")] == ["Call `f(a,_b)` here."]


def test_a_section_of_a_docstring_counts_by_its_entries() -> None:
    docstring = """Train.

    >>> What is this
    3

    Args:
        name: Where the run is kept.
            It goes on here.
        other (int): The second.

    Raises:
        ValueError: if it fails.
    """
    assert list(of_docstring(docstring)) == [
        "Train.",
        "Where the run is kept. It goes on here.",
        "The second.",
        "if it fails.",
    ]


def test_docstrings_and_messages_are_read_and_other_texts_are_not() -> None:
    code = '''
"""The module."""
x = "what is no message"
"""The attribute."""
def f(n):
    """The function."""
    warn(f"{n} runs " + "are left", UserWarning)
    self._say("it ends")
    raise ValueError("one" " text" if n else "the longer text")
'''
    assert set(_code(code)) == {
        "The module.",
        "The attribute.",
        "The function.",
        "X runs are left",
        "it ends",
        "the longer text",
    }


def test_comments_are_read_and_directives_are_not() -> None:
    code = """
#!/usr/bin/env python
x = "# no comment"  # The first.
# The second,
# in two lines.

    # The third.
y = f(x)  # type: ignore[misc]
z = 1  # noqa: E501
w = 2  # The fourth.
# The fifth.
"""
    found = ["The first.", "The second, in two lines.", "The third.", "The fourth.", "The fifth."]
    assert [text for _, text in comments("if x:\n    pass\n" + code)] == found


@pytest.mark.parametrize(
    ("sentence", "rule"),
    [
        ("Cut the list after so many members.", "unnamed number"),
        ("So few of them are left.", "unnamed number"),
        ("It takes so long that nobody waits.", None),
        ("Wait so long as it trains.", None),
    ],
)
def test_a_number_is_named(sentence: str, rule: str | None) -> None:
    assert broken_rule(sentence) == rule


def test_a_finding_names_its_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("What fails is tried again.\n", encoding="utf-8")
    (found,) = findings([page], tmp_path)
    assert str(found) == "page.md:1: headless clause: What fails is tried again."
    page.write_text("It is tried again.\n", encoding="utf-8")
    assert findings([page], tmp_path) == []


def test_pages_that_are_links_are_read_once() -> None:
    names = [path.relative_to(ROOT).as_posix() for path in files(ROOT)]
    assert {"README.md", "docs/how.md", "fusion/README.md", "hydro_rasda/tuner.py"} <= {*names}
    assert "docs/fusion/README.md" not in names
