"""An sshd of the tests' own, with throwaway keys in a temporary folder: on a loopback port, or within a
namespace."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


def skip_reason() -> str | None:
    """Why the tests that need an sshd cannot run here; None if they can."""
    if not os.environ.get("JAXPP_TEST_SSH"):
        return "needs an sshd: run `make test-ssh`"
    return (
        None
        if SSHD and shutil.which("ssh")
        else "no sshd or ssh here: `make test-ssh` installs openssh-server"
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Sshd:
    """A running sshd and what a client needs to be let in.

    Args:
        lines: of its configuration. address, port: where it listens; default: any port of loopback.
        reached_by: its names for clients; the first is where this process waits for it to answer.
        within: words before its command.

    Attributes:
        options: for `ssh_options=`. folder: with `known_hosts`, `authorized_keys` and `config`.
    """

    def __init__(
        self,
        folder: Path,
        *lines: str,
        address: str = "127.0.0.1",
        port: int | None = None,
        reached_by: Sequence[str] = ("127.0.0.1", "localhost"),
        within: Sequence[str] = (),
    ):
        self.folder, self.port, self._reached_by = folder, port or free_port(), reached_by
        for name in ("host_key", "user_key", "other_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        (folder / "authorized_keys").write_text((folder / "user_key.pub").read_text())
        self.know("host_key")
        (folder / "client_config").write_text(
            f"UserKnownHostsFile {folder}/known_hosts\nGlobalKnownHostsFile /dev/null\nIdentitiesOnly yes\n"
            f"IdentityFile {folder}/user_key\n"
        )
        (folder / "sshd_config").write_text(
            "\n".join(
                [
                    *lines,  # the first value of an option wins
                    f"Port {self.port}",
                    f"ListenAddress {address}",
                    f"HostKey {folder}/host_key",
                    f"AuthorizedKeysFile {folder}/authorized_keys",
                    f"PidFile {folder}/pid",
                    "StrictModes no",
                    "UsePAM no",
                    "PasswordAuthentication no",
                    "KbdInteractiveAuthentication no",
                    "PermitRootLogin prohibit-password",
                    "MaxStartups 10:30:100",
                ]
            )
        )
        if os.geteuid() == 0:
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
        self._log = open(folder / "sshd.log", "wb")  # noqa: SIM115 (closed by `stop`)
        command = [*within, str(SSHD), "-D", "-e", "-f", folder / "sshd_config"]
        self.process = subprocess.Popen(command, stderr=self._log)
        self._wait_up()

    @property
    def options(self) -> list[str]:
        return ["-F", str(self.folder / "client_config")]

    def know(self, key: str) -> None:
        """Write `known_hosts` so that the server is expected to have this key."""
        public = " ".join((self.folder / f"{key}.pub").read_text().split()[:2])
        names = [name if self.port == 22 else f"[{name}]:{self.port}" for name in self._reached_by]
        (self.folder / "known_hosts").write_text("".join(f"{name} {public}\n" for name in names))

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(5)
        self._log.close()

    def _wait_up(self) -> None:
        for _ in range(100):
            if self.process.poll() is not None:
                raise RuntimeError(f"sshd ended: {(self.folder / 'sshd.log').read_text()}")
            with (
                contextlib.suppress(OSError),
                socket.create_connection((self._reached_by[0], self.port), 0.2) as probe,
            ):
                if probe.recv(4) == b"SSH-":
                    return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)
        raise RuntimeError("sshd does not answer")


@contextlib.contextmanager
def running(folder: Path, *lines: str) -> Iterator[Sshd]:
    sshd = Sshd(folder, *lines)
    try:
        yield sshd
    finally:
        sshd.stop()
