"""All runs of a folder, live in a browser: a list, a page for each run (`hydro_rasda.plots.page`), and change events.

The dashboard only reads, so it may start before, during or after a run, and the run does not notice it. A page is made
when a reader asks for it, and made again after its journal has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import secrets
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from html import escape
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from hydro_rasda.common.argument_checks import require
from hydro_rasda.common.optional_packages import needed_by
from hydro_rasda.plots.page.sections import Drawn
from hydro_rasda.plots.page.write import Page, list_page, prepare
from hydro_rasda.records.record_from_journal import Follower, Stamp, Unreadable, or_why, runs_in, stamp
from hydro_rasda.records.records import RunRecord
from hydro_rasda.run.run_json import SPEC

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response


LOOK_SECONDS = 1.0
"""Seconds between two looks at the journals."""

_SHARE = 5
"""A page that took one second to make is kept for this many seconds, so that making pages keeps no core busy."""

PAGES = 32
"""The most pages that are kept. If there are more, the oldest is dropped."""


@dataclass
class _Made:
    """A page that was made. Until the time `until`, it is not made again."""

    stamps: tuple[Stamp, ...]
    page: Page | None = None
    html: str = ""
    until: float = -math.inf

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Time the context, in which the page or a figure is made; keep the page for `_SHARE` times as long."""
        began = time.monotonic()
        yield
        now = time.monotonic()
        self.until = max(self.until, now) + _SHARE * (now - began)


class Runs:
    """The runs of a folder. After a run's journal has changed, the run is read again, and its page is made again."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self._read: dict[str, tuple[Stamp, RunRecord | Unreadable]] = {}
        self._followers: dict[str, Follower] = {}  # only for runs that have not ended
        self._made: dict[tuple[str, ...], _Made] = {}
        self._locks: defaultdict[str, Lock] = defaultdict(Lock)
        self._stamps: dict[str, Stamp] = {}
        self._looked = -math.inf

    def stamps(self) -> dict[str, Stamp]:
        """Map the name of each run to the stamp of its journal; look at the journals at most once in `LOOK_SECONDS`."""
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            found = {}
            for path in runs_in(self.folder):
                with contextlib.suppress(OSError):  # the run was removed meanwhile
                    found[path.name] = stamp(path)
            self._stamps, self._looked = found, time.monotonic()
        return self._stamps

    def _path(self, name: str) -> Path:
        return self.folder if self.folder.name == name and (self.folder / SPEC).is_file() else self.folder / name

    def listed(self) -> list[tuple[str, RunRecord | Unreadable, float]]:
        """Return all runs in the form that `list_page` needs, the last written first."""
        stamps = self.stamps()
        latest = sorted(stamps, key=lambda name: -stamps[name][1])
        return [(name, self._record(name, stamps[name]), stamps[name][1] / 1e9) for name in latest]

    def _record(self, name: str, stamp: Stamp) -> RunRecord | Unreadable:
        # Not the lock of the run's page, because the list must not wait until the page is made.
        with self._locks[f"{name}/record"]:
            if name not in self._read or self._read[name][0] != stamp:
                follower = self._followers.pop(name, None) or Follower(self._path(name))
                found = or_why(follower.read)
                if not isinstance(found, Unreadable) and not found.ended:
                    self._followers[name] = follower
                self._read[name] = stamp, found
            return self._read[name][1]

    def shown(self, *names: str) -> tuple[Stamp, ...]:
        """Return the journal stamps of what `page` would show. They may be old, because pages are kept for a while."""
        made = self._made.get(names)
        if made is not None and time.monotonic() < made.until:
            return made.stamps
        stamps = self.stamps()
        return tuple(stamps[name] for name in names)

    def page(self, *names: str) -> str:
        """Return one run's page, or that of several side by side, without figures. Making it blocks no other page."""
        return self._page(names).html

    def figure(self, figure: str, *names: str) -> str | None:
        """Return a figure of a page as JSON, drawn once; None if there is none. Drawing it blocks no other figure."""
        made = self._page(names)
        drawing = None if made.page is None else made.page.drawings.get(figure)
        if drawing is None:
            return None
        with made.working():
            found = or_why(drawing.drawn)
        return (Drawn("", note=f"not drawn: {found}") if isinstance(found, Unreadable) else found).served

    def _page(self, names: tuple[str, ...]) -> _Made:
        with self._locks["page/" + "/".join(names)]:
            stamps, made = self.shown(*names), self._made.get(names)
            if made is None or made.stamps != stamps:
                made = _Made(stamps)
                with made.working():
                    found = or_why(partial(self._make, names, stamps))
                    if isinstance(found, Unreadable):
                        made.html = f"not readable: {escape(found)}"
                    else:
                        made.page, made.html = found
                while len(self._made) >= PAGES:
                    self._made.pop(next(iter(self._made)), None)
                self._made[names] = made
            return made

    def _make(self, names: Sequence[str], stamps: Sequence[Stamp]) -> tuple[Page, str]:
        records = [self._record(name, stamp) for name, stamp in zip(names, stamps)]
        for record in records:
            if isinstance(record, Unreadable):
                raise ValueError(record)
        page = Page(*[record for record in records if not isinstance(record, Unreadable)])
        return page, page.html(live=True)


LOCAL = ("127.0.0.1", "localhost")
EVERYWHERE = ("0.0.0.0", "::", "")

STREAM_SECONDS = 600.0
"""Seconds after which an event stream ends. Browsers then open the next one, unless their reader has left."""

PATIENCE_SECONDS = 20.0
"""A client is disconnected if it reads nothing of an answer, or sends no request, for this many seconds."""


def serve(folder: str | Path, host: str = "127.0.0.1", port: int = 8470, as_json: bool = False) -> None:
    """Show the runs of a folder in browsers until Ctrl-C, and print the address, with the token that readers need.

    Args:
        folder: A `storage_path` of `tune`, or the folder of a run; it need not exist yet.
        port: The port at which to listen; 0 for any free port.
        as_json: Print the address as a line of JSON, `{"url": ..., "folder": ...}`.
    """
    require(0 <= port < 65536, "port", port, "a port, 0 to 65535")
    with needed_by("the dashboard", "dashboard"):
        import uvicorn
    token, six = secrets.token_urlsafe(24), ":" in host
    with socket.create_server((host, port), family=socket.AF_INET6 if six else socket.AF_INET) as listening:
        found = listening.getsockname()[1]
        threading.Thread(target=prepare, daemon=True).start()
        shown = _own_address(six) if host in EVERYWHERE else host
        url = f"http://{f'[{shown}]' if ':' in shown else shown}:{found}/?token={token}"
        print(json.dumps({"url": url, "folder": str(Path(folder).absolute())}) if as_json else url, flush=True)
        uvicorn.Server(make_config(folder, token, host, found)).run(sockets=[listening])


def _own_address(six: bool) -> str:
    """Return an address of this machine that other machines can open; its name if it has no route to them."""
    family, far = (socket.AF_INET6, "2001:db8::1") if six else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((far, 9))  # sends nothing: a datagram socket only looks up the route
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


def make_config(folder: str | Path, token: str, host: str = "127.0.0.1", port: int = 0) -> uvicorn.Config:
    """Return the server's configuration; the arguments are those of `make_app`."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):
        """Disconnects clients that neither send requests nor read answers, because such connections cost memory."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            # Make the kernel's buffer small. Only the buffer of this process shows whether a client reads.
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**17)
            self._look(0, False)

        def _look(self, before: int, idle: bool) -> None:
            if self not in self.connections:
                return
            left = self.transport.get_write_buffer_size()
            answers = self.cycle is not None and not self.cycle.response_complete
            if (left and left == before) or (idle and not answers and not left):
                # Let the kernel drop unread data at once, instead of waiting until the client reads it.
                connection = self.transport.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.transport.abort()
            else:
                self.loop.call_later(PATIENCE_SECONDS, self._look, left, not answers)

    # When the server ends, readers still have event streams open. Wait only a second for them, and log nothing.
    quiet: dict[str, Any] = {"log_level": "critical", "timeout_graceful_shutdown": 1}
    return uvicorn.Config(make_app(folder, token, host, port), host=host, port=port, http=Impatient, **quiet)


def make_app(folder: str | Path, token: str, host: str = "127.0.0.1", port: int = 0) -> Any:
    """Make the server as an ASGI application.

    Args:
        token: The secret that the first request must carry, as `?token=`. A cookie then keeps it.
        host: Address at which the server will listen. If it is local, the server refuses requests for other host names,
            against DNS rebinding.
        port: Port at which the server will listen. It is part of the cookie's name, because all ports share cookies.
    """
    require(bool(token), "token", token, "a secret that cannot be guessed")
    with needed_by("the dashboard", "dashboard"):
        from plotly.offline import get_plotlyjs
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.base import BaseHTTPMiddleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.responses import HTMLResponse, Response, StreamingResponse
        from starlette.routing import Route
    runs = Runs(folder)
    script = cache(lambda: get_plotlyjs().encode())

    # Handlers that read files are plain functions, which Starlette runs in threads.
    def index(request: Request) -> Response:
        return HTMLResponse(list_page(runs.listed(), runs.folder))

    def run(request: Request) -> Response:
        names = _named(request, runs)
        return HTMLResponse(runs.page(*names)) if names else Response("no such run", 404)

    def figure(request: Request) -> Response:
        names = _named(request, runs)
        found = runs.figure(request.path_params["figure"], *names) if names else None
        return Response("no such figure", 404) if found is None else Response(found, media_type="application/json")

    def plotly(request: Request) -> Response:
        headers = {"Cache-Control": "max-age=86400"}
        return Response(script(), media_type="text/javascript", headers=headers)

    async def events(request: Request) -> Response:
        names = _named(request, runs)
        if not names and request.url.path != "/events":
            return Response("no such run", 404)
        return StreamingResponse(_changes(request, runs, names), media_type="text/event-stream")

    middleware = [Middleware(BaseHTTPMiddleware, dispatch=partial(_guarded, token, f"hydro_rasda_{port}"))]
    if host in LOCAL:
        middleware.insert(0, Middleware(TrustedHostMiddleware, allowed_hosts=[*LOCAL]))
    routes = [
        Route("/", index),
        Route("/plotly.js", plotly),
        Route("/events", events),
        Route("/run/{name}/", run),
        Route("/run/{name}/figure/{figure}", figure),
        Route("/run/{name}/events", events),
        Route("/compare/", run),
        Route("/compare/figure/{figure}", figure),
        Route("/compare/events", events),
    ]
    return Starlette(routes=routes, middleware=middleware)


def _named(request: Request, runs: Runs) -> tuple[str, ...]:
    """Return the names of the runs that a request asks for; an empty tuple if one of them does not exist."""
    one = request.path_params.get("name")
    names = tuple(dict.fromkeys(request.query_params.getlist("run"))) if one is None else (one,)
    return names if {*names} <= runs.stamps().keys() else ()


async def _guarded(
    token: str, cookie: str, request: Request, call_next: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Answer only requests that have the token in their address, or in the cookie that the first answer sets."""
    from starlette.responses import RedirectResponse, Response

    given = request.query_params.get("token", "")
    if given and hmac.compare_digest(given.encode(), token.encode()):
        response: Response = RedirectResponse(request.url.remove_query_params("token"))
        response.set_cookie(cookie, token, httponly=True, samesite="strict")
        return response
    held = request.cookies.get(cookie, "")
    if not hmac.compare_digest(held.encode(), token.encode()):
        return Response("the address that the dashboard printed holds a token", 403)
    response = await call_next(request)
    response.headers.update({"X-Frame-Options": "DENY", "X-Content-Type-Options": "nosniff"})
    response.headers.setdefault("Cache-Control", "no-store")
    return response


async def _changes(request: Any, runs: Runs, names: Sequence[str]) -> AsyncIterator[str]:
    """Yield an event at once, because the browser's page may be old, and another whenever one of the runs changes.

    `names` are the runs that count. If it is empty, all runs count.
    """
    seen: Any = ()
    until = time.monotonic() + STREAM_SECONDS
    while time.monotonic() < until and not await request.is_disconnected():
        now = _state(runs, *names)
        if now != seen:
            yield "data: changed\n\n"
        seen = now
        await asyncio.sleep(LOOK_SECONDS)


def _state(runs: Runs, *names: str) -> Any:
    try:
        return runs.shown(*names) if names else runs.stamps()
    except KeyError:  # a run was removed meanwhile
        return None
