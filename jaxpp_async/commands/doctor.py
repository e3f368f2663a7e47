"""The command `doctor`: would a run work on this machine or on other hosts, and what is missing."""

from __future__ import annotations

import asyncio
import json
import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from jaxpp_async.commands.output import FAILED, WRONG_USE, print_error, progress

if TYPE_CHECKING:
    from jaxpp_async.doctor.facts import Examination, RequestedRun


class PlatformChoice(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class TransportChoice(StrEnum):
    ucx = "ucx"
    nccl = "nccl"
    tcp = "tcp"


def doctor(
    hosts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A hostfile: look at every host of it, too.")
    ] = None,
    slurm: Annotated[
        bool, typer.Option(help="Look at the hosts of the Slurm allocation around this process.")
    ] = False,
    platform: Annotated[
        PlatformChoice, typer.Option(help="The platform of the actors.")
    ] = PlatformChoice.cpu,
    transport: Annotated[
        TransportChoice, typer.Option(help="tcp: UCX over TCP alone.")
    ] = TransportChoice.ucx,
    actors: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many; default: as many as the hosts hold.")
    ] = None,
    devices_per_actor: Annotated[
        int, typer.Option(metavar="N", min=1, help="The product of spmd_mesh's sizes.")
    ] = 1,
    processes_per_actor: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Default: as few as hosts allow.")
    ] = None,
    ssh_options: Annotated[
        str, typer.Option(metavar="TEXT", help="Words for ssh, such as '-o ProxyJump=gate'.")
    ] = "",
    python: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The interpreter on the hosts; default: this one's path."),
    ] = None,
    interface: Annotated[
        str | None, typer.Option(metavar="NAME", help="Network device of the data plane, such as eth0.")
    ] = None,
    ports: Annotated[
        str | None, typer.Option(metavar="N-N", help="Its TCP ports, such as 47000-47100.")
    ] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="N,...", help="CUDA_VISIBLE_DEVICES of a host's actors together.")
    ] = None,
    control_address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Where this machine listens for actors.")
    ] = None,
    transfers: Annotated[bool, typer.Option(help="Measure latency and bandwidth between hosts.")] = True,
    as_json_: Annotated[
        bool, typer.Option("--json", help="Print JSON: findings, and all that was found.")
    ] = False,
    facts: Annotated[
        bool, typer.Option(help="Print the facts of this machine as JSON, and judge nothing.")
    ] = False,
) -> None:
    """Check whether a run would work here or on given hosts.

    The findings say what keeps a run from working, and what to do about it. The exit status is 0 if it would
    work, 1 if it would not, and 2 if the options are wrong.

    \b
    Examples:
      jaxpp-async doctor
      jaxpp-async doctor --hosts hostfile --platform cuda --actors 2 --devices-per-actor 8
    """
    import msgspec

    from jaxpp_async.doctor.facts import RequestedRun
    from jaxpp_async.doctor.gather import gather
    from jaxpp_async.doctor.judge import judge, would_work
    from jaxpp_async.doctor.show import as_flags, as_json, print_findings
    from jaxpp_async.errors import MeshError

    if facts:
        typer.echo(json.dumps(msgspec.to_builtins(asyncio.run(gather(platform.value))), indent=1))
        return
    asked = RequestedRun(
        platform.value, transport.value, actors, devices_per_actor, processes_per_actor, slurm
    )
    options: dict[str, Any] = {
        "hosts": hosts, "python": python, "interface": interface, "ports": ports, "devices": devices,
        "control_address": control_address, "ssh_options": shlex.split(ssh_options),
        "launcher": "slurm" if slurm else None, "processes_per_actor": processes_per_actor,
        "num_devices": devices_per_actor,
    }  # fmt: skip
    try:
        found = asyncio.run(_examine(options, asked, transfers))
    except MeshError as error:
        print_error("doctor", as_flags(str(error)))
        raise typer.Exit(WRONG_USE) from None
    findings = [
        msgspec.structs.replace(f, what=as_flags(f.what), remedy=as_flags(f.remedy)) for f in judge(found)
    ]
    if as_json_:
        typer.echo(json.dumps(as_json(found, findings), indent=1))
    else:
        print_findings(found, findings, Console())
    raise typer.Exit(0 if would_work(findings) else FAILED)


async def _examine(options: dict[str, Any], asked: RequestedRun, measures: bool) -> Examination:
    """Look at the hosts and return what was found.

    Args:
        options: the options of `LaunchOptions`.
        asked: the run that the user has in mind.
        measures: whether to measure transfers between hosts.

    Raises:
        MeshError: an option is wrong.
    """
    from jaxpp_async.doctor.examine import ExaminationPlan, examine
    from jaxpp_async.launch.choose import choose_hosts
    from jaxpp_async.launch.options import LaunchOptions

    launching = LaunchOptions(**options)
    chosen, reach = choose_hosts(launching)
    plan = ExaminationPlan(asked, chosen, launching.settings(), launching.control_address, measures)
    with progress("looking") as report:
        return await examine(plan, reach, report)
