"""Direct tests of a controller's requests that carry host values, and of those that free arrays."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.host_values import HostValue
from jaxpp_async.controller.options import ActorConfig, ControllerOptions
from jaxpp_async.controller.requests import PendingRequest
from jaxpp_async.errors import MeshError
from jaxpp_async.program.instructions import Aval
from jaxpp_async.protocol.actor_info import Topology
from jaxpp_async.protocol.messages import Done, Put, Store

F2 = Aval((2,), "float32")


class Mesh:
    """A controller of two actors of two processes each; stand-ins for the processes answer at once.

    Attributes:
        log: the processes' requests and the transfers to them, in order.
        large: the values that take the data plane, by process.
    """

    def __init__(self):
        config = ActorConfig(spmd_mesh=(("x", 2),), processes_per_actor=2)
        self.controller = Controller(
            Topology(2, 2),
            SimpleNamespace(listen_host=None, transports=("memory",)),
            ControllerOptions(config, max_restarts=1),
            events=None,
            on_progress=lambda text: None,
        )
        self.log, self.handlers, self.awaited, self.large = [], [], [], {}
        group = self.controller._actor_group
        group._host_transfers = self
        for process in group.processes.everyone:
            group.links[process] = SimpleNamespace(info="actor", send=self._answer(process), connection=self)

    def _answer(self, process: int):
        def send(request, encoded) -> None:
            self.log.append((process, request.message))
            self.handlers.append(request.waiter)
            self.awaited.append(request.waiter.error_is_seen)
            request.waiter.on_reply(SimpleNamespace(info="actor"), Done())

        return send

    async def drain(self) -> None: ...

    def prepare(self, actor, values):
        return tuple(Put(v.array_id, v.aval, b"") for v in values), self.large

    def send(self, process, large):
        self.log.append((process, large))
        return []


async def test_values_and_frees_go_to_every_process_of_their_actors():
    mesh = Mesh()
    mesh.controller.free(1, 40)
    await mesh.controller.put({0: [HostValue(7, F2, np.zeros(2, np.float32))]})
    put = Put(7, F2, b"")
    assert mesh.log == [
        (0, Store((put,), ())),
        (1, Store((put,), ())),
        (2, Store((), (40,))),
        (3, Store((), (40,))),
    ]
    assert mesh.awaited == [True] * 4


async def test_large_values_take_the_data_plane_behind_their_request():
    mesh, data = Mesh(), np.zeros(12, np.uint8)
    mesh.large = {1: [(5, data)]}
    await mesh.controller.put({0: [HostValue(7, F2, np.zeros(2, np.float32))]})
    put = Put(7, F2, b"")
    assert mesh.log == [(0, Store((put,), ())), (1, Store((put,), ())), (1, [(5, data)])]
    assert [sent.size_bytes for sent in mesh.controller._recovery.history.needed()] == [0, 12]


async def test_frees_of_a_request_that_could_not_be_sent_are_kept_for_the_next():
    mesh = Mesh()
    mesh.controller.free(1, 40)
    with pytest.raises(MeshError, match="UTF-8"):
        await mesh.controller.put({0: [HostValue(7, Aval((2,), "\ud800"), np.zeros(2, np.float32))]})
    assert mesh.log == []
    await mesh.controller.put({})
    assert [(process, message.frees) for process, message in mesh.log] == [(2, (40,)), (3, (40,))]


async def test_frees_that_go_alone_are_requests_that_nobody_awaits():
    mesh = Mesh()
    assert await mesh.controller.fetch([]) == [] and mesh.log == []
    mesh.controller.free(0, 3)
    mesh.controller.free(0, 4)
    await mesh.controller.fetch([])
    assert [(process, message.frees) for process, message in mesh.log] == [(0, (3, 4)), (1, (3, 4))]
    assert all(isinstance(handler, PendingRequest) for handler in mesh.handlers)
    assert mesh.awaited == [False] * 2
    await mesh.controller.fetch([])
    assert len(mesh.log) == 2
