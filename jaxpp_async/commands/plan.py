"""The command `plan`: choose the cut, the schedule and the order of a user's step for machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from jaxpp_async.commands import step_options as options
from jaxpp_async.commands.load_step import EXAMPLE_ARGUMENTS, load_step
from jaxpp_async.commands.output import errors_printed, progress, result_stream, terminal_width, wrap


def plan(
    step: options.StepName,
    actors: Annotated[str, typer.Option(metavar="N,...", help="Numbers of actors to choose from.")],
    spmd: options.Spmd = None,
    device: options.DeviceName = "cpu",
    memory: options.Memory = None,
    microbatches: Annotated[
        str | None,
        typer.Option(
            metavar="N,...", help="Numbers of microbatches to choose from; default: the arguments'."
        ),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(metavar="N", help="The examples of a step; shows which arguments are batches."),
    ] = None,
    batch_argnums: options.BatchArgnums = None,
    num_stages: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The number of stages; default: any.")
    ] = None,
    arguments: options.ArgumentsName = EXAMPLE_ARGUMENTS,
    in_shardings: options.InShardings = None,
    axis_rules: options.AxisRules = None,
    donate: options.Donate = None,
    static: options.Static = None,
    network: options.Network = None,
    costs: options.Costs = None,
    efficiency: options.Efficiency = None,
    dispatch_us: options.DispatchUs = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="How many orders the search looks at; default: as many as suit."
        ),
    ] = None,
    seed: options.Seed = 0,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan as JSON, for Plan.load.")
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the order as torch.distributed.pipelining's CSV."),
    ] = None,
    shows_all: Annotated[
        bool, typer.Option("--all", help="Print every candidate and every assumption.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Choose a step's cut, schedule, microbatches and order.

    The plan is the shortest step that fits into the memory. Nothing is started, and no device is needed. STEP
    has a `pipeline_yield` behind each layer at which it may be cut. Of several --actors, --spmd and
    --microbatches the best are chosen. The exit status is 0, or 1 if there is no plan, or 2 if an option, the
    module or a file is wrong.

    \b
    train.py is your script, such as examples/plan_gpt.py (see docs/planning.md).
    Say in it with which arguments the step is called; shapes are enough:
      def example_arguments():
          batch = jax.ShapeDtypeStruct((32, 4, 128), "int32")
          return jax.eval_shape(init, jax.random.key(0)), batch

    \b
    Examples:
      jaxpp-async plan train.py:train_step --actors 8 --device h100-sxm --memory 70GB
      jaxpp-async plan train:train_step --actors 4,8 --spmd model=8 --spmd model=4 \\
          --device h100-sxm --microbatches 32,64 --donate 0 --save plan.json
    """
    width = terminal_width()
    with errors_printed("plan") as interrupt, result_stream() as result:
        counts = options.numbers("--actors", actors, least=1) or ()
        choice = options.numbers("--microbatches", microbatches, least=1)
        where = options.MachineOptions(
            spmd, device, network, axis_rules, memory, costs, efficiency, dispatch_us
        )
        where.check_costs()
        with progress(f"importing {step.rpartition(':')[0]}", interrupt.check) as report:
            loaded = load_step(step, arguments)
            report("preparing")
            import msgspec

            from jaxpp_async.planning.planner import plan as make_plan

            call = options.CallOptions.of(
                loaded.module,
                len(loaded.args),
                donate=donate,
                static=static,
                in_shardings=in_shardings,
            )
            positions = options.positions("--batch-argnums", batch_argnums, len(loaded.args))
            machines = where.machines(counts)
            known = where.known_costs(machines)
            made = make_plan(
                loaded.fn,
                loaded.args,
                machine=machines,
                global_batch=global_batch,
                costs=known,
                microbatches=choice,
                batch_argnums=positions,
                num_stages=num_stages,
                iterations=iterations,
                seed=seed,
                on_progress=report,
                **call._asdict(),
            )
        # printed before files are written, which may not be possible after the long planning
        typer.echo(
            json.dumps(msgspec.to_builtins(made), indent=1)
            if as_json
            else wrap(made.as_text(width, shows_all=shows_all, all_shown_by="--all shows all"), width),
            file=result,
        )
        if save is not None:
            made.save(save)
        if csv is not None:
            made.to_csv(csv)
