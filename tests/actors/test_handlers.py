"""Direct tests of how requests find their handlers: by a declaration beside each handler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxpp_async.actors import server
from jaxpp_async.actors.actor import Actor
from jaxpp_async.actors.server import _RequestDispatcher, handlers_of, handles
from jaxpp_async.errors import ProtocolError
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.codec import Decoder, Encoder
from tests.actors.test_actor import harness


class Doubled(m.Reply):
    number: int


class Double(m.Request):
    """A request that this package does not have."""

    rules = m.Rules(reply=Doubled, ordered=True)

    number: int


class DoublingActor(Actor):
    @handles(Double)
    def _double(self, message: Double) -> Doubled:
        return Doubled(2 * message.number)


def test_a_new_request_takes_a_definition_and_a_handler():
    controller, there = Encoder(100), Decoder(m.accepted_messages("actor"))
    actor_encoder, here = Encoder(100), Decoder(m.accepted_messages("controller"))
    replies = []

    def send(reply, number=None):
        replies.append(here.decode(actor_encoder.encode(reply, number)))

    actor = DoublingActor(0, make_transport=lambda name, network: None, send=send)
    number, message = there.decode(controller.encode(Double(21), 5))
    actor.handle(message, number)
    assert replies == [(5, Doubled(42))]
    actor._workers.shutdown()


async def test_every_request_has_a_handler_once_the_actor_is_configured():
    async with harness() as h:
        (actor,) = h.actors
        # `handle` passes steps to the queue of steps, which has no handler, since it is by far the most used.
        # The server ends the dispatching of requests at a `Shutdown`, and closes the actor.
        assert {*actor._handlers, m.Step, m.Shutdown} == {*m.accepted_messages("actor")} - {Double}


def test_a_request_that_comes_too_early_or_is_none_fails_by_name():
    failures = []
    actor = Actor(
        0,
        make_transport=lambda name, network: None,
        send=lambda reply, number: failures.append((number, reply.exception_type, reply.message)),
    )
    actor.handle(m.Sweep(b"/folder"), 1)
    actor.handle(m.Inspect(), 2)
    actor.handle(m.Beat(None), 3)
    assert [number for number, _, _ in failures] == [1, 2, 3]
    assert [text for _, _, text in failures[:2]] == ["actor 0 is not configured"] * 2
    assert failures[2][1].endswith("ProtocolError") and failures[2][2].endswith("Beat is not a request")
    actor._workers.shutdown()


def test_a_handler_of_an_ordered_request_must_not_be_a_coroutine_function():
    with pytest.raises(TypeError, match=r"keep is an `async def`, but Store is ordered with steps"):

        class Keeps:
            @handles(m.Store)
            async def keep(self, message: m.Store) -> m.Done: ...


def test_handlers_are_found_in_base_classes_and_may_be_replaced():
    class Base:
        @handles(m.Abort)
        def abort(self, message: m.Abort) -> m.Done:
            return m.Done()

        def other(self) -> None: ...

    class Derived(Base):
        pass

    derived = Derived()
    assert handlers_of(derived) == {m.Abort: derived.abort}


@pytest.mark.parametrize("is_used", [True, False])
async def test_an_actor_with_a_component_whose_handlers_nobody_calls_does_not_start(monkeypatch, is_used):
    monkeypatch.setattr(server, "_unused_components", set())

    def lost(self: Any, message: m.Abort) -> m.Done:
        return m.Done()

    lost.__module__, lost.__qualname__ = "jaxpp_async.actors.drawer", "Drawer.lost"
    Drawer = type("Drawer", (), {"lost": handles(m.Abort)(lost)})
    sent: list[m.Message] = []
    dispatcher = _RequestDispatcher()
    dispatcher.connection = SimpleNamespace(send=lambda message, number: sent.append(message))
    actor = DoublingActor(0, make_transport=lambda name, network: None, send=dispatcher.send)
    dispatcher.open(actor, spins=False)
    if is_used:
        handlers_of(Drawer())
    ready = m.Ready(b"", (), {}, m.Hardware("cpu", 1))
    dispatcher.send(ready, 0)
    actor._workers.shutdown()
    if is_used:
        assert sent == [ready]
    else:
        (failed,) = sent
        assert isinstance(failed, m.Failed) and failed.exception_type == "TypeError"
        assert failed.message.startswith("Drawer: no actor calls the handlers declared there")


async def test_an_actor_refuses_a_request_that_it_could_not_answer():
    with pytest.raises(ProtocolError, match="sent Inspect without a number"):
        _RequestDispatcher().dispatch(m.Inspect(), None)
