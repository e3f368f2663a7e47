"""Explain, from the output of ssh, a login shell or Python, why a program on a host could not be started, and
what to do about it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from jaxpp_async.launch.hosts import Host

SSH_FAILED: Final = 255
"""The exit status by which ssh reports an error of its own; any other status is that of the remote command.
"""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A cause and a remedy, for the error message about a host.

    For example, `what="refused the connection on port 22"` and `remedy="check that sshd runs there"`.
    """

    what: str
    remedy: str


def explain_ssh(
    host: Host, said: Sequence[str], exit_status: int | None, *, is_logged_in: bool
) -> Explanation | None:
    """Explain why ssh did not log in to a host. The result is None if ssh did log in, so that the program on
    the host failed for another reason.

    Args:
        host: the host.
        said: all lines that were printed before the program on the host answered.
        exit_status: the exit status of ssh; None if ssh had not ended yet.
        is_logged_in: whether the login shell on the host has run the command; if so, the result is None.
    """
    if is_logged_in:
        return None
    text = "\n".join(said)
    if exit_status is None:
        return Explanation(
            "did not finish the login in time",
            f"try `{_by_hand(host)} true`: it has to end by itself, asking nothing; start-up files of the "
            "login shell must not wait for input",
        )
    if exit_status != SSH_FAILED:
        return Explanation(
            f"let us in, but its login shell ended with code {exit_status} before it ran our command"
            + (", after it wrote a banner" if text else ""),
            f"`{_by_hand(host)} true` has to succeed: no forced command, no start-up file (.bashrc, "
            ".profile) that exits or starts another program where there is no terminal",
        )
    for pattern, what, remedy in _SSH:
        match = re.search(pattern, text, re.IGNORECASE | re.MULTILINE)
        if match is not None:
            values = {
                "by_hand": _by_hand(host),
                "name": host.name,
                "match": match[0].strip(),
                "known": _known_as(host),
            }
            return Explanation(what.format(**values), remedy.format(**values))
    last = said[-1].strip() if said else "it said nothing"
    return Explanation(f"ssh failed: {last}", f"try `{_by_hand(host)} true`, with -v for more")


_SSH: Final = (
    (
        r"HOST IDENTIFICATION HAS CHANGED",
        "its host key has changed: another machine answers by this name, or it was installed anew",
        "if that is expected, `ssh-keygen -R '{known}'`, then `{by_hand} true` once by hand to accept the "
        "new key",
    ),
    (
        r"Host key verification failed|No .* host key is known",
        "its host key is not known here",
        "run `{by_hand} true` once by hand and accept the key, or add it to ~/.ssh/known_hosts",
    ),
    (
        r"^.*Permission denied \(.*\)|Too many authentication failures",
        "refused our key: {match}",
        "`{by_hand} true` has to work without a password: put your public key in ~/.ssh/authorized_keys "
        "there, load it into ssh-agent, and check the user name (user=)",
    ),
    (
        r"Connection refused",
        "refused the connection: nothing listens on its ssh port",
        "start sshd there, or give its port (port=)",
    ),
    (
        r"Could not resolve hostname|Name or service not known",
        "its name cannot be looked up",
        "check its spelling in the hostfile, DNS, and ~/.ssh/config",
    ),
    (
        r"Connection timed out|Operation timed out|No route to host|Network is unreachable|Host is down",
        "cannot be reached ({match})",
        "check that it runs and that no firewall is in between, or leave it out",
    ),
    (
        r"kex_exchange_identification|Connection (reset|closed) by|banner exchange",
        "closed the connection before the login ({match})",
        "its sshd may be overloaded (MaxStartups) or may refuse this machine; is this port an ssh server's?",
    ),
    (
        r"Bad configuration option|Bad owner or permissions|terminating, \d+ bad config|unknown "
        r"option|illegal option",
        "ssh does not accept its configuration: {match}",
        "correct ~/.ssh/config or ssh_options=",
    ),
)
"""Patterns of text that ssh prints, each with its meaning and the remedy; the first pattern that matches
counts.
"""


def explain_python(python: str, said: Sequence[str], exit_status: int | None) -> Explanation:
    """Explain why the interpreter on a host, or this package in it, did not start.

    Args:
        python: the path of the interpreter.
        said: the lines that were printed instead of the program's greeting.
        exit_status: the exit status of the program, negative for a signal; None if it had not ended yet.
    """
    text = "\n".join(said)
    if exit_status is None:
        return Explanation(
            f"{python} did not start within the time allowed", "is its disk, or a shared folder, stuck?"
        )
    if "nknown option: -P" in text:
        return Explanation(f"{python} there is older than Python 3.11", "name a newer one with python=")
    missing = re.search(r"No module named '?([\w.]+)", text)
    if missing is not None and missing[1].split(".")[0] == "jaxpp_async":
        if missing[1] == "jaxpp_async":
            what = f"{python} there does not have the package jaxpp-async"
        else:
            what = f"{python} there has an older jaxpp-async than this machine"
        return Explanation(
            what, f"install it there: {python} -m pip install jaxpp-async, or name another python="
        )
    if missing is not None:
        return Explanation(
            f"{python} there has jaxpp-async without the package {missing[1]} that it needs",
            f"install it again there: {python} -m pip install --force-reinstall jaxpp-async",
        )
    lost = re.search(
        r"^.*(No such file or directory|not found|Permission denied|cannot execute).*$", text, re.MULTILINE
    )
    if exit_status in (126, 127) or (lost is not None and python in lost[0]):
        return Explanation(
            f"there is no Python at {python}" + (f" ({lost[0].strip()})" if lost else ""),
            "install it there, or say where it is with python= (for the mesh, or on the host's line)",
        )
    last = said[-1].strip() if said else "it said nothing"
    how = f"code {exit_status}" if exit_status >= 0 else f"signal {-exit_status}"
    return Explanation(f"{python} ended with {how} before it was ready: {last}", "")


def _by_hand(host: Host) -> str:
    port = f"-p {host.port} " if host.port else ""
    return f"ssh {port}" + (f"{host.user}@" if host.user else "") + host.name


def _known_as(host: Host) -> str:
    """Return the name under which ssh's known_hosts file lists the host."""
    return f"[{host.name}]:{host.port}" if host.port not in (None, 22) else host.name
