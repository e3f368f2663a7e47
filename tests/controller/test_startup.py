"""Direct tests of the errors about actors that could not be started."""

from __future__ import annotations

import pytest

from jaxpp_async.controller.startup import unready_error
from jaxpp_async.errors import InstallError, LaunchError, MeshError, RemoteError
from jaxpp_async.protocol.actor_info import ActorInfo

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
