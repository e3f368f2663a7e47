"""Define the command line `python -m jaxpp_async`, whose commands print text or JSON and end with an exit
status.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace
from rich.console import Console

from jaxpp_async.doctor.examine import ExaminationPlan, examine
from jaxpp_async.doctor.facts import RequestedRun
from jaxpp_async.doctor.gather import gather
from jaxpp_async.doctor.judge import judge, would_work
from jaxpp_async.doctor.show import as_flags, as_json, print_findings
from jaxpp_async.errors import MeshError
from jaxpp_async.launch.choose import choose_hosts
from jaxpp_async.launch.options import LaunchOptions

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

WRONG_USE = 2
"""The exit status when the options are wrong, as is usual for command lines."""


class PlatformChoice(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class TransportChoice(StrEnum):
    ucx = "ucx"
    nccl = "nccl"
    tcp = "tcp"


@app.callback(help="jaxpp_async: pipelines of JAX models over async actors.")
def top() -> None:
    """Offer the commands of jaxpp-async, which trains pipelined JAX models over async actors."""


@app.command()
def doctor(
    hosts: Annotated[Path | None, typer.Option(help="A hostfile: look at every host of it, too.")] = None,
    slurm: Annotated[
        bool, typer.Option(help="Look at the hosts of the Slurm allocation around this process.")
    ] = False,
    platform: Annotated[PlatformChoice, typer.Option(help="Of the actors.")] = PlatformChoice.cpu,
    transport: Annotated[
        TransportChoice, typer.Option(help="tcp: UCX over TCP alone.")
    ] = TransportChoice.ucx,
    actors: Annotated[
        int | None, typer.Option(min=1, help="How many; default: as there is room for.")
    ] = None,
    devices_per_actor: Annotated[int, typer.Option(min=1, help="The product of spmd_mesh's sizes.")] = 1,
    processes_per_actor: Annotated[
        int | None, typer.Option(min=1, help="Default: as few as hosts allow.")
    ] = None,
    ssh_options: Annotated[str, typer.Option(help="Words for ssh, such as '-o ProxyJump=gate'.")] = "",
    python: Annotated[
        str | None, typer.Option(help="The interpreter on the hosts; default: this one's path.")
    ] = None,
    interface: Annotated[str | None, typer.Option(help="Network device of the data plane.")] = None,
    ports: Annotated[str | None, typer.Option(help="Its TCP ports, such as 47000-47100.")] = None,
    devices: Annotated[
        str | None, typer.Option(help="CUDA_VISIBLE_DEVICES of a host's actors together.")
    ] = None,
    control_address: Annotated[
        str | None, typer.Option(help="Where this machine listens for actors.")
    ] = None,
    transfers: Annotated[bool, typer.Option(help="Measure latency and bandwidth between hosts.")] = True,
    as_json_: Annotated[
        bool, typer.Option("--json", help="Print JSON: findings, and all that was found.")
    ] = False,
    facts: Annotated[
        bool, typer.Option(help="Print the facts of this machine as JSON, and judge nothing.")
    ] = False,
) -> None:
    """Check whether a run would work on this machine or on the given hosts, and say what to do if it would
    not.

    The exit status is 0 if it would work, 1 if it would not, and 2 if the options are wrong.
    """
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
        work = _doctor(LaunchOptions(**options), asked, transfers)
        found = asyncio.run(work)
    except MeshError as error:
        said = f"doctor: {as_flags(str(error))}"
        Console(stderr=True).print(said, style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(WRONG_USE) from None
    findings = [replace(f, what=as_flags(f.what), remedy=as_flags(f.remedy)) for f in judge(found)]
    if as_json_:
        typer.echo(json.dumps(as_json(found, findings), indent=1))
    else:
        print_findings(found, findings, Console())
    raise typer.Exit(0 if would_work(findings) else 1)


async def _doctor(launching: LaunchOptions, asked: RequestedRun, measures: bool) -> Any:
    chosen, reach = choose_hosts(launching)
    plan = ExaminationPlan(asked, chosen, launching.settings(), launching.control_address, measures)
    console = Console(stderr=True)
    with console.status("looking") as status:  # shows nothing if stderr is not a terminal
        return await examine(plan, reach, status.update)
