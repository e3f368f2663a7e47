"""Describe the hosts of a mesh, read them from hostfiles, place processes on them, and find the addresses by
which hosts and this machine can connect to each other.

A hostfile has one host per line:

    # comment
    node1 slots=4 devices=0-3
    node2:4                                  # MPICH's form
    alice@node3 port=2222 python=/opt/venv/bin/python env=OMP_NUM_THREADS=4 cpus=0-15,32-47 interface=ib0

Every mistake in a hostfile is an error that names the file and the line; a mesh never falls back silently to
a run on this machine. Only `load_hostfile` and the functions that find addresses do I/O. The functions that
find addresses look up host names, which may block, so call these functions in a thread.
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
    """The settings of actors' processes, for a whole mesh or for one host. A host's own settings override
    those of the mesh.

    Args:
        python: the path of the interpreter on the host; None for the path of this process's interpreter.
        env: environment variables to add.
        cpus: the numbers of the CPUs that the actors of a host share; None for all that the process may use.
        devices: the GPUs that the actors of a host share, in order, as `CUDA_VISIBLE_DEVICES` names them;
            None to leave that variable as it is.
        interface: the network device of the data plane, as `UCX_NET_DEVICES` names it (`"eth0"`,
            `"mlx5_0:1"`); None to leave that variable as it is.
        ports: the first and the last TCP port that the data plane may use; None for any port.

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

    def merged_over(self, base: Settings) -> Settings:
        """Merge these settings with `base`: where a value in these settings is None, the result has the value
        of `base`.

        The environments are joined; for a variable that both set, the value in these settings wins.
        """
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return replace(base, **(given | {"env": {**base.env, **self.env}}))


@dataclass(frozen=True, slots=True)
class Host:
    """A machine on which actors run.

    Args:
        name: the name of the host in the form that `ssh` accepts: a host name, an address, or an alias of the
            user's ssh configuration.
        slots: the number of devices of the host that the mesh may use. If every host has one slot, and also
            under Slurm and Ray, a slot stands for a process instead of a device.
        user: the user name for ssh; None for the one that ssh's configuration gives.
        port: the TCP port for ssh; None for the one that ssh's configuration gives.
        settings: the settings of this host alone.

    Raises:
        MeshError: the name is no host name (ssh might read it as an option), `slots` is below 1, or the user
            name or the port is not valid.
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
        """The name and ssh port of the host, which identify it. Two ssh servers on one machine thus count as
        two hosts.
        """
        return self.name, self.port

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        return f"{user}{self.name}" + (f":{self.port}" if self.port else "")


@dataclass(frozen=True, slots=True)
class ProcessPlacement:
    """The place of one process of an actor: a host, and a number on that host.

    Args:
        host: the host on which the process runs.
        index: the number of the process among the mesh's processes on the host, counted from 0.
        count: the number of the mesh's processes on the host.
    """

    host: Host
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Spread:
    """The way in which the actors of a mesh are divided into processes on hosts.

    Args:
        per_actor: the number of processes of each actor.
        slots_each: the number of slots of one host that each process takes.
    """

    per_actor: int = 1
    slots_each: int = 1


def spread(hosts: Sequence[Host], num_actors: int, num_devices: int, per_actor: int | None = None) -> Spread:
    """Decide how many processes each actor has, and how many slots of a host each process takes.

    A slot is a device, and a process uses devices of one host only. All processes of an actor have the same
    number of devices, and an actor gets as few processes as possible. If every host has one slot, then that
    slot takes a process with any number of devices.

    Args:
        hosts: all hosts of the mesh.
        num_actors: the number of actors.
        num_devices: the number of devices of one actor.
        per_actor: the number of processes per actor that the user asked for; None for as few as possible.

    Raises:
        MeshError: there are not enough slots, or the devices cannot be divided in this way.
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
        "a slot is a device, and a process lies on one host: add hosts, raise slots=, or start fewer or "
        "smaller actors (spmd_mesh)"
    )


def place(
    hosts: Sequence[Host], num_processes: int, slots_each: int = 1, *, per_actor: int = 1
) -> tuple[ProcessPlacement, ...]:
    """Assign processes to the hosts' slots, in the order of the hosts.

    Args:
        hosts: all hosts of the mesh.
        num_processes: the number of processes.
        slots_each: the number of slots of one host that each process takes.
        per_actor: the number of processes of each actor, for the error message.

    Returns:
        One placement per process, in the order of the processes' numbers.

    Raises:
        MeshError: the processes need more slots than the hosts have.
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
    {
        "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
        "MALLOC_MMAP_MAX_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "-1",
        "MALLOC_ARENA_MAX": "1",
    }
)
"""Environment variables that make glibc's malloc keep the memory of freed arrays of less than 32 MiB. Without
them malloc returns large blocks to the system, and each step requests as much again, which causes some ten
thousand page faults per step and takes 8 % of its CPU time. Arrays of 32 MiB and more, the largest threshold
that malloc takes, have mappings of their own: in the heap the holes between them made a process up to twice
as large as its arrays. There is only one arena, because the arenas of threads are limited to 64 MiB. Other C
libraries ignore these variables.
"""

_WHOLE_BLOCKS = "glibc.malloc.tcache_count=0"
"""A glibc setting that lets a freed array become one block again. For an aligned array glibc takes a somewhat
larger block and frees its ends. Without this setting the ends stay in a cache of the thread, and the block
that is left is too small for the next aligned array of the same size.
"""

_HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""A glibc setting that allocates memory in huge pages, if the kernel gives them to programs that ask. Every
task reads its weights from end to end, and each page of 4 KiB would need an address lookup of its own.
"""

DEFAULTS = MappingProxyType(
    {
        **KEEP_MEMORY,
        "GLIBC_TUNABLES": ":".join([COPIES_PAST_CACHES["GLIBC_TUNABLES"], _HUGE_PAGES, _WHOLE_BLOCKS]),
    }
)
"""Environment variables of an actor's process, which the settings of its host override."""


def defaults(settings: Settings) -> dict[str, str]:
    """Return the environment variables that an actor's process has unless its host's environment sets them
    (`ActorRequest.defaults`).

    Args:
        settings: the settings of the process.
    """
    counted = {ORDER: "PCI_BUS_ID"} if settings.devices is not None else {}  # NVIDIA's tools' order
    return {**DEFAULTS, **counted}


def environment(settings: Settings, platform: str) -> dict[str, str]:
    """Return the environment variables that an actor's process gets in addition to the environment of its
    host. These variables override variables of the same name in that environment.

    Args:
        settings: the settings of the process; its `env` overrides the other variables.
        platform: the JAX platform, `"cpu"` or `"cuda"`.
    """
    env = {"JAX_PLATFORMS": platform, "PYTHONUNBUFFERED": "1"}  # no output is lost in a kill
    if settings.interface is not None:
        env["UCX_NET_DEVICES"] = settings.interface
    if settings.ports is not None:
        env["UCX_TCP_PORT_RANGE"] = f"{settings.ports[0]}-{settings.ports[1]}"
    if settings.devices is not None:
        env[VISIBLE] = ",".join(settings.devices)  # `ActorRequest` divides them on the host
    return env | dict(settings.env)


def parse_cpus(text: str) -> tuple[int, ...]:
    """Read CPU numbers, such as `"0-3,8"`, without duplicates.

    Raises:
        ValueError: the text is not a list of CPU numbers.
    """
    cpus: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not (last.isdigit() and int(first) <= int(last) < _MAX_CPUS)):
            raise ValueError(f"{text!r} is no list of CPU numbers such as 0-3,8")
        cpus += range(int(first), int(last or first) + 1)
    return tuple(dict.fromkeys(cpus))


def parse_ports(text: str) -> tuple[int, int]:
    """Read the first and the last port from a range, such as `"47000-47100"`.

    Raises:
        ValueError: the text is not a range of ports.
    """
    first, dash, last = text.partition("-")
    if not dash or not first.isdigit() or not last.isdigit():
        raise ValueError(f"{text!r} is no range of ports such as 47000-47100")
    if int(first) > int(last):
        raise ValueError(f"{text!r} is no range of ports: the first is larger than the last")
    return int(first), int(last)


def parse_devices(text: str) -> tuple[str, ...]:
    """Read the names of devices, such as `"0,1"` or `"0-3"`; ranges are expanded, and UUIDs stay as they are.

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
    """Read the hosts from a hostfile.

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
        text: the content of the file.
        name: the name of the file, for error messages.

    Raises:
        MeshError: a line is wrong; the error names file and line.
    """
    lines = enumerate(text.removeprefix("\ufeff").splitlines(), 1)
    return _distinct([(f"{name}:{number}", _parse(line, f"{name}:{number}")) for number, line in lines], name)


def parse_hosts(given: Sequence[str | Host], name: str = "hosts") -> tuple[Host, ...]:
    """Read hosts from a list that mixes `Host` objects and strings in the form of a hostfile's lines.

    Args:
        given: the list.
        name: the name of the list, for error messages.

    Raises:
        MeshError: an element is wrong; the error names its index.
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
    """Read one host from a line of a hostfile; None if the line is empty or a comment.

    Args:
        line: the line.
        at: the place of the line, such as `"hosts.txt:3"`, for error messages.

    Raises:
        MeshError: the line is wrong.
    """
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
"""A control address with which the controller listens on every interface, and tells each host the address by
which the host can connect to it.
"""

_ELSEWHERE = "192.0.2.1"  # RFC 5737: nobody has this address, so the default route leads there


def address_towards(host: str) -> str | None:
    """Return the IPv4 address of this machine from which packets to `host` leave. Return None if no host has
    that name, or if there is no route to the host.

    This function sends nothing, because connecting a datagram socket only consults the routing table.
    """
    way = _route_to(host)
    return way and way[0]


def _route_to(host: str) -> tuple[str, str] | None:
    """Return the two ends of the network route from this machine to a host. Return None if no host has that
    name, or if there is no route to the host.

    Returns:
        Two IPv4 addresses: this machine's address, from which packets to the host leave, and the host's
        address. The two are equal if the host is this machine.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return probe.getsockname()[0], probe.getpeername()[0]


def addresses_of_hosts(ends: Sequence[tuple[str, str]]) -> list[str]:
    """Return, for each process of the mesh, an address by which other processes can connect to the host of
    that process.

    Args:
        ends: one pair of addresses per process, for the connection between that process and the controller
            (this process). The first address is that of the process's end, the second one that of the
            controller's end.
    """
    outside = [own for theirs, own in ends if not is_loopback(theirs)]
    if not outside:
        return [theirs for theirs, _ in ends]
    # Processes on this machine may have connected over loopback, which for the others is their own host.
    return [outside[0] if is_loopback(theirs) else theirs for theirs, _ in ends]


def control_address(hosts: Sequence[str]) -> str:
    """Return the address by which all hosts can connect to this machine. If all hosts are this machine, this
    is the loopback address.

    Args:
        hosts: names or addresses of the hosts. Names that cannot be looked up on this machine are ignored,
            because starting actors on these hosts fails later with a better error.

    Raises:
        MeshError: no single address works, because the routes to the hosts leave from different addresses of
            this machine.
    """
    ways = {host: way for host in hosts if (way := _route_to(host)) is not None}
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
    return next(iter(outside or found.values()), None) or address_towards(_ELSEWHERE) or "127.0.0.1"
