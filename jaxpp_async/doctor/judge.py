"""Turn the facts that the doctor (the command that checks whether a run would work) found about a run and its
hosts into findings. A finding says whether something is as it should be, and what to do if it is not.

A finding is an error if the run that the user asked for would not work, and a warning if the run would work
less well than it could.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxpp_async.base.install_hints import SAME_VERSIONS, extra_of
from jaxpp_async.doctor import judge_gpu, judge_network
from jaxpp_async.doctor.facts import (
    ALL,
    SECTIONS,
    Examination,
    Finding,
    HostFacts,
    HostReport,
    ProcessSlots,
    RequestedRun,
    describe_differences,
    error,
    find_process_slots,
    note,
    ok,
    warning,
)
from jaxpp_async.errors import MeshError

CLOCK_S = 1.0
"""The difference in seconds from which clocks of two hosts make logs and file times hard to read."""

SAME_EVERYWHERE = ("jaxpp-async", *SAME_VERSIONS)
"""The packages of which hosts need the same version as this machine, because programs are made on this
machine and run on the hosts.
"""

SHM_BYTES = 64 << 20
"""The size in bytes of the shared memory that UCX's queues between a few actors of one host need. A container
has only that much by default.
"""

_OLDEST_PYTHON = (3, 11)
_SHOWN = ("jaxpp-async", "jax", "jaxlib", "numpy")


def judge(found: Examination) -> list[Finding]:
    """Return all findings (statements with a verdict and a remedy) about an examination, ordered by section
    and host.
    """
    findings = list(_judge_driving_machine(found))
    for report in found.hosts:
        findings += judge_host(report, found.asked)
    findings += judge_together(found)
    order = {section: index for index, section in enumerate(SECTIONS)}
    return sorted(findings, key=lambda finding: order[finding.section])  # stable: hosts stay in their order


def would_work(findings: Sequence[Finding]) -> bool:
    """Return whether the run that the user asked for would work, which means that no finding is an error."""
    return not any(finding.level == "error" for finding in findings)


# ---------------------------------------------------------------- one host


def judge_host(report: HostReport, asked: RequestedRun) -> Iterator[Finding]:
    """Yield the findings (statements with a verdict and a remedy) about one host that is to run actors.

    Args:
        report: all that is known about the host.
        asked: the run that the user wants to start.
    """
    name, facts = report.name, report.facts
    if facts is None:
        trouble = report.trouble
        what, remedy = (trouble.what, trouble.remedy) if trouble is not None else ("was not asked", "")
        yield error("hosts", name, what, remedy)
        return
    yield ok(
        "hosts",
        name,
        f"{facts.hostname}, {facts.system}, {facts.num_cpus} CPUs, {_format_gib(facts.memory_bytes)}",
    )
    yield from _judge_python(name, facts)
    yield from _judge_packages(name, facts, asked)
    yield from _judge_cache(name, facts)
    yield from judge_gpu.judge_gpus(report, facts, asked)
    yield from judge_network.judge_ucx(name, facts, asked)
    yield from judge_network.judge_infiniband(name, facts, asked)
    yield from _judge_memory(name, facts)
    yield from _judge_settings(name, facts)


def _judge_python(name: str, facts: HostFacts) -> Iterator[Finding]:
    version = tuple(int(part) for part in facts.python.split(".")[:2])
    if version < _OLDEST_PYTHON:
        needed = ".".join(map(str, _OLDEST_PYTHON))
        yield error(
            "python",
            name,
            f"Python {facts.python} is too old",
            f"install {needed} or newer; name it: python=",
        )
    else:
        yield ok("python", name, f"Python {facts.python}, {facts.executable}")


def _judge_packages(name: str, facts: HostFacts, asked: RequestedRun) -> Iterator[Finding]:
    for package in ("jax", "jaxlib"):
        if package not in facts.packages:
            remedy = facts.install(extra_of(asked.platform, facts.cuda))
            yield error("packages", name, f"{package} is not installed", remedy)
    shown = (f"{package} {facts.packages[package]}" for package in facts.packages if package in _SHOWN)
    yield ok("packages", name, ", ".join(shown) or "none")
    if facts.jax is not None:
        what = f"starts on {facts.jax.platform}: {facts.jax.num_devices} x {facts.jax.device_kind}"
        yield ok("jax", name, what)
    elif "jax" in facts.packages and not judge_gpu.explains_jax(facts, asked):
        try_it = f"JAX_PLATFORMS={asked.platform} {facts.executable} -c 'import jax; print(jax.devices())'"
        what = f"does not start on {asked.platform}: {facts.jax_error}"
        yield error("jax", name, what, f"this has to work: {try_it}")


def _judge_cache(name: str, facts: HostFacts) -> Iterator[Finding]:
    if facts.jax is None or not facts.jax.cache_error:
        return
    what, _, remedy = facts.jax.cache_error.partition("; ")  # the text of an actor's error
    yield error("jax", name, what, f"{remedy}; or set JAX_COMPILATION_CACHE_DIR there, which the doctor sees")


def _judge_memory(name: str, facts: HostFacts) -> Iterator[Finding]:
    if facts.shm_bytes < SHM_BYTES:
        yield warning(
            "memory",
            name,
            f"/dev/shm has {facts.shm_bytes >> 20} MiB free: actors of one host exchange data through it",
            "make it larger (in a container: --shm-size=1g, or --ipc=host)",
        )
    else:
        yield ok(
            "memory", name, f"{_format_gib(facts.memory_bytes)}, /dev/shm {_format_gib(facts.shm_bytes)} free"
        )


def _judge_settings(name: str, facts: HostFacts) -> Iterator[Finding]:
    shown = [
        f"{k}={v}" for k, v in facts.settings.items() if k != "JAX_PLATFORMS"
    ]  # the doctor itself sets JAX_PLATFORMS
    if shown:
        yield note("memory", name, f"set there: {', '.join(shown)}", "")


# ---------------------------------------------------------------- several hosts


def judge_together(found: Examination) -> Iterator[Finding]:
    """Yield the findings (statements with a verdict and a remedy) about all hosts together: whether the hosts
    agree in what must be the same on all of them, and whether they can connect to each other and to this
    machine.
    """
    yield from _judge_versions(found)
    yield from judge_gpu.judge_gpus_together(found)
    yield from _judge_clocks(found)
    yield from _judge_slots(found)
    if not found.is_local:
        yield from judge_network.judge_control(found)
    for link in found.links:
        yield judge_network.judge_link(link, found)


def _judge_versions(found: Examination) -> Iterator[Finding]:
    here = found.here.facts
    if found.is_local or here is None:
        return
    wrong = False
    for report in found.hosts:
        if report.facts is None:
            continue
        for package in SAME_EVERYWHERE:
            theirs, ours = report.facts.packages.get(package), here.packages.get(package)
            if theirs != ours and theirs is not None:
                wrong = True
                yield error(
                    "versions",
                    report.name,
                    f"has {package} {theirs}, this machine has {ours}; programs are made here and run there",
                    f"{report.facts.executable} -m pip install "
                    + ("this machine's clone of it" if package == "jaxpp-async" else f"'{package}=={ours}'"),
                )
    reached = {report.name: report.facts for report in (found.here, *found.hosts) if report.facts is not None}
    if said := describe_differences(
        {name: f.ucx.version for name, f in reached.items() if f.ucx is not None}
    ):
        remedy = "install the same on all; other versions need not understand each other's addresses"
        yield warning("versions", ALL, f"ucx differs: {said}", remedy)
    if not wrong and any(report.facts is not None for report in found.hosts):
        yield ok("versions", ALL, "the same jaxpp-async, jax and jaxlib as this machine")


def _judge_clocks(found: Examination) -> Iterator[Finding]:
    for report in found.hosts:
        clock = report.clock
        if clock is None or found.is_local:
            continue
        what = f"{clock.ahead_s:+.3f} s beside this machine's, give or take {clock.error_s:.3f} s"
        if abs(clock.ahead_s) - clock.error_s > CLOCK_S:
            remedy = "run an NTP client there (chrony, systemd-timesyncd); steps do not need it, "
            remedy += "logs and file times do"
            yield warning("clock", report.name, f"its clock is {what}", remedy)
        else:
            yield ok("clock", report.name, what)
    if found.is_local:
        yield ok("clock", found.here.name, "one machine, one clock")


def _judge_slots(found: Examination) -> Iterator[Finding]:
    try:
        processes = find_process_slots(found)
    except MeshError as trouble:  # the text of the launcher's error
        what, _, remedy = str(trouble).partition("; ")
        yield error("hosts", ALL, what, remedy)
        return
    if found.is_local:
        yield from _judge_load(found, processes)
    else:
        slots = sum(report.slots for report in found.hosts)
        actors = sum(processes.num_processes) // processes.per_actor
        where = f"{slots} slot{'s' * (slots != 1)} on {len(found.hosts)} host{'s' * (len(found.hosts) != 1)}"
        split = f" of {processes.per_actor} processes each" if processes.per_actor > 1 else ""
        yield ok("hosts", ALL, f"{where}, for {actors} actor{'s' * (actors != 1)}{split}")
    yield from judge_gpu.judge_process_slots(found, processes)


def _judge_load(found: Examination, slots: ProcessSlots) -> Iterator[Finding]:
    """Yield the finding that compares the number of processes that the run would start on this machine with
    the number of its CPUs.

    Args:
        found: the examination of a run on this machine alone.
        slots: the number of processes, and the number of devices of each process.
    """
    facts, num_processes, per_actor = found.here.facts, sum(slots.num_processes), slots.per_actor
    if facts is None:
        return
    counts = ((num_processes // per_actor, "actor"), (per_actor, "process"), (slots.devices_each, "device"))
    product = " x ".join(_format_count(*each) for each in counts)
    what = f"{product} = {_format_count(num_processes, 'process')} on {_format_count(facts.num_cpus, 'CPU')}"
    if num_processes > facts.num_cpus:
        yield warning(
            "hosts", found.here.name, what, "start fewer processes, or they take turns, and are slower for it"
        )
    else:
        yield ok("hosts", found.here.name, what)


def _format_count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('s') else 's'}"


def _judge_driving_machine(found: Examination) -> Iterator[Finding]:
    """Yield the findings about this machine if it runs only the user's script, and the actors run on other
    hosts.

    Such a machine needs fewer things than a host of actors, because it only traces the user's program and
    exchanges arrays with the actors.
    """
    if found.is_local:
        return
    name, facts = found.here.name, found.here.facts
    if facts is None:
        trouble = found.here.trouble
        yield error("hosts", name, trouble.what if trouble is not None else "was not asked", "")
        return
    yield ok("hosts", name, f"{facts.hostname}, {facts.system}: drives the run")
    yield from _judge_python(name, facts)
    yield from _judge_packages(name, facts, RequestedRun())
    yield from judge_network.judge_ucx(name, facts, RequestedRun())


def _format_gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"
