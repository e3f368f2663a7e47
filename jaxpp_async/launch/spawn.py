"""Prepare and start the process of one actor on its host, through a process supervisor.

The local launcher does so on this machine, and host agents do elsewhere. A launcher makes an `ActorRequest`,
which is plain data; the host of the process computes its environment and configuration from it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from jaxpp_async.base.gpu_inventory import VISIBLE, GpuShare, gpu_environment, share, visible_gpus
from jaxpp_async.errors import MeshError
from jaxpp_async.launch.commands import command_here, command_there, inherited_environment
from jaxpp_async.launch.process_supervisor import ProcessSupervisor, SupervisedProcess
from jaxpp_async.protocol.actor_info import ProgressPage, make_page
from jaxpp_async.transport.ucx.net_devices import DEVICES, check_devices

T = TypeVar("T")

PROGRAM = "jaxpp_async.actors"
_ONLINE: Final = Path("/sys/devices/system/cpu/online")

_CHATTER = "Expected number of connected peer ranks"
"""A line that gloo prints for every group of devices that computes together. It is dropped."""


@dataclass(frozen=True, slots=True)
class ActorProcess:
    """A started actor process, and the page on which it writes its progress. The code that started it closes
    the page.
    """

    process: SupervisedProcess
    page: ProgressPage


def spawn_actor(
    supervisor: ProcessSupervisor, request: ActorRequest, forward: Callable[[str], None]
) -> concurrent.futures.Future[ActorProcess]:
    """Have a process supervisor start an actor's process.

    Args:
        supervisor: starts and owns the process.
        request: describes the process.
        forward: called on the supervisor's thread with each line that the actor prints.

    Raises:
        MeshError: this host does not have what the actor is to run on.
    """
    env = request.environment()
    started: concurrent.futures.Future[ActorProcess] = concurrent.futures.Future()
    page = make_page()

    def on_spawned(spawned: concurrent.futures.Future[SupervisedProcess]) -> None:
        error = spawned.exception()
        if error is not None:
            os.close(page)
            if started.set_running_or_notify_cancel():
                started.set_exception(error)
        elif started.set_running_or_notify_cancel():
            started.set_result(ActorProcess(spawned.result(), ProgressPage(page)))
        else:  # nobody waits for the process any more
            os.close(page)
            spawned.result().signal_group(signal.SIGKILL)

    try:
        first_line = request.first_line(page)
    except BaseException:
        os.close(page)
        raise
    own = request.python == sys.executable
    command = command_here(PROGRAM) if own else command_there(request.python, PROGRAM)
    # The supervisor's thread forks while the page is still open here, and then calls back.
    supervisor.spawn(
        command, env, first_line, forward, noise=_CHATTER, descriptors=(page,)
    ).add_done_callback(on_spawned)
    return started


@dataclass(frozen=True, slots=True)
class ActorRequest:
    """Describes how to start one actor's process. It travels to host agents as JSON, over stdin, since it
    holds the secret.

    Args:
        python: the interpreter.
        env: variables to add to the host's own.
        config: the first line of the actor's stdin, without what only its host knows.
        index, count: it is the `index`-th of `count` actors on its host.
        cpus: CPU numbers that the host's actors share; None: those that the process may use.
        pin_cores: bind the actor to its share.
        gpus: number of GPUs that its process needs; 0: none.
        gpus_are_its_own: the GPUs that its host's environment names belong to this process alone, because a
            cluster assigned them, and not to all processes there.
        defaults: variables that apply where neither its host's environment nor `env` has them.
    """

    python: str
    env: Mapping[str, str]
    config: Mapping[str, Any] = field(repr=False)
    index: int = 0
    count: int = 1
    cpus: tuple[int, ...] | None = None
    pin_cores: bool = True
    gpus: int = 0
    gpus_are_its_own: bool = False
    defaults: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Compute the whole environment of the process.

        Raises:
            MeshError: its host does not have the GPUs that it needs, or too little of their memory is left
                for it, or the network devices are missing.
        """
        env = {**self.defaults, **inherited_environment(), **self.env}
        check_devices(env.get(DEVICES))
        return env | self._gpu_environment(env) if self.gpus else env

    def _gpu_environment(self, env: Mapping[str, str]) -> dict[str, str]:
        visible = visible_gpus(env)
        there = visible.names
        if not there and VISIBLE not in env:
            return {}  # the process reports itself what is missing: a GPU, its driver, or JAX for it
        if (
            visible.stopped_at and VISIBLE in self.env
        ):  # the user asked for it; it is not just this host's setting
            raise MeshError(
                f"devices= (or {VISIBLE} of env=) is {env[VISIBLE]!r}, and this host has no GPU "
                f"{visible.stopped_at}, or more than one of that name; `nvidia-smi -L` there lists them"
            )
        alone = self.gpus_are_its_own and len(there) == self.gpus
        given = GpuShare(there, 1) if alone else share(there, self.index, self.count, self.gpus)
        return gpu_environment(given, env)

    def first_line(self, progress_page: int | None) -> bytes:
        """Make the line of JSON with configuration and secret. It goes to stdin, the one channel that no
        other user can read.

        Args:
            progress_page: descriptor of the page, or None.

        Raises:
            MeshError: its host does not have the CPUs that it is to run on.
        """
        if self.cpus is not None:
            check_cpus(self.cpus)
        cpus = list(self.cpus or sorted(os.sched_getaffinity(0)))
        config = {
            **self.config,
            "parent_pid": os.getpid(),
            "cores": share_out(cpus, self.count)[self.index] if self.pin_cores or self.cpus else [],
            "progress_page": progress_page,
        }
        return json.dumps(config).encode() + b"\n"


def check_cpus(cpus: Sequence[int]) -> None:
    """Check that this host has all of these CPUs.

    Raises:
        MeshError: it has not.
    """
    online = _online_cpus()
    there = os.sched_getaffinity(0)
    for part in online.split(","):
        first, _, last = part.partition("-")
        there |= set(range(int(first), int(last or first) + 1))
    missing = sorted(set(cpus) - there)
    if missing:
        named = f"CPU {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
        raise MeshError(
            f"cpus= names {named}, which host {os.uname().nodename} does not have; its CPUs are {online}"
        )


def _online_cpus() -> str:
    """List the CPUs of this host, such as `0-3,8-11`. Numbers may be missing, and this process may not be
    allowed to use all.
    """
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if text := _ONLINE.read_text().strip():
            return text
    return f"0-{(os.cpu_count() or 1) - 1}"


def share_out(items: Sequence[T], count: int) -> list[list[T]]:
    """Divide items among actors: adjacent ones for each, or round-robin when there are more actors than
    items.
    """
    if count > len(items):
        return [[items[i % len(items)]] for i in range(count)]
    bounds = [i * len(items) // count for i in range(count + 1)]
    return [list(items[bounds[i] : bounds[i + 1]]) for i in range(count)]
