"""`polyak report --live`: a page of all runs of a directory, on this machine only, brought up to date while trainings write."""

import hashlib
import http.server
import threading
import time
import urllib.parse
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyak.reports.live_runs import LiveRuns
from polyak.reports.live_video import send_video
from polyak.reports.page import Live, content_policy, render_page, render_update, require_bokeh

HOST = "127.0.0.1"

POLL_SECONDS = 2.0
"""Seconds between two requests of a page that is in sight."""

MAX_CPU_SHARE = 0.004
"""Share of one core that bringing pages up to date may take, as trainings run beside it."""

MAX_PAGES = 64
"""Number of different pages (choices of runs) that are kept."""

THREADS, MAX_CONNECTIONS, TIMEOUT = 16, 256, 5.0

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Query:
    """The content of a page: one run, or the chosen runs compared by the groups of a setting."""

    show: str | None = None
    picked: tuple[str, ...] = ()
    group_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """A page as it was last made, with a tag that changes with its content, and the state of the runs that it shows."""

    update: bytes
    etag: str
    state: int


class LivePages:
    """The pages of a directory: one is made at a time, and again only if runs have changed and there is time for it.

    A hundred browser tabs with the same page cost one page. The first request of a page is answered at once; after each later
    one no page is made for 1 / `MAX_CPU_SHARE` of its CPU time.
    """

    def __init__(self, directory: Path) -> None:
        self.runs = LiveRuns(directory)
        self._pages: OrderedDict[Query, Page] = OrderedDict()
        self._lock = threading.Lock()
        self._rest_until = 0.0

    def page(self, query: Query) -> bytes:
        """Return the whole page, with the newest content."""
        with self._lock:
            self.runs.refresh()
            return render_page(self.runs.view(query.show, query.picked, query.group_by), Live(POLL_SECONDS))

    def update(self, query: Query) -> Page:
        """Return the content of a page, the same as before if there is nothing new or no time for it."""
        with self._lock:
            known = self._pages.get(query)
            if known is not None and time.monotonic() < self._rest_until:
                return known
            with self._count_cpu_time(is_first=known is None):
                state = self.runs.refresh()
                if known is None or known.state != state:
                    content = render_update(self.runs.view(query.show, query.picked, query.group_by), Live(POLL_SECONDS))
                    known = Page(content, f'"{hashlib.sha256(content).hexdigest()[:32]}"', state)
            self._pages[query] = known
            self._pages.move_to_end(query)
            while len(self._pages) > MAX_PAGES:
                self._pages.popitem(last=False)
            return known

    @contextmanager
    def _count_cpu_time(self, *, is_first: bool) -> Iterator[None]:
        before = time.thread_time()
        try:
            yield
        finally:
            # A reader waits for a new page, which is rare.
            if not is_first:
                self._rest_until = time.monotonic() + (time.thread_time() - before) / MAX_CPU_SHARE


class _Server(http.server.HTTPServer):
    """Answers on a bounded number of threads; a connection beyond `MAX_CONNECTIONS` is closed at once."""

    request_queue_size = 128

    def __init__(self, port: int, pages: LivePages) -> None:
        self.pages = pages
        # Before the socket is bound: a port in use closes the server.
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="report")
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((HOST, port), _Handler)

    @property
    def hosts(self) -> set[str]:
        """The names by which a browser on this machine calls the server."""
        return {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._pool.submit(self._answer, request, client_address)

    def _answer(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError:  # the browser has gone
            pass
        except Exception:
            self.handle_error(request, client_address)  # prints it; other requests are answered
        finally:
            self.shutdown_request(request)
            self._connections.release()

    def server_close(self) -> None:
        super().server_close()
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET and HEAD for this machine's own browser; no address names a file."""

    server: _Server
    server_version, sys_version = "polyak", ""
    timeout = TIMEOUT

    def do_GET(self) -> None:
        """Answer a page, an update of one, or a video."""
        if self.headers.get("Host") not in self.server.hosts:
            self._send(403, b"This page is for browsers on this machine: open http://127.0.0.1 with the port.\n", "text/plain")
            return
        address = urllib.parse.urlsplit(self.path)
        try:
            query = _parse_query(address.query)
        except ValueError:
            self._send(400, b"The address cannot be read.\n", "text/plain")
            return
        match address.path:
            case "/":
                self._send(200, self.server.pages.page(query), "text/html")
            case "/update":
                page = self.server.pages.update(query)
                if self.headers.get("If-None-Match") == page.etag:
                    self._send(304, b"", "application/json", page.etag)
                else:
                    self._send(200, page.update, "application/json", page.etag)
            case "/video":
                send_video(self, self.server.pages.runs.find_video(query.show or ""), HEADERS)
            case _:
                self._send(404, b"There is no such page.\n", "text/plain")

    do_HEAD = do_GET

    def _reject(self) -> None:
        self._send(405, b"Only GET and HEAD are answered: nothing can be changed here.\n", "text/plain")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _reject

    def _send(self, code: int, body: bytes, kind: str, etag: str | None = None) -> None:
        self.send_response(code)
        own = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        own |= {"ETag": etag} if etag else {}
        own |= {"Allow": "GET, HEAD"} if code == 405 else {}
        policy = f"{content_policy(is_live=True)}; frame-ancestors 'none'" if code == 200 else "default-src 'none'"
        for name, value in (HEADERS | own | {"Content-Security-Policy": policy}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a page asks every two seconds."""


def serve_reports(directory: Path, port: int, on_start: Callable[[str], None]) -> None:
    """Serve the live page of a directory until Ctrl-C.

    Args:
        directory: the directory of runs, which may still be empty, or a run.
        port: the port; 0 is any that is free.
        on_start: called with the address once the server accepts connections.

    Raises:
        OSError: the port is in use or not allowed.
        RunError: there is no such directory, or it cannot be read.
        ImportError: the extra `report` is missing.
    """
    require_bokeh()
    pages = LivePages(directory)
    with _Server(port, pages) as server:
        on_start(f"http://{HOST}:{server.server_port}/")
        server.serve_forever()


def _parse_query(text: str) -> Query:
    """Parse the part of an address after `?`.

    Raises:
        ValueError: it is malformed or too long.
    """
    pairs = urllib.parse.parse_qsl(text, max_num_fields=2_000, encoding="utf-8", errors="strict")
    values: dict[str, list[str]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    return Query(values.get("show", [None])[0], tuple(dict.fromkeys(values.get("run", ()))), tuple(values.get("group-by", ())))
