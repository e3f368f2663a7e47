"""Serve the page to browsers and metrics to Prometheus, over HTTP on the loopback interface.

Whoever has the link may look, and nobody can change anything. A request counts only with the token of the
link, by GET, and under a loopback name as its host, so that no web page that a browser has open can reach the
server through a name of its own (DNS rebinding). The number of connections and the time of each are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import json
import logging
import os
import re
import secrets
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, cast

from jaxpp_async.base.install_hints import pip_install
from jaxpp_async.errors import InstallError, PageError
from jaxpp_async.page.document import security_policy

if TYPE_CHECKING:
    from aiohttp import web

_LOG = logging.getLogger("jaxpp_async")

ADDRESS = "127.0.0.1"

MOST_CONNECTIONS = 32
"""The number of connections at the same time. For one more the oldest is cut that has not shown the token, or
it is refused if all have.
"""

CONNECTION_S, REQUEST_S = 20.0, 10.0
"""The most seconds that a connection may last, and that answering a request may take."""

_MOST_LINE, _MOST_HEADER = 2048, 8190
"""The most bytes of the request line and of a header."""

TOKEN_VARIABLE = "JAXPP_PAGE_TOKEN"
"""The environment variable with a token to use in the place of a random one, as Prometheus needs it."""

_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,200}")


class Responder(Protocol):
    """The part of a page that makes the answers."""

    async def page(self) -> str:
        """Return the page as HTML."""
        ...

    async def state(self, seen: int, run: str = "") -> Mapping[str, Any]:
        """Wait until the page may have changed, and return what has changed after a state.

        Args:
            seen: the number of the state.
            run: the run of the page that asks; all is new to a page of another run.
        """
        ...

    async def metrics(self) -> bytes:
        """Return the metrics for Prometheus."""
        ...


def check_packages(option: str) -> None:
    """Check that the packages are there that serving a page needs.

    Args:
        option: the option that asked for the page, such as `"page=True"`.

    Raises:
        InstallError: one of them is missing.
    """
    missing = [name for name in ("aiohttp", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise InstallError(
            f"{option} needs {' and '.join(missing)}; install the extra 'page' with: {pip_install('page')}"
        )


def choose_token() -> str:
    """Return the token of the link: that of the environment variable `JAXPP_PAGE_TOKEN`, or a random one.

    Raises:
        PageError: the variable has a token that could be guessed, or characters that no link has.
    """
    given = os.environ.get(TOKEN_VARIABLE)
    if given is None:
        return secrets.token_urlsafe(24)
    if not _TOKEN.fullmatch(given):
        raise PageError(f"{TOKEN_VARIABLE} has to be 16 to 200 letters, digits, '-' and '_'")
    return given


class PageServer:
    """An HTTP server of one page, made by `PageServer.start`.

    Attributes:
        url: the link to the page, with its token.
        num_refused: how many requests and connections were refused.
    """

    def __init__(self, responder: Responder, token: str, version: str):
        self._responder, self._token, self._version = responder, token.encode(), version
        self._connections: dict[_Connection, None] = {}  # the oldest first
        self._hosts: frozenset[str] = frozenset()
        self._listening: asyncio.Server | None = None
        self._http: Any = None
        self._has_warned = False
        self.url = ""
        self.num_refused = 0

    @classmethod
    async def start(cls, port: int, responder: Responder, *, version: str) -> PageServer:
        """Listen on a port of the loopback interface, and return the server.

        Args:
            port: the port; 0 for any that is free.
            responder: makes the answers.
            version: the version of this package.

        Raises:
            PageError: the port is taken, or this process may not listen on it.
            InstallError: a package is missing.
        """
        check_packages("page=True")
        from aiohttp import web

        token = choose_token()
        self = cls(responder, token, version)
        self._http = web.Server(
            self._answer,
            access_log=None,
            logger=_silent_logger(),
            max_line_size=_MOST_LINE,
            max_field_size=_MOST_HEADER,
            lingering_time=0,
        )
        loop = asyncio.get_running_loop()
        try:
            self._listening = await loop.create_server(
                lambda: _Connection(self._http(), self._connections, self._refuse), ADDRESS, port, backlog=64
            )
        except OSError as error:
            raise PageError(_why_no_port(port, error)) from None
        port = self._listening.sockets[0].getsockname()[1]
        self._hosts = hosts_of(port)
        self.url = f"http://{ADDRESS}:{port}/?token={token}"
        return self

    def _refuse(self) -> None:
        self.num_refused += 1

    async def aclose(self, within_s: float = 2.0) -> None:
        """Stop to listen, let requests under way end, and abort connections that are left.

        Args:
            within_s: the most seconds that requests under way may take.
        """
        self.close()
        if self._connections:
            await asyncio.wait([connection.ended for connection in self._connections], timeout=within_s)
        for connection in tuple(self._connections):
            connection.abort()
        if self._http is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._http.shutdown(0.1)

    def close(self) -> None:
        """Stop to listen, and leave connections to their ends."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    # ------------------------------------------------------------ requests

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        from aiohttp import web

        try:
            async with asyncio.timeout(REQUEST_S):
                status, kind, body = await self._respond(request)
        except TimeoutError:
            status, kind, body = 503, "text/plain", b"the page takes too long\n"
        except Exception:
            # Whatever is wrong with the page, training goes on; one warning is enough.
            if not self._has_warned:
                self._has_warned = True
                _LOG.warning("the page of the mesh could not be written", exc_info=True)
            status, kind, body = 500, "text/plain", b"the page could not be written; see the log of the run\n"
        if status >= 400:
            self._refuse()
        headers = {
            "Content-Type": f"{kind}; charset=utf-8" if ";" not in kind else kind,
            "Cache-Control": "no-store",
            "Content-Security-Policy": security_policy(),
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
        }
        if status == 405:
            headers["Allow"] = "GET"
        response = web.Response(status=status, body=body, headers=headers)
        response.force_close()
        return response

    async def _respond(self, request: web.BaseRequest) -> tuple[int, str, bytes]:
        """Return the status, the content type and the body of the answer to a request."""
        if request.method != "GET":
            return 405, "text/plain", b"only GET is allowed\n"
        if request.headers.get("Host", "").lower() not in self._hosts:
            port = self.url.rpartition(":")[2].partition("/")[0]
            text = (
                f"open this page under the address {ADDRESS}:{port}; from another machine, forward the same "
                f"port: ssh -L {port}:{ADDRESS}:{port} HOST\n"
            )
            return 403, "text/plain", text.encode()
        if not hmac.compare_digest(_token_of(request), self._token):
            return 403, "text/plain", b"the link has no token, or that of another run; see mesh.page_url\n"
        for connection in self._connections:
            connection.note_token(request.protocol)
        match request.path:
            case "/":
                return 200, "text/html", (await self._responder.page()).encode()
            case "/state":
                if request.query.get("version") != self._version:
                    return 409, "text/plain", b"this page is of another version; load it again\n"
                seen = request.query.get("seen", "")
                number = int(seen) if re.fullmatch(r"\d{1,15}", seen) else 0
                state = await self._responder.state(number, request.query.get("run", ""))
                return 200, "application/json", json.dumps(state).encode()
            case "/metrics":
                from jaxpp_async.page.prometheus import CONTENT_TYPE

                return 200, CONTENT_TYPE, await self._responder.metrics()
        return 404, "text/plain", b"there are /, /state and /metrics\n"


def hosts_of(port: int) -> frozenset[str]:
    """Return the values of `Host` under which the page answers on a port; browsers leave out port 80."""
    names = (ADDRESS, "localhost", "[::1]")
    return frozenset([*(f"{name}:{port}" for name in names), *(names if port == 80 else ())])


def _token_of(request: web.BaseRequest) -> bytes:
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() != "bearer":
        token = request.query.get("token", "")
    return token.strip().encode("utf-8", "surrogateescape")


class _Connection(asyncio.Protocol):
    """A connection that ends after some time, whatever its other end does or does not do.

    Args:
        http: the protocol that reads requests and writes answers.
        open_connections: all connections that are open, the oldest first.
        on_refused: called if there are too many of them.

    Attributes:
        has_token: whether a request with the token has come.
        ended: a future that is done when the connection has ended.
    """

    has_token = False

    def __init__(self, http: asyncio.Protocol, open_connections: dict[_Connection, None], on_refused: Any):
        self._http, self._open, self._on_refused = http, open_connections, on_refused
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def note_token(self, http: object) -> None:
        """Note that a request with the token has come, if it came to this protocol."""
        self.has_token = self.has_token or http is self._http

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        if len(self._open) >= MOST_CONNECTIONS:
            self._on_refused()
            stranger = next((connection for connection in self._open if not connection.has_token), None)
            if stranger is None:
                transport.abort()
                return
            del self._open[stranger]
            stranger.abort()
        self._transport = transport
        self._open[self] = None
        self._timer = asyncio.get_running_loop().call_later(CONNECTION_S, self.abort)
        self._http.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._transport is not None:
            self._http.data_received(data)

    def eof_received(self) -> bool | None:
        return self._http.eof_received() if self._transport is not None else None

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is None:
            return
        self._open.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        self._transport = None
        if not self.ended.done():
            self.ended.set_result(None)
        self._http.connection_lost(exc)


def _why_no_port(port: int, error: OSError) -> str:
    more = "give another port, or page=True for any that is free"
    if error.errno == errno.EADDRINUSE:
        return f"page={port}: another program listens on port {port} of {ADDRESS} already; {more}"
    if error.errno == errno.EACCES:
        return f"page={port}: this process may not listen on port {port}; {more}"
    return f"page={port}: cannot listen on {ADDRESS}: {error}; {more}"


def _silent_logger() -> logging.Logger:
    """Return a logger that shows nothing: requests that make no sense are not the user's concern."""
    logger = logging.Logger("page")  # of nobody else, since `getLogger` does not know it
    logger.disabled = True
    return logger
