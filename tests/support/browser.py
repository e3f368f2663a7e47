"""A headless Chromium for tests: opens pages, runs JavaScript in them, points, types, and takes pictures.

Chromium is spoken to over a pair of pipes, in the DevTools protocol: JSON messages, each with a zero byte
behind it. So no port is opened, and no library is needed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

_FOUND = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
CHROMIUM = next(_FOUND, None) if os.environ.get("JAXPP_TEST_BROWSER") else None
NO_CHROMIUM = "needs Chromium: run `make test-browser`, which installs it, or set JAXPP_TEST_BROWSER=1"
"""The reason why a test of pages is skipped where `CHROMIUM` is None."""

_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--remote-debugging-pipe",
)  # fmt: skip


class PageError(Exception):
    """Chromium could not do what it was asked for, or a script of the page failed."""


class Browser:
    """A Chromium process of its own; use it as an async context.

    Args:
        timeout_s: the seconds that each request may take.
    """

    def __init__(self, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Browser:
        assert CHROMIUM is not None, NO_CHROMIUM
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        to_read, self._write = os.pipe()
        read, to_write = os.pipe()
        # Chromium reads requests from descriptor 3 and writes replies to descriptor 4.
        script = f'exec "$@" 3<&{to_read} 4>&{to_write} {to_read}<&- {to_write}>&-'
        self._process = await asyncio.create_subprocess_exec(
            "bash", "-c", script, "bash", CHROMIUM, *_FLAGS, f"--user-data-dir={folder}", "about:blank",
            pass_fds=(to_read, to_write), stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._stack.callback(os.close, self._write)
        self._stack.push_async_callback(self._end)
        reader = asyncio.StreamReader(limit=2**28)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb", buffering=0)
        )
        self._stack.callback(transport.close)
        self._reading = asyncio.create_task(self._read(reader))
        self._stack.callback(self._reading.cancel)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with the processes that it has started
        await self._process.wait()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                message = json.loads((await reader.readuntil(b"\0"))[:-1])
            except asyncio.IncompleteReadError:
                for reply in self._replies.values():
                    if not reply.done():
                        reply.set_exception(PageError("Chromium has ended"))
                return
            reply = self._replies.pop(message.get("id"), None)
            if reply is not None and not reply.done():
                reply.set_result(message)

    async def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a request of the DevTools protocol, and return its result."""
        number = next(self._ids)
        request: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            request["sessionId"] = session
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        os.write(self._write, json.dumps(request).encode() + b"\0")
        message = await asyncio.wait_for(reply, self._timeout_s)
        if "error" in message:
            raise PageError(f"{method}: {message['error']['message']}")
        return message["result"]

    async def open(
        self,
        address: str | Path,
        *,
        size: tuple[int, int] = (1200, 800),
        is_dark: bool = False,
        before: str = "",
    ) -> Page:
        """Open a file or an address, and return the page when it has been loaded.

        Args:
            address: the path of a file, or an address.
            size: the width and the height of the window, in pixels.
            is_dark: whether the page is asked for dark colours.
            before: JavaScript that runs before any script of the page.
        """
        target = (await self.send("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.send("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = Page(self, session)
        width, height = size
        await page.send("Page.enable")
        await page.send("Runtime.enable")
        await page.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await page.send("Emulation.setEmulatedMedia", features=[scheme])
        await page.send("Page.addScriptToEvaluateOnNewDocument", source=before)
        opened = await page.send("Page.navigate", url=_url(address))
        if "errorText" in opened:
            raise PageError(f"{address}: {opened['errorText']}")
        await page.wait_for("document.readyState === 'complete'")
        return page


def _url(address: str | Path) -> str:
    return address.absolute().as_uri() if isinstance(address, Path) else address


class Page:
    """A page that a `Browser` has opened."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a request of the DevTools protocol for this page, and return its result."""
        return await self._browser.send(method, self._session, **params)

    async def evaluate(self, script: str) -> Any:
        """Run a JavaScript expression in the page, await it if it is a promise, and return its value.

        Raises:
            PageError: the expression throws.
        """
        done = await self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            details = done["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description") or details["text"])
        return done["result"].get("value")

    async def wait_for(self, condition: str, timeout_s: float = 30.0) -> None:
        """Wait until a JavaScript expression is true in the page.

        Raises:
            TimeoutError: the expression has not become true in time.
        """
        async with asyncio.timeout(timeout_s):
            while not await self.evaluate(condition):  # noqa: ASYNC110 # the browser tells of nothing
                await asyncio.sleep(0.02)

    async def text(self, selector: str) -> str | None:
        """Return the text of the first element that a CSS selector finds; None if there is none."""
        return await self.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent ?? null")

    async def point(self, x: float, y: float) -> None:
        """Move the mouse to a position in the window."""
        await self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def wheel(self, x: float, y: float, delta_y: float) -> None:
        """Turn the mouse's wheel at a position in the window."""
        await self.send("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=delta_y)

    async def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the mouse's left button at a position, move to another, and release it."""
        for kind, (x, y) in (("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)):
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1)

    async def press(self, key: str) -> None:
        """Press and release a key, such as `"+"` or `"ArrowLeft"`."""
        for kind in ("keyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, key=key)

    async def picture(self) -> bytes:
        """Return a picture of the window as PNG."""
        return base64.b64decode((await self.send("Page.captureScreenshot", format="png"))["data"])


@contextlib.asynccontextmanager
async def opened(
    address: str | Path, *, size: tuple[int, int] = (1200, 800), is_dark: bool = False, before: str = ""
) -> AsyncIterator[Page]:
    """Open a page in a browser of its own; see `Browser.open`.

    Yields:
        The page.
    """
    async with Browser() as browser:
        yield await browser.open(address, size=size, is_dark=is_dark, before=before)
