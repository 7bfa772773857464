"""Widths of consoles, and short texts for times."""

from __future__ import annotations

import io
from typing import Any

import pytest

from hydro_rasda.common.console import UNBROKEN, PrintableConsole, duration, encodable, make_console


class OfNotebook(PrintableConsole):
    def __init__(self, **options: Any) -> None:
        super().__init__(force_jupyter=True, **options)


class OfTerminal(PrintableConsole):
    def __init__(self, **options: Any) -> None:
        super().__init__(force_terminal=True, **options)


class OfFile(PrintableConsole):
    def __init__(self, **options: Any) -> None:
        super().__init__(force_terminal=False, force_jupyter=False, **options)


@pytest.mark.parametrize(("of", "wraps"), [(OfNotebook, True), (OfTerminal, True), (OfFile, False)])
def test_lines_that_people_watch_are_as_wide_as_their_screen(
    of: type[PrintableConsole], wraps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COLUMNS", "JUPYTER_COLUMNS"):
        monkeypatch.setenv(name, "50")
    assert make_console(cls=of).width == (50 if wraps else UNBROKEN)


def test_a_quiet_console_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    make_console(quiet=True).print("something")
    assert capsys.readouterr().out == ""
    make_console().print("something")
    assert capsys.readouterr().out == "something\n"


def test_a_file_gets_escapes_for_what_its_encoding_lacks() -> None:
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    assert encodable("ä é 中", latin) == r"ä é \u4e2d"
    assert encodable("ä 中", io.StringIO()) == "ä 中"


def test_a_duration_has_its_two_largest_units() -> None:
    seconds = (0.1234, 59.94, 60, 3599, 3600, 86_399, 86_400, 100_000_000)
    told = ("0.123 s", "59.9 s", "1 min 0 s", "59 min 59 s", "1 h 0 min", "23 h 59 min", "1 d 0 h", "1157 d 9 h")
    assert tuple(map(duration, seconds)) == told
