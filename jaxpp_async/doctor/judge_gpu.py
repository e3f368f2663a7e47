"""Make the doctor's findings (statements with a verdict and a remedy) about the GPUs of hosts: their drivers,
the packages for CUDA, NCCL, and the sharing of a GPU by several processes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from jaxpp_async.base.gpu_inventory import VISIBLE, choose_gpus, gpu_environment, memory_fraction
from jaxpp_async.base.install_hints import extra_of
from jaxpp_async.controller.device_checks import ProcessDevices, check_agreement
from jaxpp_async.doctor.facts import (
    ALL,
    Examination,
    Finding,
    Gpu,
    HostFacts,
    HostReport,
    ProcessSlots,
    RequestedRun,
    describe_differences,
    error,
    note,
    ok,
    warning,
)
from jaxpp_async.errors import MeshError
from jaxpp_async.transport.nccl.order import ranks_may_share

DRIVERS: Mapping[int, str] = {12: "525.60.13", 13: "580"}
"""The oldest driver that supports each major version of CUDA on Linux.

Source: JAX's installation page; NVIDIA's CUDA compatibility guide.
"""

NCCL_FROM = (2, 31, 2)
"""The oldest version of NCCL whose grouped transfers do not hang.

Source: https://github.com/marin-community/marin/issues/7024
"""

MOST_USED = 0.1
"""The fraction of a GPU's memory that other programs may use, because an actor that has a GPU alone reserves
nine tenths of its memory when it starts.
"""

_GIB = 1 << 30


def judge_gpus(report: HostReport, facts: HostFacts, asked: RequestedRun) -> Iterator[Finding]:
    """Yield the findings (statements with a verdict and a remedy) about the GPUs of one host, and about the
    packages that are installed for them.

    Args:
        report: all that is known about the host.
        facts: the facts in that report.
        asked: the run that the user wants to start.
    """
    if asked.platform == "cpu":
        what = (
            f"{len(facts.gpus)}, which a run on CPUs leaves alone"
            if facts.gpus
            else "none, and none is asked for"
        )
        yield ok("gpu", report.name, what)
        if asked.transport != "nccl":
            yield ok("nccl", report.name, _list_nccl(facts) or "not installed, and not asked for")
        return
    yield from _judge_devices(report, facts)
    yield from _judge_jax(report.name, facts)
    yield from _judge_cupy(report.name, facts)
    yield from _judge_nccl(report.name, facts, asked)


def explains_jax(facts: HostFacts, asked: RequestedRun) -> bool:
    """Return whether a finding about the host's GPUs or CUDA packages already gives the reason why JAX does
    not start there, so that no other finding has to.
    """
    if asked.platform == "cpu":
        return False
    majors = _find_jax_cudas(facts)
    return not facts.gpus or len(majors) != 1 or facts.cuda is None or facts.cuda[0] < max(majors)


def judge_gpus_together(found: Examination) -> Iterator[Finding]:
    """Yield the findings (statements with a verdict and a remedy) about what all hosts must have in common
    for a run on GPUs.
    """
    asked = found.asked
    if asked.transport == "nccl" and asked.platform == "cpu":
        yield error(
            "nccl",
            ALL,
            "NCCL moves GPU memory, and a run on CPUs has none",
            "--platform cuda, or --transport ucx",
        )
    known = {report.name: report.facts for report in found.hosts if report.facts is not None}
    if asked.platform != "cuda":
        return
    yield from _judge_mixture(known)
    cudas = {name: _single({f"CUDA {major}" for major in _find_jax_cudas(f)}) for name, f in known.items()}
    if said := describe_differences(cudas):
        yield error(
            "versions", ALL, f"JAX is for different CUDAs: {said}", "install the same extra on all hosts"
        )
    nccls = {name: _list_nccl(facts) or None for name, facts in known.items()}
    if asked.transport == "nccl" and (said := describe_differences(nccls)):
        yield error("versions", ALL, f"NCCL differs: {said}", "install the same on all")
    kinds = {name: _single({gpu.name for gpu in facts.gpus}) for name, facts in known.items()}
    if said := describe_differences(kinds):
        remedy = "stages are as slow as the slowest; share work out by that"
        yield warning("gpu", ALL, f"they differ: {said}", remedy)


def _judge_mixture(known: Mapping[str, HostFacts]) -> Iterator[Finding]:
    without = [name for name, facts in known.items() if not facts.gpus]
    if without and len(without) < len(known):
        others, missing = ", ".join(name for name in known if name not in without), ", ".join(without)
        yield error(
            "gpu",
            ALL,
            f"{others} {'has' if len(known) - len(without) == 1 else 'have'} GPUs, {missing} none: "
            "the actors of a mesh are all on GPUs or all on CPUs",
            f"leave {missing} out, or run on CPUs (--platform cpu)",
        )


# ---------------------------------------------------------------- devices


def _judge_devices(report: HostReport, facts: HostFacts) -> Iterator[Finding]:
    name = report.name
    if facts.driver is None:
        why = f" ({facts.gpu_error})" if facts.gpu_error else ""
        yield error(
            "gpu", name, f"no NVIDIA driver answers{why}", "install the driver (in a container: --gpus all)"
        )
        return
    if not facts.gpus:
        yield error(
            "gpu", name, "the NVIDIA driver is there, but no GPU", "does the container or the job have any?"
        )
        return
    driver = f"driver {facts.driver.version} (CUDA {_format_version(facts.driver.cuda)})"
    for gpu in facts.gpus:
        yield from _judge_gpu(name, gpu, driver)


def _judge_gpu(name: str, gpu: Gpu, driver: str) -> Iterator[Finding]:
    what = f"{gpu.index}: {gpu.name}, {gpu.memory_bytes / _GIB:.1f} GiB, {driver}"
    if gpu.mode == "prohibited":
        yield error(
            "gpu", name, f"{what}: nobody may compute on it", f"sudo nvidia-smi -i {gpu.index} -c DEFAULT"
        )
    elif gpu.used_bytes > MOST_USED * gpu.memory_bytes:
        used = f"{gpu.used_bytes / _GIB:.1f} GiB of it are in use"
        remedy = "see who with nvidia-smi; or say what actors may take: env XLA_PYTHON_CLIENT_MEM_FRACTION"
        yield warning("gpu", name, f"{what}: {used}", remedy)
    else:
        yield ok("gpu", name, what)
    if gpu.mig:
        yield note(
            "gpu", name, f"{gpu.index} is cut into instances (MIG)", "name them with devices= (MIG-<UUID>)"
        )


def judge_process_slots(found: Examination, slots: ProcessSlots) -> Iterator[Finding]:
    """Yield the findings (statements with a verdict and a remedy) about whether each host has enough GPUs for
    the processes that it gets.

    Args:
        found: the examination.
        slots: the number of processes that each host gets, and the number of devices of each process.
    """
    if found.asked.platform == "cpu":
        return
    for report, num_processes in zip(found.hosts, slots.num_processes, strict=True):
        facts = report.facts
        if facts is not None and facts.driver is not None and facts.gpus and num_processes:
            yield from _judge_processes(report, facts, num_processes, slots, found)


def _judge_processes(
    report: HostReport, facts: HostFacts, num_processes: int, slots: ProcessSlots, found: Examination
) -> Iterator[Finding]:
    visible = facts.visible_gpus
    there = len(visible.names)
    needed, have = slots.devices_each, f"{there} GPU{'s' * (there != 1)}"
    one, several = ("a process", "processes") if slots.per_actor > 1 else ("an actor", "actors")
    if visible.stopped_at:
        yield _report_unknown_gpu(report, facts, visible.stopped_at)
        if report.names_gpus:
            return
    if needed > there:
        remedy = "make spmd_mesh smaller, or have an actor span hosts (processes_per_actor=)"
        yield error("gpu", report.name, f"{one} needs {needed} GPUs, the host gives {have}", remedy)
    elif needed * num_processes > there:
        what = f"{num_processes} {several} with {needed} GPU{'s' * (needed != 1)} each share {have}"
        remedy = _suggest_fewer(there // needed, slots, found)
        exclusive = [gpu.index for gpu in facts.gpus if gpu.mode == "exclusive"]
        if exclusive:
            remedy = f"sudo nvidia-smi -i {exclusive[0]} -c DEFAULT, or start fewer actors"
            yield error("gpu", report.name, f"{what}, and GPU {exclusive[0]} takes one process only", remedy)
        elif found.asked.slots_are_processes and report.names_gpus:
            yield error("gpu", report.name, f"{what} of devices=, which the launcher refuses", remedy)
        elif found.asked.slots_are_processes and needed == there:
            # Each task of Slurm assumes that the GPUs that it sees are its own.
            yield error(
                "gpu", report.name, f"{what}, each with 0.9 of its memory, which the mesh refuses", remedy
            )
        elif min(slots.per_actor, num_processes) > there // needed:
            what = f"processes of one actor with {needed} GPU{'s' * (needed != 1)} each cannot share {have}"
            yield error("gpu", report.name, what, "make spmd_mesh smaller, or have fewer processes on a host")
        elif refusal := _find_refusal(report, facts, num_processes, slots, found.asked):
            yield refusal
        else:
            yield warning("gpu", report.name, f"{what}, and the memory there", remedy)
    elif refusal := _find_refusal(report, facts, num_processes, slots, found.asked):
        yield refusal


def _find_refusal(
    report: HostReport, facts: HostFacts, num_processes: int, slots: ProcessSlots, asked: RequestedRun
) -> Finding | None:
    """Return an error finding if a mesh would refuse to start its processes on a host, with the text of the
    mesh's own error; return None if the mesh would start them.

    To get that text, this function calls the functions with which the mesh itself checks its processes.

    Args:
        report: all that is known about the host.
        facts: the facts in that report.
        num_processes: the number of processes that the host gets.
        slots: the number of processes of each actor, and the number of devices of each process.
        asked: the run that the user wants to start.
    """
    names, settings, members = facts.visible_gpus.names, facts.settings, list[ProcessDevices]()
    nccl = _find_nccl_version(facts) if asked.transport == "nccl" else ""
    try:
        for index in range(num_processes):
            given = choose_gpus(names, index, num_processes, slots.devices_each)
            fraction = memory_fraction({**settings, **gpu_environment(given, settings)})
            actor = index // slots.per_actor
            who = f"actor {actor}" + (f", process {index % slots.per_actor}" if slots.per_actor > 1 else "")
            has = "", given.devices[: slots.devices_each], fraction, nccl, ranks_may_share(nccl, settings)
            members.append(ProcessDevices(who, actor, report.name, *has))
        check_agreement(members)
    except MeshError as refused:
        what, _, remedy = str(refused).partition("; ")
        return error("gpu", report.name, what, remedy)
    return None


def _report_unknown_gpu(report: HostReport, facts: HostFacts, name: str) -> Finding:
    """Make the finding about a name in `CUDA_VISIBLE_DEVICES` that does not stand for exactly one GPU of the
    host.

    CUDA stops reading the list at such a name, without an error. If the user gave the list for this run, the
    mesh refuses the name, and the finding is an error. Otherwise the finding is a warning.

    Args:
        report: all that is known about the host.
        facts: the facts in that report.
        name: the wrong name.
    """
    there = f"there {'is' if len(facts.gpus) == 1 else 'are'} {len(facts.gpus)}"
    what = (
        f"{VISIBLE}={facts.settings[VISIBLE]} names GPU {name}, which is none here ({there}), or not only one"
    )
    if report.names_gpus:
        return error("gpu", report.name, what, "correct devices=, or env=: `nvidia-smi -L` lists them")
    return warning(
        "gpu", report.name, f"{what}: CUDA reads no further", "correct it: `nvidia-smi -L` lists them"
    )


def _suggest_fewer(fits: int, slots: ProcessSlots, found: Examination) -> str:
    """Return advice on how to start fewer processes on a host.

    Args:
        fits: the number of processes for which the host has enough GPUs.
        slots: the number of processes of each actor, and the number of slots that each process takes.
        found: the examination of the run.
    """
    if found.is_local:
        most = max(1, fits // slots.per_actor)
        return f"start at most {most} actor{'s' * (most != 1)}"
    return (
        f"--ntasks-per-node={fits}" if found.asked.slots_are_processes else f"slots={fits * slots.slots_each}"
    )


# ---------------------------------------------------------------- packages


def _judge_jax(name: str, facts: HostFacts) -> Iterator[Finding]:
    """Yield the findings about the packages for JAX on CUDA.

    The packages must be installed for one version of CUDA only. The driver must support that version, and the
    installed JAX and ucxx must match the packages.

    Args:
        name: the name of the host.
        facts: the facts about the host.
    """
    plugins = {p: v for p, v in facts.packages.items() if re.fullmatch(r"jax-cuda\d+-plugin", p)}
    majors = _find_jax_cudas(facts)
    install = facts.install(extra_of("cuda", facts.cuda))
    if not plugins:
        yield error("jax", name, "JAX is without CUDA", install)
        return
    if len(plugins) > 1:
        fitting = extra_of("cuda", facts.cuda)
        drop = " ".join(package for package in plugins if fitting not in package)
        yield error(
            "jax", name, f"JAX has {' and '.join(plugins)}", f"{facts.executable} -m pip uninstall {drop}"
        )
        return
    ((plugin, version),), (major,) = plugins.items(), majors
    jaxlib = facts.packages.get("jaxlib", "")
    if _first_numbers(version) != _first_numbers(jaxlib):
        yield error("jax", name, f"{plugin} is {version}, jaxlib {jaxlib}: it does not load", install)
    if facts.driver is not None and facts.driver.cuda[0] < major:
        older = [m for m in DRIVERS if m <= facts.driver.cuda[0]]
        other = f", or take CUDA {max(older)}: {facts.install(f'cuda{max(older)}')}" if older else ""
        yield error(
            "gpu",
            name,
            f"driver {facts.driver.version} runs CUDA {_format_version(facts.driver.cuda)} at most, "
            f"JAX is for CUDA {major}",
            f"install driver {DRIVERS.get(major, 'that is newer')} or newer{other}",
        )
    for package in facts.packages:
        match = re.fullmatch(r"ucxx-cu(\d+)", package)
        if match is not None and int(match[1]) != major:
            unwanted = f"{package} lib{package.replace('ucxx', 'ucx')}"
            remedy = f"{facts.executable} -m pip uninstall {unwanted}; {install}"
            yield warning("ucx", name, f"{package} is for CUDA {match[1]}, JAX for CUDA {major}", remedy)


def _judge_cupy(name: str, facts: HostFacts) -> Iterator[Finding]:
    cupy = {
        package: version for package, version in facts.packages.items() if package.startswith("cupy-cuda")
    }
    if not cupy:
        remedy = facts.install(extra_of("cuda", facts.cuda))
        yield error("gpu", name, "CuPy is not installed: it says when values are computed", remedy)
        return
    package, version = next(iter(cupy.items()))
    majors = _find_jax_cudas(facts)
    if len(cupy) > 1:
        yield error(
            "gpu", name, f"CuPy is there twice: {', '.join(cupy)}", "uninstall them, and install one again"
        )
    elif majors and not any(f"cuda{major}x" in package for major in majors):
        remedy = facts.install(f"cuda{max(majors)}")
        yield warning(
            "gpu", name, f"{package} {version} is for another CUDA than JAX (CUDA {max(majors)})", remedy
        )
    else:
        yield ok("gpu", name, f"{package} {version}")


def _judge_nccl(name: str, facts: HostFacts, asked: RequestedRun) -> Iterator[Finding]:
    found = _list_nccl(facts)
    missing = [] if _find_nccl_version(facts) else ["NCCL"]
    missing += [] if "nccl4py" in facts.packages else ["nccl4py"]
    if asked.transport == "nccl" and missing:
        remedy = facts.install(extra_of("cuda", facts.cuda))
        yield error("nccl", name, f"{' and '.join(missing)} not installed", remedy)
    elif (asked.transport == "nccl" or asked.devices_per_actor > 1) and (
        package := _find_old_nccl(facts)
    ) is not None:
        least = ".".join(map(str, NCCL_FROM))
        what = f"{found}: before {least} NCCL's grouped transfers may hang (marin-community/marin#7024)"
        yield warning("nccl", name, what, f"{facts.executable} -m pip install '{package}>={least}'")
    else:
        yield ok("nccl", name, found or "not installed, and not asked for")


def _list_nccl(facts: HostFacts) -> str:
    found = (
        f"{package} {v}"
        for package, v in facts.packages.items()
        if package.startswith(("nvidia-nccl-", "nccl4py"))
    )
    return ", ".join(found)


def _find_old_nccl(facts: HostFacts) -> str | None:
    """Return the name of the installed NCCL package if its version is so old that grouped transfers may hang;
    return None if there is no such package.
    """
    for package, version in facts.packages.items():
        numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
        if package.startswith("nvidia-nccl-") and numbers < NCCL_FROM:
            return package
    return None


def _find_nccl_version(facts: HostFacts) -> str:
    """Return the version of the NCCL library that pip has installed on the host; empty if pip has installed
    none.
    """
    found = (version for package, version in facts.packages.items() if package.startswith("nvidia-nccl-"))
    return next(found, "")


def _find_jax_cudas(facts: HostFacts) -> set[int]:
    """Return the major versions of CUDA for which JAX's plugin is installed on the host."""
    found = (re.fullmatch(r"jax-cuda(\d+)-plugin", package) for package in facts.packages)
    return {int(match[1]) for match in found if match}


def _single(values: set) -> object:
    return next(iter(values)) if len(values) == 1 else None


def _first_numbers(version: str) -> tuple[str, ...]:
    """Return the first three numbers of a version as strings, in order to compare the versions of jaxlib and
    of JAX's CUDA plugin.

    Further numbers are left out, because a later build of the plugin for the same jaxlib may differ in them.
    """
    return tuple(version.split(".")[:3])


def _format_version(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
