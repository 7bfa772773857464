"""Check the English of pages and code: find headless or long sentences, and paragraphs with many numbers.

    python -m docs.sentences            all pages and packages; exit status 1 if such a sentence is found
    python -m docs.sentences PATH ...   these files or folders

A headless clause begins with What, Who, Where, Which or Whether and stands for a noun, as in "What fails is tried
again". Questions are allowed, and so are headings. Pages are parsed as Markdown. Docstrings and comments are read, and
so are texts that are raised, warned of or printed.

"So many" and "so much" stand for a number that the reader must look for, unless "as" or "that" follows. Name the number
instead.

A sentence does not begin with Of, Those, Equal or Whose either, which leave out an actor. It begins with By
only if a comma ends that phrase, so that an actor can follow: "By default, `tune` halves". A fragment in lower case,
as in a table's cell, is no sentence.

A paragraph of a guide has at most four numbers; more belong into a table. `numbers` says what counts as one.
"""

from __future__ import annotations

import ast
import doctest
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/**/*.md", "fusion/*.md", "surrogate/*.md", "benchmarks/**/*.md")
PACKAGES = ("fusion", "surrogate", "hydro_rasda")
MOST_WORDS = 30
MOST_NUMBERS = 4
COUNTED = ("docs/", "fusion/", "surrogate/")
"""Folders in whose pages numbers are counted; pages of measurements elsewhere are full of them."""

SPOKEN = {"warn", "warn_explicit", "say", "notify", "tell", "log", "print", "warning", "info", "error"}
"""Functions whose texts people read."""

SECTIONS = {"Args", "Arguments", "Attributes", "Returns", "Yields", "Raises", "Example", "Examples", "Note", "Notes"}
"""Sections of Google's docstrings."""

_HEADLESS = re.compile(r"\W*(what|who|where|which|whether|whatever|whoever|wherever)\b", re.IGNORECASE)
_UNNAMED = re.compile(r"\bso (?:many|much|few|long|little)\b(?!.*\b(?:as|that)\b)", re.IGNORECASE)
_DIRECTIVE = re.compile(r"#[!:]|# ?(?:type:|noqa|ruff:|fmt:|pragma|mypy:|doctest:|%%)")
_WITHOUT_ACTOR = re.compile(r"\W*(?:(?:Of|Those|Equal|Whose)\b|By\b[^,]*$)")
_CODE, _VERSION = re.compile("`[^`]*`"), re.compile(r"\b(?:Python|torch|Ray|CUDA|Optuna|version) \d[\d.]*\d")
_NUMBER = re.compile(
    r"(?<![\w./-])[-+±]?(?!(?:19|20)\d\d\b)(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:/\d+)?(?![\w/]|-\w|\.\d)"
)
_END = re.compile(r"[.!?][\"'”’)\]]*(\s+)(?=[\"“]|['(\[]?[A-Z`0-9])")
_ENTRY = re.compile(r"\*{0,2}\w+(?: \([^)]*\))?: ")
_ABBREVIATED = ("e.g.", "i.e.", "et al.", "vs.", "etc.", "cf.", "Fig.", "eq.", "No.")


class Finding(NamedTuple):
    """A sentence that breaks a rule."""

    place: str
    line: int
    rule: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.place}:{self.line}: {self.rule}: {self.sentence}"


def sentences(text: str) -> Iterator[str]:
    """Split a paragraph where a sentence ends.

    >>> list(sentences("It halves, e.g. Ray's. `tune` does (too.) 3 of 4 go on."))
    ["It halves, e.g. Ray's.", '`tune` does (too.)', '3 of 4 go on.']
    """
    text, start = " ".join(text.split()), 0
    for end in _END.finditer(text):
        if not text[: end.start(1)].endswith(_ABBREVIATED):
            yield text[start : end.start(1)]
            start = end.end()
    if start < len(text):
        yield text[start:]


def broken_rule(sentence: str) -> str | None:
    """Name the rule that a sentence breaks; None if it breaks none.

    >>> broken_rule("What fails is tried again.")
    'headless clause'
    >>> broken_rule("Which trial wins?")
    >>> broken_rule("one " * 31)
    '31 words'
    >>> broken_rule("Train so many epochs."), broken_rule("Train as long as it pays: so long that all end.")
    ('unnamed number', None)
    """
    if _HEADLESS.match(sentence) and not sentence.rstrip("*_\"')").endswith("?"):
        return "headless clause"
    if _UNNAMED.search(sentence):
        return "unnamed number"
    if lacks_actor(sentence):
        return "no actor"
    words = [word for word in sentence.split() if any(map(str.isalnum, word))]
    return f"{len(words)} words" if len(words) > MOST_WORDS else None


def lacks_actor(sentence: str) -> bool:
    """Tell whether a sentence begins without an actor.

    >>> [lacks_actor(text) for text in ("Of 9 runs, 8 agree.", "Those that fail end.", "By default, it ends.")]
    [True, True, False]
    """
    return bool(_WITHOUT_ACTOR.match(sentence)) and not sentence.rstrip("*_\"')").endswith("?")


def numbers(text: str) -> list[str]:
    """Return the numbers of a paragraph, in digits; a fraction such as 1/8 is one number.

    Not counted: code, parts of names such as ResNet-18 or 2-D, years, and versions such as torch 2.13.

    >>> numbers("1/8 of 1,024, -0.3 and .5: `lr=3` of ResNet-18 under Python 3.11 (Yang et al. 2022).")
    ['1/8', '1,024', '-0.3', '.5']
    """
    return _NUMBER.findall(_VERSION.sub("", _CODE.sub("", text)))


def paragraphs(markdown: str, cells: bool = True) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each paragraph and table cell; code stands as one word in backticks."""
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    line, kinds = 0, [""]
    for token in tokens:
        line = token.map[0] if token.map else line
        if token.nesting == 1:
            kinds.append(token.type)
        elif token.nesting == -1:
            kinds.pop()
        elif token.type == "inline" and kinds[-1] not in ("heading_open", "th_open", *["td_open"] * (not cells)):
            text = "".join(map(_shown, token.children or []))
            if not text.startswith(":::"):  # here, mkdocstrings inserts the documentation of a name
                yield line + 1, text


def _shown(token: Token) -> str:
    if token.type == "code_inline":
        return f"`{token.content.replace(' ', '_')}`"
    return " " if token.type in ("softbreak", "hardbreak") else token.content if token.type == "text" else ""


def of_page(path: Path, place: str) -> Iterator[Finding]:
    """Yield the findings in a page."""
    page = path.read_text(encoding="utf-8")
    for line, text in paragraphs(page):
        yield from _of_text(place, line, text)
    for line, text in paragraphs(page, cells=False) if place.startswith(COUNTED) else ():
        if len(found := numbers(text)) > MOST_NUMBERS:
            yield Finding(place, line, f"{len(found)} numbers", text)


def of_code(path: Path, place: str) -> Iterator[Finding]:
    """Yield the findings in the docstrings, comments and messages of a module."""
    source = path.read_text(encoding="utf-8")
    for line, text in (*prose(ast.parse(source)), *comments(source)):
        yield from _of_text(place, line, text)


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each comment. Adjacent lines are one comment; directives are left out.

    >>> list(comments("x = 1  # One.\\n# Two\\n# lines.\\ny = 2  # noqa"))
    [(1, 'One.'), (2, 'Two lines.')]
    """
    first, last, parts = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or _DIRECTIVE.match(token.string):
            continue
        line, alone = token.start[0], not token.line[: token.start[1]].strip()
        if parts and not (alone and line == last + 1):
            yield first, " ".join(parts)
            parts = []
        first, last = (line if not parts else first), (line if alone else -1)
        parts.append(token.string.lstrip("# "))
    if parts:
        yield first, " ".join(parts)


def _of_text(place: str, line: int, text: str) -> Iterator[Finding]:
    for sentence in sentences(text):
        rule = broken_rule(sentence)
        if rule is not None:
            yield Finding(place, line, rule, sentence)


def prose(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the lines and texts of docstrings, those of attributes included, and of messages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for text in of_docstring(node.value.value):
                yield node.lineno, text
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from _messages(node.exc)
        elif isinstance(node, ast.Call) and _name(node.func).lstrip("_") in SPOKEN:
            yield from _messages(node)


def _messages(call: ast.Call) -> Iterator[tuple[int, str]]:
    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
        text = literal(argument)
        if " " in text:
            yield argument.lineno, text


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def literal(node: ast.expr) -> str:
    """Return the text of a string expression, with `X` for each part that only a running program knows.

    >>> literal(ast.parse('f"{n} of " + "all" * many', mode="eval").body)
    'X of all'
    """
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "X"
    if isinstance(node, ast.JoinedStr):
        return "".join(map(literal, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        return literal(node.left) + (literal(node.right) if isinstance(node.op, ast.Add) else "")
    if isinstance(node, ast.IfExp):
        return max(literal(node.body), literal(node.orelse), key=len)
    return "X"


def of_docstring(docstring: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring without doctests; entries of a section count without their names."""
    told = "".join(part for part in doctest.DocTestParser().parse(docstring) if isinstance(part, str))
    section: list[str] | None = None
    outside: list[str] = []
    lines = told.strip().splitlines()
    margin = min((len(each) - len(each.lstrip()) for each in lines[1:] if each.strip()), default=0)
    for line in [*lines[:1], *(each[margin:] for each in lines[1:])]:
        if line.rstrip().removesuffix(":") in SECTIONS and line.rstrip().endswith(":"):
            section = []
        elif section is not None and line.startswith("    "):
            entry = line[4:]
            named = _ENTRY.match(entry)
            outside += ["", entry[named.end() :]] if named else [entry.lstrip()]
        else:
            section = None if line.strip() else section
            outside.append(line)
    yield from (text for _, text in paragraphs("\n".join(outside)))


def files(root: Path) -> list[Path]:
    """Return the pages and modules of a checkout; links are left out."""
    pages = {path for pattern in PAGES for path in root.glob(pattern)}
    modules = {path for package in PACKAGES for path in (root / package).rglob("*.py")}
    own = (path for path in pages | modules if not any(each.is_symlink() for each in (path, *path.parents)))
    return sorted(own)


def findings(paths: Iterable[Path], root: Path = ROOT) -> list[Finding]:
    """Find all sentences that break a rule."""
    found: list[Finding] = []
    for path in paths:
        place = path.relative_to(root).as_posix()
        found += of_page(path, place) if path.suffix == ".md" else of_code(path, place)
    return found


def main(arguments: Sequence[str]) -> int:
    """Print the findings; return the exit status."""
    asked = [Path(each).resolve() for each in arguments]
    chosen = (
        [path for path in files(ROOT) if any(path.is_relative_to(each) for each in asked)] if asked else files(ROOT)
    )
    lines = [str(each) for each in findings(chosen)]
    print("\n".join([*sorted(lines), f"{len(lines)} sentences to rewrite, in {len(chosen)} files"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
