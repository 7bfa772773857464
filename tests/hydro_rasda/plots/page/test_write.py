"""What a page says of runs of all sorts, and that nothing in a run can become a part of it."""

from __future__ import annotations

import ast
import base64
import gzip
import html
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import wraps
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hydro_rasda import choice, loguniform, plots, uniform
from hydro_rasda.cli import main
from hydro_rasda.plots.hyperparameters import importance_of
from hydro_rasda.plots.page import sections as sections_module
from hydro_rasda.plots.page import write_page
from hydro_rasda.plots.page.sections import sections
from hydro_rasda.plots.page.words import answer, call_of, configuration, domain_of, environment
from hydro_rasda.plots.page.write import Page, digest, list_page, plotly
from hydro_rasda.records.record_from_journal import read_record
from hydro_rasda.records.records import RunRecord
from hydro_rasda.records.report import as_html
from hydro_rasda.run.run_json import read_asked
from hydro_rasda.settings.config import TuneConfig
from hydro_rasda.space.space import describe
from tests.hydro_rasda.conftest import Said
from tests.hydro_rasda.journals import SCRIPT, SPACE, Writer, write_run

Sorts = dict[str, RunRecord]

LARGEST = 2e6


class Elements(HTMLParser):
    """The tags of a page, with their attributes, and its text outside of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        self._script = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._script = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._script else data


def test_of_one_full_size_model_alone_no_page_says_how_sure_it_is(sorts: Sorts) -> None:
    told = "How sure that is cannot be said: one model alone was trained at full size."
    assert [sort for sort, record in sorts.items() if told in answer(record)] == ["single"]


@pytest.mark.parametrize("sort", ["over", "interrupted", "swept", "single", "failed", "empty", "large"])
def test_a_page_of_every_sort_of_run(sorts: Sorts, sort: str) -> None:
    record = sorts[sort]
    written = Page(record).html()
    assert len(written.encode()) < LARGEST  # of 2,000 trials, too
    found = Elements(written)
    for title in (section.title for section in sections(record)):
        assert title in found.text
    # Figures, Plotly and the page's own two: what a run holds adds none.
    assert sum(tag == "script" for tag, _ in found.tags) == 4
    # It asks for nothing else.
    links = [more[name] for _, more in found.tags for name in ("src", "href") if name in more]
    assert all(link is not None and link.startswith(("#", "data:")) for link in links)


def test_a_page_of_many_hyperparameters_is_small(tmp_path: Path) -> None:
    record, draw = write_run(tmp_path / "a", num_samples=1_000, width=8), random.Random(0)
    more = [{f"factor_{i}": draw.random() for i in range(6)} for _ in record.trials]
    trials = tuple(replace(trial, config={**trial.config, **own}) for trial, own in zip(record.trials, more))
    written = Page(replace(record, trials=trials)).html()
    assert "factor_5" in written
    assert len(written.encode()) < LARGEST


def test_it_says_what_the_run_found(sorts: Sorts) -> None:
    record = sorts["over"]
    text = Elements(Page(record).html()).text
    best = f"Trial {record.best_trial} wins: val_loss {record.best_metric:.4g} at full size"
    assert f"{best}, of the weights after epoch " in text
    assert "finished" in text
    assert f"ValueError: {SCRIPT} in trial 5" in text  # as text
    assert SCRIPT not in Page(record).html()
    assert "about" not in Elements(Page(sorts["empty"]).html()).text
    assert "No trial has begun." in Elements(Page(sorts["empty"]).html()).text
    assert "No trial has a finite score." in Elements(Page(sorts["failed"]).html()).text
    assert "<dt>dropout</dt>" in Page(record).html()
    assert "<dt>dropout</dt>" not in Page(sorts["failed"]).html()  # no configuration is the best
    winner = record.trials[record.best_trial]
    diverged = replace(record, trials=(replace(winner, trial=0, epochs=1, metric=math.nan),), best_trial=0)
    diverged = replace(diverged, best_metric=math.nan)
    assert "has the best val_loss on a surrogate" in " ".join(answer(diverged))
    assert configuration(diverged) == configuration(record)
    told = "interrupted, or running elsewhere; repeat the call to resume"
    assert told in Elements(Page(sorts["interrupted"]).html()).text
    assert told in Elements(list_page([("a", sorts["interrupted"], 1e9)], Path("runs"))).text
    assert told not in Elements(list_page([("a", record, 1e9)], Path("runs"))).text


def drawn(record: RunRecord) -> dict[str, str]:
    """What a page draws, as the dashboard serves it."""
    return {name: drawing.drawn().served for name, drawing in Page(record).drawings.items()}


def test_the_list_says_how_far_a_run_is_and_in_which_time_zone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path / "a", TuneConfig(num_samples=4))
    now = time.time()

    def told() -> str:
        return Elements(list_page([("a", writer.record, now - 10)], tmp_path)).text

    writer.unit("sweep/kinds-from-0", {}, seconds=30)
    assert "%" not in told()
    writer.unit("sweep/cost-of-a", {}, seconds=30, left=60.0)
    assert writer.record.seconds_left == 60
    assert "50 %" in told()
    assert "left" not in told()  # nobody works on it
    monkeypatch.setattr("hydro_rasda.records.report.held", lambda path: True)
    assert "50 %, about 50 s left" in told()
    assert f"{datetime.fromtimestamp(now - 10).astimezone():%Y-%m-%d %H:%M %Z}" in told()
    assert "100 %" in Elements(list_page([("b", write_run(tmp_path / "b", num_samples=3), now)], tmp_path)).text


def test_figures_cannot_end_their_script(sorts: Sorts) -> None:
    held = drawn(sorts["over"])
    assert held.keys() >= {"trials", "learning-curves", "importances", "timeline", "slice-0", "parallel-coordinates"}
    for name, text in held.items():
        assert "<" not in text
        assert ({"heads", "columns"} if name == "trials" else {"data", "layout"}) <= json.loads(text).keys()
    assert {*map(str, json.loads(drawn(sorts["empty"])["timeline"]))} == {"note"}


def test_a_file_holds_the_same_figures_compressed(sorts: Sorts) -> None:
    written = Page(sorts["over"]).html()
    (text,) = re.findall(r'<script type="text/plain" id="packed-figures">(.*?)</script>', written, re.S)
    assert "<" not in text
    lists, figures = json.loads(gzip.decompress(base64.b85decode(text.replace(",", "<"))))

    def whole(value: dict[str, Any]) -> Any:
        return lists[value["$list"]] if "$list" in value else value

    held = drawn(sorts["over"])
    assert json.loads(figures, object_hook=whole) == {name: json.loads(figure) for name, figure in held.items()}


def test_a_served_page_draws_nothing_and_each_figure_once(sorts: Sorts, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counter[str]()

    def counting(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(make)
        def counts(*arguments: Any) -> Any:
            counted[name] += 1
            return make(*arguments)

        return counts

    monkeypatch.setattr(sections_module, "importance_of", counting("importance", importance_of))
    for name in plots.__all__:
        monkeypatch.setattr(plots, name, counting(name, getattr(plots, name)))
    served = Page(sorts["over"])
    assert f"Trial {sorts['over'].best_trial} wins" in served.html(live=True)
    assert counted == {}
    assert served.drawings["timeline"].drawn().served == served.drawings["timeline"].drawn().served
    assert counted == {"timeline": 1}
    for _ in range(2):
        assert all(drawing.drawn().served for drawing in served.drawings.values())
    slices = sum(name.startswith("slice-") for name in served.drawings)
    assert counted.pop("slices") == slices
    assert counted.keys() == {*plots.__all__, "importance"} - {"front", "importances", "slices", "population"}
    assert {*counted.values()} == {1}


@pytest.mark.parametrize("live", [False, True])
def test_a_page_s_policy_allows_its_own_scripts_alone(sorts: Sorts, live: bool) -> None:
    written = Page(sorts["over"]).html(live)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', written)
    rules = {name: values for name, *values in (rule.split() for rule in html.unescape(policy).split("; "))}
    assert rules["default-src"] == ["'none'"]
    assert rules.get("connect-src") == (["'self'"] if live else None)
    own = re.findall(r"<script>(.*?)</script>", written, re.S)
    allowed = [digest(script) for script in own] + ([] if live else [digest(plotly())])
    assert sorted(rules["script-src"]) == sorted([*allowed, "'unsafe-eval'", *["'self'"] * live])


def test_the_call_is_python_and_asks_for_the_same_run(sorts: Sorts) -> None:
    asked = read_asked(sorts["over"].path)
    (call,) = ast.parse(call_of(asked)).body
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.value.keywords}
    assert given["race"] == "RaceConfig(top_k=3)"  # and the others are the defaults
    always = {"metric", "mode", "num_samples", "max_t", "seed", "train_data", "val_data", "loss_fn"}
    assert given.keys() == always | {"race"}
    space = ast.unparse(call.value.args[1])
    assert "loguniform(0.0001, 1)" in space
    assert "uniform(0, 0.5)" in space
    assert space.count(":") == len(SPACE)


def test_the_call_has_its_parts(sorts: Sorts) -> None:
    asked = read_asked(sorts["over"].path)
    asked |= {"surrogate": 0.5, "fusion": 8, "sweep_rule": "Median", "searcher": "OptunaSearch", "keep": "last"}
    asked["rasda"] |= {"workers": 2}
    asked["digests"] = {"first": "a", "train": "b", "metrics": "c"}
    told = call_of(asked)
    sweep = "SweepConfig(surrogate=0.5, fusion=8, rule=Median(...), searcher=OptunaSearch(...), first=first)"
    assert f"    sweep={sweep},\n" in told
    assert "    race=RaceConfig(top_k=3, keep='last', workers=2),\n" in told
    assert "    train=train,\n" in told
    assert "    metrics=metrics,\n" in told
    assert "data=" not in told
    ast.parse(told)
    assert "    sweep=SweepConfig(surrogate=0.5, fusion=8, rule='median'," in call_of(asked | {"sweep_rule": "median"})
    several = call_of(asked | {"metric": ["val_loss", "macs"], "mode": ["min", "min"]})
    assert "    metric=['val_loss', 'macs'],\n    mode=['min', 'min'],\n" in several
    assert "objectives" not in several


def test_the_call_has_branches_as_they_were_given(sorts: Sorts) -> None:
    second = {"optimizer": "adamw", "more": {"eps": choice([1e-8])}}
    branches = [{"optimizer": "sgd", "momentum": uniform(0, 0.9)}, second]
    space = {"lr": loguniform(1e-4, 1), "by": choice(branches)}
    told = call_of(read_asked(sorts["over"].path) | {"space": describe(space)})
    (call,) = ast.parse(told).body
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    written = ast.unparse(call.value.args[1])
    again = eval(written, {"choice": choice, "loguniform": loguniform, "uniform": uniform})
    assert describe(again) == describe(space)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("float uniform(0.1, 0.5, q=0.1)", "quniform(0.1, 0.5, 0.1)"),
        ("integer loguniform(1, 100)", "ray.tune.lograndint(1, 100)"),
        ("float normal(-inf, inf, mean=0, sd=1)", "ray.tune.randn(0, 1)"),
        ("float normal(-inf, inf, q=0.5, mean=-1, sd=1)", "ray.tune.qrandn(-1, 1, 0.5)"),
        ("'sgd'", "'sgd'"),
    ],
)
def test_a_domain_as_it_is_written(words: str, expected: str) -> None:
    assert domain_of(words) == expected


def test_a_result_whose_folder_is_gone_has_a_page(sorts: Sorts, tmp_path: Path) -> None:
    shutil.copytree(sorts["over"].path, tmp_path / "moved")
    record = read_record(tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved")
    written = write_page([record], tmp_path / "a" / "p.html").read_text()
    assert f"Trial {record.best_trial} wins" in Elements(written).text


def test_the_command_writes_it(sorts: Sorts, tmp_path: Path, said: Said) -> None:
    out = tmp_path / "page.html"
    assert said("report", sorts["single"].path, "--out", out) == f"{out}\n"
    assert "<title>single" in out.read_text()
    assert main(["report", str(tmp_path)]) == 2


def test_the_command_needs_neither_torch_nor_ray(sorts: Sorts, tmp_path: Path) -> None:
    code = (
        "import sys; from hydro_rasda.cli import main; "
        f"assert main(['report', {str(sorts['over'].path)!r}, '--out', {str(tmp_path / 'page.html')!r}]) == 0; "
        "assert not {'torch', 'ray'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_notebook_shows_the_best_trials(sorts: Sorts) -> None:
    record = sorts["over"]
    found = Elements(as_html(record))
    assert {tag for tag, _ in found.tags} == {"div", "p", "table", "thead", "tbody", "tr", "th", "td"}
    assert f"best configuration (trial {record.best_trial})" in found.text
    assert math.isfinite(record.best_metric)
    assert "8 of 27 trials" in found.text
    assert as_html(sorts["empty"])


@pytest.mark.parametrize(("names", "told"), [("w", "1 parameter tensor"), ("wb", "2 parameter tensors")])
def test_parameter_tensors_are_counted(names: str, told: str) -> None:
    assert environment({"model": dict.fromkeys(names, "(2,) float32")}, {})["model"] == told


def test_a_page_is_utf_8_whatever_the_locale_and_the_bytes_of_a_file_name(sorts: Sorts, tmp_path: Path) -> None:
    """A configuration may have the name of a file that is not UTF-8."""
    out, here = tmp_path / "page.html", os.fsdecode(b"caf\xe9")
    record = sorts["single"]
    (trial,) = record.trials
    named = replace(record, trials=(replace(trial, config={**trial.config, "file": here}),))
    assert "caf\\udce9" in write_page([named], out).read_text(encoding="utf-8")
    assert "caf\\udce9" in list_page([("a", record, 0.0)], Path(here))
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code = f"from hydro_rasda.cli import main; assert main(['report', {str(record.path)!r}, '-o', {str(out)!r}]) == 0"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=plain)
    assert "<title>single · hydro_rasda</title>" in out.read_text(encoding="utf-8")


def test_a_hyperparameter_with_the_name_of_another_column_has_a_column_of_its_own(sorts: Sorts) -> None:
    record = sorts["over"]
    trials = tuple(replace(t, config={**t.config, "epochs": t.trial % 7, "state": str(t.trial)}) for t in record.trials)
    *_, table = (part.trials for part in sections(replace(record, trials=trials)) if part.trials)
    found = json.loads(table.drawn().json)
    columns = dict(zip(found["heads"], found["columns"], strict=True))
    assert len(columns) == len(found["heads"])
    assert columns["config/epochs"] == [number % 7 for number in columns["trial"]]
    assert columns["config/state"] == [*map(str, columns["trial"])]
    assert "finished" in columns["state"]


BROWSER = """
const doc = (titles) => ({
  addEventListener() {}, getElementById: () => null, querySelector: () => ({}),
  querySelectorAll: (what) => (what === "section h2" ? titles.map((textContent) => ({textContent})) : []),
});
let titles = ["Cost", "Trials"];
globalThis.document = doc(titles);
globalThis.page = {whenNear() {}};
globalThis.location = {search: "", href: "", reload: () => console.log("loaded anew")};
globalThis.fetch = async () => ({ok: true, text: async () => ""});
globalThis.DOMParser = class { parseFromString() { return doc(titles); } };
globalThis.EventSource = class { constructor() { globalThis.server = this; } };
globalThis.setInterval = () => {};
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_a_page_that_gains_a_section_is_loaded_anew() -> None:
    """A run's first copy brings the section of its population."""
    live = (Path(sections_module.__file__).parent / "live.js").read_text(encoding="utf-8")
    then = (
        "server.onmessage().then(() => { console.log('taken'); titles = [];"
        " return server.onmessage(); }).then(() => { titles = ['Cost', 'Population', 'Trials'];"
        " return server.onmessage(); }).then(() => console.log('taken'));"
    )
    said = subprocess.run(["node", "-e", BROWSER + live + then], check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == ["taken", "loaded anew", "taken"]
