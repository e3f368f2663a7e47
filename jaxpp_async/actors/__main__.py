"""Run an actor process: `python -m jaxpp_async.actors`, which only launchers start.

The launcher writes one line of JSON (the configuration and the secret) to the stdin of the process, and then
one byte every few seconds. If these bytes stop, the process exits, because the launcher is then lost. JAX is
imported only after the CPU affinity is set, since JAX sizes its thread pools by the affinity.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import sys
import traceback
from dataclasses import dataclass, field
from typing import Any

from jaxpp_async.errors import HandshakeError
from jaxpp_async.protocol.actor_info import ExitCode
from jaxpp_async.protocol.parent_watch import LEASE_S, die_with_parent, leave, watch_stdin

_MAX_LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Config:
    """The configuration that an actor process reads from the first line of its stdin.

    `LaunchSpec.config` makes most of the fields, and the launcher adds the rest.
    """

    process_id: int
    incarnation: int
    secret: bytes = field(repr=False)
    controller: tuple[str, int]
    lease_s: float
    actor: str
    max_frame_bytes: int
    parent_pid: int | None = None
    log_level: int = logging.INFO
    cores: tuple[int, ...] = ()
    progress_page: int | None = None


def main() -> None:
    """Run one actor process until it ends, and exit with an `ExitCode`."""
    faulthandler.enable()  # a crash in native code prints its traceback, which the controller shows
    try:
        config = _parse(_read_line(0))
    except (ValueError, KeyError, TypeError) as error:
        # The message does not show the line itself, since that contains the secret.
        print(
            f"python -m jaxpp_async.actors is started by a mesh, not by hand ({type(error).__name__})",
            file=sys.stderr,
        )
        leave(ExitCode.CONFIG)
        return
    if config.parent_pid is not None:
        die_with_parent(config.parent_pid)
    watch_stdin(_move_stdin(), config.lease_s, leave)
    if config.cores:
        try:
            os.sched_setaffinity(0, config.cores)
        except OSError as error:
            print(
                f"cannot run on CPUs {list(config.cores)} of this host ({error}); correct cpus=",
                file=sys.stderr,
            )
            leave(ExitCode.CONFIG)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_and_leave(config))


async def _serve_and_leave(config: _Config) -> None:
    """Serve the controller's requests until shutdown, and then exit the process from inside the event loop.

    The loop is not closed, because closing waits for the loop's threads, and these may be blocked inside JAX.
    An error is printed to stderr. The exit status says what kind of error occurred, if any.
    """
    try:
        code = await _serve(config)
    except HandshakeError as error:
        print(error, file=sys.stderr)
        code = ExitCode.REFUSED
    except OSError as error:
        print(f"lost the controller at {config.controller}: {error}", file=sys.stderr)
        code = ExitCode.CONNECTION_LOST
    except BaseException:
        # this is the outermost frame: every error is printed and decides the exit status
        traceback.print_exc()
        code = ExitCode.CRASH
    leave(code)


async def _serve(config: _Config) -> ExitCode:
    from jaxpp_async.actors.heartbeat import Heartbeat, start_beating
    from jaxpp_async.actors.server import ActorLike, load_actor_class, serve
    from jaxpp_async.protocol.actor_info import ProgressPage
    from jaxpp_async.protocol.connection import connect_tcp
    from jaxpp_async.protocol.frames import Identity
    from jaxpp_async.protocol.log_forwarding import send_records
    from jaxpp_async.transport.registry import make_process_transport

    lost_s = max(LEASE_S, config.lease_s)
    identity, page = Identity(config.process_id, config.incarnation), ProgressPage(config.progress_page)

    def make_actor(process_id: int, **seams: Any) -> ActorLike:
        # After the handshake, for two reasons: the controller accepts heartbeats only from actors that have
        # connected, and importing JAX takes longer than a handshake may.
        start_beating(Heartbeat(identity, config.secret, config.controller, lost_s), page.read, leave)
        sender = send_records(seams["send"], config.log_level)  # before JAX is imported, which may log
        actor = load_actor_class(config.actor)(process_id, note_progress=page.note, **seams)
        sender.step = lambda: actor.current_step
        return actor

    return await serve(
        identity,
        config.secret,
        connect=lambda connection: connect_tcp(connection, *config.controller),
        make_actor=make_actor,
        make_transport=lambda kind, network: make_process_transport(kind, config.process_id, network),
        max_frame_bytes=config.max_frame_bytes,
        lost_s=lost_s,
        spins=True,
    )


def _read_line(descriptor: int) -> bytes:
    line = bytearray()
    while b"\n" not in line:
        data = os.read(descriptor, 4096)
        if not data or len(line) > _MAX_LINE_BYTES:
            raise ValueError("no configuration on stdin")
        line += data
    return bytes(line.partition(b"\n")[0])


def _parse(line: bytes) -> _Config:
    values = json.loads(line)
    values["secret"] = bytes.fromhex(values["secret"])
    values["controller"] = tuple(values["controller"])
    values["cores"] = tuple(values.get("cores", ()))
    return _Config(**values)


def _move_stdin() -> int:
    """Move stdin to another descriptor and return that descriptor, so that no child process and no `input()`
    reads the launcher's bytes."""
    moved = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return moved


if __name__ == "__main__":
    main()
