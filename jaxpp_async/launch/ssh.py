"""Start actors on other hosts with the system's own `ssh`, so that the user's ssh configuration, ssh agents
and jump hosts work.

Each host has one connection, whatever the number of its actors. This needs the fewest logins, and no new
login when an actor is replaced. If the connection is lost, its stream ends, which tells both sides of the
loss. The connection is never shared with a connection of the user (ControlMaster), because the end of one
would end the other. Signals do not travel over ssh. Instead the host agent, the program that starts actors on
the host, ends the actors when its stdin ends, or is silent for longer than a time limit (the lease).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpp_async.errors import MeshError
from jaxpp_async.launch.host_agent_client import ProgramNotStartedError
from jaxpp_async.launch.hosts import Host, load_hostfile, parse_hosts
from jaxpp_async.launch.login_errors import Explanation, explain_ssh
from jaxpp_async.launch.options import OF_HOSTS, LauncherKind, LaunchOptions
from jaxpp_async.launch.remote import CommandReach, RemoteLauncher

LOGIN_MARK = "jaxpp-async-login"
CONNECT_TIMEOUT_S = 10
_RESOLVE_S = 3.0

_OPTIONS = {
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "ConnectTimeout": str(CONNECT_TIMEOUT_S),
    "ConnectionAttempts": "1",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "ClearAllForwardings": "yes",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "ControlMaster": "no",
    "ControlPath": "none",
    "LogLevel": "ERROR",
}


def ssh_command(
    host: Host, host_agent: Sequence[str], ssh_options: Sequence[str] = (), program: str = "ssh"
) -> list[str]:
    """Return the argument vector, without any secret, that runs a host agent on `host` by ssh.

    Args:
        host: the host.
        host_agent: the agent's argument vector on the host.
        ssh_options: the user's options for ssh; they come first, because ssh uses the first value of an
            option that it finds.
        program: the name or path of the ssh program.
    """
    options = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
    port = ["-p", str(host.port)] if host.port else []
    user = ["-l", host.user] if host.user else []
    # The mark tells a failed login from a failed Python. Without `exec`, the shell would keep
    # the agent's stdin open.
    there = f"echo {LOGIN_MARK}; exec {shlex.join(host_agent)}"
    return [program, *ssh_options, "-T", *options, *port, *user, "--", host.name, there]


class SSHReach(CommandReach):
    """A `Reach` (an object that starts programs on hosts) that starts host agents by ssh, with one connection
    per host.

    Args:
        ssh_options: the user's options for `ssh`, such as `["-i", "key", "-o", "ProxyJump=gate"]`.
        program: the name or path of the ssh program.
    """

    login_mark: str | None = LOGIN_MARK

    def __init__(self, ssh_options: Sequence[str] = (), *, program: str = "ssh"):
        super().__init__(lambda p, host_agent: ssh_command(p.host, host_agent, ssh_options, program))
        self._ssh_options, self._program = tuple(ssh_options), program

    async def resolve(self, hosts: Sequence[Host]) -> list[str]:
        """Return the real names of the hosts, which the user may have given by aliases of the ssh
        configuration.
        """
        return list(await asyncio.gather(*(self._resolve(host) for host in hosts)))

    def explain(self, host: Host, error: ProgramNotStartedError) -> Explanation | None:
        """Explain why ssh did not log in to a host; None if ssh did log in (see `Reach.explain`)."""
        return explain_ssh(host, error.said, error.exit_status, is_logged_in=error.is_logged_in)

    async def _resolve(self, host: Host) -> str:
        port = ["-p", str(host.port)] if host.port else []
        command = [self._program, *self._ssh_options, *port, "-G", "--", host.name]
        with contextlib.suppress(OSError, TimeoutError):  # if ssh fails, use the given name
            async with asyncio.timeout(_RESOLVE_S):
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                )
                output, _ = await process.communicate()
                found = re.search(r"^hostname (\S+)$", output.decode(errors="replace"), re.MULTILINE)
                return found[1] if found else host.name
        return host.name


def ssh_launcher(hosts: Sequence[Host], *, ssh_options: Sequence[str] = (), **options: Any) -> RemoteLauncher:
    """Make a launcher that starts actors by ssh.

    Args:
        hosts: the hosts, whose slots are filled in order.
        ssh_options: the user's options for `ssh`.
        options: the keyword arguments of `RemoteLauncher`.

    Raises:
        MeshError: ssh is not installed on this machine.
    """
    return RemoteLauncher(ssh_reach(ssh_options), hosts, **options)


def ssh_reach(ssh_options: Sequence[str] = ()) -> SSHReach:
    """Make the object that runs programs on hosts by ssh, after a check that ssh is installed.

    Args:
        ssh_options: the user's options for `ssh`.

    Raises:
        MeshError: ssh is not installed on this machine.
    """
    if shutil.which("ssh") is None:
        raise MeshError(
            "hosts are reached with ssh, which is not installed here; Debian: apt install openssh-client"
        )
    return SSHReach(ssh_options)


def _hosts(given: Any) -> tuple[Host, ...]:
    if given is None:
        raise MeshError("launcher='ssh' needs hosts=: a hostfile's path, or a list such as ['node1 slots=2']")
    if isinstance(given, str | Path):
        return load_hostfile(given)
    if not isinstance(given, Sequence):
        raise MeshError(f"hosts is {given!r}; it is a hostfile's path or a list of hosts")
    return parse_hosts(given)


def _make(options: LaunchOptions, num_processes: int) -> RemoteLauncher:
    return ssh_launcher(_hosts(options.hosts), ssh_options=options.ssh_options, **options.remote_options())


KIND = LauncherKind(
    make=_make,
    find_hosts=lambda options: (_hosts(options.hosts), ssh_reach(options.ssh_options)),
    uses=OF_HOSTS | {"hosts", "ssh_options"},
    phrase="launcher='ssh'",
)
