"""Prepare and start the process of one actor on its host, through a process supervisor.

The local launcher calls this module on this machine, and host agents call it on other hosts. A launcher makes
an `ActorRequest`, which is plain data; the host on which the process starts computes the process's
environment and configuration from it.
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

from jaxpp_async.base.gpu_inventory import VISIBLE, GpuShare, choose_gpus, gpu_environment, visible_gpus
from jaxpp_async.errors import MeshError
from jaxpp_async.launch.process_supervisor import ProcessSupervisor, SupervisedProcess
from jaxpp_async.launch.run_module import command_here, command_there, inherited_environment
from jaxpp_async.protocol.actor_info import ProgressPage, make_page
from jaxpp_async.transport.ucx.net_devices import DEVICES, check_devices

T = TypeVar("T")

PROGRAM = "jaxpp_async.actors"
_ONLINE: Final = Path("/sys/devices/system/cpu/online")

_CHATTER = "Expected number of connected peer ranks"
"""A part of the line that gloo prints for every group of devices that computes together; such lines are
dropped.
"""


@dataclass(frozen=True, slots=True)
class ActorProcess:
    """A started actor process, and the shared memory page on which it writes its progress. The code that
    started the process must close the page.
    """

    process: SupervisedProcess
    page: ProgressPage


def spawn_actor(
    supervisor: ProcessSupervisor, request: ActorRequest, forward: Callable[[str], None]
) -> concurrent.futures.Future[ActorProcess]:
    """Have a process supervisor start an actor's process.

    Args:
        supervisor: the supervisor that starts and owns the process.
        request: the description of the process.
        forward: a function that is called on the supervisor's thread with each line that the actor prints.

    Returns:
        A future whose result is the started process; the future fails with OSError if the process could not
        be started.

    Raises:
        MeshError: this host does not have the CPUs, GPUs or network devices that the actor is to use.
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
    except BaseException:  # whatever interrupts the start, the page has no other owner yet
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
    """A description of how to start one actor's process. The process's host adds the settings that only that
    host knows.

    The description is sent to host agents as JSON over stdin, since it contains the mesh's secret.

    Args:
        python: the path of the interpreter.
        env: variables to add to the host's environment, which they override.
        config: the configuration that the actor reads from the first line of its stdin, without the entries
            that only its host knows.
        index: which of the host's processes this is, counted from 0.
        count: the number of the mesh's processes on the host.
        cpus: the numbers of the CPUs that the host's processes share; None for all that the starting process
            may use.
        gpus: the number of GPUs that the process needs; 0 if it needs none.
        gpus_are_its_own: whether the GPUs that the host's environment names are for this process alone,
            because a cluster assigned them. Otherwise all processes of the mesh on the host share them.
        defaults: variables that apply where neither the host's environment nor `env` has them.
    """

    python: str
    env: Mapping[str, str]
    config: Mapping[str, Any] = field(repr=False)
    index: int = 0
    count: int = 1
    cpus: tuple[int, ...] | None = None
    gpus: int = 0
    gpus_are_its_own: bool = False
    defaults: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Compute the whole environment of the process on its host; call this on that host.

        Raises:
            MeshError: the host does not have the GPUs that the process needs, or too little of their memory
                is left for it, or the network devices are missing.
        """
        env = {**self.defaults, **inherited_environment(), **self.env}
        check_devices(env.get(DEVICES))
        return env | self._gpu_environment(env) if self.gpus else env

    def _gpu_environment(self, env: Mapping[str, str]) -> dict[str, str]:
        visible = visible_gpus(env)
        there = visible.names
        if not there and VISIBLE not in env:
            return {}  # the process reports itself what is missing: a GPU, its driver, or JAX for it
        if visible.stopped_at and VISIBLE in self.env:
            # the user asked for it; it is not just this host's setting
            raise MeshError(
                f"devices= (or {VISIBLE} of env=) is {env[VISIBLE]!r}, and this host has no GPU "
                f"{visible.stopped_at}, or more than one of that name; `nvidia-smi -L` there lists them"
            )
        alone = self.gpus_are_its_own and len(there) == self.gpus
        given = GpuShare(there, 1) if alone else choose_gpus(there, self.index, self.count, self.gpus)
        return gpu_environment(given, env)

    def first_line(self, progress_page: int | None) -> bytes:
        """Make the first line of the process's stdin: JSON with its configuration and the secret.

        The secret is sent over stdin because that is the one channel that no other user can read.

        Args:
            progress_page: the file descriptor of the shared page for the process's progress; None for no
                page.

        Raises:
            MeshError: this host does not have the CPUs that the process is to use.
        """
        if self.cpus is not None:
            check_cpus(self.cpus)
        cpus = list(self.cpus or sorted(os.sched_getaffinity(0)))
        config = {
            **self.config,
            "parent_pid": os.getpid(),
            "cores": share_out(cpus, self.count)[self.index],
            "progress_page": progress_page,
        }
        return json.dumps(config).encode() + b"\n"


def check_cpus(cpus: Sequence[int]) -> None:
    """Check that this host has all of the given CPUs.

    Raises:
        MeshError: the host does not have one of them.
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
    """Return the numbers of this host's CPUs as text, such as `"0-3,8-11"`.

    Some numbers may be missing in between, because a CPU can be offline. This process may not be allowed to
    use all of these CPUs.
    """
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if text := _ONLINE.read_text().strip():
            return text
    return f"0-{(os.cpu_count() or 1) - 1}"


def share_out(items: Sequence[T], count: int) -> list[list[T]]:
    """Divide items, such as CPU cores, among actors. Each actor gets adjacent items. If there are more actors
    than items, each actor gets one item, and several actors share an item.

    Args:
        items: the items.
        count: the number of actors.

    Returns:
        One list of items per actor.
    """
    if count > len(items):
        return [[items[i % len(items)]] for i in range(count)]
    bounds = [i * len(items) // count for i in range(count + 1)]
    return [list(items[bounds[i] : bounds[i + 1]]) for i in range(count)]
