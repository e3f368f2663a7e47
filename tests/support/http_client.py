"""Requests to a page, byte by byte, so that tests can also send what no browser would."""

from __future__ import annotations

import asyncio
from typing import NamedTuple
from urllib.parse import urlsplit


class Reply(NamedTuple):
    """An answer: its status, its headers in lower case, and its body."""

    status: int
    headers: dict[str, str]
    body: str


def request_text(url: str, path: str | None = None, *, method: str = "GET", **headers: str) -> bytes:
    """Return the bytes of a request for a path, by default that of the link."""
    parts = urlsplit(url)
    target = path if path is not None else f"{parts.path}?{parts.query}"
    lines = {"Host": parts.netloc, **{name.replace("_", "-"): value for name, value in headers.items()}}
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {target} HTTP/1.1\r\n{text}\r\n".encode()


async def send(url: str, request: bytes) -> Reply:
    """Send a request, and return the answer."""
    parts = urlsplit(url)
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(request)
            text = (await reader.read()).decode()
        finally:
            writer.close()
    head, _, body = text.partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return Reply(int(first.split()[1]) if first else 0, headers, body)


async def get(url: str, path: str | None = None, **more: str) -> Reply:
    """Send a plain request; see `request_text`."""
    return await send(url, request_text(url, path, **more))


def with_path(url: str, name: str, **query: object) -> str:
    """Return the path of another part of the page, with the token of its link."""
    token = urlsplit(url).query
    return f"/{name}?{token}" + "".join(f"&{key}={value}" for key, value in query.items())
