"""A request that cannot be encoded fails alone: nothing is sent or remembered of it, and the mesh goes on."""

from __future__ import annotations

import logging
from typing import Any

import jax
import numpy as np
import pytest
from resources import inspect_actors

import jaxpp_async as jpp
from jaxpp_async.actors import server
from jaxpp_async.actors.server import failed_reply
from jaxpp_async.controller.recovery import FailureFound
from jaxpp_async.controller.request_history import OutgoingRequest
from jaxpp_async.controller.requests import PendingRequest
from jaxpp_async.errors import ActorDiedError, MeshError
from jaxpp_async.protocol import codec
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.log_forwarding import as_message
from tests.controller.test_request_dispatch import Mesh

LONE = "name-\udcff"
"""No text that UTF-8 can hold: a file's name with a byte 0xff, as Python has it."""

BAD = {
    "surrogates": m.Sweep(b"", (LONE,)),
    "more than 64 bits": m.Store((), (2**64,)),
    "takes .* bytes": m.Sweep(b"", ("x" * 200_000,)),
}


@pytest.mark.parametrize("said", BAD)
@pytest.mark.parametrize("is_open", [True, False])
async def test_what_cannot_be_encoded_is_neither_sent_nor_remembered(said, is_open):
    mesh = Mesh(max_frame_bytes=100_000)
    mesh.finish(mesh.step())
    if not is_open:  # during a restart
        mesh.recovery.handle(FailureFound(ActorDiedError("lost", actor=1)), 0.0)
        mesh.requests.hold_back()
    for _ in range(3):
        with pytest.raises(MeshError, match=rf"^\w+ (cannot be sent: .*)?{said}"):
            mesh.requests.send(0, BAD[said])
        pending = PendingRequest()
        with pytest.raises(MeshError):  # all of them, or none
            mesh.requests.post(
                OutgoingRequest(1, m.Inspect(), pending), OutgoingRequest(0, BAD[said], pending)
            )
    assert mesh.asked(0) == mesh.asked(1) == [] and not mesh.requests._waiters
    assert len(mesh.recovery.history) == 2 and mesh.recovery.history.size_bytes == 0


def test_an_encoder_goes_on_behind_what_it_could_not_encode():
    encoder = codec.Encoder(1000)
    decoder = codec.decoder_of(m.accepted_messages("actor"))
    for bad in BAD.values():
        for encode in (encoder.encode_message, lambda message: encoder.encode(message, 0)):
            with pytest.raises(MeshError):
                encode(bad)
        assert decoder.decode(encoder.encode(m.Inspect(), 1)) == (1, m.Inspect())
        assert decoder.decode(encoder.encode(encoder.encode_message(m.Inspect()), 2)) == (2, m.Inspect())


@pytest.mark.parametrize("max_restarts", [0, 3])
async def test_what_cannot_be_sent_fails_alone(remote_mesh, monkeypatch, max_restarts):
    mesh = await remote_mesh(1, launcher="inline", max_restarts=max_restarts)
    requests, history = mesh._running().requests, mesh._running()._recovery.history
    step, small = mesh.distributed(lambda tree: jax.tree.map(lambda x: x * 3, tree)), np.float32(2)
    many = [np.ones(1000, np.float32)] * 3
    with monkeypatch.context() as patch:
        patch.setattr(requests, "_encoder", codec.Encoder(500))
        with pytest.raises(MeshError, match="Load takes"):
            await mesh.run(step, many)
        assert not requests._waiters and not len(history)
    like = await mesh.run(step, many)  # the executable that was not sent is sent now
    with monkeypatch.context() as patch:
        patch.setattr(requests, "_encoder", codec.Encoder(500))
        remembered = len(history)
        with pytest.raises(MeshError, match="Step takes"):  # their values go with it
            await mesh.run(step, many)
        with pytest.raises(MeshError, match="Store takes"):
            await mesh.put(many, like)
        assert len(history) == remembered and not mesh._running()._under_way and not requests._waiters
    assert float(await (await mesh.run(step, small))) == 6.0


async def test_setup_that_cannot_be_sent_is_told_before_anything_runs():
    with pytest.raises(MeshError, match="Configure cannot be sent"):
        async with jpp.RemoteMesh(1, launcher="local", setup=f"{LONE}:f"):
            pass


async def test_what_a_step_that_cannot_be_sent_was_given_stays(remote_mesh, monkeypatch):
    """Also what the step would have freed, since it does not use it, and what it would have handed back."""
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(
        lambda gone, back, used, more: (back, used + more.sum()), donate_argnums=(0, 1, 2)
    )
    xs = await mesh.run(mesh.distributed(lambda: tuple(np.arange(3.0, dtype="f4") + k for k in range(3))))
    more = np.ones(1000, np.float32)
    await step.compile(*xs, more)
    with monkeypatch.context() as patch:
        patch.setattr(mesh._running().requests, "_encoder", codec.Encoder(500))
        with pytest.raises(MeshError, match="Step takes"):
            await mesh.run(step, *xs, more)
    await inspect_actors(mesh._running())  # whatever is to be freed is freed
    assert [float((await x)[0]) for x in xs] == [0.0, 1.0, 2.0]


# ---------------------------------------------------------------- the other way


def test_errors_and_records_of_actors_are_text_that_can_be_sent():
    encoder = codec.Encoder(10_000)
    reply = failed_reply(ValueError(LONE))
    assert reply.message == "name-\\udcff" and encoder.encode(reply, 1)
    record = logging.LogRecord(LONE, logging.INFO, LONE, 1, "%s", (LONE,), None)
    assert encoder.encode(as_message(record, None), None)


async def test_a_reply_that_cannot_be_sent_is_told_as_a_failure(caplog):
    sent: list[Any] = []

    class Connection:
        def send(self, message: Any, number: int | None) -> None:
            codec.Encoder(1000).encode(message, number)
            sent.append((type(message), number, message.message))

    dispatcher = server._RequestDispatcher()
    dispatcher.connection = Connection()  # type: ignore[assignment]
    dispatcher.send(m.Inspected({LONE: 1}), 7)
    dispatcher.send(m.Log(10**30, "", "", None))
    ((kind, number, text),) = sent
    assert (kind, number) == (m.Failed, 7) and "surrogates" in text
