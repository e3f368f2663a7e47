"""Describe the hosts of a mesh, read them from hostfiles, place processes on them, and find addresses between
them.

A hostfile has one host a line:

    # comment
    node1 slots=4 devices=0-3
    node2:4                                  # MPICH's form
    alice@node3 port=2222 python=/opt/venv/bin/python env=OMP_NUM_THREADS=4 cpus=0-15,32-47 interface=ib0

Every mistake is an error that names file and line; there is never a silent local run. Only `load_hostfile`
and the functions for addresses do I/O. The latter look names up and may block: call them in a thread.
"""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxpp_async.base.gpu_inventory import ORDER, VISIBLE
from jaxpp_async.errors import MeshError
from jaxpp_async.transport.network import is_loopback
from jaxpp_async.transport.shared_memory import COPIES_PAST_CACHES

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_DEVICE = re.compile(r"[A-Za-z0-9_:./-]+")
_INTERFACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:,@-]*")
_MAX_CPUS = 1 << 16
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of actors, for a whole mesh or for one host (whose own settings win).

    Args:
        python: the interpreter there; None: the path of this one.
        env: environment variables to add.
        cpus: CPU numbers that the actors of a host share; None: all that the process may use.
        devices: values of `CUDA_VISIBLE_DEVICES` that the actors of a host share, in order; None: the
            variable is left as it is.
        interface: network device of the data plane, as `UCX_NET_DEVICES` names it (`"eth0"`, `"mlx5_0:1"`).
        ports: range of TCP ports of the data plane, first and last.

    Raises:
        MeshError: a value is not possible.
    """

    python: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] | None = None
    devices: tuple[str, ...] | None = None
    interface: str | None = None
    ports: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name, value in self.env.items():
            if not isinstance(name, str) or not isinstance(value, str) or not _VARIABLE.fullmatch(name):
                raise MeshError(f"env has {name!r}: {value!r}; environment variables are names and strings")
            if "\0" in value:
                raise MeshError(f"env has {name!r}: {value!r}; environment variables hold no NUL")
        if self.python is not None and (
            not self.python or self.python.startswith("-") or "\0" in self.python
        ):
            raise MeshError(f"python is {self.python!r}; give the path of an interpreter")
        if self.cpus is not None and not (self.cpus and min(self.cpus) >= 0 and max(self.cpus) < _MAX_CPUS):
            raise MeshError(f"cpus is {self.cpus}; give CPU numbers, at least one")
        if self.devices is not None and (not self.devices or not all(map(_DEVICE.fullmatch, self.devices))):
            raise MeshError(f"devices is {self.devices}; give what CUDA_VISIBLE_DEVICES takes, at least one")
        if self.interface is not None and not _INTERFACE.fullmatch(self.interface):
            raise MeshError(f"interface is {self.interface!r}; give a network device, such as 'eth0'")
        if self.ports is not None and not 1 <= self.ports[0] <= self.ports[1] <= 65535:
            raise MeshError(f"ports is {self.ports}; give the first and the last TCP port, from 1 to 65535")

    def over(self, base: Settings) -> Settings:
        """Merge these settings, where they are given, with those of `base` elsewhere; environments are
        joined.
        """
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return replace(base, **(given | {"env": {**base.env, **self.env}}))


@dataclass(frozen=True, slots=True)
class Host:
    """A machine on which actors run.

    Args:
        name: as `ssh` takes it: a host name, an address, or an alias of the user's ssh configuration.
        slots: number of devices that it takes; with one slot on every host, and under Slurm and Ray, number
            of processes.
        user, port: for ssh; None: as ssh is configured.
        settings: of this host alone.

    Raises:
        MeshError: the name is none (it might be read as an option), slots are below 1, or the port is none.
    """

    name: str
    slots: int = 1
    user: str | None = None
    port: int | None = None
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise MeshError(
                f"{self.name!r} is no host name; hosts are names or IPv4 addresses, also with user@"
            )
        if self.slots < 1:
            raise MeshError(
                f"host {self.name} has slots={self.slots}; a host takes at least 1 device, or is left out"
            )
        if self.user is not None and not _NAME.fullmatch(self.user):
            raise MeshError(f"host {self.name} has user={self.user!r}, which is no user name")
        if self.port is not None and not 1 <= self.port <= 65535:
            raise MeshError(f"host {self.name} has port={self.port}; a TCP port is from 1 to 65535")

    @property
    def where(self) -> tuple[str, int | None]:
        """Name and port, which distinguish hosts: two sshds of one machine are two hosts."""
        return self.name, self.port

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        return f"{user}{self.name}" + (f":{self.port}" if self.port else "")


@dataclass(frozen=True, slots=True)
class ProcessPlacement:
    """Says where one process of an actor runs: as the `index`-th of `count` on its host."""

    host: Host
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Says how actors spread over hosts.

    Args:
        per_actor: number of processes of each actor.
        slots_each: number of slots of one host that a process takes.
    """

    per_actor: int = 1
    slots_each: int = 1


def spread(hosts: Sequence[Host], num_actors: int, num_devices: int, per_actor: int | None = None) -> Spread:
    """Decide of how many processes each actor is: as few as the hosts allow, each on one host.

    A slot is a device, so that an actor which fits on no host has one process on each of several hosts. Where
    every host has one slot, that slot takes a process of any size.

    Args:
        hosts: all hosts of the mesh.
        num_actors: number of actors.
        num_devices: number of devices of one actor.
        per_actor: the number of processes that was asked for; None: as few as possible.

    Raises:
        MeshError: there are not enough slots, or the devices cannot be divided so.
    """
    if num_devices == 1 or all(host.slots == 1 for host in hosts):
        place(hosts, num_actors * (per_actor or 1), per_actor=per_actor or 1)
        return Spread(per_actor or 1)
    for each in [per_actor] if per_actor else [k for k in range(1, num_devices + 1) if num_devices % k == 0]:
        slots_each = num_devices // each
        if sum(host.slots // slots_each for host in hosts) >= num_actors * each:
            return Spread(each, slots_each)
    there = f"{sum(host.slots for host in hosts)} slots on {len(hosts)} host{'s' * (len(hosts) != 1)}"
    of_each = f" in {per_actor} processes of {num_devices // per_actor} each" if per_actor else ""
    raise MeshError(
        f"{num_actors} actor{'s' * (num_actors != 1)} of {num_devices} devices{of_each} do not fit {there}; "
        "a slot "
        "is a device, and a process lies on one host: add hosts, raise slots=, or start fewer or smaller "
        "actors (spmd_mesh)"
    )


def place(
    hosts: Sequence[Host], num_processes: int, slots_each: int = 1, *, per_actor: int = 1
) -> tuple[ProcessPlacement, ...]:
    """Assign processes to the hosts' slots, in order.

    Args:
        hosts: all hosts of the mesh.
        num_processes: number of processes.
        slots_each: number of slots of one host that a process takes.
        per_actor: number of processes of each actor, for the error's text.

    Returns:
        One entry a process.

    Raises:
        MeshError: there are more processes than slots.
    """
    slots = sum(host.slots // slots_each for host in hosts)
    if num_processes > slots:
        there = f"{slots} slot{'s' * (slots != 1)} on {len(hosts)} host{'s' * (len(hosts) != 1)}"
        actors, most = num_processes // per_actor, slots // per_actor
        who = f"{actors} actor{'s' * (actors != 1)}" + (
            f" of {per_actor} processes each" if per_actor > 1 else ""
        )
        do = "does" if actors == 1 else "do"
        fewer = f"start at most {most} actor{'s' * (most != 1)}" if most else "have fewer processes an actor"
        raise MeshError(f"{who} {do} not fit {there}; add hosts, raise slots=, or {fewer}")
    placements: list[ProcessPlacement] = []
    for host in hosts:
        count = min(host.slots // slots_each, num_processes - len(placements))
        placements += [ProcessPlacement(host, index, count) for index in range(count)]
    return tuple(placements)


KEEP_MEMORY = MappingProxyType(
    {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_ARENA_MAX": "1"}
)
"""Settings of glibc's malloc with which it keeps memory that is freed. Without them it returns large memory
to the system, and a step asks for as much again: some ten thousand page faults a step, 8 % of its CPU time.
One arena, because those of threads end at 64 MiB. Other C libraries do not know these variables.
"""

_HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Memory in huge pages, where the kernel gives them to programs that ask: every task reads its weights from
end to end, and each page of 4 KiB has to be looked up anew.
"""

DEFAULTS = MappingProxyType(
    {**KEEP_MEMORY, "GLIBC_TUNABLES": ":".join([COPIES_PAST_CACHES["GLIBC_TUNABLES"], _HUGE_PAGES])}
)
"""Variables of an actor's process, which its host's own settings override."""


def defaults(settings: Settings) -> dict[str, str]:
    """Make the variables that an actor's process has unless its host's environment sets them:
    `ActorRequest.defaults`.
    """
    counted = {ORDER: "PCI_BUS_ID"} if settings.devices is not None else {}  # as NVIDIA's tools count
    return {**DEFAULTS, **counted}


def environment(settings: Settings, placement: ProcessPlacement, platform: str) -> dict[str, str]:
    """Make the variables that an actor's process gets in addition to its host's, and in place of them. `env=`
    wins.
    """
    env = {"JAX_PLATFORMS": platform, "PYTHONUNBUFFERED": "1"}  # output is seen even if it is killed next
    if settings.interface is not None:
        env["UCX_NET_DEVICES"] = settings.interface
    if settings.ports is not None:
        env["UCX_TCP_PORT_RANGE"] = f"{settings.ports[0]}-{settings.ports[1]}"
    if settings.devices is not None:
        env[VISIBLE] = ",".join(settings.devices)  # divided on the host: `ActorRequest`
    return env | dict(settings.env)


def parse_cpus(text: str) -> tuple[int, ...]:
    """Read CPU numbers, such as `"0-3,8"`.

    Raises:
        ValueError: the text is no such list.
    """
    cpus: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not (last.isdigit() and int(first) <= int(last) < _MAX_CPUS)):
            raise ValueError(f"{text!r} is no list of CPU numbers such as 0-3,8")
        cpus += range(int(first), int(last or first) + 1)
    return tuple(dict.fromkeys(cpus))


def parse_ports(text: str) -> tuple[int, int]:
    """Read a range of ports, such as `"47000-47100"`.

    Raises:
        ValueError: the text is no such range.
    """
    first, dash, last = text.partition("-")
    if not dash or not first.isdigit() or not last.isdigit():
        raise ValueError(f"{text!r} is no range of ports such as 47000-47100")
    if int(first) > int(last):
        raise ValueError(f"{text!r} is no range of ports: the first is larger than the last")
    return int(first), int(last)


def parse_devices(text: str) -> tuple[str, ...]:
    """Read devices, such as `"0,1"` or `"0-3"`; UUIDs stay as they are.

    Raises:
        ValueError: a range ends before it begins.
    """
    found: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,4})-([0-9]{1,4})", part)
        if match and int(match[1]) > int(match[2]):
            raise ValueError(f"{text!r} is no list of devices such as 0-3: {part} ends before it begins")
        found += map(str, range(int(match[1]), int(match[2]) + 1)) if match else [part]
    return tuple(found)


# ---------------------------------------------------------------- hostfile

KEYS = ("slots", "user", "port", "python", "env", "cpus", "devices", "interface", "ports")
_MAX_BYTES = 1 << 22


def load_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Read a hostfile.

    Raises:
        MeshError: the file is missing, unreadable, empty or wrong; the error names file and line.
    """
    try:
        if Path(path).stat().st_size > _MAX_BYTES:
            raise MeshError(f"hostfile {path} has more than {_MAX_BYTES >> 20} MiB; is it a hostfile?")
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        what = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise MeshError(f"hostfile {path} {what}; give the path of a file with one host a line") from None
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, name: str = "hostfile") -> tuple[Host, ...]:
    """Read hosts from the text of a hostfile.

    Args:
        text: of the file.
        name: of the file, for errors.

    Raises:
        MeshError: a line is wrong; the error names file and line.
    """
    lines = enumerate(text.removeprefix("\ufeff").splitlines(), 1)
    return _distinct([(f"{name}:{number}", _parse(line, f"{name}:{number}")) for number, line in lines], name)


def parse_hosts(given: Sequence[str | Host], name: str = "hosts") -> tuple[Host, ...]:
    """Read hosts from a list: each a `Host` or a line as in a hostfile.

    Args:
        given: the list.
        name: of the list, for errors.

    Raises:
        MeshError: an element is wrong; the error names it.
    """
    found: list[tuple[str, Host | None]] = []
    for index, entry in enumerate(given):
        at = f"{name}[{index}]"
        if not isinstance(entry, str | Host):
            raise MeshError(f"{at} is {entry!r}; a host is a string such as 'node1 slots=4', or a Host")
        found.append((at, _parse(entry, at) if isinstance(entry, str) else entry))
    return _distinct(found, name)


def _distinct(found: Sequence[tuple[str, Host | None]], name: str) -> tuple[Host, ...]:
    seen: dict[Any, str] = {}
    for at, host in found:
        if host is not None:
            first = seen.setdefault(host.where, at)
            if first != at:
                raise MeshError(f"{at}: host {host} stands at {first} already; write it once, with slots=N")
    if not seen:
        raise MeshError(f"{name} names no host; write one host a line, such as 'node1 slots=4'")
    return tuple(host for _, host in found if host is not None)


def _parse(line: str, at: str) -> Host | None:
    """Read one line; None if it is empty."""
    try:
        words = shlex.split(line, comments=True)
        if not words:
            return None
        host = _parse_name(words[0])
        for word in words[1:]:
            host = _with_word(
                host, word, given=[w.partition("=")[0] for w in words[1:]], has_slots=":" in words[0]
            )
        return host
    except ValueError as error:  # MeshError is one
        raise MeshError(f"{at}: {error}") from None


def _parse_name(word: str) -> Host:
    match = re.fullmatch(r"(?:(?P<user>[^@]*)@)?(?P<name>[^:@]*)(?::(?P<slots>\d+))?", word)
    if match is None:
        raise ValueError(
            f"{word!r} is no host; write 'host', 'user@host' or 'host:slots' (IPv6 addresses by a name)"
        )
    if "=" in word:
        raise ValueError(f"the line begins with {word!r}; a host's name comes first")
    return Host(match["name"], int(match["slots"] or 1), match["user"])


def _with_word(host: Host, word: str, given: Sequence[str], has_slots: bool) -> Host:
    key, equals, value = word.partition("=")
    if not equals or key not in KEYS:
        raise ValueError(f"unknown {word!r}; a host takes {', '.join(f'{k}=' for k in KEYS)}")
    if not value:
        raise ValueError(f"{key}= has no value")
    if key != "env" and given.count(key) > 1:
        raise ValueError(f"{key}= stands twice")
    if (key == "slots" and has_slots) or (key == "user" and host.user is not None):
        raise ValueError(f"{key}= is given a second time, after the one beside the host's name")
    if key in ("slots", "port"):
        if not re.fullmatch(r"-?\d{1,9}", value):
            raise ValueError(f"{key}={value} is no whole number")
        return replace(host, **{key: int(value)})
    if key == "user":
        return replace(host, user=value)
    return replace(host, settings=_with_setting(host.settings, key, value))


def _with_setting(settings: Settings, key: str, value: str) -> Settings:
    if key == "env":
        name, equals, content = value.partition("=")
        if not equals:
            raise ValueError(f"env={value} has no second '='; write env=NAME=VALUE")
        return replace(settings, env={**settings.env, name: content})
    parse: Any = {"cpus": parse_cpus, "devices": parse_devices, "ports": parse_ports}.get(key, str)
    return replace(settings, **{key: parse(value)})


# ---------------------------------------------------------------- addresses

ANY = "0.0.0.0"
"""A control address with which the controller listens on every interface, and tells each host the address
that reaches it.
"""

_ELSEWHERE = "192.0.2.1"  # RFC 5737: nobody has this address, so the default route leads there


def address_towards(host: str) -> str | None:
    """Find this machine's IPv4 address on the way to `host`; None if there is no way, or no such name.

    Nothing is sent: connecting a datagram socket only asks the routing table.
    """
    way = _way_to(host)
    return way and way[0]


def _way_to(host: str) -> tuple[str, str] | None:
    """Find our address on the way to a host, and the host's address. Both are equal if the host is this
    machine.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return probe.getsockname()[0], probe.getpeername()[0]


def addresses_of_hosts(ends: Sequence[tuple[str, str]]) -> list[str]:
    """Find the addresses by which the hosts of some processes reach each other.

    Args:
        ends: for the connection of each process with this one: the process's address, and ours.
    """
    outside = [own for theirs, own in ends if not is_loopback(theirs)]
    if not outside:
        return [theirs for theirs, _ in ends]
    # Processes on this machine may have connected over loopback, which for the others is their own host.
    return [outside[0] if is_loopback(theirs) else theirs for theirs, _ in ends]


def control_address(hosts: Sequence[str]) -> str:
    """Find the one address by which all hosts reach this machine: loopback if all of them are this machine.

    Args:
        hosts: names or addresses. Names that cannot be looked up here are left out; reaching these hosts will
            fail with the reason.

    Raises:
        MeshError: they reach this machine by different addresses.
    """
    ways = {host: way for host in hosts if (way := _way_to(host)) is not None}
    if ways and all(ours == theirs or is_loopback(theirs) for ours, theirs in ways.values()):
        return "127.0.0.1"
    found = {host: ours for host, (ours, _) in ways.items()}
    outside = {a: host for host, a in found.items() if not is_loopback(a)}
    if len(outside) > 1:
        ways = ", ".join(f"{address} for {host}" for address, host in outside.items())
        raise MeshError(
            f"hosts reach this machine by different addresses ({ways}); choose one with control_address=, "
            f"or listen on all of them with control_address={ANY!r}"
        )
    if outside:
        return next(iter(outside))
    return next(iter(found.values()), None) or address_towards(_ELSEWHERE) or "127.0.0.1"
