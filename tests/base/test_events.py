"""The listener of events hears each at once, and can do no harm."""

from __future__ import annotations

from jaxpp_async.base.events import EventLog


def test_a_listener_hears_each_event_in_order():
    log, heard = EventLog(), []
    log.emit("started", "before anybody listens")
    log.listen(lambda event: heard.append((event.kind, event.actor, event.details["n"])))
    log.emit("started", "actor 0", actor=0, n=1)
    log.emit("closed", "over", n=2)
    log.emit("started", "nothing follows the end", n=3)
    assert heard == [("started", 0, 1), ("closed", None, 2)]


async def test_a_listener_that_fails_is_logged_and_readers_get_the_event(caplog):
    log = EventLog()
    log.listen(lambda event: 1 / 0)
    log.emit("died", "actor 1 was killed")
    assert [event.kind for event in [await anext(log.subscribe())]] == ["died"]
    assert "a listener of events failed" in caplog.text and "ZeroDivisionError" in caplog.text
