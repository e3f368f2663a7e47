"""Compile a step for a machine that need not exist, without a process, a device or memory of its own.

A `Machine` says how many actors there are, which devices each has, and how they are joined. `compile_for`
makes the same programs as `step.compile` on a mesh of that shape. By default nothing is lowered to StableHLO,
since no decision and no prediction depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax

from jaxpp_async.compiler.export import Target
from jaxpp_async.compiler.pipeline import compile_step, plan
from jaxpp_async.errors import MeshError
from jaxpp_async.jax_bridge import tracebacks
from jaxpp_async.jax_bridge.tracebacks import HiddenFrames
from jaxpp_async.planning.devices import Device, Link, find_device, find_link
from jaxpp_async.session import mesh_options
from jaxpp_async.session.argument_binding import shape_struct
from jaxpp_async.session.step import StepForm
from jaxpp_async.session.step_request import StepDefinition, make_options

BETWEEN_DEVICES, SAME_HOST, BETWEEN_HOSTS = "devices", "same host", "between hosts"
"""The kinds of links of a machine: between the devices of one actor, between actors whose devices the vendor
joins by a fast link, such as those of one host, and between any others."""


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
        memory: the bytes of memory that each device has for arrays; None for all that the device has.
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
    memory: int | None = None
    axis_types: Any = field(default_factory=dict)
    axis_rules: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        axes = mesh_options.check_axes(self.spmd_mesh)
        device = find_device(self.device)
        given = {kind: find_link(link) for kind, link in self.links.items()}
        if unknown := given.keys() - {BETWEEN_DEVICES, SAME_HOST, BETWEEN_HOSTS}:
            raise MeshError(
                f"links has {', '.join(map(repr, sorted(unknown)))}; its keys are {BETWEEN_DEVICES!r}, "
                f"{SAME_HOST!r} and {BETWEEN_HOSTS!r}"
            )
        own = (
            {} if device.link is None else dict.fromkeys((BETWEEN_DEVICES, SAME_HOST), find_link(device.link))
        )
        memory = device.memory_bytes if self.memory is None else self.memory
        checked = {
            "actors": mesh_options.check_actor_count(self.actors),
            "spmd_mesh": MappingProxyType(axes),
            "device": device,
            "links": MappingProxyType({**own, **given}),
            "memory": None if memory is None else mesh_options.check_count("memory", memory, least=1),
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
    """

    machine: Machine
    name: str


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
        options = make_options(
            train_step,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
            caller="compile_for",
            schedule=schedule,
        )
        step = StepDefinition(machine, train_step, options, line=tracebacks.caller_line())
        step.signature(args)  # names the argument with which JAX cannot compute
        request = step.request(args)
        compiled = compile_step(request) if lower else plan(request)
        return PlannedStep(compiled, {}, {}, machine, step.__name__)


def argument_types(args: Sequence[Any], static_argnums: Sequence[int]) -> list[Any]:
    """Return a call's arguments with a `jax.ShapeDtypeStruct` in each leaf; static ones are as they are.

    Args:
        args: the arguments.
        static_argnums: the positions of the static arguments.
    """
    return [arg if n in static_argnums else jax.tree.map(shape_struct, arg) for n, arg in enumerate(args)]
