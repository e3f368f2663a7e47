"""Hostfiles, lists of hosts, settings and placements: pure text and data."""

from __future__ import annotations

import os
from typing import Any

import pytest

import jaxpp_async as jpp
from jaxpp_async.errors import MeshError
from jaxpp_async.jax_bridge import jax_config
from jaxpp_async.launch import spawn
from jaxpp_async.launch.choose import choose_launcher
from jaxpp_async.launch.host_agent_protocol import StartActor, read_order, write_order
from jaxpp_async.launch.hosts import (
    DEFAULTS,
    Host,
    Settings,
    environment,
    load_hostfile,
    parse_cpus,
    parse_hostfile,
    parse_hosts,
    place,
)
from jaxpp_async.launch.options import LaunchOptions
from jaxpp_async.launch.spawn import ActorRequest
from jaxpp_async.protocol.parent_watch import Lease

HOSTFILES = [
    ("a\nb\n", [Host("a"), Host("b")]),
    ("\ufeffa", [Host("a")]),
    ("# all\n\n  a slots=4 # four\n\tb\r\n", [Host("a", 4), Host("b")]),
    ("a:3\n", [Host("a", 3)]),
    ("me@10.0.0.7:2 port=2222", [Host("10.0.0.7", 2, "me", 2222)]),
    ("a port=1\na port=2\na", [Host("a", port=1), Host("a", port=2), Host("a")]),
    (
        "a user=me python=/opt/py/bin/python",
        [Host("a", user="me", settings=Settings(python="/opt/py/bin/python"))],
    ),
    ("a env=A=1 env=B=x=y", [Host("a", settings=Settings(env={"A": "1", "B": "x=y"}))]),
    ("a 'env=A=two words'", [Host("a", settings=Settings(env={"A": "two words"}))]),
    ("a cpus=0-2,8", [Host("a", settings=Settings(cpus=(0, 1, 2, 8)))]),
    ("a devices=0-2,GPU-1b2c", [Host("a", settings=Settings(devices=("0", "1", "2", "GPU-1b2c")))]),
    (
        "a interface=mlx5_0:1 ports=47000-47100",
        [Host("a", settings=Settings(None, {}, None, None, "mlx5_0:1", (47000, 47100)))],
    ),
]


@pytest.mark.parametrize(("text", "hosts"), HOSTFILES)
def test_hostfiles(text, hosts):
    assert list(parse_hostfile(text)) == hosts


WRONG = [
    ("", "hf names no host; write one host a line"),
    ("# nothing\n", "hf names no host"),
    ("a\nb\na slots=2", "hf:3: host a stands at hf:1 already; write it once, with slots=N"),
    ("a slots=0", "hf:1: host a has slots=0"),
    ("a\nb slots=-1", "hf:2: host b has slots=-1"),
    ("a slots=two", "hf:1: slots=two is no whole number"),
    ("a slots=", "hf:1: slots= has no value"),
    ("a slots=1 slots=2", "hf:1: slots= stands twice"),
    ("a:2 slots=2", "hf:1: slots= is given a second time"),
    ("me@a user=you", "hf:1: user= is given a second time"),
    ("a max_slots=2", "hf:1: unknown 'max_slots=2'; a host takes slots=, user=, port=, python="),
    ("a b", "hf:1: unknown 'b'"),
    ("slots=2 a", "hf:1: the line begins with 'slots=2'; a host's name comes first"),
    ("a port=70000", "hf:1: host a has port=70000"),
    ("-oProxyCommand=evil", "hf:1: "),
    ("a user=-x", "hf:1: host a has user='-x'"),
    ("a:x", "hf:1: 'a:x' is no host"),
    ("fe80::1", "hf:1: 'fe80::1' is no host; .*IPv6"),
    ("a 'open", "hf:1: No closing quotation"),
    ("a env=A", "hf:1: env=A has no second '='"),
    ("a env=1A=2", "hf:1: env has '1A': '2'"),
    ("a cpus=x", "hf:1: 'x' is no list of CPU numbers"),
    ("a cpus=3-1", "hf:1: '3-1' is no list of CPU numbers"),
    ("a ports=9", "hf:1: '9' is no range of ports"),
    ("a ports=9-1", "hf:1: '9-1' is no range of ports: the first is larger"),
    ("a 'devices=0 1'", "hf:1: devices is"),
    ("a devices=0,5-4", "hf:1: '0,5-4' is no list of devices such as 0-3: 5-4 ends"),
    ("a 'interface=eth0 '", "hf:1: interface is 'eth0 '"),
    ("a python=-c", "hf:1: python is '-c'"),
]


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_wrong_hostfiles_name_file_and_line(text, says):
    with pytest.raises(MeshError, match=f"^{says}"):
        parse_hostfile(text, "hf")


def test_files(tmp_path):
    path = tmp_path / "hosts"
    with pytest.raises(MeshError, match=rf"hostfile {path} does not exist; give the path"):
        load_hostfile(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MeshError, match="cannot be read"):
        load_hostfile(path)
    path.write_text("a slots=2")
    assert load_hostfile(path) == (Host("a", 2),)


def test_lists_of_hosts():
    assert parse_hosts(["a slots=2", Host("b")]) == (Host("a", 2), Host("b"))
    for hosts, says in (
        ([], "hosts names no host"),
        (["a", "b", "a"], r"hosts\[2\]: host a stands at hosts\[0\]"),
        ([3], r"hosts\[0\] is 3"),
        (["a", "b slot=2"], r"hosts\[1\]: unknown 'slot=2'"),
    ):
        with pytest.raises(MeshError, match=says):
            parse_hosts(hosts)


def test_slots_are_filled_in_order():
    placed = place([Host("a", 2), Host("b", 3), Host("c")], 4)
    assert [(p.host.name, p.index, p.count) for p in placed] == [
        ("a", 0, 2),
        ("a", 1, 2),
        ("b", 0, 2),
        ("b", 1, 2),
    ]
    with pytest.raises(MeshError, match=r"7 actors do not fit 6 slots on 3 hosts; .* at most 6 actors"):
        place([Host("a", 2), Host("b", 3), Host("c")], 7)
    with pytest.raises(
        MeshError, match=r"2 actors of 2 processes each do not fit 2 slots on 2 hosts; .* at most 1 actor$"
    ):
        choose_launcher(LaunchOptions(num_devices=4, processes_per_actor=2, hosts=["a", "b"]), 2)
    with pytest.raises(
        MeshError, match=r"1 actor of 2 processes each does not fit 1 slot on 1 host; .* fewer proc"
    ):
        place([Host("a")], 2, per_actor=2)


def test_a_hosts_own_settings_win():
    base = Settings(
        python="p", env={"A": "1", "B": "1"}, cpus=(0,), devices=("0",), interface="i", ports=(1, 2)
    )
    own = Settings(env={"B": "2"}, devices=("4", "5", "6"))
    joined = own.merged_over(base)
    assert joined == Settings("p", {"A": "1", "B": "2"}, (0,), ("4", "5", "6"), "i", (1, 2))
    assert Settings().merged_over(base) == base
    assert environment(joined, "cuda") == {
        "JAX_PLATFORMS": "cuda",
        "PYTHONUNBUFFERED": "1",
        "UCX_NET_DEVICES": "i",
        "UCX_TCP_PORT_RANGE": "1-2",
        "CUDA_VISIBLE_DEVICES": "4,5,6",
        "A": "1",
        "B": "2",
    }


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_what_a_host_says_of_its_malloc_wins_over_our_defaults_and_env_over_both(monkeypatch, name):
    def found(env=None):
        on_controller = environment(Settings(env=env or {}), "cpu")
        order = read_order(
            write_order(StartActor("0", ActorRequest("py", on_controller, {}, defaults=dict(DEFAULTS)), "/"))
        )
        assert isinstance(order, StartActor)
        return order.request.environment()[name]

    monkeypatch.delenv(name, raising=False)
    assert found() == DEFAULTS[name]
    monkeypatch.setenv(name, "the host's")
    assert found() == "the host's"
    assert found({name: "env="}) == "env="


def test_our_defaults_are_not_taken_from_the_controllers_environment(monkeypatch):
    before = environment(Settings(), "cpu")
    for name in DEFAULTS:
        monkeypatch.setenv(name, "the controller's")
    assert environment(Settings(), "cpu") == before and not DEFAULTS.keys() & before.keys()


def test_cpu_lists():
    assert parse_cpus("3,0-1,1") == (3, 0, 1)


OPTIONS = [
    ({"launcher": "ssh"}, "launcher='ssh' needs hosts="),
    ({"launcher": "local", "hosts": ["a"]}, "hosts= has no effect with launcher='local'"),
    ({"launcher": "inline", "cpus": "0"}, "cpus= has no effect with launcher='inline'"),
    (
        {"launcher": "slurm", "hosts": ["a"]},
        "hosts= has no effect with launcher='slurm', which takes the hosts of",
    ),
    ({"ssh_options": ["-v"]}, "ssh_options= has no effect with launcher='local'"),
    ({"control_address": "::"}, "control_address= has no effect with launcher='local'"),
    ({"launcher": "inline", "lease_s": 20.0}, "lease_s= has no effect with launcher='inline'"),
    ({"hosts": 3}, "hosts is 3; it is a hostfile's path or a list of hosts"),
    ({"hosts": "/no/such/hostfile"}, "hostfile /no/such/hostfile does not exist"),
    ({"hosts": ["a"]}, "2 actors do not fit 1 slot on 1 host"),
    ({"cpus": "a-b"}, "cpus='a-b': 'a-b' is no list of CPU numbers"),
    ({"cpus": "0-999"}, r"cpus= names CPU \d+ and \d+ more, which host .* does not have; its CPUs are 0\S*$"),
    ({"python": "/no/such/python"}, "python='/no/such/python' is no program of this machine"),
    ({"devices": []}, r"devices is \(\)"),
    ({"ports": 5}, "ports=5: "),
    ({"launcher": 3}, "nor a Launcher: it has no listen_host"),
]


@pytest.mark.parametrize(("options", "says"), OPTIONS, ids=[repr(o[0]) for o in OPTIONS])
def test_options_that_cannot_be(options, says):
    with pytest.raises(MeshError, match=says):
        choose_launcher(LaunchOptions(**options), 2)


@pytest.mark.parametrize("options", [{}, {"hosts": ["a slots=2"]}], ids=["local", "ssh"])
def test_the_lease_reaches_the_actors_and_signs_of_life_keep_it(options):
    for lease_s, beat_s in ((15.0, 3.0), (2.0, 0.4), (600.0, 3.0)):
        launcher: Any = jpp.RemoteMesh(2, lease_s=lease_s, **options)._launcher
        assert launcher._lease.seconds == lease_s
        assert not options or launcher._reach.lease.seconds == lease_s
        assert Lease(lease_s).beat_s == beat_s
    for wrong in (0, -1.0, True, "15", None, float("nan"), 0.5, float("inf")):
        with pytest.raises(MeshError, match=r"lease_s is .*; give .* seconds"):
            jpp.RemoteMesh(2, lease_s=wrong, **options)


def test_an_interpreter_is_looked_up_where_its_actors_will_look(tmp_path, monkeypatch):
    (tmp_path / "own-python").write_text("#!/bin/sh\n")
    (tmp_path / "own-python").chmod(0o755)
    jpp.RemoteMesh(1, launcher="local", python="own-python", env={"PATH": str(tmp_path)})
    monkeypatch.setenv("PATH", str(tmp_path))
    jpp.RemoteMesh(1, launcher="local", python="own-python")
    with pytest.raises(MeshError, match="python='own-python' is no program"):
        jpp.RemoteMesh(1, launcher="local", python="own-python", env={"PATH": "/no/such"})


def test_a_machine_may_leave_numbers_of_cpus_out(tmp_path, monkeypatch):
    (tmp_path / "online").write_text("0-3,8,10-11\n")
    monkeypatch.setattr(spawn, "_ONLINE", tmp_path / "online")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    spawn.check_cpus([3, 8, 11])
    with pytest.raises(MeshError, match=r"names CPU 4 and 1 more, .* its CPUs are 0-3,8,10-11$"):
        spawn.check_cpus([4, 8, 9])
    (tmp_path / "online").unlink()
    spawn.check_cpus([6])


def test_another_host_says_itself_which_cpus_it_has_not():
    with pytest.raises(MeshError, match="cpus= names CPU 9999, which"):
        ActorRequest("py", {}, {}, cpus=(0, 9999)).first_line(None)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("spmd_mash", "RemoteMesh has no option spmd_mash=; did you mean spmd_mesh="),
        ("q", "q=; it has num_actors, "),
    ],
)
def test_an_option_that_there_is_not(option, says):
    with pytest.raises(TypeError, match=says):
        jpp.RemoteMesh(2, **{option: 1})
    mesh = jpp.RemoteMesh(1, launcher="inline")
    with pytest.raises(TypeError, match="no option donate_args=; did you mean donate_argnums="):
        mesh.distributed(len, **{"donate_args": 0})


GPUS_WITHOUT_PLATFORM = [
    ({"devices": "0-3"}, "devices= names GPUs, and platform= was not given"),
    ({"hosts": ["a", "b devices=0-3"]}, "devices= of host b names GPUs"),
]


@pytest.mark.parametrize(("options", "says"), GPUS_WITHOUT_PLATFORM)
def test_devices_are_not_left_idle_silently(monkeypatch, options, says):
    monkeypatch.setattr(jax_config, "default_platform", lambda: "cpu")
    with pytest.raises(MeshError, match=f"{says}.*give platform='cuda'"):
        jpp.RemoteMesh(1, **options)
    jpp.RemoteMesh(1, **options, platform="cpu")
    jpp.RemoteMesh(1, **options, platform="cuda")


def test_gpus_are_set_aside_for_every_device_of_an_actor_that_computes_on_them():
    assert LaunchOptions(num_devices=4, platform="cuda").gpus_per_actor == 4
    assert LaunchOptions(num_devices=4).gpus_per_actor == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"ports": "47000-47000"},
            "ports= 47000-47000 has 1 and this machine gets 2 processes, .* least 47000-47001",
        ),
        (
            {"ports": (1, 2), "processes_per_actor": 2, "spmd_mesh": (2,)},
            "has 2 and this machine gets 4 processes",
        ),
        ({"ports": (1, 2), "hosts": ["a", "b slots=2 ports=5-5"]}, None),
        ({"ports": (1, 1), "hosts": ["a slots=2"]}, "ports= 1-1 has 1 and host a gets 2 processes"),
        (
            {"ports": (1, 3), "max_restarts": 1},
            "needs one, and another one after a restart .* give at least 1-4",
        ),
        ({"ports": (1, 4), "max_restarts": 1}, None),
    ],
)
def test_a_range_has_a_port_for_each_process_of_a_host(options, says):
    if says is None:
        jpp.RemoteMesh(2, **options)
    else:
        with pytest.raises(MeshError, match=says):
            jpp.RemoteMesh(2, **options)
