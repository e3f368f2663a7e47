"""actor_process: an actor's process, started through a warden: by the local launcher here, by keepers elsewhere."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

from jaxpp_async.actors.processes.actor_request import ActorRequest
from jaxpp_async.actors.processes.commands import command_here, command_there
from jaxpp_async.actors.processes.progress import ProgressPage, make_page
from jaxpp_async.actors.processes.warden import Process, Warden

PROGRAM = "jaxpp_async.actors"

_CHATTER = "Expected number of connected peer ranks"
"""What gloo prints for every group of devices that computes together, and nobody has asked for."""


@dataclass(frozen=True, slots=True)
class ActorProcess:
    """A started actor: its process, and the page on which it writes where it is, for whoever started it to close."""

    process: Process
    page: ProgressPage


def spawn_actor(
    warden: Warden, request: ActorRequest, forward: Callable[[str], None]
) -> concurrent.futures.Future[ActorProcess]:
    """Have the warden start an actor's process.

    Args:
        forward: called on the warden's thread with each line that the actor prints.

    Raises:
        MeshError: this host has not what the actor is to run on.
    """
    env = request.environment()
    started: concurrent.futures.Future[ActorProcess] = concurrent.futures.Future()
    page = make_page()

    def on_spawned(spawned: concurrent.futures.Future[Process]) -> None:
        error = spawned.exception()
        if error is not None:
            os.close(page)
            if started.set_running_or_notify_cancel():
                started.set_exception(error)
        elif started.set_running_or_notify_cancel():
            started.set_result(ActorProcess(spawned.result(), ProgressPage(page)))
        else:  # nobody waits for it any more
            os.close(page)
            spawned.result().signal_group(signal.SIGKILL)

    try:
        first_line = request.first_line(page)
    except BaseException:
        os.close(page)
        raise
    own = request.python == sys.executable
    command = command_here(PROGRAM) if own else command_there(request.python, PROGRAM)
    # The warden's thread forks, with the page still open here, and then calls back.
    warden.spawn(command, env, first_line, forward, noise=_CHATTER, descriptors=(page,)).add_done_callback(on_spawned)
    return started
