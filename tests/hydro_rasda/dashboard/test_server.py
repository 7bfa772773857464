"""The dashboard as it is served, to a client and to a real Chromium, while a run's journal grows."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from hydro_rasda.cli import main
from tests.hydro_rasda.browser import ALL_DRAWN, errors, needs_chromium, open_page, wait
from tests.hydro_rasda.journals import write_run

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from hydro_rasda.dashboard.server import Runs, make_app  # noqa: E402

PATIENCE_S = 60.0


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


def _serving(folder: Path, token: str = "") -> Iterator[tuple[str, Path]]:
    config = uvicorn.Config(make_app(folder, token), host="127.0.0.1", port=0, log_level="critical")
    config.timeout_graceful_shutdown = 1
    server, socket = uvicorn.Server(config), config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    until = time.monotonic() + PATIENCE_S
    while not server.started:
        assert time.monotonic() < until
        time.sleep(0.01)
    yield f"http://127.0.0.1:{socket.getsockname()[1]}/", folder
    server.should_exit = True
    thread.join(PATIENCE_S)
    socket.close()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        text: str = answer.read().decode()
    return text


@needs_chromium
def test_a_run_is_followed_from_before_it_begins(served: tuple[str, Path], browser: Any, tmp_path: Path) -> None:
    url, folder = served
    record = write_run(tmp_path / "whole")
    open_page(browser, url)
    assert "No run yet" in browser.page_source
    run = Grows(folder / "night 1", tmp_path / "whole")
    run.to(0.4)
    wait(browser, "return document.querySelectorAll('#runs a').length === 1")
    browser.execute_script("document.querySelector('#runs a').click()")
    wait(browser, ALL_DRAWN)
    assert browser.title == "night 1 · hydro_rasda"
    assert "on a surrogate" in browser.execute_script("return document.querySelector('.lead').textContent")
    bars = "return document.getElementById('timeline').data.reduce((sum, bar) => sum + bar.x.length, 0)"
    before = browser.execute_script(bars)
    browser.execute_script("document.querySelector('#section-1 details').open = true")
    run.to(1)
    best = f"Trial {record.best_trial} has the best val_loss: {record.best_metric:.4g}, after"
    wait(browser, f"return document.querySelector('.lead').textContent.startsWith('{best}')")
    wait(browser, ALL_DRAWN)
    assert browser.execute_script(bars) > before
    assert browser.execute_script("return document.querySelector('#section-1 details').open")
    assert errors(browser) == []
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
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        assert 'href="run/a/"' in get(url)
        taken = main(["dashboard", str(tmp_path), "--port", url.split(":")[2].strip("/")])
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=PATIENCE_S)
    assert taken == 2
    assert "Traceback" not in told


def test_other_names_and_missing_tokens_are_refused(served: tuple[str, Path], tmp_path: Path) -> None:
    url, _ = served
    connection = HTTPConnection(url.split("/")[2], timeout=PATIENCE_S)
    connection.request("GET", "/", headers={"Host": "evil.example"})
    assert connection.getresponse().status == 400
    connection.close()
    for guarded, _ in _serving(tmp_path, token="secret"):
        for address in (guarded, guarded + "?token=wrong", guarded + "plotly.js"):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                get(address)
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(guarded + "?token=secret", timeout=PATIENCE_S) as answer:
            assert "Runs" in answer.read().decode()
            assert "token" not in answer.url
        with opener.open(guarded, timeout=PATIENCE_S) as answer:
            assert answer.status == 200
