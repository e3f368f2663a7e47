"""Start actors on the hosts of the Slurm allocation in which this process runs, by `srun`, one Slurm task for
each process.

Slurm says which hosts there are and starts a host agent (the program that starts an actor) in each task; the
module `remote` does the rest. When srun's stdin ends, the agents end as well.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpp_async.errors import MeshError
from jaxpp_async.launch.host_agent_client import ProgramNotStartedError
from jaxpp_async.launch.hosts import Host, ProcessPlacement
from jaxpp_async.launch.login_errors import Explanation
from jaxpp_async.launch.options import OF_HOSTS, LauncherKind
from jaxpp_async.launch.remote import CommandReach, RemoteLauncher

_TOOL_S = 10.0
_OVERLAP_SINCE = (20, 11)


def srun_command(
    placement: ProcessPlacement, host_agent: Sequence[str], version: tuple[int, ...]
) -> list[str]:
    """Return the argument vector that runs the host agent of one process as a Slurm task on the placement's
    host.

    Args:
        placement: the process and its host.
        host_agent: the agent's argument vector.
        version: the version of Slurm, such as (22, 5, 8). Since version 20.11, a job step gets its resources
            exclusively unless it has the option `--overlap`. Without the option, the step of the driver or of
            another actor would block this step for ever.
    """
    overlap = ["--overlap"] if version >= _OVERLAP_SINCE else []
    # The step asks for no CPUs and no memory of its own: actors share those of the host among themselves.
    return [
        "srun", "--nodes=1", "--ntasks=1", f"--nodelist={placement.host.name}", *overlap,
        "--cpu-bind=none", "--mem=0", "--unbuffered", "--kill-on-bad-exit=1", "--quiet", *host_agent,
    ]  # fmt: skip


class SlurmReach(CommandReach):
    """A `Reach` (an object that starts programs on hosts) that starts host agents by srun on the hosts of a
    Slurm allocation, one agent per process.

    Args:
        version: the version of Slurm, such as (22, 5, 8).
    """

    agent_per_process = True

    def __init__(self, version: tuple[int, ...]):
        super().__init__(lambda placement, host_agent: srun_command(placement, host_agent, version))

    def explain(self, host: Host, error: ProgramNotStartedError) -> Explanation | None:
        """Explain why a host agent did not start, if srun printed the reason; else return None (see
        `Reach.explain`).
        """
        return explain_srun(error.said, is_late=error.exit_status is None)


def explain_srun(said: Sequence[str], *, is_late: bool) -> Explanation | None:
    """Explain why srun did not start a task. The result is None if srun's output does not show the reason.

    Args:
        said: the lines that srun, and the program that it started, printed.
        is_late: whether srun was still running when the time for the start was over; if so, and no other
            reason is found, the reason is taken from the last line of srun.
    """
    own = [line for line in said if re.match(r"(srun|slurmstepd): ", line)]
    text = "\n".join(own)
    if re.search(r"busy|temporarily (disabled|unable)|queued and waiting", text):
        return Explanation(
            f"Slurm did not start a task there: {own[-1]}",
            "the allocation has no room: allocate more (--ntasks, --cpus-per-task, --mem), or start fewer "
            "actors",
        )
    if re.search(
        r"(expired|invalid|not exist).*job|job.*(expired|invalid|revoked|not exist)", text, re.IGNORECASE
    ):
        return Explanation(f"the allocation has ended: {own[-1]}", "allocate anew with salloc or sbatch")
    wrong = next(
        (line for line in own if "error" in line and "execve" not in line and "Exited with" not in line), None
    )
    if wrong is not None:
        return Explanation(f"Slurm did not start a task there: {wrong}", "")
    if is_late and own:
        return Explanation(f"Slurm did not start a task there in time: {own[-1]}", "")
    return None


def slurm_launcher(**options: Any) -> RemoteLauncher:
    """Make a launcher for the Slurm allocation in which this process runs.

    Args:
        options: the keyword arguments of `RemoteLauncher`.

    Raises:
        MeshError: this process is not inside an allocation, or Slurm's commands are missing.
    """
    hosts, reach = slurm_reach()
    return RemoteLauncher(reach, hosts, **options)


def slurm_reach() -> tuple[tuple[Host, ...], SlurmReach]:
    """Return the hosts of the Slurm allocation in which this process runs, and the object that runs programs
    on them.

    Raises:
        MeshError: this process is not inside an allocation, or Slurm's commands are missing.
    """
    hosts = allocation(os.environ)
    return hosts, SlurmReach(parse_version(_output("srun", "--version")))


def allocation(env: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts of the Slurm allocation, each with one slot for every task that the user requested on
    that host.

    Args:
        env: the environment with Slurm's variables.

    Raises:
        MeshError: this process is not inside an allocation, or Slurm's commands are missing.
    """
    nodes = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if not env.get("SLURM_JOB_ID") or not nodes:
        raise MeshError(
            "launcher='slurm' works inside an allocation, and this process is in none (no SLURM_JOB_ID); "
            "start it with salloc or sbatch, e.g. salloc --nodes=2 --ntasks-per-node=1 python train.py"
        )
    names = _output("scontrol", "show", "hostnames", nodes).split()
    tasks = parse_tasks_per_node(env.get("SLURM_TASKS_PER_NODE") or "1")
    tasks += [1] * (len(names) - len(tasks))
    if not names:
        raise MeshError(
            f"scontrol names no host for SLURM_JOB_NODELIST={nodes!r}; is the allocation still alive?"
        )
    return tuple(Host(name, slots) for name, slots in zip(names, tasks, strict=False))


def parse_tasks_per_node(text: str) -> list[int]:
    """Read the number of tasks of each node from Slurm's form, such as `"2(x3),1"` for `[2, 2, 2, 1]`.

    Raises:
        MeshError: the text does not have that form.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None or not int(match[1]):
            raise MeshError(f"SLURM_TASKS_PER_NODE={text!r} is not of Slurm's form '2(x3),1'")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def parse_version(text: str) -> tuple[int, ...]:
    """Return the version in a text, such as (22, 5, 8) for `"slurm 22.05.8"`; (0,) if the text has none."""
    match = re.search(r"(\d+(?:\.\d+)+)", text)
    return tuple(map(int, match[1].split("."))) if match else (0,)


def _output(*command: str) -> str:
    """Run one of Slurm's short commands and return what it prints to stdout.

    Raises:
        MeshError: the command is missing, fails, or does not end within `_TOOL_S` seconds.
    """
    if shutil.which(command[0]) is None:
        raise MeshError(
            f"launcher='slurm' needs Slurm's command {command[0]!r}, which is not in PATH; load its module"
        )
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_TOOL_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MeshError(f"`{' '.join(command)}` failed: {error}") from None
    if done.returncode:
        raise MeshError(f"`{' '.join(command)}` ended with code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


KIND = LauncherKind(
    make=lambda options, num_processes: slurm_launcher(**options.remote_options()),
    find_hosts=lambda options: slurm_reach(),
    uses=OF_HOSTS,
    phrase="launcher='slurm', which takes the hosts of the allocation",
)
