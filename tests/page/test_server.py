"""Only who has the link gets an answer, and nobody can keep the server busy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import pytest
import uvloop
from http_client import get, request_text, send, with_path

from jaxpp_async.errors import InstallError, PageError
from jaxpp_async.page import server as module
from jaxpp_async.page.server import MOST_CONNECTIONS, PageServer, check_packages, hosts_of

pytest.importorskip("aiohttp", reason="the extra 'page' is not installed")


class Answers:
    """A page whose answers tests know."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.size = 10

    async def page(self) -> str:
        self.asked.set()
        await self.may_answer.wait()
        return "x" * self.size

    async def state(self, seen: int, run: str = ""):
        return {"seen": seen}

    async def metrics(self) -> bytes:
        raise RuntimeError("a bug in the page")


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
async def server(answers) -> AsyncIterator[PageServer]:
    made = await PageServer.start(0, answers, version="1.2")
    yield made
    await made.aclose(0.1)


async def test_the_link_opens_the_page(server):
    reply = await get(server.url)
    assert (reply.status, reply.body) == (200, "x" * 10)
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["cache-control"] == "no-store"
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "access-control-allow-origin" not in reply.headers
    state = await get(server.url, with_path(server.url, "state", seen=3, version="1.2"))
    assert (state.status, json.loads(state.body)) == (200, {"seen": 3})


async def test_it_listens_on_loopback_alone(server):
    assert server.url.startswith("http://127.0.0.1:")
    assert [s.getsockname()[0] for s in server._listening.sockets] == ["127.0.0.1"]


@pytest.mark.parametrize(
    "path", ["/", "/?token=", "/?token=wrong", "/state?token=wrong", "/metrics", "/?token=%FF"]
)
async def test_without_the_token_there_is_no_answer(server, path):
    reply = await get(server.url, path)
    assert reply.status == 403 and "xxx" not in reply.body


async def test_a_token_may_be_a_header_as_prometheus_sends_it(server):
    token = server.url.partition("token=")[2]
    assert (await get(server.url, "/", Authorization=f"Bearer {token}")).status == 200
    assert (await get(server.url, "/", Authorization=f"Bearer {token}x")).status == 403
    assert (await get(server.url, "/", Authorization=f"Basic {token}")).status == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:PORT", "127.0.0.1:1", "127.0.0.1", "", "0.0.0.0:PORT"]
)
async def test_another_host_is_refused_and_says_how_to_get_here(server, host):
    port = server.url.split(":")[2].partition("/")[0]
    reply = await get(server.url, Host=host.replace("PORT", port))
    assert reply.status in (400, 403) and "xxx" not in reply.body
    if reply.status == 403:
        assert f"ssh -L {port}:127.0.0.1:{port}" in reply.body


async def test_localhost_is_this_host(server):
    port = server.url.split(":")[2].partition("/")[0]
    assert (await get(server.url, Host=f"LOCALHOST:{port}")).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "FOO"])
async def test_nothing_but_get_is_allowed(server, method):
    reply = await get(server.url, method=method)
    assert reply.status in (400, 405) and "xxx" not in reply.body


async def test_another_path_and_a_page_of_another_version(server):
    assert (await get(server.url, with_path(server.url, "other"))).status == 404
    assert (await get(server.url, with_path(server.url, "../../etc/passwd"))).status == 404
    assert (await get(server.url, with_path(server.url, "state", seen=1, version="1.1"))).status == 409
    odd = await get(server.url, with_path(server.url, "state", seen="-1e9", version="1.2"))
    assert json.loads(odd.body) == {"seen": 0}


async def test_a_bug_in_the_page_is_told_once_and_ends_nothing(server, caplog):
    for _ in range(3):
        assert (await get(server.url, with_path(server.url, "metrics"))).status == 500
    assert sum("could not be written" in record.message for record in caplog.records) == 1
    assert (await get(server.url)).status == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"GET " + b"/" * 100_000,
    ],
)
async def test_what_is_no_request_is_refused(server, request_bytes):
    reply = await send(server.url, request_bytes + b"\r\n\r\n")
    assert reply.status in (0, 400) and "xxx" not in reply.body
    assert (await get(server.url)).status == 200


async def test_oversized_headers_are_refused(server):
    assert (await get(server.url, Cookie="x" * 100_000)).status == 400
    many = request_text(server.url).replace(b"\r\n\r\n", b"\r\n" + b"X-A: b\r\n" * 20_000 + b"\r\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "REQUEST_S", 5.0)
        with contextlib.suppress(ConnectionError):  # it may be cut off while it still sends
            assert (await send(server.url, many)).status in (0, 200, 400)
    assert (await get(server.url)).status == 200


async def test_idle_connections_are_cut(server, monkeypatch):
    monkeypatch.setattr(module, "CONNECTION_S", 0.3)
    host, port = "127.0.0.1", int(server.url.split(":")[2].partition("/")[0])
    reader, writer = await asyncio.open_connection(host, port)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readexactly(1), 5)
    writer.close()


async def test_strangers_cannot_keep_the_page_from_whoever_has_the_token(server):
    host, port = "127.0.0.1", int(server.url.split(":")[2].partition("/")[0])
    idle = [await asyncio.open_connection(host, port) for _ in range(MOST_CONNECTIONS)]
    for _, writer in idle:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n")  # and no end
    for _ in range(3):
        assert (await get(server.url)).status == 200
    assert server.num_refused >= 1 and len(server._connections) <= MOST_CONNECTIONS
    for _, writer in idle:
        writer.close()


async def test_more_requests_with_the_token_than_may_be_open_are_refused(server, answers):
    answers.may_answer.clear()
    waiting = [asyncio.create_task(get(server.url)) for _ in range(MOST_CONNECTIONS)]
    async with asyncio.timeout(10):
        while sum(c.has_token for c in server._connections) < MOST_CONNECTIONS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", int(server.url.split(":")[2].partition("/")[0])
    )
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    answers.may_answer.set()
    assert {reply.status for reply in await asyncio.gather(*waiting)} == {200}


def test_browsers_leave_out_port_80():
    assert hosts_of(80) >= {"127.0.0.1", "localhost", "127.0.0.1:80"}
    assert hosts_of(8471) == {"127.0.0.1:8471", "localhost:8471", "[::1]:8471"}


async def test_a_browser_that_never_reads_is_cut_off(server, answers, monkeypatch):
    monkeypatch.setattr(module, "CONNECTION_S", 0.3)
    answers.size = 50_000_000
    port = int(server.url.split(":")[2].partition("/")[0])
    with socket.create_connection(("127.0.0.1", port)) as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.sendall(request_text(server.url))
        await answers.asked.wait()
        async with asyncio.timeout(10):
            while server._connections:  # noqa: ASYNC110 # nothing tells of its end
                await asyncio.sleep(0.01)


async def test_an_answer_that_takes_too_long_is_given_up(server, answers, monkeypatch):
    monkeypatch.setattr(module, "REQUEST_S", 0.05)
    answers.may_answer.clear()
    assert (await get(server.url)).status == 503


async def test_closing_lets_an_answer_end_and_waits_for_nobody(answers):
    server = await PageServer.start(0, answers, version="1.2")
    answers.may_answer.clear()
    port = int(server.url.split(":")[2].partition("/")[0])
    idle = await asyncio.open_connection("127.0.0.1", port)
    asking = asyncio.create_task(get(server.url))
    await answers.asked.wait()
    closing = asyncio.create_task(server.aclose(0.5))
    await asyncio.sleep(0.05)
    answers.may_answer.set()
    assert (await asking).status == 200
    async with asyncio.timeout(5):
        await closing
    idle[1].close()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_port_that_is_taken_is_named(server, answers):
    port = int(server.url.split(":")[2].partition("/")[0])
    with pytest.raises(PageError, match=f"page={port}: another program listens on port {port}.*page=True"):
        await PageServer.start(port, answers, version="1.2")


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(InstallError, match=r"page=True needs aiohttp and prometheus_client; .*\[page\]"):
        check_packages("page=True")


async def test_a_token_of_ones_own(answers, monkeypatch):
    monkeypatch.setenv(module.TOKEN_VARIABLE, "dashboard-2f8a61b0")
    server = await PageServer.start(0, answers, version="1.2")
    assert server.url.endswith("/?token=dashboard-2f8a61b0")
    assert (await get(server.url)).status == 200
    await server.aclose()
    for bad in ("", "short", "with spaces and more", "x" * 300):
        monkeypatch.setenv(module.TOKEN_VARIABLE, bad)
        with pytest.raises(PageError, match=module.TOKEN_VARIABLE):
            await PageServer.start(0, answers, version="1.2")


async def test_it_serves_on_uvloop_as_well():
    async def ask() -> tuple[int, int]:
        server = await PageServer.start(0, Answers(), version="1.2")
        statuses = (await get(server.url)).status, (await get(server.url, "/?token=wrong")).status
        await server.aclose()
        return statuses

    def run() -> tuple[int, int]:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(ask())

    assert await asyncio.to_thread(run) == (200, 403)
