"""Every picture of the repository has a script that draws it."""

from pathlib import Path

import pytest

from docs.pictures import PICTURES, REPORT, ROOT, SETTLED, main, tune_digits
from hydro_rasda.schedulers.named_rules import RuleName


def test_each_picture_is_drawn_by_the_one_command() -> None:
    folders = (ROOT / "docs", ROOT / "benchmarks" / "results")
    there = {path for folder in folders for kind in ("png", "svg") for path in folder.glob(f"*.{kind}")}
    assert {path.relative_to(ROOT).as_posix() for path in there} == {*PICTURES, *REPORT, *SETTLED}


def test_a_picture_of_measurements_is_drawn_from_its_file(tmp_path: Path) -> None:
    source = (ROOT / "benchmarks/results/transfer_digits.json").read_text()
    (tmp_path / "transfer_digits.json").write_text(source)
    PICTURES["benchmarks/results/transfer_digits.png"](tmp_path / "transfer_digits.png")
    assert (tmp_path / "transfer_digits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("rule", sorted({rule for rule, *_ in REPORT.values()}))
def test_the_report_has_a_search_by_each_rule(rule: RuleName, tmp_path: Path) -> None:
    result = tune_digits(rule, tmp_path, num_samples=6, max_t=3)
    assert result.path == tmp_path / rule
    assert result.report(tmp_path / "page.html").stat().st_size > 100_000


def test_an_unknown_picture_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["docs/nothing.png"])
    assert "no picture 'docs/nothing.png'" in capsys.readouterr().err
