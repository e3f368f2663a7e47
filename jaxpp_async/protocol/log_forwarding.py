"""Send the log records of actor processes to the controller, which logs them with the actor and the step
added to each.

In the actor process, `RecordSender` is a `logging` handler that sends records over the control channel as
`Log` messages, a few at a time and at a limited rate. On the controller, `log_remote` logs each record that
arrives. Neither side ever waits for the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from jaxpp_async.base.printable import printable
from jaxpp_async.protocol.actor_info import ActorInfo
from jaxpp_async.protocol.messages import Log

RECORDS_PER_S = 200.0
"""The number of log records that an actor may send per second on average. Further records are counted and
dropped.
"""

BURST = 400
"""The most log records that an actor may send in quick succession, and the most that may wait to be sent."""

REPORT_AFTER_S = 1.0
"""The seconds for which dropped log records are counted before their number is reported to the controller."""

PER_TURN = 16
"""The most log records that are sent in one turn of the event loop; this takes about as long as a small task.
"""

MAX_MESSAGE_CHARS, MAX_TRACEBACK_CHARS, MAX_NAME_CHARS = 4096, 16384, 200

PACKAGE = "jaxpp_async"
_OWN_LOGGERS = (PACKAGE, f"{PACKAGE}.control", f"{PACKAGE}.events", f"{PACKAGE}.records")
_HERE: contextvars.ContextVar[int | None] = contextvars.ContextVar("jaxpp_async_actor", default=None)


class RateLimit:
    """A limit on the rate of log records. Up to `burst` records may be sent at the same time, and on average
    at most `per_s` records per second. No record is accepted while `burst` records are queued.

    Args:
        per_s: the largest average number of records per second.
        burst: the largest number of records that may be sent at the same time, and that may be queued.
        now_s: the time now, in seconds of the clock that the caller uses for `admit` too.

    Attributes:
        num_refused: how many records were refused since the caller last set this to 0.
    """

    def __init__(self, per_s: float, burst: int, now_s: float):
        self._per_s, self._burst, self._left, self._then_s = per_s, burst, float(burst), now_s
        self.num_refused = 0

    def admit(self, now_s: float, num_waiting: int) -> bool:
        """Return whether one more log record may be sent, and count the record as sent or as refused.

        Args:
            now_s: the current time, in seconds.
            num_waiting: the number of records that are queued.
        """
        self._left = min(self._burst, self._left + (now_s - self._then_s) * self._per_s)
        self._then_s = now_s
        if self._left < 1 or num_waiting >= self._burst:
            self.num_refused += 1
            return False
        self._left -= 1
        return True


# ---------------------------------------------------------------- in the actor


class RecordSender(logging.Handler):
    """A `logging` handler that sends the records of an actor process to the controller. Any thread may log;
    the handler is created and closed on the actor's event loop.

    Args:
        send: sends a `Log` message to the controller, or drops the message if too much is unsent; called on
            the event loop.
        clock: returns the time in seconds, like `time.monotonic`.

    Attributes:
        step: a function that returns the number of the step under way, or None; called on any thread.
    """

    def __init__(self, send: Callable[[Log], None], clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self.step: Callable[[], int | None] = lambda: None
        self._send, self._clock = send, clock
        self._loop = asyncio.get_running_loop()
        self._guard = threading.Lock()  # guards the fields below; never locked while text is formatted
        self._limit = RateLimit(RECORDS_PER_S, BURST, clock())
        self._waiting: deque[Log] = deque()
        self._is_woken = False
        self._report_timer: asyncio.TimerHandle | None = None

    def handle(self, record: logging.LogRecord) -> bool:
        """Handle a record as `logging.Handler` does, but without holding the handler's lock while the record
        is formatted. A thread that formats a JAX array waits until the device has computed the array. If the
        thread held the lock meanwhile, a log call on the event loop would have to wait too.
        """
        kept = bool(self.filter(record))
        if kept:
            self.emit(record)
        return kept

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record to be sent; if there are too many records, count this one as dropped instead.
        `logging` calls this on any thread.
        """
        with self._guard:  # before formatting: a flood of records must cost little
            is_wanted = self._limit.admit(self._clock(), len(self._waiting))
        if is_wanted:
            try:
                message = as_message(record, self.step())
            except Exception:
                # As in every `logging` handler: code that logs must not fail because a text cannot be made.
                self.handleError(record)
                return
            with self._guard:
                self._waiting.append(message)
        self._wake()

    def close(self) -> None:
        """Remove the handler from `logging`, and send the records that are still queued. Call this on the
        event loop.
        """
        super().close()
        logging.getLogger().removeHandler(self)
        if self._report_timer is not None:
            self._report_timer.cancel()
            self._report_refused()
        while self._waiting:
            self._send(self._waiting.popleft())

    def _wake(self) -> None:
        with self._guard:
            if self._is_woken or not (
                self._waiting or (self._limit.num_refused and self._report_timer is None)
            ):
                return
            self._is_woken = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is about to end
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        with self._guard:
            batch = [self._waiting.popleft() for _ in range(min(PER_TURN, len(self._waiting)))]
            self._is_woken = more = bool(self._waiting)
            if self._limit.num_refused and self._report_timer is None:
                self._report_timer = self._loop.call_later(REPORT_AFTER_S, self._report_refused)
        for message in batch:
            self._send(message)
        if more:
            self._loop.call_soon(self._flush)

    def _report_refused(self) -> None:
        with self._guard:
            self._report_timer = None
            count, self._limit.num_refused = self._limit.num_refused, 0
        text = f"{count} log records were dropped: this actor logs more than {RECORDS_PER_S:g} a second"
        self._send(Log(logging.WARNING, f"{PACKAGE}.records", text, self.step()))


def send_records(send: Callable[[Log], None], level: int) -> RecordSender:
    """Send everything that this process logs at `level` and above to the controller, including Python's
    warnings.

    An actor process calls this once, on its event loop. Inline actors, which run inside the controller's
    process, use the user's `logging` instead.

    Args:
        send: sends a `Log` message to the controller.
        level: the lowest level to send.

    Returns:
        The handler, which the caller must close when the process ends.
    """
    sender = RecordSender(send)
    root = logging.getLogger()
    root.addHandler(sender)
    root.setLevel(level)
    logging.captureWarnings(True)
    return sender


def as_message(record: logging.LogRecord, step: int | None) -> Log:
    """Convert a log record to a message of plain data, with an exception as text.

    Args:
        record: the record.
        step: the number of the step under way, or None.
    """
    fields: dict[str, str | int | float] = {
        "thread": printable(record.threadName or ""),
        "created": record.created,
        "file": printable(record.pathname),
        "line": record.lineno or 0,
    }
    if traceback := _traceback(record):
        fields["traceback"] = printable(traceback)
    message = printable(_cut(record.getMessage(), MAX_MESSAGE_CHARS))
    return Log(record.levelno, printable(record.name[:MAX_NAME_CHARS]), message, step, fields)


def _traceback(record: logging.LogRecord) -> str:
    texts = []
    if record.exc_info and record.exc_info[0] is not None:
        texts.append(logging.Formatter().formatException(record.exc_info))
    elif record.exc_text:
        texts.append(record.exc_text)
    if record.stack_info:
        texts.append(record.stack_info)
    return "\n".join(texts)[-MAX_TRACEBACK_CHARS:]  # the end of a traceback says most


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


# ---------------------------------------------------------------- on the controller


def package_level() -> int:
    """Return the lowest level of the log records that actors send, which is the effective level of the logger
    `jaxpp_async` at the time of the call.
    """
    return logging.getLogger(PACKAGE).getEffectiveLevel()


def log_remote(actor: ActorInfo, message: Log) -> None:
    """Log a record that an actor has sent, on this process's logger of the same name, with the attributes
    `actor`, `host` and `step`.

    If a level was set for that logger or for a parent of it below the root logger, that level decides whether
    the record is logged; otherwise the level of the logger `jaxpp_async` decides.

    Args:
        actor: a description of the actor that has sent the record.
        message: the record.
    """
    logger = logging.getLogger(message.logger)
    if message.level < _level_of(logger) or message.level <= logger.manager.disable:
        return
    text, fields = f"[actor {actor.id}] {message.message}", message.fields
    record = logger.makeRecord(
        logger.name, message.level, str(fields.get("file", "")), int(fields.get("line", 0)), text, (), None
    )
    record.threadName, record.thread = str(fields.get("thread", "")), None
    record.process, record.processName = actor.pid, f"actor {actor.id}"
    record.exc_text = str(fields["traceback"]) if "traceback" in fields else None
    record.__dict__.update(actor=actor.id, host=actor.host, step=message.step)
    logger.handle(record)


def _level_of(logger: logging.Logger) -> int:
    root, package = logging.getLogger(), logging.getLogger(PACKAGE)
    at: logging.Logger | None = logger
    while at is not None and at is not root:
        if at.level:
            return at.level
        at = at.parent
    return package.getEffectiveLevel()


# ---------------------------------------------------------------- attributes of the package's own records


def name_actor(actor_id: int) -> contextvars.Context:
    """Return a context in which this package's log records name an actor. Actors that run inside the
    controller's process run in such a context.
    """
    context = contextvars.copy_context()
    context.run(_HERE.set, actor_id)
    return context


def _label(record: logging.LogRecord) -> bool:
    """Add the attributes `actor`, `host` and `step` to a log record of this package if the record lacks them,
    so that a format string may use these attributes. This function is used as a `logging` filter, and always
    returns True, so that no record is dropped.
    """
    fields = record.__dict__
    if fields.setdefault("actor", None) is None:
        fields["actor"] = _HERE.get()
    fields.setdefault("host", None)
    fields.setdefault("step", None)
    return True


def label_own_records() -> None:
    """Make every log record of this package's loggers have the attributes `actor`, `host` and `step`. A
    second call changes nothing.
    """
    for name in _OWN_LOGGERS:  # a logger's filters do not apply to its children's records
        logging.getLogger(name).addFilter(_label)


label_own_records()
