"""judge: an `Examination` in, findings out: what is well, what is not, and what to do. Pure.

`errors` among them mean that a run of the asked kind would not work; warnings, that it would, but not as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxpp_async.base.install_hints import extra_of
from jaxpp_async.doctor import judge_gpu, judge_network
from jaxpp_async.doctor.facts import (
    ALL,
    SECTIONS,
    Asked,
    Examination,
    Finding,
    HostFacts,
    HostReport,
    error,
    note,
    ok,
    warning,
)
from jaxpp_async.doctor.process_slots import find_process_slots
from jaxpp_async.errors import MeshError

CLOCK_S = 1.0
"""Clocks that are further apart make logs and file times hard to read."""

SAME_EVERYWHERE = ("jaxpp-async", "jax", "jaxlib")
"""Programs are made here and run there."""

SHM_BYTES = 64 << 20
"""UCX's queues between the processes of a host, for a few actors; containers have so little unless told otherwise."""

_OLDEST_PYTHON = (3, 11)


def judge(found: Examination) -> list[Finding]:
    """All findings, by section and host."""
    findings = [*_of_the_driver(found)]
    for report in found.hosts:
        findings += judge_host(report, found.asked)
    findings += judge_together(found)
    order = {section: index for index, section in enumerate(SECTIONS)}
    return sorted(findings, key=lambda finding: order[finding.section])  # stable: hosts stay in their order


def would_work(findings: Sequence[Finding]) -> bool:
    """Whether a run of the asked kind would."""
    return not any(finding.level == "error" for finding in findings)


# ---------------------------------------------------------------- one host


def judge_host(report: HostReport, asked: Asked) -> Iterator[Finding]:
    """What is to be said of one host that is to run actors."""
    name, facts = report.name, report.facts
    if facts is None:
        trouble = report.trouble
        what, remedy = (trouble.what, trouble.remedy) if trouble is not None else ("was not asked", "")
        yield error("hosts", name, what, remedy)
        return
    yield ok(
        "hosts", name, f"{facts.hostname}, {facts.system}, {facts.num_cpus} CPUs, {_gib(facts.memory_bytes)}"
    )
    yield from _python(name, facts)
    yield from _packages(name, facts, asked)
    yield from _cache(name, facts)
    yield from judge_gpu.judge(report, facts, asked)
    yield from judge_network.judge_ucx(name, facts, asked)
    yield from judge_network.judge_infiniband(name, facts, asked)
    yield from _memory(name, facts)
    yield from _settings(name, facts)


def _python(name: str, facts: HostFacts) -> Iterator[Finding]:
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


def _packages(name: str, facts: HostFacts, asked: Asked) -> Iterator[Finding]:
    for package in ("jax", "jaxlib"):
        if package not in facts.packages:
            remedy = facts.install(extra_of(asked.platform, facts.cuda))
            yield error("packages", name, f"{package} is not installed", remedy)
    shown = (f"{package} {version}" for package, version in facts.packages.items() if package in _SHOWN)
    yield ok("packages", name, ", ".join(shown) or "none")
    if facts.jax is not None:
        what = f"starts on {facts.jax.platform}: {facts.jax.num_devices} x {facts.jax.device_kind}"
        yield ok("jax", name, what)
    elif "jax" in facts.packages and not judge_gpu.explains_jax(facts, asked):
        yield error(
            "jax", name, f"does not start on {asked.platform}: {facts.jax_error}", _try_jax(facts, asked)
        )


_SHOWN = ("jaxpp-async", "jax", "jaxlib", "numpy")


def _try_jax(facts: HostFacts, asked: Asked) -> str:
    return f"this has to work: JAX_PLATFORMS={asked.platform} {facts.executable} -c 'import jax; print(jax.devices())'"


def _cache(name: str, facts: HostFacts) -> Iterator[Finding]:
    if facts.jax is None or not facts.jax.cache_error:
        return
    what, _, remedy = facts.jax.cache_error.partition("; ")  # an actor's own words
    yield error("jax", name, what, f"{remedy}; or set JAX_COMPILATION_CACHE_DIR there, which the doctor sees")


def _memory(name: str, facts: HostFacts) -> Iterator[Finding]:
    if facts.shm_bytes < SHM_BYTES:
        yield warning(
            "memory",
            name,
            f"/dev/shm has {facts.shm_bytes >> 20} MiB free: actors of one host exchange data through it",
            "make it larger (in a container: --shm-size=1g, or --ipc=host)",
        )
    else:
        yield ok("memory", name, f"{_gib(facts.memory_bytes)}, /dev/shm {_gib(facts.shm_bytes)} free")


def _settings(name: str, facts: HostFacts) -> Iterator[Finding]:
    shown = {k: v for k, v in facts.settings.items() if k not in _OURS}
    if shown:
        yield note("memory", name, "set there: " + ", ".join(f"{k}={v}" for k, v in shown.items()), "")


_OURS = ("JAX_PLATFORMS",)


# ---------------------------------------------------------------- several hosts


def judge_together(found: Examination) -> Iterator[Finding]:
    """What hosts have to have in common, and how they reach each other."""
    yield from _versions(found)
    yield from judge_gpu.judge_together(found)
    yield from _clocks(found)
    yield from _slots(found)
    if not found.is_local:
        yield from judge_network.judge_control(found)
    for link in found.links:
        yield judge_network.judge_link(link, found)


def _versions(found: Examination) -> Iterator[Finding]:
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
    for package, versions in _differing(found, ("ucx",)).items():
        yield warning(
            "versions",
            ALL,
            f"{package} differs: {versions}",
            "install the same on all; other versions need not understand each other's addresses",
        )
    if not wrong and any(report.facts is not None for report in found.hosts):
        yield ok("versions", ALL, "the same jaxpp-async, jax and jaxlib as this machine")


def _differing(found: Examination, names: Sequence[str]) -> dict[str, str]:
    """Those of which hosts have several versions, with who has which."""
    differing: dict[str, str] = {}
    for name in names:
        by_version: dict[str, list[str]] = {}
        for report in (found.here, *found.hosts):
            if report.facts is not None and report.facts.ucx is not None and name == "ucx":
                by_version.setdefault(report.facts.ucx.version, []).append(report.name)
        if len(by_version) > 1:
            differing[name] = "; ".join(
                f"{version} on {', '.join(who)}" for version, who in by_version.items()
            )
    return differing


def _clocks(found: Examination) -> Iterator[Finding]:
    for report in found.hosts:
        clock = report.clock
        if clock is None or found.is_local:
            continue
        what = f"{clock.ahead_s:+.3f} s beside this machine's, give or take {clock.error_s:.3f} s"
        if abs(clock.ahead_s) - clock.error_s > CLOCK_S:
            yield warning(
                "clock",
                report.name,
                f"its clock is {what}",
                "run an NTP client there (chrony, systemd-timesyncd); steps do not need it, logs and file times do",
            )
        else:
            yield ok("clock", report.name, what)
    if found.is_local:
        yield ok("clock", found.here.name, "one machine, one clock")


def _slots(found: Examination) -> Iterator[Finding]:
    try:
        room = find_process_slots(found)
    except MeshError as trouble:  # the launcher's own words
        what, _, remedy = str(trouble).partition("; ")
        yield error("hosts", ALL, what, remedy)
        return
    if found.is_local:
        yield from _load(found, sum(room.num_processes), room.per_actor, room.devices_each)
    else:
        slots, actors = sum(report.slots for report in found.hosts), sum(room.num_processes) // room.per_actor
        where = f"{slots} slot{'s' * (slots != 1)} on {len(found.hosts)} host{'s' * (len(found.hosts) != 1)}"
        split = f" of {room.per_actor} processes each" if room.per_actor > 1 else ""
        yield ok("hosts", ALL, f"{where}, for {actors} actor{'s' * (actors != 1)}{split}")
    yield from judge_gpu.judge_room(found, room)


def _load(found: Examination, num_processes: int, per_actor: int, devices_each: int) -> Iterator[Finding]:
    """What was asked of this machine, beside its CPUs."""
    facts = found.here.facts
    if facts is None:
        return
    counts = ((num_processes // per_actor, "actor"), (per_actor, "process"), (devices_each, "device"))
    product = " x ".join(_count(*each) for each in counts)
    what = f"{product} = {_count(num_processes, 'process')} on {_count(facts.num_cpus, 'CPU')}"
    if num_processes > facts.num_cpus:
        yield warning(
            "hosts", found.here.name, what, "start fewer processes, or they take turns, and are slower for it"
        )
    else:
        yield ok("hosts", found.here.name, what)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('s') else 's'}"


def _of_the_driver(found: Examination) -> Iterator[Finding]:
    """This machine, where it runs no actors: it traces, compiles nothing, and takes part in the data plane."""
    if found.is_local:
        return
    name, facts = found.here.name, found.here.facts
    if facts is None:
        trouble = found.here.trouble
        yield error("hosts", name, trouble.what if trouble is not None else "was not asked", "")
        return
    yield ok("hosts", name, f"{facts.hostname}, {facts.system}: drives the run")
    yield from _python(name, facts)
    yield from _packages(name, facts, Asked())
    yield from judge_network.judge_ucx(name, facts, Asked())


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"
