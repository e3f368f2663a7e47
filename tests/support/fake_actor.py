"""A stand-in for `actors.actor.Actor` that the tests of the control plane steer through the program. No JAX.

The label of the program's one instruction says what a step does, e.g. `"done"`, `"hang"`, `"raise"`; host
values are kept as bytes.
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxpp_async.base.gpu_inventory import memory_fraction
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import Run
from jaxpp_async.protocol import messages as m

if TYPE_CHECKING:
    from jaxpp_async.controller.controller import Controller

GPUS = "JAXPP_TEST_GPUS"
"""Names of the GPUs that an actor of this environment says it has."""

STATS = m.StepStats(0.5, 0.25, 1.0, 4096, 3, bytes(16))


def scripted(does: str, num_actors: int = 2) -> dict[int, ActorProgram]:
    """Programs for fake actors, by actor.

    Args:
        does: what each actor does in a step, such as `"hang"`, or what some do, such as `"1:raise 0:hang"`.
        num_actors: the number of actors.
    """
    return {actor: ActorProgram(actor, (Run(does, 0, (), ()),), ()) for actor in range(num_actors)}


class NullTransport:
    """A data plane on which nothing travels."""

    address = b"null"

    async def connect(self, peer: int, address: bytes) -> None: ...
    async def abort(self, peer: int | None = None) -> None: ...
    async def aclose(self) -> None: ...

    def send(self, buffer: Any, peer: int, tag: int) -> Any:
        raise AssertionError("the fake actor takes inline values only")

    recv = send

    def post_send(self, memory: Any, peer: int, tag: int, done: Any) -> bool:
        raise AssertionError("the fake actor takes inline values only")

    post_recv = post_send

    def hurry(self, on: bool) -> None: ...

    def routes(self, peer: int) -> tuple[str, ...]:
        return ()


async def start_fakes(
    num_actors: int,
    launcher: Any,
    config: Any = None,
    *,
    events: Any = None,
    on_progress: Any = None,
    **options: Any,
) -> Controller:
    """A controller of actors that `launcher` starts, without a data plane; `options` as of
    `ControllerOptions`."""
    from jaxpp_async.controller.controller import (
        Controller,  # here: actors import this module, and need no controller
    )
    from jaxpp_async.controller.options import ActorConfig, ControllerOptions

    chosen = ControllerOptions(
        config or ActorConfig(), make_transport=lambda kind: NullTransport(), **options
    )
    return await Controller.start(num_actors, launcher, chosen, events=events, on_progress=on_progress)


class FakeActor:
    current_step: int | None = None

    def __init__(
        self, actor_id: int, *, make_transport: Callable[..., Any], send: Callable[..., None], **_: Any
    ):
        self._id, self._send = actor_id, send
        self._programs: dict[int, str] = {}
        self._blobs: dict[str, bytes] = {}
        self._arrays: dict[int, m.Put] = {}
        self._steps: list[m.Step] = []
        self._aborted = False

    def handle(self, message: Any, number: int) -> None:
        try:
            reply = getattr(self, f"_on_{type(message).__name__.lower()}")(message)
        except Exception as error:
            step = message.step if isinstance(message, m.Step) else None
            text = traceback.format_exc()
            reply = m.Failed(type(error).__name__, str(error), text, step, "run fwd(stage 1, mb 3)")
        if reply is not None:
            self._send(reply, number)

    async def aclose(self) -> None:
        if "stubborn" in self._programs.values():
            await asyncio.sleep(60)

    def _on_configure(self, message: m.Configure) -> m.Ready | None:
        if message.setup == "raise":
            raise RuntimeError("no such setup")
        if message.setup == "exit":
            print("about to leave", flush=True)
            os._exit(7)
        if message.setup == "silent":
            return None
        versions = {"jax": "0.0.1"} if message.setup == "old jax" else {}
        self._send(m.Log(20, "jaxpp_async.actor", "configured"))
        gpus = tuple(os.environ.get(GPUS, "").split())
        fraction = memory_fraction(os.environ) if gpus else 0.0
        hardware = m.Hardware("fake", 1, gpus=gpus, memory_fraction=fraction)
        return m.Ready(b"null", ("fake:0",), versions, hardware)

    def _on_connect(self, message: m.Connect) -> m.Connected:
        return m.Connected({})

    def _on_load(self, message: m.Load) -> m.Loaded:
        (run,) = message.program.instructions
        assert isinstance(run, Run)
        if run.label == "bad":
            raise ValueError("cannot compile")
        self._programs[message.program_id] = run.label
        self._blobs |= message.blobs
        return m.Loaded(0.1, {0: len(message.blobs)})

    def _on_store(self, message: m.Store) -> m.Done:
        self._keep(message.puts, message.frees)
        return m.Done()

    def _on_step(self, message: m.Step) -> m.StepDone | None:
        self._keep(message.puts, message.frees)
        self._steps.append(message)
        what = self._programs[message.program_id]
        mine = (
            what if ":" not in what else dict(p.split(":") for p in what.split()).get(str(self._id), "done")
        )
        if mine == "raise":
            raise ValueError("boom")
        if mine == "transfer":
            raise type("TransferError", (Exception,), {})("the link is down")
        if mine == "exit":
            print("last words", file=sys.stderr, flush=True)
            os._exit(3)
        return m.StepDone(message.step, STATS) if mine != "hang" else None

    def _on_fetch(self, message: m.Fetch) -> m.Fetched:
        arrays = [self._arrays[i] for i in message.array_ids]
        return m.Fetched(tuple((p.aval.shape, p.aval.dtype, p.data) for p in arrays))

    def _on_abort(self, message: m.Abort) -> m.Done:
        self._aborted = True
        print(f"aborted: {message.cause.splitlines()[0]}", flush=True)
        return m.Done()

    def _on_resettransport(self, message: m.ResetTransport) -> m.TransportReset:
        return m.TransportReset(b"null")

    def _on_rollback(self, message: m.Rollback) -> m.Done:
        return m.Done()

    def _on_report(self, message: m.Report) -> m.Reported:
        # A step that hangs here is one that computes: nobody waits for anybody.
        last = self._steps[-1].step if self._steps else None
        return m.Reported(last, running=last is not None)

    def _on_inspect(self, message: m.Inspect) -> m.Inspected:
        numbers = {"arrays": len(self._arrays), "blobs": len(self._blobs), "steps": len(self._steps)}
        numbers["cores"] = len(os.sched_getaffinity(0))
        numbers["secrets"] = sum(len(v) == 64 and v.isalnum() for v in os.environ.values())
        return m.Inspected(numbers)

    def _keep(self, puts: tuple[m.Put, ...], frees: tuple[int, ...]) -> None:
        for put in puts:
            self._arrays[put.array_id] = put
        for array_id in frees:
            del self._arrays[array_id]
