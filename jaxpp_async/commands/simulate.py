"""The command `simulate`: predict the time and the memory of a user's step on a machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table

from jaxpp_async.commands import step_options as options
from jaxpp_async.commands.load_step import EXAMPLE_ARGUMENTS, load_step, use_cpus
from jaxpp_async.commands.output import (
    FAILED,
    UseError,
    errors_printed,
    progress,
    result_stream,
    terminal_width,
    wrap,
)
from jaxpp_async.commands.schedule_text import parse_schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxpp_async.planning.memory import ActorMemory
    from jaxpp_async.planning.plan import Plan
    from jaxpp_async.planning.simulation import Simulation


def simulate(
    step: options.StepName,
    actors: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The number of actors; default: the plan's.")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Such as 'Std1F1B(4, stages=\"balanced\")'; default: the step's own."
        ),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A saved plan: its schedule, actors and microbatches.")
    ] = None,
    spmd: options.Spmd = None,
    device: options.DeviceName = "cpu",
    memory: options.Memory = None,
    microbatches: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="The number of microbatches; default: the plan's or arguments'."
        ),
    ] = None,
    batch_argnums: options.BatchArgnums = None,
    arguments: options.ArgumentsName = EXAMPLE_ARGUMENTS,
    in_shardings: options.InShardings = None,
    axis_rules: options.AxisRules = None,
    donate: options.Donate = None,
    static: options.Static = None,
    network: options.Network = None,
    costs: options.Costs = None,
    efficiency: options.Efficiency = None,
    dispatch_us: options.DispatchUs = None,
    draws: Annotated[int, typer.Option(metavar="N", min=1, help="How many steps to simulate.")] = 15,
    seed: options.Seed = 0,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the median step's timeline, for Perfetto.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Predict a step's time and memory on a machine.

    Nothing is started, and no device is needed. The exit status is 0 if the step fits into the memory, or 1
    if it does not or cannot be simulated, or 2 if an option, the module or a file is wrong.

    \b
    train.py is your script, such as examples/plan_gpt.py (see docs/planning.md).
    Say in it with which arguments the step is called; shapes are enough:
      def example_arguments():
          batch = jax.ShapeDtypeStruct((32, 4, 128), "int32")
          return jax.eval_shape(init, jax.random.key(0)), batch

    \b
    Examples:
      jaxpp-async simulate train.py:train_step --actors 4 --device h100-sxm
      jaxpp-async simulate train.py:train_step --actors 4 --costs costs.json \\
          --schedule 'ZeroBubbleH1(4, stages="balanced")' --trace step.json
      jaxpp-async simulate train.py:train_step --plan plan.json --device h100-sxm
    """
    width = terminal_width()
    with errors_printed("simulate") as interrupt, result_stream() as result:
        if schedule is not None and plan is not None:
            raise UseError("give --schedule or --plan, not both")
        if actors is None and plan is None:
            raise UseError("give --actors N, or a saved plan: --plan FILE")
        if spmd is not None and len(spmd) > 1:
            raise UseError("give --spmd once; it may have several axes, such as data=2,model=4")
        where = options.MachineOptions(
            spmd, device, network, axis_rules, memory, costs, efficiency, dispatch_us
        )
        use_cpus()
        planned = None if plan is None else _load_plan(plan)
        chosen = None if schedule is None else parse_schedule(schedule)
        where.check_costs()
        with progress(f"importing {step.rpartition(':')[0]}", interrupt.check) as report:
            loaded = load_step(step, arguments)
            report("preparing")
            from jaxpp_async.planning.layers import resized
            from jaxpp_async.planning.machine import argument_types, compile_for
            from jaxpp_async.planning.memory import memory_needs
            from jaxpp_async.planning.simulation import simulate as simulate_step

            call = options.CallOptions.of(
                loaded.module,
                len(loaded.args),
                donate=donate,
                static=static,
                in_shardings=in_shardings,
            )
            positions = options.positions("--batch-argnums", batch_argnums, len(loaded.args))
            if planned is not None:
                chosen, actors = planned.schedule, actors or planned.num_actors
                microbatches = microbatches or planned.num_microbatches
                shape = ",".join(f"{axis}={size}" for axis, size in planned.spmd_mesh.items())
                where = where._replace(spmd=spmd or [shape])
            (machine,), known = where.machines([actors or 1]), where.load_costs()
            types = argument_types(loaded.args, call.static_argnums)
            if microbatches is not None:
                dynamic = [n for n in range(len(types)) if n not in call.static_argnums]
                types = resized(types, dynamic[-1:] if positions is None else positions, microbatches)
            if planned is not None:
                planned.check_mesh(getattr(loaded.fn, "__name__", "step"), machine.actors, machine.spmd_mesh)
                planned.check_arguments(types)
            report("compiling")
            compiled = compile_for(machine, loaded.fn, types, schedule=chosen, **call._asdict())
            report("simulating")
            simulation = simulate_step(
                compiled, known or where.published_costs(machine), seed=seed, draws=draws
            )
            needs = memory_needs(compiled, machine)
        if as_json:
            typer.echo(json.dumps(_as_json(simulation, needs), indent=1), file=result)
        else:
            summary = wrap(simulation.summary("--json has the causes"), width)
            typer.echo(f"{summary}\n\n{_memory_text(needs, width)}", file=result)
            if simulation.assumed:
                typer.echo(wrap("\n".join(simulation.assumed_lines()), width), file=result)
        if trace is not None:
            simulation.timeline.write(trace)
        if any(each.fits is False for each in needs):
            raise typer.Exit(FAILED)


def _load_plan(path: Path) -> Plan:
    """Return a saved plan.

    Raises:
        UseError: the file is no plan.
    """
    from jaxpp_async.errors import PlanError
    from jaxpp_async.planning.plan import Plan

    try:
        return Plan.load(path)
    except PlanError as error:
        raise UseError(f"--plan: {error}") from None


def _memory_text(needs: Sequence[ActorMemory], width: int) -> str:
    """Return the memory that each device needs, one line an actor, and a table of what takes the most of it.

    Args:
        needs: the memory that each actor's devices need.
        width: the number of characters of a line.
    """
    from jaxpp_async.view.table import table_as_text

    lines = ["memory of each device, at most:"]
    for each in needs:
        limit = "" if each.limit_bytes is None else f" of {decimal(each.limit_bytes)}"
        verdict = ", which does not fit" if each.fits is False else ""
        lines.append(f"  actor {each.actor}: {decimal(each.total_bytes)}{limit}{verdict}")
    fullest = max(needs, key=lambda each: each.total_bytes)
    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    table.add_column()
    for row in fullest.rows:
        table.add_row(row.what, decimal(row.size_bytes), row.source, row.note)
    return "\n".join(
        [*lines, "", f"memory of actor {fullest.actor}, the fullest:", table_as_text(table, width)]
    )


def _as_json(simulation: Simulation, needs: Sequence[ActorMemory]) -> dict[str, Any]:
    """Return a simulation, and the bytes that each device needs, as plain data."""
    bill = simulation.timeline.bill
    return {
        "step_s": simulation.step_s._asdict(),
        "bill": {**asdict(bill), "efficiency": bill.efficiency},
        "actors": [
            {
                **asdict(shares),
                "peak_bytes": peak,
                "memory_bytes": need.total_bytes,
                "limit_bytes": need.limit_bytes,
                "memory": [asdict(row) for row in need.rows],
            }
            for shares, peak, need in zip(
                simulation.timeline.shares, simulation.peak_bytes, needs, strict=True
            )
        ],
        "assumed": list(simulation.assumed),
    }
