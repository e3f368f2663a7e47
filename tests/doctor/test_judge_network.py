"""Tests of the findings about UCX, InfiniBand and the links between hosts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from jaxpp_async.doctor.facts import (
    UNLIMITED,
    Examination,
    HostFacts,
    HostReport,
    IbPort,
    LinkReport,
    RequestedRun,
    Ucx,
    UcxResource,
)
from jaxpp_async.doctor.judge_network import judge_control, judge_infiniband, judge_link, judge_ucx

GIB = 1 << 30
PORT = IbPort("mlx5_0", 1, "ACTIVE", 400.0, "InfiniBand")
TCP, RC = UcxResource("tcp", "eth0"), UcxResource("rc_mlx5", "mlx5_0:1")
FACTS = HostFacts(
    hostname="n", executable="/py", python="3.11.7", system="Linux",
    packages={"ucxx-cu13": "0.52.0"}, num_cpus=1, memory_bytes=GIB,
    shm_bytes=GIB, memlock_bytes=UNLIMITED, ucx=Ucx("1.21.0", "/opt/libucp.so", (TCP, RC)),
    ib_ports=(PORT,), verbs_devices=1,
)  # fmt: skip


def said(findings) -> list[tuple[str, str]]:
    return [(finding.level, finding.what) for finding in findings]


@pytest.mark.parametrize(
    ("facts", "level", "what"),
    [
        (FACTS, "ok", "UCX 1.21.0 of /opt/libucp.so (ucxx-cu13 0.52.0); eth0: tcp; mlx5_0:1: rc_mlx5"),
        (replace(FACTS, ucx=None, packages={}), "error", "ucxx is not installed"),
        (replace(FACTS, ucx=None, ucx_error="no libucp"), "error", "does not start: no libucp"),
        (
            replace(FACTS, ucx=Ucx("1.21.0", "", (UcxResource("posix", "memory"),))),
            "error",
            "UCX 1.21.0 (ucxx-cu13 0.52.0); memory: posix: no way to other processes' hosts",
        ),
    ],
    ids=["well", "missing", "broken", "alone"],
)
def test_of_ucx_its_version_and_its_ways_are_told(facts, level, what):
    assert said(judge_ucx("n1", facts, RequestedRun())) == [(level, what)]


def test_a_setting_of_the_users_that_leaves_ways_out_is_the_remedy():
    facts = replace(FACTS, ucx=Ucx("1", "", ()), settings={"UCX_TLS": "sm"})
    (found,) = judge_ucx("n1", facts, RequestedRun())
    assert found.remedy == "UCX_TLS=sm leaves them out: add tcp, or unset it"


@pytest.mark.parametrize(
    ("facts", "asked", "levels"),
    [
        (FACTS, RequestedRun(), ["ok"]),
        (replace(FACTS, ib_ports=()), RequestedRun(), ["ok"]),
        (replace(FACTS, ib_ports=(replace(PORT, state="DOWN"),)), RequestedRun(), ["note"]),
        (
            replace(FACTS, ib_ports=(replace(PORT, state="DOWN"),), settings={"UCX_NET_DEVICES": "mlx5_0:1"}),
            RequestedRun(),
            ["error"],
        ),
        (replace(FACTS, verbs_devices=0, memlock_bytes=65536), RequestedRun(), ["ok", "warning", "warning"]),
        (replace(FACTS, verbs_devices=0, memlock_bytes=65536), RequestedRun(transport="tcp"), ["ok"]),
        (replace(FACTS, ucx=Ucx("1", "/x", (TCP,))), RequestedRun(), ["ok", "warning"]),
    ],
    ids=["well", "none", "down", "down and named", "locked out", "not asked for", "without rc"],
)
def test_of_infiniband_it_is_told_whether_it_can_be_used(facts, asked, levels):
    assert [finding.level for finding in judge_infiniband("n1", facts, asked)] == levels


def examination(calls_back: str | None = "", control_error: str = "") -> Examination:
    hosts = tuple(HostReport(name, facts=FACTS, calls_back=calls_back) for name in ("n1", "n2"))
    return Examination(RequestedRun(), HostReport("here"), hosts, control_error=control_error)


def test_hosts_that_do_not_reach_this_machine_are_told_apart_from_those_that_were_not_tried():
    assert said(judge_control(examination())) == [("ok", "reaches this machine")] * 2
    assert said(judge_control(examination(None, "two addresses"))) == [("error", "two addresses")]
    assert (
        said(judge_control(examination("10.0.0.1: refused")))
        == [("error", "does not reach this machine at 10.0.0.1: refused")] * 2
    )


@pytest.mark.parametrize(
    ("link", "level", "what"),
    [
        (LinkReport("n1", "n2", "ucx", 5e-6, 40e9), "ok", "5.0 us, 40.00 GB/s over ucx, host memory"),
        (
            LinkReport("n1", "n2", "ucx", 5e-5, 1e9),
            "warning",
            "50.0 us, 1.00 GB/s over ucx, host memory, where ports could do 50.0 GB/s",
        ),
        (LinkReport("n1", "n2", "tcp", 5e-5, 1e9), "ok", "50.0 us, 1.00 GB/s over tcp, host memory"),
        (
            LinkReport("n1", "n1", "ucx", 1e-5, 1e9),
            "ok",
            "10.0 us, 1.00 GB/s over ucx, host memory, between two processes",
        ),
        (LinkReport("n1", "n2", "ucx", error="timed out"), "error", "no data over ucx: timed out"),
    ],
)
def test_a_way_between_hosts_is_judged_by_what_its_ports_could_do(link, level, what):
    found = judge_link(link, examination())
    assert (found.level, found.what) == (level, what)
    assert found.host == ("n1" if link.first == link.second else "n1 to n2")
