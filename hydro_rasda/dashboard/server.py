"""The server: a list of runs, a page for each, and a stream of events that says when one has changed."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from hydro_rasda.checks import require
from hydro_rasda.page.write import list_page, page
from hydro_rasda.run.reading import read_record
from hydro_rasda.run.records import RunRecord

EXTRA = "pip install 'hydro-rasda[dashboard]'"
LOCAL = ("127.0.0.1", "localhost")

LOOK_SECONDS = 1.0
"""Between two looks at the journals."""

_SHARE = 5
"""So many times as long as a page took to be made, its next is not: no core is kept busy with it."""

_COOKIE = "hydro_rasda"


def serve(folder: str | Path, host: str = "127.0.0.1", port: int = 8470) -> None:
    """Show the runs of a folder until Ctrl-C; prints the address.

    Args:
        folder: A `storage_path` of `tune`, or a run's own folder; it may be yet to be made.
        host: Where to listen. Elsewhere than on this machine alone, the address that is printed holds a token.
        port: 0 for any that is free.

    Raises:
        ImportError: where the server's packages are not there; it says what to install.
        ValueError: where the port is none.
        OSError: where it is taken.
    """
    require(0 <= port < 65536, "port", port, "a port, 0 to 65535")
    try:
        import uvicorn
    except ImportError as error:
        raise ImportError(f"the dashboard needs {error.name}, which is not there: {EXTRA}") from error
    token = "" if host in LOCAL else secrets.token_urlsafe(24)
    # Readers hold streams open, which end with the server: nothing to be told of.
    quiet: dict[str, Any] = {"log_level": "critical", "timeout_graceful_shutdown": 1}
    config = uvicorn.Config(make_app(folder, token, host), host=host, port=port, **quiet)
    six = ":" in host
    with socket.create_server((host, port), family=socket.AF_INET6 if six else socket.AF_INET) as listening:
        found = listening.getsockname()[1]
        query = f"?token={token}" if token else ""
        print(f"http://{f'[{host}]' if six else host}:{found}/{query}", flush=True)
        uvicorn.Server(config).run(sockets=[listening])


Stamp = tuple[int, int]
"""Changes where a journal does: its length and when it was written."""


@dataclass(frozen=True)
class _Made:
    """A page as it was made last, and when, and how long that took."""

    stamp: Stamp
    html: str
    took: float
    at: float


class Runs:
    """The runs of a folder, read again, and made into a page again, where their journals have changed."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self._read: dict[str, tuple[Stamp, RunRecord | None]] = {}
        self._made: dict[str, _Made] = {}
        self._lock = Lock()

    def paths(self) -> dict[str, Path]:
        """The folders of the runs that there are, by name."""
        if (self.folder / "run.json").is_file():
            return {self.folder.name: self.folder}
        return {path.parent.name: path.parent for path in self.folder.glob("*/run.json")}

    def stamp(self, name: str) -> Stamp:
        """Of the journal as it is."""
        path = self.paths()[name]
        journal = path / "journal.jsonl"
        stat = (journal if journal.exists() else path / "run.json").stat()
        return stat.st_size, stat.st_mtime_ns

    def listed(self) -> list[tuple[str, RunRecord | None, float]]:
        """All runs as `list_page` takes them, the last written first."""
        with self._lock:
            stamps = {name: self.stamp(name) for name in self.paths()}
            latest = sorted(stamps, key=lambda name: -stamps[name][1])
            return [(name, self._record(name, stamps[name]), stamps[name][1] / 1e9) for name in latest]

    def _record(self, name: str, stamp: Stamp) -> RunRecord | None:
        if name not in self._read or self._read[name][0] != stamp:
            try:
                record = read_record(self.paths()[name])
            except (ValueError, KeyError, TypeError, OSError):  # another program's, or of an older version
                record = None
            self._read[name] = stamp, record
        return self._read[name][1]

    def shown(self, name: str) -> Stamp:
        """Of what `page` gives: where a page has just been made, for a while that of this page."""
        made = self._made.get(name)
        if made is not None and time.monotonic() - made.at < _SHARE * made.took:
            return made.stamp
        return self.stamp(name)

    def page(self, name: str) -> str:
        """The page of a run."""
        with self._lock:
            stamp, made = self.shown(name), self._made.get(name)
            if made is None or made.stamp != stamp:
                began = time.monotonic()
                record = self._record(name, stamp)
                html = "not readable" if record is None else page(record, live=True)
                made = self._made[name] = _Made(stamp, html, time.monotonic() - began, time.monotonic())
            return made.html


def make_app(folder: str | Path, token: str = "", host: str = "127.0.0.1") -> Any:
    """The server as an ASGI application.

    Args:
        folder: See `serve`.
        token: What the first request must bring, as `?token=`; a cookie keeps it. Empty: none.
        host: Where it will listen; on this machine alone, it answers to no other name (DNS rebinding).
    """
    try:
        from plotly.offline import get_plotlyjs
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.requests import Request
        from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
        from starlette.routing import Route
    except ImportError as error:
        raise ImportError(f"the dashboard needs {error.name}, which is not there: {EXTRA}") from error
    runs = Runs(folder)

    # Those that read files are no coroutines: Starlette has threads for them.
    def index(request: Request) -> Response:
        return HTMLResponse(list_page(runs.listed(), runs.folder))

    def run(request: Request) -> Response:
        name = request.path_params["name"]
        return HTMLResponse(runs.page(name)) if name in runs.paths() else Response("no such run", 404)

    def plotly(request: Request) -> Response:
        headers = {"Cache-Control": "max-age=86400"}
        return Response(get_plotlyjs(), media_type="text/javascript", headers=headers)

    async def events(request: Request) -> Response:
        name = request.path_params.get("name")
        if name is not None and name not in runs.paths():
            return Response("no such run", 404)
        return StreamingResponse(_changes(request, runs, name), media_type="text/event-stream")

    async def guarded(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.query_params.get("token", "")
        if token and given and hmac.compare_digest(given.encode(), token.encode()):
            response: Response = RedirectResponse(request.url.remove_query_params("token"))
            response.set_cookie(_COOKIE, token, httponly=True, samesite="strict")
            return response
        held = request.cookies.get(_COOKIE, "")
        if token and not hmac.compare_digest(held.encode(), token.encode()):
            return Response("the address that the dashboard printed holds a token", 403)
        response = await call_next(request)
        response.headers.update({"X-Frame-Options": "DENY", "X-Content-Type-Options": "nosniff"})
        response.headers.setdefault("Cache-Control", "no-store")
        return response

    from starlette.middleware.base import BaseHTTPMiddleware

    middleware = [Middleware(BaseHTTPMiddleware, dispatch=guarded)]
    if host in LOCAL:
        middleware.insert(0, Middleware(TrustedHostMiddleware, allowed_hosts=[*LOCAL]))
    routes = [
        Route("/", index),
        Route("/plotly.js", plotly),
        Route("/events", events),
        Route("/run/{name}/", run),
        Route("/run/{name}/events", events),
    ]
    return Starlette(routes=routes, middleware=middleware)


async def _changes(request: Any, runs: Runs, name: str | None) -> AsyncIterator[str]:
    """A line at first, as what the reader has may be old by now, and where something changes: one run, or any."""
    seen: Any = ()
    while not await request.is_disconnected():
        now = _state(runs, name)
        if now != seen:
            yield "data: changed\n\n"
        seen = now
        await asyncio.sleep(LOOK_SECONDS)


def _state(runs: Runs, name: str | None) -> Any:
    try:
        return runs.shown(name) if name is not None else {each: runs.stamp(each) for each in runs.paths()}
    except (KeyError, OSError):  # removed meanwhile
        return None
