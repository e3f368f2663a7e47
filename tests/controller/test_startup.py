"""Direct tests of the errors about actors that could not be started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxpp_async.controller.request_history import OutgoingRequest
from jaxpp_async.controller.requests import PendingRequest
from jaxpp_async.controller.startup import make_link, unready_error
from jaxpp_async.errors import InstallError, LaunchError, MeshError, ProtocolError, RemoteError
from jaxpp_async.protocol.actor_info import ActorInfo, ProcessRank
from jaxpp_async.protocol.messages import Done, Failed, Reserve, Reserved

ACTOR = ActorInfo(1, "n2", 7, (), "starting")

UNREADY = [
    (
        "jaxpp_async.errors.InstallError",
        "no JAX for GPUs",
        InstallError,
        r"^actor 1 \(host n2, pid 7\): no JAX for GPUs$",
    ),
    ("jaxpp_async.errors.MeshError", "too few", MeshError, r"^actor 1 \(host n2, pid 7\): too few$"),
    (
        "jaxpp_async.errors.LaunchError",
        "setup='m:f' raised OSError: x",
        LaunchError,
        r"(?s)^actor 1 \(host n2, pid 7\): setup='m:f' raised OSError: x\n\nTraceback.*line 1",
    ),
    (
        "ValueError",
        "own",
        LaunchError,
        r"(?s)^could not start JAX and the transport on actor 1.*own.*Traceback.*line 1",
    ),
]


@pytest.mark.parametrize(("kind", "message", "error", "says"), UNREADY)
def test_what_an_actor_lacks_is_no_traceback(kind, message, error, says):
    text = f"{ACTOR}: {kind}: {message}\n\nTraceback on the actor:\n  line 1"
    with pytest.raises(error, match=says) as raised:
        raise unready_error(ACTOR, RemoteError(text, exception_type=kind))
    assert ("Traceback" in str(raised.value)) == (error is LaunchError)


@pytest.mark.parametrize(
    ("what", "error", "says"),
    [
        ("fails", RemoteError, r"^actor 1 \(host n2, pid 7\): OSError: no port"),
        ("closes", LaunchError, "^actor 1 closed its control connection before it was ready: reset"),
        ("answers", None, ""),
    ],
)
async def test_a_process_that_is_being_started_answers_or_all_its_requests_fail(what, error, says):
    connection: Any = SimpleNamespace(send=lambda message, number: None)
    handle: Any = SimpleNamespace(host="n2", pid=7)
    link = make_link(ProcessRank(1, 1), handle, connection)
    requests = [PendingRequest(), PendingRequest()]
    for request in requests:
        link.send(OutgoingRequest(1, Reserve(), request))
    if what == "fails":
        connection.on_message(Failed("OSError", "no port", ""), None)
    elif what == "closes":
        connection.on_closed(OSError("reset"))
    else:
        for number in (0, 1):
            connection.on_message(Reserved(80), number)
    for request in requests:
        if error is None:
            assert (await request).port == 80
        else:
            with pytest.raises(error, match=says):
                await request
    with pytest.raises(ProtocolError, match="answered request 9, which nobody made"):
        connection.on_message(Done(), 9)  # the connection ends with it
