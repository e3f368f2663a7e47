"""Keep the record of one mesh, and show it as a live page or as a file.

`RunPage` is told of the mesh's events and steps. If the page is wanted, it owns the server. The content is
collected on the event loop, which takes microseconds, and written in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Protocol

import jaxpp_async
from jaxpp_async.base.events import Event
from jaxpp_async.base.printable import first_line
from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.page.document import save_document, write_document
from jaxpp_async.page.failed_runs import keep_page
from jaxpp_async.page.renderer import PARTS, Part, Renderer, Snapshot
from jaxpp_async.page.run_state import ActorMemoryUse, EndedStep, MeshNow, RunRecord, RunState
from jaxpp_async.page.sections import MOST_CURVES
from jaxpp_async.page.server import PageServer
from jaxpp_async.protocol.messages import step_number
from jaxpp_async.session.logger_delivery import LoggerState
from jaxpp_async.session.step import StepForm
from jaxpp_async.view.history import History

_LOG = logging.getLogger("jaxpp_async")

_MOST_PROGRAMS, _WRITE_S, _KEEP_S = 64, 1.0, 10.0

_MOST_BUBBLE_SHARE = 0.001
"""The share of the time of one core that reading timelines for Prometheus may take."""

_POLL_S = 5.0
"""The most seconds for which a browser waits for an answer while nothing is due."""

_LOOKS_S = 1.0
"""The seconds after its last request for which somebody counts as looking, and is waited for at the end."""


class LoggedValues(Protocol):
    """The values that a user has logged, as `session.metrics.Metrics` has them."""

    @property
    def names(self) -> Sequence[str]: ...

    def latest(self) -> Mapping[str, Any]: ...

    def history(self, name: str) -> History: ...

    def loggers(self) -> tuple[LoggerState, ...]: ...


class NeededMemory(Protocol):
    """The memory that a step needs on each device of one actor, as `planning.memory.ActorMemory` has it."""

    @property
    def actor(self) -> int: ...

    @property
    def total_bytes(self) -> int: ...

    @property
    def batch_bytes(self) -> int: ...


class RunPage:
    """The record and the page of one mesh, which it does not hold, so that a dropped mesh can end.

    Args:
        title: the mesh in one line.
        port: the port of the live page; 0 for any that is free, None for no live page.
        controller: a function that returns the mesh's controller; None before the mesh has started.
        logged: the values that the user has logged.
        memory_needs: a function that returns the memory that a compiled step needs, one entry an actor.
    """

    def __init__(
        self,
        title: str,
        port: int | None,
        *,
        controller: Callable[[], Controller | None],
        logged: LoggedValues,
        memory_needs: Callable[[StepForm], Sequence[NeededMemory]],
    ):
        self._title, self._port, self._version = title, port, jaxpp_async.__version__
        self._controller, self._logged, self._memory_needs = controller, logged, memory_needs
        self._record = RunRecord(time.monotonic(), _now_as_text())
        self._renderer, self._run = Renderer(), secrets.token_hex(8)
        self._writing: asyncio.Task[None] | None = None
        self._closing: asyncio.Event | None = None
        self._server: PageServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked_s = -math.inf
        self._error: BaseException | None = None
        self._has_ended = self._is_cancelled = False
        self._last: SubmittedStep | None = None
        self._form: StepForm | None = None
        self._sent_bytes: dict[int, int] = {}
        self._needs: Sequence[NeededMemory] = ()
        self._needs_of: StepForm | None = None
        self._bubble = _Bubble()

    # ------------------------------------------------------------ what happens

    @property
    def url(self) -> str | None:
        """The link to the live page; None without one, and before and after it is served."""
        return self._server.url if self._server is not None else None

    def on_event(self, event: Event) -> None:
        """Note an event of the mesh."""
        controller = self._controller()
        self._record.on_event(event, None if controller is None else controller.under_way_since_s)

    def on_started(self) -> None:
        """Note that all actors are ready."""
        self._record.on_started(time.monotonic())

    def on_starting(self) -> None:
        """Note that the mesh begins to start, maybe once more after it could not."""
        self._error, self._has_ended, self._is_cancelled = None, False, False
        self._record.on_starting()

    def on_end(self, error: BaseException | None) -> None:
        """Note that the mesh could not start, or that the user's `async with` was left, and by which error.

        A cancellation, Ctrl-C and `sys.exit(0)` are ways to end a run, and no failures.
        """
        self._has_ended = True
        if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
            self._is_cancelled = True
        elif not (isinstance(error, SystemExit) and error.code in (None, 0)):
            self._error = self._error or error

    def on_step_end(self, step: SubmittedStep, compiled: StepForm) -> None:
        """Note that a step has ended whose results count.

        Args:
            step: the step.
            compiled: its compiled form.
        """
        if step.kind != "step":
            return
        if step.program_id not in self._sent_bytes:
            while len(self._sent_bytes) >= _MOST_PROGRAMS:
                del self._sent_bytes[next(iter(self._sent_bytes))]
            self._sent_bytes[step.program_id] = step.sent_bytes()
        if self._form is None or self._form.compiled is not compiled.compiled:
            # Not `compiled` itself, which holds arrays of the mesh; nobody asks how long compiling took.
            self._form = StepForm(compiled.compiled, {}, compiled.temp_bytes)
        self._last = step
        sent_bytes, number = self._sent_bytes[step.program_id], step_number(step.id)
        self._record.on_step_end(
            EndedStep(number, step.name, step.sent_s, time.monotonic(), step.result(), sent_bytes)
        )

    # ------------------------------------------------------------ the live page

    async def start(self) -> None:
        """Serve the live page, if it is wanted.

        Raises:
            PageError: the port is taken.
            InstallError: a package is missing.
        """
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        self._told_end = asyncio.Event()
        if self._port is not None:
            self._server = await PageServer.start(self._port, self, version=self._version)
            _LOG.info("the page of this run: %s", self._server.url)

    async def aclose(self) -> None:
        """Show the end of the run to whoever looks, and end the live page, within about three seconds."""
        server, self._server = self._server, None
        if server is not None:
            assert self._closing is not None
            self._closing.set()
            if time.monotonic() - self._asked_s < _LOOKS_S:  # a browser is between two requests
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOKS_S):
                        await self._told_end.wait()
            await server.aclose()
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=_WRITE_S)
        if server is not None and isinstance(self._cause(), Exception):  # and not a cancellation or Ctrl-C
            await self._keep_failed()

    async def _keep_failed(self) -> None:
        """Write the page of this run, which has failed, to a file, and tell the user which."""
        try:
            async with asyncio.timeout(_KEEP_S):
                await asyncio.to_thread(self._update_needs)
                snapshot = self._snapshot(frozenset(PARTS))
                path = await asyncio.to_thread(lambda: keep_page(self._document(snapshot)))
        except Exception as error:  # the error that ended the run is the one to raise
            _LOG.warning("the page of the failed run could not be kept: %s", first_line(error))
        else:
            _LOG.error("the run has failed; its page is %s", path)

    def abandon(self) -> None:
        """End the live page of a mesh that nothing refers to any more; any thread may call this."""
        server, self._server = self._server, None
        if server is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(server.close)

    async def page(self) -> str:
        """Return the live page; see `server.Responder`."""
        await self._refresh()
        return write_document(
            self._renderer.sections,
            title=self._document_title(),
            version=self._version,
            seen=self._renderer.seen,
            run=self._run,
        )

    async def state(self, seen: int, run: str = "") -> Mapping[str, Any]:
        """Return what has changed after a state; see `server.Responder`."""
        assert self._closing is not None
        if run not in ("", self._run):  # a tab of an earlier run on the same port, with the same token
            seen = 0
        self._asked_s = time.monotonic()
        if seen == self._renderer.seen:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_POLL_S, self._renderer.due_in(time.monotonic()))):
                    await self._closing.wait()
        await self._refresh()
        self._asked_s = time.monotonic()
        changed = self._renderer.changed_since(seen if seen <= self._renderer.seen else 0)
        if self._closing.is_set():
            self._told_end.set()
        return {
            "run": self._run,
            "seen": self._renderer.seen,
            "title": self._document_title(),
            "sections": changed,
            "over": self._closing.is_set(),
        }

    async def metrics(self) -> bytes:
        """Return the metrics for Prometheus; see `server.Responder`."""
        from jaxpp_async.page.prometheus import write_metrics

        step, run = self._last, self._state()

        def write() -> bytes:
            return write_metrics(replace(run, bubble=self._bubble.of(step)))

        return await asyncio.to_thread(write)

    async def _refresh(self) -> None:
        """Write the parts of the page again that are due, in a thread, if nobody does already."""
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write_due(), name="write the page")
        await asyncio.shield(self._writing)  # others may wait for it as well

    async def _write_due(self) -> None:
        assert self._closing is not None
        now_s = time.monotonic()
        parts = frozenset(PARTS) if self._closing.is_set() else self._renderer.due(now_s)
        if "step" in parts:
            await asyncio.to_thread(self._update_needs)
        if parts:
            await asyncio.to_thread(self._renderer.write, self._snapshot(parts), parts, now_s)

    # ------------------------------------------------------------ the file

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file; see `RemoteMesh.write_page`."""
        self._update_needs()
        save_document(path, self._document(self._snapshot(frozenset(PARTS))))

    def _document(self, snapshot: Snapshot) -> str:
        """Return the page of a file. This may run in any thread."""
        renderer = Renderer()
        renderer.write(snapshot, frozenset(PARTS), time.monotonic())
        title = f"jaxpp-async: {self._title}"
        return write_document(renderer.sections, title=title, version=self._version)

    # ------------------------------------------------------------ its content

    def _update_needs(self) -> None:
        """Compute the memory that the last step needs, if it is not known. This may run in any thread."""
        form = self._form
        if form is None or form is self._needs_of:
            return
        try:
            self._needs = tuple(self._memory_needs(form))
        except Exception:  # the page can do without
            _LOG.debug("the memory of a step cannot be computed", exc_info=True)
            self._needs = ()
        self._needs_of = form

    def _document_title(self) -> str:
        run = self._renderer.run
        main = run.main if run is not None else None
        where = f"step {main.last:,}" if main is not None else "starting"
        status = run.status if run is not None else "starting"
        return f"{where if status == 'running' else status} - jaxpp-async"

    def _snapshot(self, parts: frozenset[Part]) -> Snapshot:
        step = self._last
        is_due = "curves" in parts
        names = self._logged.names[:MOST_CURVES] if is_due else ()
        return Snapshot(
            self._state(),
            self._record.curves() if is_due else (),
            {name: self._logged.history(name) for name in names},
            None if step is None else step.timeline,
            None if step is None else step.id,
        )

    def _state(self) -> RunState:
        return self._record.state(self._mesh_now())

    def _cause(self) -> BaseException | None:
        """Return the error that ended the run, or None."""
        controller = self._controller()
        return (controller.cause if controller is not None else None) or self._error

    def _mesh_now(self) -> MeshNow:
        controller, now_s = self._controller(), time.monotonic()
        logged = {name: (step, value) for name, (step, value) in self._logged.latest().items()}
        bad = [name for name, (_, value) in logged.items() if not math.isfinite(value)]
        found = {name: self._logged.history(name).not_finite_since for name in bad}
        now = MeshNow(
            self._title,
            now_s,
            is_closed=self._has_ended,
            is_cancelled=self._is_cancelled,
            error=self._cause(),
            logged=logged,
            not_finite={name: since for name, since in found.items() if since is not None},
            loggers=self._logged.loggers(),
        )
        if controller is None:
            return now
        return replace(
            now,
            actors=controller.actors,
            doing={} if controller.is_closed else controller.activities(),
            is_closed=controller.is_closed,
            num_under_way=controller.num_under_way,
            memory=self._memory(controller),
        )

    def _memory(self, controller: Controller) -> dict[int, ActorMemoryUse]:
        """Return the memory that the last step needs on each device of each actor, and what there is."""
        return {
            needs.actor: ActorMemoryUse(
                0, needs.total_bytes, needs.batch_bytes, controller.device_bytes(needs.actor)
            )
            for needs in self._needs
        }


class _Bubble:
    """The bubble of a recent step. Its timeline costs more than all other metrics, so it is read seldom."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step_id: object = None
        self._share: float | None = None
        self._due_s = -math.inf

    def of(self, step: SubmittedStep | None) -> float | None:
        """Return the share of a step in which its schedule kept actors from work, or that of an earlier one.

        Args:
            step: the last step; None if none has ended.
        """
        with self._lock:
            begun_s = time.monotonic()
            if step is not None and step.id != self._step_id and begun_s >= self._due_s:
                bill = step.timeline().bill
                self._share = bill.schedule_s / bill.total_s if bill.total_s > 0 else 0.0
                self._step_id = step.id
                self._due_s = begun_s + (time.monotonic() - begun_s) / _MOST_BUBBLE_SHARE
            return self._share


def _now_as_text() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
