"""Direct tests of how an actor's process is to be started."""

from __future__ import annotations

import json
import os

import pytest

from jaxpp_async.errors import MeshError
from jaxpp_async.launch.spawn import ActorRequest


def first_line(request: ActorRequest, page: int | None = None) -> dict:
    line = request.first_line(page)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    return json.loads(line)


def test_the_first_line_has_the_configuration_and_what_only_the_host_knows():
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    said = first_line(ActorRequest("python3", {}, {"secret": "x\ny"}), page=9)
    assert said == {"secret": "x\ny", "parent_pid": os.getpid(), "cores": list(cpus), "progress_page": 9}


def test_an_actor_gets_its_share_of_the_cores_that_are_named():
    cpu = min(os.sched_getaffinity(0))
    assert first_line(ActorRequest("python3", {}, {}, cpus=(cpu,)))["cores"] == [cpu]


def test_the_hosts_environment_wins_over_defaults_and_the_request_over_both(monkeypatch):
    monkeypatch.setenv("ONE", "host")
    monkeypatch.setenv("TWO", "host")
    monkeypatch.delenv("THREE", raising=False)
    request = ActorRequest(
        "python3", {"TWO": "asked"}, {}, defaults={"ONE": "default", "TWO": "default", "THREE": "default"}
    )
    env = request.environment()
    assert (env["ONE"], env["TWO"], env["THREE"]) == ("host", "asked", "default")


def test_network_devices_that_are_not_there_are_refused_before_anything_starts(monkeypatch):
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    with pytest.raises(MeshError, match=r"^there is no network device nonesuch0 on host "):
        ActorRequest("python3", {"UCX_NET_DEVICES": "nonesuch0"}, {}).environment()


def test_gpus_are_shared_out_among_the_actors_of_a_host():
    env = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    own = [ActorRequest("p", env, {}, index=k, count=2, gpus=2).environment() for k in range(2)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in own] == ["0,1", "2,3"]
    env = {"CUDA_VISIBLE_DEVICES": "2"}
    alone = ActorRequest("p", env, {}, index=1, count=2, gpus=1, gpus_are_its_own=True)
    assert alone.environment()["CUDA_VISIBLE_DEVICES"] == "2"
