"""Sends a video over HTTP, whole or the part that a player asks for."""

import http.server
import os
import re
from collections.abc import Mapping
from pathlib import Path

from polyak.storage.files import open_regular

_BLOCK = 256 * 2**10


def send_video(handler: http.server.BaseHTTPRequestHandler, path: Path | None, headers: Mapping[str, str]) -> None:
    """Answer a request for a video; 404 without one, 416 for a range outside of it."""
    try:
        if path is None:
            raise FileNotFoundError
        file = open_regular(path)
    except (OSError, ValueError):
        _start(handler, 404, {"Content-Length": "0"}, headers)
        return
    with file:
        size = os.fstat(file.fileno()).st_size
        span = _parse_range(handler.headers.get("Range"), size)
        if span is None:
            _start(handler, 416, {"Content-Range": f"bytes */{size}", "Content-Length": "0"}, headers)
            return
        start, end = span
        own = {"Content-Type": "video/mp4", "Content-Length": str(end - start), "Accept-Ranges": "bytes"}
        is_part = (start, end) != (0, size)
        own |= {"Content-Range": f"bytes {start}-{end - 1}/{size}"} if is_part else {}
        _start(handler, 206 if is_part else 200, own, headers)
        file.seek(start)
        left = 0 if handler.command == "HEAD" else end - start
        while left and (data := file.read(min(_BLOCK, left))):
            handler.wfile.write(data)
            left -= len(data)


def _start(handler: http.server.BaseHTTPRequestHandler, code: int, own: Mapping[str, str], headers: Mapping[str, str]) -> None:
    handler.send_response(code)
    for name, value in {**headers, **own, "Content-Security-Policy": "default-src 'none'"}.items():
        handler.send_header(name, value)
    handler.end_headers()


def _parse_range(text: str | None, size: int) -> tuple[int, int] | None:
    """Return the first byte and the one after the last; None for a range outside of the file. Other forms are ignored."""
    found = re.fullmatch(r"bytes=(\d{1,15})-(\d{0,15})", text or "")
    if found is None:
        return 0, size
    start, end = int(found[1]), int(found[2]) + 1 if found[2] else size
    return (start, min(end, size)) if start < min(end, size) else None
