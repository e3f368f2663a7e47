"""Hosts for tests: network namespaces of this machine, each with an sshd and two links: one for control, one
for data.

    this process      control0 10.213.0.1    data0 10.214.0.1
    host i            control0 10.213.0.1i   data0 10.214.0.1i   namespace jaxpp-PID-i
    the switch        a bridge a network, a port a link           namespace jaxpp-PID-switch

`make test-net` runs pytest in a network and mount namespace of its own, so that this machine's network is
never touched, and the kernel takes everything back when the last process in there ends, however it ends.
Cutting is done at the switch: no end of a link is told.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import psutil
from sshd import SSHD, Sshd

Link = Literal["control", "data"]

NETWORKS: dict[Link, str] = {"control": "10.213.0", "data": "10.214.0"}
INTERFACE: dict[Link, str] = {"control": "control0", "data": "data0"}
DRIVER = 1
"""The last part of this process's addresses; host i has 10 + i."""

_MARK = "JAXPP_TEST_NET_RUN"
"""In the environment of every process that is started on a host: the pid of the pytest that it belongs to."""

_CHECKOUT = Path(__file__).parents[2]

_NOBODY = "02:00:00:00:00:00"  # a hardware address that nobody has


def skip_reason(target: str = "make test-net") -> str | None:
    """Why what needs namespaces cannot run here; None if it can.

    Args:
        target: the command that makes a namespace for a program and runs it there.
    """
    if not os.environ.get("JAXPP_TEST_NET"):
        return f"needs network namespaces: run `{target}`"
    if os.geteuid() != 0:
        return f"only root can make network namespaces: run `{target}` as root"
    for name in ("ip", "tc", "ss", "nft", "ssh"):
        if shutil.which(name) is None:
            return (
                f"there is no {name} here: `{target}` installs iproute2, nftables and openssh-server (Debian)"
            )
    if SSHD is None:
        return f"there is no sshd here: `{target}` installs openssh-server (Debian)"
    if os.environ["JAXPP_TEST_NET"] != "inside":
        return "this machine does not let us make network namespaces (a container without CAP_SYS_ADMIN?)"
    return None


def run(*words: str, text: str | None = None) -> str:
    """What a command prints.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def listening(namespace: str | None = None) -> dict[int, set[str]]:
    """Addresses (`"10.213.0.1:47000"`) of the TCP sockets that listen in a namespace (None: this process's),
    by pid."""
    within = ("ip", "netns", "exec", namespace) if namespace else ()
    found: dict[int, set[str]] = {}
    for line in run(*within, "ss", "-Htlnp").splitlines():
        for pid in re.findall(r"pid=(\d+)", line):
            found.setdefault(int(pid), set()).add(line.split()[3])
    return found


class Host:
    """A namespace with an sshd.

    Attributes:
        name: of the namespace. address: on each network; the one on `control` is what ssh takes. sshd: its.
    """

    def __init__(self, index: int, folder: Path):
        self.index, self.name = index, f"jaxpp-{os.getpid()}-{index}"
        self.address: dict[Link, str] = {
            link: f"{network}.{10 + index}" for link, network in NETWORKS.items()
        }
        (folder / "home").mkdir(parents=True)
        self._folder = folder
        self.sshd: Sshd | None = None

    def start_sshd(self) -> None:
        """On every address of the host."""
        self.sshd = Sshd(
            self._folder,
            f"SetEnv HOME={self._folder}/home PYTHONPATH={_CHECKOUT} {_MARK}={os.getpid()}",
            address="0.0.0.0",
            port=22,
            reached_by=tuple(self.address.values()),
            # It ends with this process, however that ends.
            within=(
                "ip",
                "netns",
                "exec",
                self.name,
                "setpriv",
                "--pdeathsig",
                "KILL",
                "env",
                f"{_MARK}={os.getpid()}",
            ),
        )

    def run(self, *words: str, text: str | None = None) -> str:
        """What a command prints that is run on this host."""
        return run("ip", "netns", "exec", self.name, *words, text=text)

    def pids(self) -> set[int]:
        """Processes on this host, its sshd left out."""
        found = {int(pid) for pid in run("ip", "netns", "pids", self.name).split()}
        return found - ({self.sshd.process.pid} if self.sshd else set())

    def hang_up(self) -> None:
        """End what the sshd has open: after a cut it would wait for its clients for minutes."""
        assert self.sshd is not None
        sessions = psutil.Process(self.sshd.process.pid).children(recursive=True)
        for session in sessions:
            with contextlib.suppress(psutil.NoSuchProcess):
                session.kill()
        psutil.wait_procs(sessions, timeout=5)

    def listening(self) -> dict[int, set[str]]:
        """See `listening`."""
        return listening(self.name)

    @contextlib.contextmanager
    def firewall(self, rule: str) -> Iterator[None]:
        """Outgoing packets go through `rule` (of nft) meanwhile."""
        chain = f"chain output {{\n type filter hook output priority 0\n {rule}\n }}"
        self.run("nft", "-f", "-", text=f"table inet tests {{\n {chain}\n }}\n")
        try:
            yield
        finally:
            self.run("nft", "delete", "table", "inet", "tests")


class Network:
    """Hosts, this process among them, on two switched networks. Made by `network`."""

    def __init__(self, folder: Path, num_hosts: int):
        self._switch = f"jaxpp-{os.getpid()}-switch"
        self.hosts = [Host(i, folder / f"host{i}") for i in range(num_hosts)]

    @property
    def ssh_options(self) -> list[str]:
        """What lets `ssh` into every host."""
        sshds = [host.sshd for host in self.hosts if host.sshd is not None]
        known = "".join((sshd.folder / "known_hosts").read_text() for sshd in sshds)
        keys = "".join(f"IdentityFile {sshd.folder}/user_key\n" for sshd in sshds)
        first = sshds[0].folder
        (first / "all_known_hosts").write_text(known)
        (first / "all_config").write_text(
            f"UserKnownHostsFile {first}/all_known_hosts\nGlobalKnownHostsFile /dev/null\n"
            f"IdentitiesOnly yes\n{keys}"
        )
        return ["-F", str(first / "all_config")]

    def address(self, link: Link) -> str:
        """This process's own."""
        return f"{NETWORKS[link]}.{DRIVER}"

    # ------------------------------------------------------------ links

    def cut(self, host: Host, link: Link) -> None:
        """The switch forgets this port: everything to and from it is lost, and nobody is told."""
        run("ip", "-n", self._switch, "link", "set", _port(host.index, link), "nomaster")

    def restore(self, host: Host, link: Link) -> None:
        """Undo `cut`."""
        run("ip", "-n", self._switch, "link", "set", _port(host.index, link), "master", link)

    def cut_between(self, one: Host, other: Host, link: Link) -> None:
        """These two lose each other, and nobody else."""
        for here, there in ((one, other), (other, one)):
            words = (
                "replace",
                there.address[link],
                "lladdr",
                _NOBODY,
                "dev",
                INTERFACE[link],
                "nud",
                "permanent",
            )
            run("ip", "-n", here.name, "neigh", *words)

    def restore_between(self, one: Host, other: Host, link: Link) -> None:
        """Undo `cut_between`."""
        for here, there in ((one, other), (other, one)):
            with contextlib.suppress(RuntimeError):  # it was not cut
                run("ip", "-n", here.name, "neigh", "del", there.address[link], "dev", INTERFACE[link])

    def slow(self, host: Host, link: Link, megabits_per_s: float) -> None:
        """Limit what comes to a host."""
        run(
            *("tc", "-n", self._switch, "qdisc", "replace", "dev", _port(host.index, link), "root"),
            *("tbf", "rate", f"{megabits_per_s}mbit", "burst", "64kb", "latency", "200ms"),
        )

    def speed_up(self, host: Host, link: Link) -> None:
        """Undo `slow`."""
        with contextlib.suppress(RuntimeError):  # it was not slow
            run("tc", "-n", self._switch, "qdisc", "del", "dev", _port(host.index, link), "root")

    def heal(self) -> None:
        """Every link whole and fast."""
        for host in self.hosts:
            for link in NETWORKS:
                self.restore(host, link)
                self.speed_up(host, link)
            for other in self.hosts[host.index + 1 :]:
                self.restore_between(host, other, "data")

    # ------------------------------------------------------------ life

    def open(self) -> None:
        """Make it all."""
        run("ip", "netns", "add", self._switch)
        for link in NETWORKS:
            run("ip", "-n", self._switch, "link", "add", link, "type", "bridge")
            run("ip", "-n", self._switch, "link", "set", link, "up")
            self._plug(None, DRIVER, link)
        for host in self.hosts:
            run("ip", "netns", "add", host.name)
            run("ip", "-n", host.name, "link", "set", "lo", "up")
            for link in NETWORKS:
                self._plug(host, 10 + host.index, link)
            host.start_sshd()

    def close(self) -> None:
        """Take it all back, also what is there in part."""
        for host in self.hosts:
            if host.sshd is not None:
                host.sshd.stop()
        remove_runs({os.getpid()})
        for link in NETWORKS:
            with contextlib.suppress(RuntimeError):  # gone with the switch
                run("ip", "link", "del", INTERFACE[link])

    def _plug(self, host: Host | None, last: int, link: Link) -> None:
        """A link from a host (None: this process) into the switch."""
        name, port = INTERFACE[link], _port(host.index if host else None, link)
        inside, namespace = (("ip", "-n", host.name), host.name) if host else (("ip",), str(os.getpid()))
        peer = ("peer", "name", name, "netns", namespace)
        run("ip", "-n", self._switch, "link", "add", port, "type", "veth", *peer)
        run("ip", "-n", self._switch, "link", "set", port, "master", link, "up")
        run(*inside, "address", "add", f"{NETWORKS[link]}.{last}/24", "dev", name)
        run(*inside, "link", "set", name, "up")


def _port(index: int | None, link: Link) -> str:
    return f"{link}-{'driver' if index is None else index}"


@contextlib.contextmanager
def network(folder: Path, num_hosts: int) -> Iterator[Network]:
    """Hosts, and nothing of them afterwards. What an earlier run left that was killed goes first."""
    remove_runs({pid for pid in _runs() if not psutil.pid_exists(pid)})
    made = Network(folder, num_hosts)
    try:
        made.open()
        yield made
    finally:
        made.close()


def _runs() -> set[int]:
    """Whose namespaces or processes there are: pids of pytest, living and dead."""
    names = os.listdir("/run/netns") if os.path.isdir("/run/netns") else ()
    found = {int(match[1]) for name in names if (match := re.fullmatch(r"jaxpp-(\d+)-\w+", name))}
    return found | {pid for _, pid in _marked()}


def _marked() -> Iterator[tuple[psutil.Process, int]]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is a zombie
            if pid := process.environ().get(_MARK):
                yield process, int(pid)


def present() -> set[str]:
    """What there is of this process's networks: namespaces, interfaces, processes on hosts."""
    mine = f"jaxpp-{os.getpid()}-"
    names = os.listdir("/run/netns") if os.path.isdir("/run/netns") else ()
    return {
        *(f"namespace {name}" for name in names if name.startswith(mine)),
        *(f"interface {name}" for name in os.listdir("/sys/class/net")),
        *(f"process {process.pid}" for process, pid in _marked() if pid == os.getpid()),
    }


def remove_runs(runs: set[int]) -> None:
    """End the processes of these runs on their hosts, and remove their namespaces with the links."""
    for process, pid in _marked():
        if pid in runs:
            with contextlib.suppress(psutil.Error):  # it has ended
                process.kill()
    for name in os.listdir("/run/netns") if os.path.isdir("/run/netns") else ():
        match = re.fullmatch(r"jaxpp-(\d+)-\w+", name)
        if match and int(match[1]) in runs:
            run("ip", "netns", "del", name)
