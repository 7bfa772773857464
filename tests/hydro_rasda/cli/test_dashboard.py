"""The dashboard as it is served, to a client and to a real Chromium, while a run's journal grows."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from select import POLLERR, POLLHUP, POLLRDHUP, poll
from socket import SO_RCVBUF, SOL_SOCKET, create_server, gethostname, socket
from typing import Any

import pytest

from hydro_rasda.cli import main
from hydro_rasda.plots.page import sections
from hydro_rasda.plots.page.sections import Drawn
from hydro_rasda.records.record_from_journal import runs_in
from hydro_rasda.records.records import RunRecord
from tests.hydro_rasda.browser import ALL_DRAWN, errors, needs_chromium, open_page, wait
from tests.hydro_rasda.conftest import Said
from tests.hydro_rasda.journals import write_run

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from hydro_rasda.cli import dashboard  # noqa: E402
from hydro_rasda.cli.dashboard import Runs, make_config  # noqa: E402

PATIENCE_S = 600.0
TOKEN = "of this test"


class Grows:
    """A run's folder that gets the journal of another, a part at a time."""

    def __init__(self, folder: Path, whole: Path) -> None:
        self.folder = folder
        self._lines = (whole / "journal.jsonl").read_text().splitlines(keepends=True)
        folder.mkdir(parents=True)
        shutil.copy(whole / "run.json", folder)

    def to(self, share: float) -> None:
        text = "".join(self._lines[: round(share * len(self._lines))])
        (self.folder / "journal.jsonl").write_text(text)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A dashboard of an empty folder."""
    folder = tmp_path / "runs"
    folder.mkdir()
    yield from _serving(folder)


def _serving(folder: Path) -> Iterator[tuple[str, Path]]:
    listening = create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    server = uvicorn.Server(make_config(folder, TOKEN, port=port))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    until = time.monotonic() + PATIENCE_S
    while not server.started:
        assert time.monotonic() < until
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}/", folder
    server.should_exit = True
    thread.join(PATIENCE_S)
    listening.close()


def address(url: str) -> str:
    """What the server prints."""
    return f"{url}?{urllib.parse.urlencode({'token': TOKEN})}"


def get(url: str, printed: str = "") -> str:
    """A page, as a browser gets it that has opened the address that was printed."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    root = "/".join(url.split("/")[:3]) + "/"
    opener.open(printed or address(root), timeout=PATIENCE_S).close()
    with opener.open(url, timeout=PATIENCE_S) as answer:
        text: str = answer.read().decode()
    return text


@pytest.mark.slow
@needs_chromium
def test_a_run_is_followed_from_before_it_begins(served: tuple[str, Path], browser: Any, tmp_path: Path) -> None:
    url, folder = served
    record = write_run(tmp_path / "whole")
    open_page(browser, address(url))
    wait(browser, "return document.body !== null && document.body.textContent.includes('No run yet')")
    run = Grows(folder / "night 1", tmp_path / "whole")
    run.to(0.4)
    wait(browser, "return document.querySelectorAll('#runs a').length === 1")
    browser.execute_script("document.querySelector('#runs a').click()")
    wait(browser, ALL_DRAWN)
    assert browser.title == "night 1 · hydro_rasda"
    assert "on a surrogate" in browser.execute_script("return document.querySelector('.lead').textContent")
    wait(browser, "return /^updated \\d+ s ago$/.test(document.getElementById('updated').textContent)")
    bars = "return document.getElementById('timeline').data.reduce((sum, bar) => sum + bar.x.length, 0)"
    before = browser.execute_script(bars)
    browser.execute_script("document.querySelector('details').open = true")
    browser.find_element("xpath", "//th/button[.='trial']").click()
    browser.find_element("css selector", "#trials input").send_keys("adamw")
    run.to(1)
    best = f"Trial {record.best_trial} wins: val_loss {record.best_metric:.4g}"
    wait(browser, f"return document.querySelector('.lead').textContent.startsWith('{best}')")
    wait(browser, ALL_DRAWN)
    wait(browser, f"{bars} > {before}")
    assert browser.execute_script("return document.querySelector('details').open")
    numbers = "return [...document.querySelectorAll('#trials tbody tr')].map((row) => Number(row.cells[0].textContent))"
    adamw = [trial.trial for trial in record.trials if trial.config["optimizer"] == "adamw"]
    wait(browser, f"return ({numbers.removeprefix('return ')}).join() === '{','.join(map(str, adamw))}'")
    assert browser.execute_script("return document.querySelector('#trials input').value") == "adamw"
    assert errors(browser) == []
    ago = "return document.getElementById('updated').textContent"
    hour = time.time() - 3601
    os.utime(run.folder / "journal.jsonl", (hour, hour))
    wait(browser, f"{ago} === 'updated 1 h ago'")
    # It only reads.
    assert sorted(path.name for path in run.folder.iterdir()) == ["journal.jsonl", "run.json"]


def test_pages_are_made_again_when_the_journal_has_changed(tmp_path: Path) -> None:
    write_run(tmp_path / "whole")
    run = Grows(tmp_path / "runs" / "a", tmp_path / "whole")
    run.to(0.3)
    runs = Runs(tmp_path / "runs")
    first, stamp = runs.page("a"), runs.shown("a")
    assert runs.page("a") is first
    run.to(1)
    until = time.monotonic() + PATIENCE_S
    while runs.shown("a") == stamp:  # not at once: no core is kept busy with it
        assert time.monotonic() < until
        time.sleep(0.1)
    assert runs.page("a") is not first


@needs_chromium
def test_ticked_runs_are_shown_side_by_side_and_followed(
    served: tuple[str, Path], browser: Any, tmp_path: Path
) -> None:
    url, folder = served
    write_run(tmp_path / "whole", num_samples=9)
    first, second = Grows(folder / "a & b", tmp_path / "whole"), Grows(folder / "c", tmp_path / "whole")
    first.to(1)
    second.to(0.5)
    open_page(browser, address(url))
    wait(browser, "return document.querySelectorAll('[name=run]').length === 2")
    button = "document.querySelector('#runs button')"  # the list may be replaced at any time
    assert browser.execute_script(f"return {button}.disabled")
    browser.execute_script("document.querySelectorAll('[name=run]').forEach((box) => box.click())")
    assert not browser.execute_script(f"return {button}.disabled")
    write_run(folder / "third", num_samples=3)
    wait(browser, "return document.querySelectorAll('[name=run]').length === 3")  # and the two are still ticked
    browser.execute_script(f"{button}.click()")
    wait(browser, ALL_DRAWN)
    assert {*browser.title.removesuffix(" · hydro_rasda").split(", ")} == {"a & b", "c"}
    lead = "return document.querySelector('.lead').textContent"
    assert browser.execute_script(lead) == "Not to be compared yet: one has no full-size model."
    second.to(1)
    wait(browser, f"{lead}.startsWith('Both reached val_loss')")
    traces = "return document.getElementById('winners-curves').data.length"
    wait(browser, f"{traces} === 4")
    assert errors(browser) == []
    for missing in ("compare/", "compare/?run=c&run=none", "compare/events", "compare/figure/none?run=c"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(url + missing)


def test_a_second_request_with_nothing_new_draws_no_figure(
    served: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, folder = served
    write_run(folder / "a")
    drawn: list[str] = []

    def counted(figure: Any) -> Drawn:
        drawn.append(held(figure).json)
        return held(figure)

    held = sections._held
    monkeypatch.setattr(sections, "_held", counted)
    for _ in range(2):
        assert "Trial " in get(f"{url}run/a/")
        assert drawn == []
    names = re.findall(r'id="([^"]+)" class="figure" data-drawing', get(f"{url}run/a/"))
    assert {"cost", "learning-curves", "slice-3", "timeline"} <= {*names}
    first, second = ([get(f"{url}run/a/figure/{name}") for name in names] for _ in range(2))
    assert first == second
    assert [*map(json.loads, drawn)] == [*map(json.loads, first)]
    assert json.loads(get(f"{url}run/a/figure/trials"))["heads"][0] == "trial"
    for missing in ("run/a/figure/none", "run/none/figure/timeline"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(url + missing)


def test_a_figure_that_cannot_be_drawn_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(record: RunRecord) -> None:
        raise ValueError("no such journal")

    write_run(tmp_path / "a", num_samples=3)
    monkeypatch.setattr("hydro_rasda.plots.timeline", broken)
    assert json.loads(str(Runs(tmp_path).figure("broken", "a"))) == {"note": "not drawn: no such journal"}


@pytest.mark.parametrize("slow", ["page", "figure"])
def test_a_page_or_figure_that_is_being_made_keeps_no_other_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    for name in "ab":
        write_run(tmp_path / name, num_samples=3)
    runs, begun, end = Runs(tmp_path), threading.Event(), threading.Event()

    def waits(record: RunRecord) -> list[Any]:
        if record.path.name == "a":
            begun.set()
            end.wait(PATIENCE_S)
        return []

    if slow == "page":
        monkeypatch.setattr("hydro_rasda.plots.page.write.sections", waits)
        work = threading.Thread(target=runs.page, args=["a"])
    else:
        monkeypatch.setattr("hydro_rasda.plots.timeline", waits)
        work = threading.Thread(target=runs.figure, args=["waits", "a"])
    work.start()
    try:
        assert begun.wait(PATIENCE_S)
        assert "<title>b" in runs.page("b")
        assert len(runs.listed()) == 2
        if slow == "figure":
            assert "<title>a" in runs.page("a")
            assert '"data"' in str(runs.figure("cost", "a"))
        assert work.is_alive()
    finally:
        end.set()
        work.join()


def test_a_run_that_cannot_be_read_does_not_hide_the_others(served: tuple[str, Path]) -> None:
    url, folder = served
    write_run(folder / "good", num_samples=3)
    (folder / "bad").mkdir()
    (folder / "bad" / "run.json").write_text("{}")
    listed = get(url)
    assert "not readable" in listed
    assert 'href="run/good/"' in listed
    for name in ("run/none/", "run/..%2F..%2Fetc/", "run/none/events"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(url + name)


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    write_run(tmp_path / "a", num_samples=3)
    command = [sys.executable, "-m", "hydro_rasda.cli", "dashboard", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:")
            assert 'href="run/a/"' in get(url.partition("?")[0], url)
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(url.partition("?")[0], timeout=PATIENCE_S)
            taken = main(["dashboard", str(tmp_path), "--port", url.split(":")[2].partition("/")[0]])
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()  # the end of the block waits for it
    assert taken == 2
    assert "Traceback" not in told


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost"])
def test_the_printed_address_is_one_that_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    dashboard.serve(tmp_path, host, port=0)
    shown = urllib.parse.urlsplit(capsys.readouterr().out.strip()).hostname
    if host == "localhost":
        assert shown == host
    else:
        assert shown in (dashboard._own_address(six=False), gethostname().lower())
        assert shown not in dashboard.EVERYWHERE


def test_a_program_reads_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    (line,) = said("dashboard", tmp_path, "--port", "0", "--json").splitlines()
    told = json.loads(line)
    assert told.keys() == {"url", "folder"}
    assert told["folder"] == str(tmp_path)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=\S{32}", told["url"])


def test_other_names_and_missing_tokens_are_refused(served: tuple[str, Path]) -> None:
    url, _ = served
    connection = HTTPConnection(url.split("/")[2], timeout=PATIENCE_S)
    connection.request("GET", "/", headers={"Host": "evil.example"})
    assert connection.getresponse().status == 400
    connection.close()
    for refused in (url, url + "?token=wrong", url + "plotly.js", url + "events"):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(refused, timeout=PATIENCE_S)
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with opener.open(address(url), timeout=PATIENCE_S) as answer:
        assert "Runs" in answer.read().decode()
        assert "token" not in answer.url
    with opener.open(url, timeout=PATIENCE_S) as answer:
        assert answer.status == 200


def test_two_dashboards_of_a_machine_do_not_lock_each_other_out(served: tuple[str, Path], tmp_path: Path) -> None:
    """Browsers send cookies to all ports of a machine."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    opener.open(address(served[0]), timeout=PATIENCE_S).close()
    for other, _ in _serving(tmp_path):
        opener.open(address(other), timeout=PATIENCE_S).close()
        for url in (served[0], other):
            opener.open(url, timeout=PATIENCE_S).close()


def bad_runs(folder: Path) -> list[str]:
    """Runs that somebody has put there to hide the others, or to keep their reader busy."""
    whole = folder / "good"
    write_run(whole, num_samples=3)
    spec, journal = (whole / "run.json").read_text(), (whole / "journal.jsonl").read_text()
    unit = journal.splitlines()[0]
    for name, asked, told in (
        ("deep", "[" * 100_000 + "]" * 100_000, ""),
        ("deep-journal", spec, '{"event": "a", "b":' + "[" * 100_000 + "]" * 100_000 + "}\n" + journal),
        ("nan", spec, journal.replace('"at": 0.5', '"at": NaN')),
        ("infinite", spec, journal.replace('"at": 0.5', '"at": 1e999')),
        ("large", spec, journal.replace('"at": 0.5', f'"at": {10**400}')),
        ("strange", spec, journal.replace('"members": [', '"members": [7, ')),
        ("words", spec, unit + "\n" + journal.replace('"val_loss": ', '"val_loss": "much", "x": ')),
    ):
        (folder / name).mkdir()
        (folder / name / "run.json").write_text(asked)
        (folder / name / "journal.jsonl").write_text(told)
    for name in ("fifo", "link", "zero"):
        (folder / name).mkdir()
        (folder / name / "run.json").write_text(spec)
    os.mkfifo(folder / "fifo" / "journal.jsonl")
    (folder / "link" / "journal.jsonl").symlink_to(whole / "journal.jsonl")
    (folder / "zero" / "journal.jsonl").symlink_to("/dev/zero")
    return [path.name for path in folder.iterdir() if path.name not in ("good", "strange")]


def test_a_bad_run_is_a_row_that_says_so(served: tuple[str, Path], said: Said) -> None:
    url, folder = served
    bad = bad_runs(folder)
    listed = get(url)
    assert 'href="run/good/"' in listed
    rows = {row.split('href="run/')[1].split("/")[0]: row for row in listed.split("<tr>")[2:]}
    assert {name for name, row in rows.items() if "not readable" in row} >= {*bad}
    assert "is a link to /dev/zero" in rows["zero"]
    assert "must be a regular file" in rows["fifo"]
    told = {row["name"]: row for row in json.loads(said("runs", folder, "--json"))}
    assert {name for name, row in told.items() if row["state"] == "not readable"} >= {*bad}
    assert told["good"]["trials"] == 3
    assert "nested more than 100 levels deep" in said("runs", folder)
    for name in bad:
        assert "not readable" in get(f"{url}run/{name}/")


def test_readers_share_one_look_at_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a look for each run and each reader, 45 readers of 100 runs kept all others waiting for 10 s."""
    looks: list[Path] = []

    def counted(folder: Path) -> list[Path]:
        looks.append(folder)
        return runs_in(folder)

    for name in ("a", "b", "c"):
        write_run(tmp_path / name, num_samples=3)
    monkeypatch.setattr(dashboard, "runs_in", counted)
    monkeypatch.setattr(dashboard, "LOOK_SECONDS", 3600.0)
    runs = Runs(tmp_path)
    for _ in range(45):
        assert dashboard._state(runs).keys() == {"a", "b", "c"}
        dashboard._state(runs, "b")
    assert {name for name, *_ in runs.listed()} == {"a", "b", "c"}
    assert len(looks) == 1


def test_who_stops_reading_or_never_asks_is_disconnected(
    served: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And who waits for events does not."""
    url, _ = served
    monkeypatch.setattr(dashboard, "PATIENCE_SECONDS", 0.2)
    host, port = url.split("/")[2].split(":")
    cookies = urllib.request.HTTPCookieProcessor()
    urllib.request.build_opener(cookies).open(address(url), timeout=PATIENCE_S).close()
    cookie = "; ".join(f"{each.name}={each.value}" for each in cookies.cookiejar)
    request = f"GET /{{}} HTTP/1.1\r\nHost: {host}\r\nCookie: {cookie}\r\n\r\n"
    follower = connected(host, port, request.format("events"))
    assert follower.recv(15) == b"HTTP/1.1 200 OK"
    for sent in (request.format("plotly.js"), "", request[:20]):
        assert closed(connected(host, port, sent), PATIENCE_S)
    assert not closed(follower, 0)


def connected(host: str, port: str, sent: str) -> socket:
    made = socket()
    made.setsockopt(SOL_SOCKET, SO_RCVBUF, 4096)
    made.settimeout(PATIENCE_S)
    made.connect((host, int(port)))
    made.sendall(sent.encode())
    return made


def closed(connection: socket, seconds: float) -> bool:
    """Whether the other end hangs up meanwhile, which is looked for without reading what it sent."""
    poller = poll()
    poller.register(connection, POLLHUP | POLLERR | POLLRDHUP)
    found = bool(poller.poll(1000 * seconds))
    connection.close()
    return found
