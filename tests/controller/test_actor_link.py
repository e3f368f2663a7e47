"""Direct tests of the numbers that a link gives to requests when it sends them, and of the replies."""

from __future__ import annotations

import pytest

from jaxpp_async.actors.server import _RequestDispatcher
from jaxpp_async.controller.requests import ActorLink
from jaxpp_async.errors import ProtocolError, RemoteError
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.actor_info import ActorInfo
from jaxpp_async.protocol.codec import Encoder


class Connection:
    """Keeps what is sent."""

    def __init__(self):
        self.sent = []

    def send(self, message, number=None) -> None:
        self.sent.append((message, number))


@pytest.fixture
def link() -> ActorLink:
    return ActorLink(ActorInfo(3, "here", 1, (), "ready"), None, Connection())  # type: ignore[arg-type]


async def test_each_request_gets_the_next_number_also_when_the_same_one_is_sent_again(link):
    message = m.Abort(1, "x")
    link.ask(message)
    link.ask(message)
    link.request(message, link.ask(m.Inspect()), Encoder(100).encode_message(message))
    assert [number for _, number in link.connection.sent] == [0, 1, 2, 3]
    assert [type(message).__name__ for message, _ in link.connection.sent][:3] == [
        "Abort",
        "Abort",
        "Inspect",
    ]
    assert bytes(link.connection.sent[3][0]) == bytes(Encoder(100).encode_message(message))


async def test_a_reply_ends_the_request_of_its_number(link):
    first, second = link.ask(m.Inspect()), link.ask(m.Inspect())
    assert link.handle_reply(m.Inspected({"a": 2}), 1) is None
    assert second.done and not first.done
    assert link.handle_reply(m.Failed("ValueError", "no", ""), 0) is None
    with pytest.raises(RemoteError):
        await first
    assert (await second).numbers == {"a": 2}


async def test_a_reply_of_another_type_than_the_rules_name_fails_the_request(link):
    asked = link.ask(m.Inspect())
    link.handle_reply(m.Done(), 0)
    with pytest.raises(ProtocolError, match="answered with Done, expected Inspected"):
        await asked


@pytest.mark.parametrize("number", [None, 1, 7])
async def test_a_reply_to_what_nobody_asked_is_refused(link, number):
    link.ask(m.Inspect())
    with pytest.raises(ProtocolError, match=f"answered request {number}, which nobody made"):
        link.handle_reply(m.Done(), number)


async def test_a_failure_without_a_number_is_that_of_the_actor(link):
    asked, failed = link.ask(m.Inspect()), m.Failed("ValueError", "no", "")
    assert link.handle_reply(failed, None) is failed
    assert not asked.done


async def test_late_replies_to_dropped_requests_are_ignored_once(link):
    link.ask(m.Inspect())
    link.ask(m.Inspect())
    link.drop_reply_handlers()
    assert link.handle_reply(m.Inspected({}), 0) is None
    assert link.handle_reply(m.Failed("ValueError", "no", ""), 1) is None
    with pytest.raises(ProtocolError, match="nobody made"):
        link.handle_reply(m.Inspected({}), 0)


async def test_an_actor_refuses_a_request_that_it_could_not_answer():
    with pytest.raises(ProtocolError, match="sent Inspect without a number"):
        _RequestDispatcher().dispatch(m.Inspect(), None)
