"""Start actors in a Ray cluster, with one placement group.

Ray reserves one bundle of resources for each process of the mesh, and runs one Ray actor in each bundle. The
Ray actor runs a host agent (the program that starts this package's actors) as a child process, and passes
bytes between the driver and the agent's stdin and stdout. Ray does nothing else: the control connection and
all transfers of arrays are this package's own.

The mesh's secret is sent as an argument of a method call of the Ray actor, so that the secret is in no
command line, environment variable or file. Whoever can observe the cluster's own traffic may see the secret,
unless Ray runs with TLS (docs/launching.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpp_async.base.install_hints import pip_install
from jaxpp_async.errors import InstallError, MeshError
from jaxpp_async.launch.host_agent_client import ProgramNotStartedError, Stream
from jaxpp_async.launch.hosts import Host, ProcessPlacement
from jaxpp_async.launch.login_errors import Explanation
from jaxpp_async.launch.options import OF_HOSTS, LauncherKind, LaunchOptions
from jaxpp_async.launch.process_supervisor import Death, OutputLines
from jaxpp_async.launch.remote import RemoteLauncher
from jaxpp_async.protocol.parent_watch import Lease

PLACEMENT_TIMEOUT_S = 30.0
_READ_BYTES = 1 << 16
_NAME = "jaxpp_async"


class HostAgentRunner:
    """The Ray actor class that runs a host agent as a child process on the node that Ray chose. Ray calls
    `read` and `write` on different threads, so that a waiting `read` does not delay `write`.

    Args:
        command: the agent's argument vector; None in the place of the interpreter stands for the interpreter
            of Ray's own workers.
    """

    def __init__(self, command: Sequence[str | None]):
        self._process = subprocess.Popen(
            [command[0] or sys.executable, *(word for word in command[1:] if word)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def write(self, data: bytes) -> None:
        """Write bytes to the agent's stdin; they are dropped if the agent has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def read(self) -> tuple[bytes, int | None]:
        """Wait for output of the agent and return it.

        Returns:
            The bytes of output and None; at the end of the output, no bytes and the agent's exit status.
        """
        assert self._process.stdout is not None
        data = os.read(self._process.stdout.fileno(), _READ_BYTES)
        return data, None if data else self._process.wait()


class RayReach:
    """A `Reach` (an object that starts programs on hosts) that starts host agents on the nodes of a Ray
    placement group, one bundle and one agent per process.

    Args:
        bundle: the resources that Ray reserves for each process.
        own_python: whether the user named an interpreter; otherwise agents use the one of Ray's workers.
    """

    agent_per_process = True
    login_mark: str | None = None
    lease = Lease()

    def __init__(self, bundle: Mapping[str, float], *, own_python: bool):
        self._bundle, self._own_python = dict(bundle), own_python
        self._ray: Any = None
        self._is_ours = False
        self._group: Any = None
        self._bundles: dict[tuple[str, int], int] = {}
        self._streams: list[_RayStream] = []

    def place(self, num_processes: int) -> tuple[Host, ...]:
        """Connect to the Ray cluster and reserve a bundle for each process. Blocks until the bundles are
        reserved.

        Returns:
            The hosts on which Ray placed bundles, each with as many slots as it has bundles.

        Raises:
            InstallError: Ray is not installed.
            MeshError: there is no cluster, or it has not enough free resources.
        """
        ray = self._ray = _import_ray()
        if not ray.is_initialized():
            try:
                ray.init(address="auto", log_to_driver=False, logging_level="warning")
            except (ConnectionError, RuntimeError) as error:
                raise MeshError(
                    f"launcher='ray' found no Ray cluster ({str(error).splitlines()[0]}); start one (`ray "
                    "start --head`), set RAY_ADDRESS, or call ray.init(...) yourself before"
                ) from None
            self._is_ours = True
        self._group = ray.util.placement_group([self._bundle] * num_processes, strategy="PACK")
        if not self._group.wait(PLACEMENT_TIMEOUT_S):
            raise MeshError(
                f"the Ray cluster has no room for {num_processes} processes of {self._bundle} within "
                f"{PLACEMENT_TIMEOUT_S:g} s; free now: {_numbers(ray.available_resources())}; see `ray "
                "status`"
            )
        table = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        by_host: dict[str, list[int]] = {}
        for bundle, node in sorted(table.items()):
            by_host.setdefault(addresses[node], []).append(bundle)
        self._bundles = {(host, i): b for host, bundles in by_host.items() for i, b in enumerate(bundles)}
        return tuple(Host(host, len(bundles)) for host, bundles in by_host.items())

    async def resolve(self, hosts: Sequence[Host]) -> list[str]:
        """Return the hosts' names, which are IP addresses because Ray lists nodes by address."""
        return [host.name for host in hosts]

    async def open(
        self, placement: ProcessPlacement, host_agent: Sequence[str], on_line: Callable[[str], None]
    ) -> Stream:
        """Start a host agent in the placement's bundle and return a stream connected to it (see
        `Reach.open`).
        """
        python = host_agent[0] if self._own_python else None
        stream = await asyncio.to_thread(self._open, placement, [python, *host_agent[1:]], on_line)
        self._streams.append(stream)
        return stream

    def _open(
        self, placement: ProcessPlacement, command: Sequence[str | None], on_line: Callable[[str], None]
    ) -> _RayStream:
        from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
            PlacementGroupSchedulingStrategy,
        )

        bundle = self._bundles[placement.host.name, placement.index]
        runner = self._ray.remote(
            num_cpus=self._bundle.get("CPU", 0),
            num_gpus=self._bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
            # One thread for each group: reads block, and writes must keep their order.
            concurrency_groups={"read": 1, "write": 1},
            max_restarts=0,
        )(HostAgentRunner)
        return _RayStream(self._ray, runner.remote(list(command)), on_line, self.lease.beat_s)

    def explain(self, host: Host, error: ProgramNotStartedError) -> Explanation | None:
        """Explain why a host agent did not start, if Ray reported an error; else return None (see
        `Reach.explain`).
        """
        text = "\n".join(error.said)
        if f"No module named '{_NAME}" in text or "ray.exceptions" not in text:
            return None
        return Explanation(
            f"Ray could not run a host agent there: {error.said[-1]}", "see `ray status` and `ray logs`"
        )

    async def aclose(self) -> None:
        """End the Ray actors, release the bundles, and disconnect from the cluster if this object connected
        to it.
        """
        streams, self._streams = self._streams, []
        await asyncio.to_thread(self._close, streams)

    def _close(self, streams: Sequence[_RayStream]) -> None:
        for stream in streams:
            stream.close()
        group, self._group = self._group, None
        if group is not None:
            self._ray.util.remove_placement_group(group)
        if self._is_ours:
            self._is_ours = False
            self._ray.shutdown()


class _RayStream:
    """A `Stream` to a host agent through a Ray actor.

    The stream has a thread of its own, so that a blocked event loop does not delay the heartbeats without
    which the agent would exit.
    """

    def __init__(self, ray: Any, actor: Any, on_line: Callable[[str], None], beat_s: float):
        self._ray, self._actor, self._beat_s = ray, actor, beat_s
        self._lines = OutputLines(on_line)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: Death | None = None
        self._is_closing = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxpp-async ray", daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        """Send bytes to the agent's stdin, without waiting; see `Stream.write`."""
        if not self._over.is_set():
            self._actor.write.options(concurrency_group="write").remote(data)

    def kill(self) -> None:
        """Kill the Ray actor, and with it the stream; see `Stream.kill`."""
        if not self._is_closing:
            self._is_closing = True
            self._ray.kill(self._actor, no_restart=True)

    def close(self) -> None:
        """Kill the Ray actor and wait a few seconds at most until the stream's thread has ended."""
        self.kill()
        self._thread.join(self._beat_s)

    async def wait_ended(self) -> Death:
        """Wait until the stream has ended, and return how the agent ended; see `Stream.wait_ended`."""
        await asyncio.to_thread(self._over.wait)
        assert self._end is not None
        return self._end

    def _run(self) -> None:
        returncode = -9
        try:
            returncode = self._read()
        except Exception as error:
            # Ray's errors have no common base class; any of them ends the stream.
            if not self._is_closing:
                for line in f"{type(error).__module__}.{type(error).__name__}: {error}".splitlines():
                    self._lines.feed(line.encode() + b"\n")
        self._lines.feed(b"", final=True)
        self._end = Death(returncode, tuple(self._lines.tail))
        self._over.set()

    def _read(self) -> int:
        """Forward the agent's output until it ends, and return the agent's exit status. Meanwhile send the
        heartbeats without which the agent would exit.
        """
        reading = self._actor.read.options(concurrency_group="read").remote()
        next_beat_s = time.monotonic() + self._beat_s
        while True:
            ready, _ = self._ray.wait([reading], timeout=max(0.0, next_beat_s - time.monotonic()))
            if time.monotonic() >= next_beat_s:
                next_beat_s = time.monotonic() + self._beat_s
                self.write(b".")
            if not ready:
                continue
            data, returncode = self._ray.get(reading)
            if not data:
                return returncode
            self._lines.feed(data)
            reading = self._actor.read.options(concurrency_group="read").remote()


class RayLauncher(RemoteLauncher):
    """A launcher that starts actors in a Ray cluster.

    Args:
        num_processes: the number of bundles to reserve, one for each process.
        bundle: the resources that Ray reserves for each process; None for one CPU.
        options: the keyword arguments of `RemoteLauncher`.
    """

    def __init__(self, num_processes: int, *, bundle: Mapping[str, float] | None = None, **options: Any):
        settings = options.get("settings")
        own_python = settings is not None and settings.python is not None
        reach = RayReach(bundle or {"CPU": 1}, own_python=own_python)
        super().__init__(reach, (), **options)
        self._num_processes, self._ray_reach = num_processes, reach

    async def prepare(self) -> None:
        """Reserve the bundles, then find the address on which the controller listens for the actors.

        Raises:
            InstallError: Ray is not installed.
            MeshError: there is no cluster, it has not enough free resources, or no single address of this
                machine works for all hosts.
        """
        try:
            self.hosts = await asyncio.to_thread(self._ray_reach.place, self._num_processes)
            await super().prepare()
        except BaseException:  # also a cancellation: nobody else releases the bundles
            await self._reach.aclose()
            raise


def _import_ray() -> Any:
    try:
        import ray  # pyright: ignore[reportMissingImports]
        import ray.util  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InstallError(
            f"launcher='ray' needs the package ray, which does not import here ({error}); install it with: "
            f"{pip_install('ray')}"
        ) from None
    return ray


def _numbers(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{n} {resources[n]:g}" for n in ("CPU", "GPU") if n in resources) or "nothing"


def _make(options: LaunchOptions, num_processes: int) -> RayLauncher:
    gpus = options.gpus_per_actor / (options.processes_per_actor or 1)
    bundle = {"CPU": 1.0, "GPU": gpus} if gpus else {"CPU": 1.0}
    return RayLauncher(num_processes, bundle=bundle, **options.remote_options())


KIND = LauncherKind(
    make=_make, uses=OF_HOSTS, phrase="launcher='ray', which takes the hosts of the Ray cluster"
)
