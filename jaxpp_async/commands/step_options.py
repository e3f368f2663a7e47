"""Define the options that `plan` and `simulate` share: a step, its call, and machines to run it on."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from jaxpp_async.commands.load_step import lookup, use_cpus
from jaxpp_async.commands.output import UseError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import ModuleType

    from jaxpp_async.planning.cost_model import CostModel
    from jaxpp_async.planning.machine import Machine

StepName = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:STEP",
        help="A module or a .py file, and the name of a step function in it.",
        show_default=False,
    ),
]
ArgumentsName = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="The step's arguments in MODULE: a tuple or a function that returns one."
    ),
]
Spmd = Annotated[
    list[str] | None,
    typer.Option(
        metavar="AXIS=SIZE,...",
        help="The devices of an actor, such as model=8 or data=2,model=4; default: one.",
    ),
]
AxisRules = Annotated[
    str | None,
    typer.Option(metavar="NAME=AXIS,...", help="Mesh axes of logical axis names, for jpp.shard."),
]
InShardings = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="The arguments' shardings in MODULE: a value or a function that returns it."
    ),
]
DeviceName = Annotated[
    str,
    typer.Option(
        metavar="DEVICE",
        help="The kind of device, such as h100-sxm, whose published figures count; a cpu has none, and "
        "needs --costs.",
    ),
]
Network = Annotated[
    str | None, typer.Option(metavar="LINK", help="The link between hosts, such as ethernet-100g.")
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="BYTES", help="The memory of each device, such as 70GB; default: all that it has."),
]
Efficiency = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE",
        help="The share of DEVICE's published rates that is reached, such as 0.6, or several: "
        "matmul=0.6,memory=0.8,links=0.8; default: 1. Not with --costs.",
    ),
]
DispatchUs = Annotated[
    float | None,
    typer.Option(
        metavar="US",
        min=0,
        help="Microseconds from when a task could begin until it begins; default: 0. Not with --costs.",
    ),
]
Costs = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Measured costs, from CostModel.save; they count instead of DEVICE's figures."
    ),
]
BatchArgnums = Annotated[
    str | None, typer.Option(metavar="N,...", help="Positions of the batches; default: the last argument.")
]
Donate = Annotated[
    str | None, typer.Option(metavar="N,...", help="Positions of donated arguments, as donate_argnums.")
]
Static = Annotated[
    str | None, typer.Option(metavar="N,...", help="Positions of static arguments, as static_argnums.")
]
Seed = Annotated[int, typer.Option(metavar="N", help="The seed of all that is random.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class CallOptions(NamedTuple):
    """The options of a step's call, as `RemoteMesh.distributed` names them.

    Attributes:
        donate_argnums: positions of the arguments whose memory the step may reuse.
        static_argnums: positions of the arguments that are part of the program.
        in_shardings: the shardings of the arguments; None if they are to be inferred.
    """

    donate_argnums: tuple[int, ...]
    static_argnums: tuple[int, ...]
    in_shardings: Any

    @classmethod
    def of(
        cls,
        module: ModuleType,
        num_arguments: int,
        *,
        donate: str | None,
        static: str | None,
        in_shardings: str | None,
    ) -> CallOptions:
        """Return the options of these texts; `in_shardings` is a name in the user's module.

        Raises:
            UseError: a text has a wrong form, a position is not that of an argument, or the module has no
                such name.
        """
        shardings = None if in_shardings is None else lookup(module, in_shardings, "shardings")
        shardings = shardings() if callable(shardings) else shardings
        donated = positions("--donate", donate, num_arguments) or ()
        return cls(donated, positions("--static", static, num_arguments) or (), shardings)


class MachineOptions(NamedTuple):
    """The options that describe machines and costs, as texts of the command line.

    Attributes:
        spmd: the shapes of an actor's devices to choose from; None or nothing for one device.
        device, network, axis_rules, memory: the options of these names.
        costs: the file of a cost model; None if the device's published figures count.
        efficiency, dispatch_us: the options of these names.
    """

    spmd: Sequence[str] | None
    device: str
    network: str | None
    axis_rules: str | None
    memory: str | None
    costs: Path | None
    efficiency: str | None = None
    dispatch_us: float | None = None

    def machines(self, actors: Iterable[int]) -> list[Machine]:
        """Return the machines to choose from: each number of actors with each shape of an actor's devices.

        Args:
            actors: the numbers of actors.

        Raises:
            UseError: an option is wrong.
        """
        from jaxpp_async.base.quantities import parse_bytes
        from jaxpp_async.errors import MeshError, PlanError, ShardingError
        from jaxpp_async.planning.devices import OWN_FIGURES
        from jaxpp_async.planning.machine import BETWEEN_HOSTS, Machine

        shapes = [_mesh_shape(text) for text in self.spmd or [""]]
        links = {} if self.network is None else {BETWEEN_HOSTS: self.network}
        rules = pairs("--axis-rules", self.axis_rules)
        try:
            limit = None if self.memory is None else parse_bytes(self.memory)
            if (
                self.memory is not None
                and limit is not None
                and limit < 10**6
                and self.memory.strip()[-1].isdigit()
            ):
                raise UseError(
                    f"--memory {self.memory} is {self.memory} bytes; did you mean {self.memory}GB? "
                    "Write the unit, also for less than 1MB"
                )
            return [
                Machine(count, shape, self.device, links=links, memory=limit, axis_rules=rules)
                for count, shape in product(actors, shapes)
            ]
        except (MeshError, PlanError, ShardingError) as error:
            raise UseError(str(error).partition(OWN_FIGURES)[0]) from None

    def published_costs(self, machine: Machine) -> CostModel:
        """Return the costs of a machine by published figures, with the efficiency that was given.

        Args:
            machine: a machine of `machines`.

        Raises:
            UseError: the efficiency is wrong.
        """
        from jaxpp_async.errors import CostError
        from jaxpp_async.planning.cost_model import CostModel

        shares = efficiencies(self.efficiency)
        try:
            return CostModel.for_machine(
                machine,
                matmul=shares.get("matmul", 1.0),
                memory=shares.get("memory", 1.0),
                links=shares.get("links", 1.0),
                dispatch_s=(self.dispatch_us or 0.0) / 1e6,
            )
        except CostError as error:
            raise UseError(f"--efficiency: {error}") from None

    def known_costs(self, machines: Sequence[Machine]) -> CostModel | None:
        """Return the costs of all machines; None if they are the published figures as they are.

        Args:
            machines: what `machines` returned.

        Raises:
            UseError: as for `load_costs` and `published_costs`, or shapes of several machines differ, whose
                links are not equally fast, and the costs are not published figures as they are.
        """
        known = self.load_costs()
        if known is not None or (self.efficiency is None and self.dispatch_us is None):
            return known
        if len({tuple(machine.spmd_mesh.items()) for machine in machines}) > 1:
            raise UseError(
                "--efficiency and --dispatch-us go with one --spmd; plan for each shape, and compare plans"
            )
        return self.published_costs(machines[0])

    def check_costs(self) -> None:
        """Check the file of costs, or that the device has published figures, before the user's module is
        imported, which may take long.

        Raises:
            UseError: as for `load_costs`.
            OSError: the file cannot be read.
        """
        if self.costs is not None:
            self.costs.stat()
        use_cpus()
        self.load_costs()

    def load_costs(self) -> CostModel | None:
        """Return the cost model of the file; None if there is no file, so that the device's figures count.

        Raises:
            UseError: the file is no cost model; or there is none, and the device has no published figures.
        """
        from jaxpp_async.errors import CostError
        from jaxpp_async.planning.cost_model import CostModel
        from jaxpp_async.planning.devices import DEVICES, missing_figures

        if self.costs is not None:
            if self.efficiency is not None or self.dispatch_us is not None:
                raise UseError("--efficiency and --dispatch-us are for published figures; leave out --costs")
            try:
                return CostModel.load(self.costs)
            except CostError as error:
                raise UseError(f"--costs: {error}") from None
        if self.device in DEVICES and missing_figures(DEVICES[self.device]) is not None:
            named = ", ".join(name for name, row in DEVICES.items() if missing_figures(row) is None)
            raise UseError(
                f"--device {self.device}: no rates of it are published, by which a task would have a time.\n"
                f"Write --device with one of {named}.\n"
                "Or write --costs costs.json, with the costs of steps that you have measured: collect "
                "`mesh.last_step_timeline()` after some steps, and save all but the first two by "
                "`jpp.CostModel.from_timelines(timelines[2:]).save('costs.json')` (docs/planning.md)"
            )
        return None


def numbers(option: str, text: str | None, *, least: int = 0) -> tuple[int, ...] | None:
    """Return the numbers of an option such as `4,8`; None if the option is not given.

    Args:
        option: the name of the option.
        text: its text.
        least: the least number that makes sense.

    Raises:
        UseError: the text is no list of such numbers.
    """
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) >= least for word in words):
        raise UseError(f"{option} {text!r}: write whole numbers of at least {least}, such as 4 or 4,8")
    return tuple(map(int, words))


def positions(option: str, text: str | None, num_arguments: int) -> tuple[int, ...] | None:
    """Return the positions of arguments of an option such as `0,2`; None if the option is not given.

    Args:
        option: the name of the option.
        text: its text.
        num_arguments: the number of arguments of a call.

    Raises:
        UseError: the text is no list of numbers, or there is no argument at a position.
    """
    found = numbers(option, text)
    for position in found or ():
        if position >= num_arguments:
            raise UseError(
                f"{option} {text}: the step is called with {num_arguments} arguments, counted from 0, and "
                f"none has position {position}"
            )
    return found


def efficiencies(text: str | None) -> dict[str, float]:
    """Return the shares of published rates of an option such as `0.6` or `matmul=0.6,links=0.8`.

    Args:
        text: the text of the option `--efficiency`; None for no shares.

    Raises:
        UseError: the text is neither a number nor a list of names and numbers.
    """
    names = ("matmul", "memory", "links")
    if text is None:
        return {}
    shares = pairs("--efficiency", text) if "=" in text else dict.fromkeys(names, text)
    try:
        found = {name: float(share) for name, share in shares.items()}
    except ValueError:
        found = {}
    if not found or not set(found) <= set(names):
        raise UseError(
            f"--efficiency {text!r}: write a share such as 0.6, or shares of {', '.join(names)}, such as "
            "matmul=0.6,links=0.8"
        )
    return found


def pairs(option: str, text: str | None) -> dict[str, str]:
    """Return the names and values of an option such as `data=2,model=4`.

    Args:
        option: the name of the option.
        text: its text; None for no pairs.

    Raises:
        UseError: the text is no list of pairs.
    """
    found = {}
    for word in text.split(",") if text else ():
        name, _, value = (part.strip() for part in word.partition("="))
        if not (name and value):
            raise UseError(
                f"{option} {text!r}: write NAME=VALUE, or several with commas, such as data=2,model=4"
            )
        found[name] = value
    return found


def _mesh_shape(text: str) -> dict[str, int]:
    shape = pairs("--spmd", text)
    if not all(size.isdecimal() and int(size) for size in shape.values()):
        raise UseError(f"--spmd {text!r}: write the number of devices of each axis, such as data=2,model=4")
    return {axis: int(size) for axis, size in shape.items()}
