"""Compile a step for a machine that need not exist, without a process, a device or memory of its own.

A `Machine` says how many actors there are, which devices each has, and how they are joined. `compile_for`
makes the same programs as `step.compile` on a mesh of that shape. By default nothing is lowered to StableHLO,
since no decision and no prediction depends on it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import jax

from jaxpp_async.base.quantities import parse_bytes
from jaxpp_async.compiler.export import Target
from jaxpp_async.compiler.ir import Loop
from jaxpp_async.compiler.pass_cache import PassCache
from jaxpp_async.compiler.pipeline import StepRequest, compile_step, plan, trace_step
from jaxpp_async.compiler.work import CountedWorks
from jaxpp_async.errors import MeshError, PlanError
from jaxpp_async.jax_bridge import tracebacks
from jaxpp_async.jax_bridge.tracebacks import HiddenFrames
from jaxpp_async.planning.devices import (
    BETWEEN_DEVICES,
    BETWEEN_HOSTS,
    SAME_HOST,
    Device,
    Link,
    find_device,
    find_link,
)
from jaxpp_async.program.work import TaskWork
from jaxpp_async.session import mesh_options
from jaxpp_async.session.argument_binding import shape_struct
from jaxpp_async.session.step import StepForm
from jaxpp_async.session.step_request import StepDefinition, make_options
from jaxpp_async.view import Drawing

_LINKS = f"{{{BETWEEN_HOSTS!r}: 'ethernet-100g'}}"
"""An example of the links of a machine, for error messages."""


@dataclass(frozen=True)
class Machine:
    """A machine that need not exist.

    Args:
        actors: the number of actors.
        spmd_mesh: the shape of each actor's device mesh, as for `RemoteMesh`; empty for one device.
        device: the kind of device: the name of a row in the table of `planning.devices`, or a `Device`.
        links: the links, by their kind: `"devices"` between the devices of one actor, `"same host"` between
            actors in one group of devices, `"between hosts"` between other actors. Each is the name of a row
            in the table, or a `Link`. By default the first two are the device's own link, and there is none
            between hosts.
        memory: the memory that each device has for arrays, in bytes or as text such as `"70GB"`, and then the
            number of bytes; None for all that the device has.
        axis_types: the types of mesh axes, as for `RemoteMesh`.
        axis_rules: the mesh axes of logical axis names, as for `RemoteMesh`.

    Raises:
        MeshError: an option is invalid, or the table has no such device or link.
        ShardingError: an axis rule names an axis that `spmd_mesh` does not have.
    """

    actors: int
    spmd_mesh: Any = field(default_factory=dict)
    device: str | Device = "cpu"
    links: Mapping[str, str | Link] = field(default_factory=dict)
    memory: Any = None
    axis_types: Any = field(default_factory=dict)
    axis_rules: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        axes = mesh_options.check_axes(self.spmd_mesh)
        device = find_device(self.device)
        if not isinstance(self.links, Mapping):
            raise MeshError(f"links is {self.links!r:.60}; write a dictionary such as {_LINKS}")
        given = {kind: find_link(link) for kind, link in self.links.items()}
        if unknown := given.keys() - {BETWEEN_DEVICES, SAME_HOST, BETWEEN_HOSTS}:
            raise MeshError(
                f"links has {', '.join(sorted(map(repr, unknown)))}; its keys are {BETWEEN_DEVICES!r}, "
                f"{SAME_HOST!r} and {BETWEEN_HOSTS!r}"
            )
        own = (
            {} if device.link is None else dict.fromkeys((BETWEEN_DEVICES, SAME_HOST), find_link(device.link))
        )
        try:
            memory = device.memory_bytes if self.memory is None else parse_bytes(self.memory)
        except PlanError as error:
            raise MeshError(str(error)) from None
        checked = {
            "actors": mesh_options.check_actor_count(self.actors),
            "spmd_mesh": MappingProxyType(axes),
            "device": device,
            "links": MappingProxyType({**own, **given}),
            "memory": memory,
            "axis_types": mesh_options.check_axis_types(self.axis_types, axes),
            "axis_rules": MappingProxyType(mesh_options.check_axis_rules(self.axis_rules, axes)),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def num_actors(self) -> int:
        return self.actors

    @property
    def target(self) -> Target:
        """The devices of one actor, for which the compiler works."""
        platform = find_device(self.device).platform
        return mesh_options.make_target(self.spmd_mesh, self.axis_types, self.axis_rules, platform)

    @property
    def devices_per_actor(self) -> int:
        return math.prod(self.spmd_mesh.values())


@dataclass(frozen=True, eq=False, repr=False)
class PlannedStep(StepForm):
    """A step that was compiled for a machine that need not exist.

    Attributes:
        machine: the machine.
        name: the name of the step function.
        known_works: the work of tasks that was counted earlier, by the keys of their recipes.
    """

    machine: Machine
    name: str
    known_works: dict[Hashable, TaskWork] = field(default_factory=dict)

    def to_drawing(self, **options: Any) -> Drawing:
        """Return a drawing of the step, with the memory of an actor's devices as the cap unless one is given.

        Args:
            options: those of `session.drawing.draw_step`.
        """
        if self.machine.memory is not None:
            options = {"cap": float(self.machine.memory * self.machine.devices_per_actor), **options}
        return super().to_drawing(**options)

    @property
    def works(self) -> tuple[TaskWork, ...]:
        """The work of each executable, for each device of an actor; counted when first read."""
        return self._works

    @functools.cached_property
    def _works(self) -> tuple[TaskWork, ...]:
        done = self.compiled
        return CountedWorks(
            done.placed.recipes, done.placed.types, done.specs, done.target, self.known_works
        )()


def compile_for(
    machine: Machine,
    train_step: Callable,
    args: Sequence[Any],
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    schedule: Any = None,
    lower: bool = False,
) -> PlannedStep:
    """Compile a step for a machine, and start nothing.

    The programs are those that `step.compile` makes on a mesh of this shape.

    Args:
        machine: the machine.
        train_step: the step function.
        args: the arguments of a call; each array may be a `jax.ShapeDtypeStruct` instead.
        in_shardings, out_shardings, donate_argnums, static_argnums: as for `RemoteMesh.distributed`.
        schedule: the schedule to use in place of those in the function; None keeps them.
        lower: whether to lower the executables to StableHLO as well, which takes most of the time. This finds
            operations that cannot be lowered for the device's platform.

    Returns:
        The compiled step, with its programs, the text of each pass, and the work of each task.

    Raises:
        UnsupportedError: the step function cannot be pipelined.
        StageError: a stage needs a later stage's value, or a loop has no usable microbatch axis.
        ScheduleError: the schedule is invalid for this step.
        ShardingError: a sharding is invalid for this machine or for the array.
    """
    with HiddenFrames():
        compiler = StepCompiler(
            train_step,
            "compile_for",
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
        )
        return compiler.compile(machine, args, schedule, lower=lower)


class StepCompiler:
    """Compiles one step for several machines, arguments and schedules, and does once what they share.

    Args:
        train_step: the step function.
        caller: the function that the user called, for error messages.
        on_pass: a function that is called with the name of each pass of the compiler behind it. An exception
            that it raises ends the compilation.
        in_shardings, out_shardings, donate_argnums, static_argnums: as for `compile_for`.
    """

    def __init__(
        self,
        train_step: Callable,
        caller: str,
        on_pass: Callable[[str], None] = lambda _: None,
        *,
        in_shardings: Any = None,
        out_shardings: Any = None,
        donate_argnums: int | Sequence[int] = (),
        static_argnums: int | Sequence[int] = (),
    ) -> None:
        self._fn, self._on_pass = train_step, on_pass
        self._options = make_options(
            train_step,
            caller=caller,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
        )
        self.name = getattr(train_step, "__name__", "step")
        self._shared, self._line = PassCache(), tracebacks.caller_line()

    def compile(
        self, machine: Machine, args: Sequence[Any], schedule: Any = None, *, lower: bool = False
    ) -> PlannedStep:
        """Compile the step; the arguments are those of `compile_for`."""
        request = self._request(machine, args, schedule)
        compiled = compile_step(request, self._on_pass) if lower else plan(request, self._on_pass)
        return PlannedStep(compiled, {}, {}, machine, self.name, self._shared.works)

    def loops(self, machine: Machine, args: Sequence[Any]) -> list[Loop]:
        """Return the microbatch loops of the traced step, with all their marks."""
        traced, _ = trace_step(self._request(machine, args, None))
        return [item for item in traced.flat.ops if isinstance(item, Loop)]

    def _request(self, machine: Machine, args: Sequence[Any], schedule: Any) -> StepRequest:
        options = replace(self._options, schedule=schedule)
        step = StepDefinition(machine, self._fn, options, line=self._line)
        step.signature(args)  # names the argument with which JAX cannot compute
        return replace(step.request(args), shared=self._shared)


def argument_types(args: Sequence[Any], static_argnums: Sequence[int]) -> list[Any]:
    """Return a call's arguments with a `jax.ShapeDtypeStruct` in each leaf; static ones are as they are.

    Args:
        args: the arguments.
        static_argnums: the positions of the static arguments.
    """
    return [arg if n in static_argnums else jax.tree.map(shape_struct, arg) for n, arg in enumerate(args)]
