"""Make the doctor's findings (statements with a verdict and a remedy) about the network: UCX, InfiniBand, the
hosts' connections to this machine, and the links that were measured.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxpp_async.base.install_hints import SYSTEM_UCX, extra_of, page
from jaxpp_async.doctor.facts import (
    UNLIMITED,
    Examination,
    Finding,
    HostFacts,
    IbPort,
    LinkReport,
    RequestedRun,
    Ucx,
    error,
    note,
    ok,
    warning,
)

MEMLOCK_BYTES = 1 << 30
"""The amount of memory in bytes that a process should be able to lock, because RDMA pins the memory that it
reads and writes.
"""

SLOW = 0.2
"""A fraction of the rate that the RDMA ports of both hosts could reach. If a measured rate is below it, the
transfer did not use these ports.
"""

WHEEL = "/site-packages/libucx/"
"""A part of the path of a UCX library that pip has installed."""

_RDMA = ("rc", "dc", "ud")


def judge_ucx(name: str, facts: HostFacts, asked: RequestedRun) -> Iterator[Finding]:
    """Yield the findings (statements with a verdict and a remedy) about UCX on one host: whether UCX starts
    there, and whether it has the transports that the run needs.

    Args:
        name: the name of the host.
        facts: the facts about the host.
        asked: the run that the user wants to start.
    """
    package = next((f"{p} {v}" for p, v in facts.packages.items() if p.startswith("ucxx-cu")), "")
    if facts.ucx is None:
        install = facts.install(extra_of(asked.platform, facts.cuda))
        what = f"does not start: {facts.ucx_error}" if package else "ucxx is not installed"
        yield error("ucx", name, what, _suggest_for_start(facts) if package else install)
        return
    described = _describe_ucx(facts.ucx, package)
    transports = {resource.transport for resource in facts.ucx.resources}
    has_rdma = any(transport.startswith(_RDMA) for transport in transports)
    if "tcp" not in transports and not has_rdma:
        yield error(
            "ucx",
            name,
            f"{described}: no way to other processes' hosts",
            _suggest_ucx_tls(facts),
        )
        return
    if _prefers_system(facts) and WHEEL in facts.ucx.library:
        what = f"{described}: pip's, though {SYSTEM_UCX} is set; no other libucp.so was found"
        remedy = "lead LD_LIBRARY_PATH to the folder of libucp.so "
        remedy += "(of that name: it comes with development packages)"
        yield warning("ucx", name, what, remedy)
    else:
        yield ok("ucx", name, described)
    if asked.platform == "cuda" and facts.gpus:
        yield from _judge_cuda_transports(name, facts, transports)


def _prefers_system(facts: HostFacts) -> bool:
    return facts.settings.get(SYSTEM_UCX, "false").lower() != "false"


def _suggest_for_start(facts: HostFacts) -> str:
    """Return advice on what to do if UCX does not start on a host."""
    if "network device" in facts.ucx_error:
        return "correct interface= (or UCX_NET_DEVICES): name one of these"
    if _prefers_system(facts):
        return f"have LD_LIBRARY_PATH lead to a UCX that ucxx takes, or unset {SYSTEM_UCX}"
    return "look for the cause in what it says; `UCX_LOG_LEVEL=info` there makes it say more"


def _describe_ucx(ucx: Ucx, package: str) -> str:
    """Describe a UCX library, such as `UCX 1.21.0 (ucxx-cu13 0.52.0); eth0: tcp; memory: posix, cma`.

    Args:
        ucx: the facts about the library.
        package: the name and version of the ucxx package that loads it; empty if that is not known.
    """
    by_device: dict[str, list[str]] = {}
    for resource in ucx.resources:
        if resource.transport != "self":
            by_device.setdefault(resource.device, []).append(resource.transport)
    devices = "".join(f"; {device}: {', '.join(transports)}" for device, transports in by_device.items())
    # The path of a UCX from pip tells the user nothing new.
    place = "" if WHEEL in ucx.library or not ucx.library else f" of {ucx.library}"
    return f"UCX {ucx.version}{place} ({package or 'ucxx'}){devices}"


def _judge_cuda_transports(name: str, facts: HostFacts, transports: set[str]) -> Iterator[Finding]:
    if "cuda_copy" not in transports:
        remedy = _suggest_ucx_tls(facts, "cuda") or _suggest_ucx_with_cuda(facts)
        yield error("ucx", name, "UCX cannot take GPU memory: it has no cuda_copy", remedy)
    elif "cuda_ipc" not in transports:
        remedy = (
            _suggest_ucx_tls(facts, "cuda") or "in a container: --ipc=host, so that processes see each other"
        )
        yield warning("ucx", name, "no cuda_ipc: GPUs of this host exchange data through host memory", remedy)


def _suggest_ucx_with_cuda(facts: HostFacts) -> str:
    if facts.ucx is not None and facts.ucx.library and WHEEL not in facts.ucx.library:
        return (
            f"{facts.ucx.library} is built without it: take one built with CUDA, or pip's: unset {SYSTEM_UCX}"
        )
    return "install UCX with CUDA: " + facts.install(extra_of("cuda", facts.cuda))


def _suggest_ucx_tls(facts: HostFacts, needed: str = "tcp") -> str:
    """Return advice on what to do if a needed transport is missing because the variable `UCX_TLS` excludes
    it; empty if the variable is not set.

    Args:
        facts: the facts about the host.
        needed: the name of the transport that the advice says to add to the variable.
    """
    given = facts.settings.get("UCX_TLS", "")
    return f"UCX_TLS={given} leaves them out: add {needed}, or unset it" if given else ""


# ---------------------------------------------------------------- InfiniBand


def judge_infiniband(name: str, facts: HostFacts, asked: RequestedRun) -> Iterator[Finding]:
    """Yield the findings (statements with a verdict and a remedy) about the RDMA ports of one host, and about
    whether UCX can use them.

    Args:
        name: the name of the host.
        facts: the facts about the host.
        asked: the run that the user wants to start.
    """
    if not facts.ib_ports:
        yield ok("infiniband", name, "no InfiniBand or RoCE device")
        return
    named = {word for word in facts.settings.get("UCX_NET_DEVICES", "").split(",") if word}
    for port in facts.ib_ports:
        yield _judge_port(name, port, is_named=bool(named & {str(port), port.device}))
    active = [port for port in facts.ib_ports if port.state == "ACTIVE"]
    if not active or asked.transport == "tcp":
        return
    if not facts.verbs_devices:
        remedy = "in a container: --device=/dev/infiniband --cap-add=IPC_LOCK; else ask for access to it"
        yield warning("infiniband", name, "this process may not open /dev/infiniband/uverbs*", remedy)
    elif facts.ucx is not None and not any(r.transport.startswith("rc") for r in facts.ucx.resources):
        yield warning("infiniband", name, *_explain_missing_rc(facts))
    if facts.memlock_bytes != UNLIMITED and facts.memlock_bytes < MEMLOCK_BYTES:
        what = f"processes may lock {facts.memlock_bytes >> 10} KiB only, and RDMA locks its buffers"
        yield warning(
            "infiniband", name, what, "ulimit -l unlimited (limits.conf; LimitMEMLOCK= of sshd or slurmd)"
        )
    if asked.platform == "cuda" and facts.driver is not None and not facts.driver.has_peer_memory:
        what = "RDMA devices cannot read GPU memory: it is copied through host memory"
        yield warning(
            "infiniband", name, what, "sudo modprobe nvidia_peermem, or NVIDIA's open modules (dma-buf)"
        )


def _judge_port(name: str, port: IbPort, *, is_named: bool) -> Finding:
    what = f"{port}: {port.state}, {port.rate_gbits:g} Gbit/s, {port.link_layer}"
    if port.state == "ACTIVE":
        return ok("infiniband", name, what)
    if port.link_layer == "Ethernet":
        remedy = (
            f"ip link set up its interface (`rdma link` shows which), or leave {port} out of UCX_NET_DEVICES"
        )
    else:
        remedy = "see `ibstat`: is the cable in, and does a subnet manager run?"
    if is_named:
        return error("infiniband", name, f"{what}, and interface= or UCX_NET_DEVICES names it", remedy)
    return note("infiniband", name, what, remedy)


def _explain_missing_rc(facts: HostFacts) -> tuple[str, str]:
    what = "UCX has no rc: it would use TCP, not InfiniBand"
    if restricted := _suggest_ucx_tls(facts, "rc"):
        return what, restricted
    if facts.ucx is not None and WHEEL in facts.ucx.library:
        return (
            f"{what}; UCX of pip's wheels is built without InfiniBand",
            f"take a UCX with verbs (your cluster's, if it is as new as ucxx wants it; else build one), lead "
            f"LD_LIBRARY_PATH there and set {SYSTEM_UCX}=true for the actors (env=); or take ucxx from "
            f"conda-forge, with rdma-core. See {page('cluster.md')}",
        )
    return what, "is UCX built with verbs (`ucx_info -v`), and is rdma-core installed?"


# ---------------------------------------------------------------- between hosts


def judge_control(found: Examination) -> Iterator[Finding]:
    """Yield a finding (a statement with a verdict and a remedy) for each host, which says whether actors on
    that host could connect to this machine.
    """
    if found.control_error:
        remedy = "choose an address with control_address="
        yield error("control", found.here.name, found.control_error, remedy)
    for report in found.hosts:
        if report.calls_back == "":
            yield ok("control", report.name, "reaches this machine")
        elif report.calls_back is not None:
            yield error(
                "control",
                report.name,
                f"does not reach this machine at {report.calls_back}",
                "is a firewall between? actors connect to this machine, at any port; choose another way with "
                "control_address=",
            )


def judge_link(link: LinkReport, found: Examination) -> Finding:
    """Return the finding about the measured latency and rate of a link between two hosts, or about why
    nothing was measured.

    Args:
        link: the report of the link.
        found: the examination, which has the rates of the hosts' RDMA ports for comparison.
    """
    is_one = link.first == link.second
    who = link.first if is_one else f"{link.first} to {link.second}"
    if link.error:
        remedy = (
            "see /dev/shm, and UCX_* variables"
            if is_one
            else "do they reach each other on any port? "
            "give interface=, and ports= that a firewall lets through"
        )
        return error("transfer", who, f"no data over {link.transport}: {link.error}", remedy)
    rate = f"{link.bytes_per_s / 1e9:.2f} GB/s"
    between = ", between two processes" if is_one else ""
    what = f"{link.latency_s * 1e6:.1f} us, {rate} over {link.transport}, host memory{between}"
    fastest = _find_fastest_port_rate(link, found)
    if fastest and link.transport != "tcp" and link.bytes_per_s < SLOW * fastest:
        remedy = "this is not RDMA: see InfiniBand above, and UCX_LOG_LEVEL=info for what UCX picks"
        return warning("transfer", who, f"{what}, where ports could do {fastest / 1e9:.1f} GB/s", remedy)
    return ok("transfer", who, what)


def _find_fastest_port_rate(link: LinkReport, found: Examination) -> float:
    """Return the rate in bytes per second that a link could have over RDMA; 0 if that is not known.

    The result is the lower one of two rates: for each of the two hosts, the rate of its fastest active RDMA
    port. The rate is not known if a host has no active port, or if both ends of the link are on the same
    host.
    """
    if link.first == link.second:
        return 0.0
    rates: list[float] = []
    for report in found.hosts:
        if report.name in (link.first, link.second) and report.facts is not None:
            active = [port.rate_gbits for port in report.facts.ib_ports if port.state == "ACTIVE"]
            rates.append(max(active, default=0.0) * 1e9 / 8)
    return min(rates, default=0.0)
