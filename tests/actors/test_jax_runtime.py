"""Direct tests of how the processes of one actor agree on a number, and keep a port."""

from __future__ import annotations

import socket

import pytest

from jaxpp_async.actors.jax_runtime import agree, reserve_port
from jaxpp_async.errors import MeshError
from jaxpp_async.jax_bridge import jax_config
from jaxpp_async.protocol.messages import Cluster


class Store:
    """The key-value store of `jax.distributed`, in which the others have said something already."""

    def __init__(self, **said: str):
        self.said, self.asked = {name.replace("_", "/"): value for name, value in said.items()}, []

    def key_value_set(self, key: str, value: str) -> None:
        self.said[key.removeprefix("jaxpp-async/")] = value

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        self.asked.append((key, timeout_ms))
        if key.removeprefix("jaxpp-async/") not in self.said:
            raise RuntimeError("DEADLINE_EXCEEDED")
        return self.said[key.removeprefix("jaxpp-async/")]


CLUSTER = Cluster("host:1", ("a", "b", "c"), rank=1)


@pytest.mark.parametrize(("mine", "found"), [(3, 7), (9, 9)])
def test_the_greatest_number_is_agreed_on(monkeypatch, mine, found):
    store = Store(step_0="7", step_2="5")
    monkeypatch.setattr(jax_config, "distributed_client", lambda: store)
    assert agree("step", mine, CLUSTER, 2.5) == found
    assert store.said["step/1"] == str(mine)
    assert store.asked == [("jaxpp-async/step/0", 2500), ("jaxpp-async/step/2", 2500)]


def test_a_process_that_says_nothing_in_time_is_an_error(monkeypatch):
    monkeypatch.setattr(jax_config, "distributed_client", Store)
    with pytest.raises(MeshError, match=r"^a process of this actor did not say how far it is: DEADLINE"):
        agree("step", 1, CLUSTER, 1.0)


def test_a_reserved_port_is_kept_from_others_and_does_not_listen():
    with reserve_port() as held, socket.socket(socket.AF_INET, socket.SOCK_STREAM) as other:
        port = held.getsockname()[1]
        assert port > 0
        with pytest.raises(OSError):
            other.bind(("0.0.0.0", port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=60.0)
