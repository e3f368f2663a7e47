"""A request that cannot be encoded fails alone: nothing is sent or remembered of it, and the mesh goes on."""

from __future__ import annotations

import logging
from typing import Any

import jax
import numpy as np
import pytest

import jaxpp_async as jpp
from jaxpp_async.actors import server
from jaxpp_async.actors.server import failed_reply
from jaxpp_async.controller.options import ControllerOptions
from jaxpp_async.controller.requests import PendingRequest, RequestLog, SentRequest
from jaxpp_async.errors import MeshError
from jaxpp_async.protocol import codec
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.log_forwarding import as_message
from tests.controller.test_request_log import Requests

LONE = "name-\udcff"
"""No text that UTF-8 can hold: a file's name with a byte 0xff, as Python has it."""

BAD = {
    "surrogates": m.Abort(0, LONE),
    "more than 64 bits": m.Abort(2**64, ""),
    "takes .* bytes": m.Abort(0, "x" * 200_000),
}


@pytest.mark.parametrize("said", BAD)
@pytest.mark.parametrize("is_open", [True, False])
async def test_what_cannot_be_encoded_is_neither_sent_nor_remembered(said, is_open):
    requests = Requests()
    options = ControllerOptions(max_restarts=1, max_frame_bytes=100_000)
    requests.request_log = log = RequestLog(requests.links, lambda: None, options)  # type: ignore[arg-type]
    requests.step()
    requests.finish(0)
    if not is_open:  # during a restart
        log.hold_back()
    asked = [len(link.asked) for link in requests.links.values()]
    for _ in range(3):
        with pytest.raises(MeshError, match=rf"^Abort (cannot be sent: .*)?{said}"):
            log.send(0, BAD[said])
        reply_handler = PendingRequest(m.Done)
        with pytest.raises(MeshError):  # all of them, or none
            log.post(
                SentRequest(1, m.Inspect(), reply_handler),
                SentRequest(0, BAD[said], reply_handler),
            )
    assert [len(link.asked) for link in requests.links.values()] == asked
    assert not log._open and len(log._sent) == 2 and log.size_bytes == 0
    assert requests.again() == ["Step"]


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
    request_log = mesh._running().request_log
    step, small = mesh.distributed(lambda tree: jax.tree.map(lambda x: x * 3, tree)), np.float32(2)
    many = [np.ones(1000, np.float32)] * 3
    with monkeypatch.context() as patch:
        patch.setattr(request_log, "_encoder", codec.Encoder(500))
        with pytest.raises(MeshError, match="Load takes"):
            await mesh.run(step, many)
        assert not request_log._open and not request_log._sent
    like = await mesh.run(step, many)  # the executable that was not sent is sent now
    with monkeypatch.context() as patch:
        patch.setattr(request_log, "_encoder", codec.Encoder(500))
        remembered = len(request_log._sent)
        with pytest.raises(MeshError, match="Step takes"):  # their values go with it
            await mesh.run(step, many)
        with pytest.raises(MeshError, match="Store takes"):
            await mesh.put(many, like)
        assert (
            len(request_log._sent) == remembered and not mesh._running()._under_way and not request_log._open
        )
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
        patch.setattr(mesh._running().request_log, "_encoder", codec.Encoder(500))
        with pytest.raises(MeshError, match="Step takes"):
            await mesh.run(step, *xs, more)
    await mesh._running().inspect()  # whatever is to be freed is freed
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
