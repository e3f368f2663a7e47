"""Direct tests of requests that carry host values, and of those that free arrays."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from jaxpp_async.controller.controller import HostRequests
from jaxpp_async.controller.host_values import HostValue
from jaxpp_async.controller.requests import FreeList, PendingRequest
from jaxpp_async.errors import MeshError
from jaxpp_async.layout.array_parts import Scattering
from jaxpp_async.program.instructions import Aval
from jaxpp_async.protocol.actor_info import Topology
from jaxpp_async.protocol.messages import Done, Put, Store

F2 = Aval((2,), "float32")


class Mesh:
    """Stands in for the actors, the data plane and the requests of a mesh; it answers at once."""

    def __init__(self, *, refuses: bool = False):
        self.processes, self.scattering, self.refuses = Topology(2, 2), Scattering((("x", 2),), 2), refuses
        self.plane, self.posts, self.sent, self._number = self, [], [], 0
        self.large = {}
        self.frees = FreeList()
        self.requests = HostRequests(self, self, self.frees)

    def number(self) -> int:
        self._number += 1
        return self._number

    def post(self, *posts) -> None:
        if self.refuses:
            raise MeshError("no text that UTF-8 can hold")
        for post in posts:
            self.posts.append(post)
            if post.transfers is not None:
                post.transfers()
            post.reply_handler.on_reply(SimpleNamespace(info="actor"), Done(post.message.request))

    async def drain(self, process: int) -> None: ...

    def prepare(self, actor, values):
        return tuple(Put(v.array_id, v.aval, b"") for v in values), self.large

    def send(self, process, large):
        self.sent.append((process, large))
        return []


async def test_values_and_frees_go_to_every_process_of_their_actors():
    mesh = Mesh()
    mesh.frees.add(1, 40)
    await mesh.requests.put({0: [HostValue(7, F2, np.zeros(2, np.float32))]})
    put = Put(7, F2, b"")
    assert [(post.process, post.message) for post in mesh.posts] == [
        (0, Store(1, (put,), ())),
        (1, Store(2, (put,), ())),
        (2, Store(3, (), (40,))),
        (3, Store(4, (), (40,))),
    ]


async def test_large_values_take_the_data_plane_behind_their_request():
    mesh, data = Mesh(), np.zeros(12, np.uint8)
    mesh.large = {1: [(5, data)]}
    await mesh.requests.put({0: [HostValue(7, F2, np.zeros(2, np.float32))]})
    assert mesh.sent == [(1, [(5, data)])]
    assert [post.size_bytes for post in mesh.posts] == [0, 12]


async def test_frees_of_a_request_that_could_not_be_sent_are_kept_for_the_next():
    mesh = Mesh(refuses=True)
    mesh.frees.add(1, 40)
    with pytest.raises(MeshError, match="UTF-8"):
        await mesh.requests.put({})
    assert mesh.frees.take() == {1: (40,)}


async def test_frees_that_go_alone_are_requests_that_nobody_awaits():
    mesh = Mesh()
    mesh.requests.send_frees()
    assert mesh.posts == []
    mesh.frees.add(0, 3)
    mesh.frees.add(0, 4)
    mesh.requests.send_frees()
    assert [(post.process, post.message.frees) for post in mesh.posts] == [(0, (3, 4)), (1, (3, 4))]
    assert all(
        isinstance(post.reply_handler, PendingRequest) and not post.reply_handler.is_awaited
        for post in mesh.posts
    )
    assert mesh.frees.take() == {}
