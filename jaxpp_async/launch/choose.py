"""Make the launcher that the options of a mesh ask for, from a table of launchers.

To add a launcher, write its module with a `LauncherKind` and add one line to `LAUNCHERS`. Options that
contradict each other are errors, and so are options that would have no effect: a mesh never falls back
silently to a run on this machine. This module may read a hostfile and run Slurm's query commands, but starts
no actors.
"""

from __future__ import annotations

import difflib
from typing import Any

from jaxpp_async.base.gpu_inventory import read_visible
from jaxpp_async.errors import MeshError
from jaxpp_async.launch import inline, local, ray, slurm, ssh
from jaxpp_async.launch.host_agent_client import Reach
from jaxpp_async.launch.hosts import Host, place, spread
from jaxpp_async.launch.launcher import Launcher
from jaxpp_async.launch.options import LauncherKind, LaunchOptions
from jaxpp_async.launch.remote import RemoteLauncher

LAUNCHERS = {
    "local": local.KIND,
    "inline": inline.KIND,
    "ssh": ssh.KIND,
    "slurm": slurm.KIND,
    "ray": ray.KIND,
}
"""The kinds of launchers, by the names that users give."""

_OWN = LauncherKind(
    make=lambda options, num_processes: options.launcher,
    phrase="a launcher of your own, which is already set up",
)
_METHODS = ("listen_host", "transports", "make_transport", "start", "aclose")


def choose_launcher(options: LaunchOptions, num_actors: int) -> tuple[Any, int]:
    """Make the launcher that the options of a mesh ask for.

    Args:
        options: the launch options of the mesh.
        num_actors: the number of actors of the mesh.

    Returns:
        The launcher, and the number of processes of each actor.

    Raises:
        MeshError: options contradict each other, the hostfile is wrong, or there are more actors than slots.
    """
    kind = _checked_kind(options)
    launcher = kind.make(options, num_actors * (options.processes_per_actor or 1))
    each = _set_process_slots(options, launcher, num_actors)
    if kind is not _OWN:
        _check_ports(options, launcher, num_actors * each)
    return launcher, each


def choose_hosts(options: LaunchOptions) -> tuple[tuple[Host, ...] | None, Reach | None]:
    """Find the hosts that the launcher would use, and the object that runs programs on them, without starting
    anything.

    Returns:
        The hosts, and their `Reach`, which runs programs on them; None and None if actors run on this machine
        alone.

    Raises:
        MeshError: `choose_launcher` would refuse the options too, or a launcher of this kind knows its hosts
            only after it has started something.
    """
    kind = _checked_kind(options)
    if kind.find_hosts is None:
        raise MeshError(f"launcher {options.launcher!r} does not say beforehand which hosts it takes")
    return kind.find_hosts(options)


def _checked_kind(options: LaunchOptions) -> LauncherKind:
    """Return the kind of launcher that the options ask for, after a check that this kind uses every option
    that the user set.

    Raises:
        MeshError: an option has no effect with this kind of launcher; or `processes_per_actor` does not
            divide the number of devices of an actor, or is above 1 for a kind that allows only 1.
    """
    kind = _kind(options)
    for name in options.given:
        if name not in kind.uses:
            raise MeshError(f"{name}= has no effect with {kind.phrase}; leave it out")
    each = options.processes_per_actor or 1
    if options.num_devices % each:
        raise MeshError(
            f"processes_per_actor={each} does not divide the {options.num_devices} device"
            f"{'s' * (options.num_devices != 1)} of an actor (spmd_mesh); "
            f"give spmd_mesh a product that is a multiple of {each}, for example {{'data': {each}}}"
        )
    if each > 1 and not kind.splits_actors:
        raise MeshError(f"processes_per_actor={each} does not work with {kind.phrase}; use launcher='local'")
    return kind


def _kind(options: LaunchOptions) -> LauncherKind:
    launcher = options.launcher
    if launcher is None:
        return LAUNCHERS["local" if options.hosts is None else "ssh"]
    if isinstance(launcher, str) and launcher in LAUNCHERS:
        return LAUNCHERS[launcher]
    known = ", ".join(map(repr, LAUNCHERS))
    if isinstance(launcher, str):
        near = difflib.get_close_matches(launcher, LAUNCHERS, 1)
        remedy = (
            f"did you mean {near[0]!r}?" if near else "or give a Launcher of your own (docs/launching.md)"
        )
        raise MeshError(f"launcher {launcher!r} is none of {known}; {remedy}")
    missing = [name for name in _METHODS if not _defines(launcher, name)]
    if missing:
        raise MeshError(
            f"launcher {launcher!r} is none of {known}, nor a Launcher: it has no {', '.join(missing)}"
        )
    return _OWN


def _defines(launcher: Any, name: str) -> bool:
    """Return whether an object has a member with this name that is more than the empty one in the interface
    `Launcher`.
    """
    return hasattr(launcher, name) and getattr(type(launcher), name, None) is not getattr(Launcher, name)


def _set_process_slots(options: LaunchOptions, launcher: Any, num_actors: int) -> int:
    """Decide how many processes each actor has, and how many slots of a host each process takes.

    A slot is a device of a host, but under Slurm and Ray a slot is a process. If slots are devices and the
    launcher's hosts are known already, the number of slots per process is stored in `launcher.slots_each`.

    Returns:
        The number of processes of each actor.

    Raises:
        MeshError: the hosts have too few slots, or too few devices in `devices=`, for the actors.
    """
    each = options.processes_per_actor or 1
    if not isinstance(launcher, RemoteLauncher) or not launcher.hosts:  # Ray chooses hosts later
        return each
    if not launcher.slots_are_processes:
        found = spread(launcher.hosts, num_actors, options.num_devices, options.processes_per_actor)
        launcher.slots_each = found.slots_each
        return found.per_actor
    needed = options.gpus_per_actor // each
    for placement in place(launcher.hosts, num_actors * each, per_actor=each):
        host, count = placement.host, placement.count
        devices = launcher.devices_on(host)
        named = None if devices is None else len(read_visible(",".join(devices), ()).names)
        if named is not None and count * needed > named:
            fits = named // needed
            remedy = f"ask for {fits} (--ntasks-per-node={fits})" if fits else "make spmd_mesh smaller"
            raise MeshError(
                f"host {host} takes {count} process{'es' * (count != 1)} of {needed} "
                f"device{'s' * (needed != 1)} each, one a task, and devices= names {named}; {remedy}"
            )
    return each


def _check_ports(options: LaunchOptions, launcher: Any, num_processes: int) -> None:
    """Raise MeshError if the range of ports (`ports=`) is too small for the processes of some host.

    Each process of a host needs one port. If the mesh may restart actors, each process needs a second port,
    since a freed port cannot be used again for a minute.
    """
    settings = options.settings()
    used = [(settings.ports, num_processes, "this machine")]
    if isinstance(launcher, RemoteLauncher):
        placements = place(launcher.hosts, num_processes, launcher.slots_each) if launcher.hosts else ()
        used = [(p.host.settings.merged_over(settings).ports, p.count, f"host {p.host}") for p in placements]
    for ports, count, where in used:
        least = count * 2 if options.max_restarts else count
        if ports is None or ports[1] - ports[0] + 1 >= least:
            continue
        first, last = ports
        rest = ", and another one after a restart (max_restarts), since what is given back rests for a minute"
        again = rest if options.max_restarts else ""
        raise MeshError(
            f"ports= {first}-{last} has {last - first + 1} and {where} gets {count} processes, each of which "
            f"needs one{again}; give at least {first}-{first + least - 1}"
        )
