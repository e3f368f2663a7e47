"""Compile JaxPP's rows with this project's compiler, and simulate them.

Compiling does not depend on the constants, so that a step is compiled once and simulated with several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpp_async.compiler.pipeline import CompilePlan
from jaxpp_async.planning.machine import Machine, compile_for
from jaxpp_async.planning.memory import RECEIVE_BUFFERS, SENDS, device_aval, memory_needs
from jaxpp_async.planning.simulation import Simulation, simulate
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import BufferId, Delete, Run, buffers_made
from jaxpp_async.program.work import TaskWork
from jaxpp_async.schedules import Interleaved1F1B
from paper.costs import Constants, cost_model, machine_of
from paper.models import MODELS, ModelShape, stage_layers, training_step
from paper.rows import GPUS_PER_NODE, JAXPP, Row


@dataclass(frozen=True)
class Configuration:
    """A way to train a model in an interleaved pipeline.

    Args:
        model: the name of the model.
        actors: the number of actors. Each has one node for each replica.
        repeat: the number of stages of each actor.
        microbatches: the number of microbatches of each replica.
        microbatch: the number of sequences in a microbatch.
        replicas: the number of replicas.
    """

    model: str
    actors: int
    repeat: int
    microbatches: int
    microbatch: int
    replicas: int = 1

    @property
    def machine(self) -> Machine:
        return machine_of(self.actors, self.replicas)

    @property
    def nodes(self) -> int:
        return self.actors * self.replicas


def configuration_of(row: Row) -> Configuration:
    """Return the configuration of one of JaxPP's rows."""
    assert row.system == JAXPP and row.tensor == GPUS_PER_NODE and row.repeat is not None
    return Configuration(row.model, row.pipeline, row.repeat, row.microbatches, row.microbatch, row.data)


@dataclass(frozen=True)
class CompiledPrograms:
    """What a simulation needs of a compiled step. In contrast to the step it can go to another process.

    Attributes:
        configuration: the configuration that was compiled.
        programs: the program of each actor.
        works: the work of each executable.
        memory_bytes: the most bytes that a device of any actor needs.
    """

    configuration: Configuration
    programs: tuple[ActorProgram, ...]
    works: tuple[TaskWork, ...]
    memory_bytes: float

    @property
    def compiled(self) -> Any:
        """The programs, as `simulate` looks for them."""
        return self

    @property
    def cut(self) -> None:
        """No cut: the constants say how long the layers take, and no measured stage corrects them."""

    cut_choice = ""
    """Nobody chose a cut that advice could speak of."""

    def find_cut(self) -> None:
        """Return no cut."""


def compile_configuration(
    configuration: Configuration, models: Mapping[str, ModelShape] = MODELS
) -> CompiledPrograms:
    """Trace, cut, schedule and lower a configuration to programs, with abstract arguments.

    Args:
        configuration: the configuration.
        models: the shapes of the models, by name.
    """
    c, shape = configuration, models[configuration.model]
    layers = stage_layers(shape.num_layers, c.actors, c.repeat)
    schedule = Interleaved1F1B(c.actors * c.repeat)
    step = training_step(shape, layers, schedule, c.microbatches, c.microbatch, c.replicas)
    planned = compile_for(c.machine, step.fn, step.args, in_shardings=step.in_shardings, donate_argnums=0)
    compiled: CompilePlan = planned.compiled
    extra = [
        needs.row(SENDS).size_bytes + needs.row(RECEIVE_BUFFERS).size_bytes
        for needs in memory_needs(planned, c.machine)
    ]
    held = [held_bytes(program, c.machine.spmd_mesh) for program in compiled.programs]
    most = max(map(sum, zip(held, extra, strict=True)))
    temporaries = temporary_bytes(shape, c.microbatch, GPUS_PER_NODE)
    return CompiledPrograms(c, tuple(compiled.programs), planned.works, most + temporaries)


def held_bytes(program: ActorProgram, axes: Mapping[str, int]) -> int:
    """Return the most bytes of arrays that a device holds at one time, arguments included.

    Results of an executable take the memory of its donated arguments first.

    Args:
        program: the program of the device's actor.
        axes: the devices of the actor along each mesh axis.
    """
    sizes = [device_aval(aval, axes).size_bytes for aval in program.avals]
    held: set[BufferId] = set()
    now = most = 0
    for instruction in program.instructions:
        freed: set[BufferId] = set()
        if isinstance(instruction, Run):
            freed = {instruction.inputs[k] for k in instruction.donated} & held
        elif isinstance(instruction, Delete):
            freed = {instruction.buffer} & held
        made = set(buffers_made(instruction)) - held
        held = (held - freed) | made
        now += sum(sizes[b] for b in made) - sum(sizes[b] for b in freed)
        most = max(most, now)
    return most


def temporary_bytes(shape: ModelShape, microbatch: int, devices: int) -> float:
    """Return the bytes that the largest task needs for temporaries on each device, with fused attention.

    That is either the backward of a feed-forward block (its input and the gradient of its output, both
    gathered, and the gradients before and after its nonlinearity, bfloat16), or that of the output projection
    (its input, gathered, and logits and their gradient in float32).

    Args:
        shape: the sizes of the model.
        microbatch: the number of sequences in a microbatch.
        devices: the number of devices that share each layer.
    """
    tokens = microbatch * shape.seq_len
    inner = (3 if shape.gated else 2) * shape.hidden / devices
    block = 2 * tokens * (2 * shape.dim + inner)
    head = tokens * (2 * shape.dim + 2 * 4 * shape.vocab / devices)
    return max(block, head)


def simulate_configuration(step: CompiledPrograms, constants: Constants) -> Simulation:
    """Simulate a compiled configuration, without stragglers.

    Args:
        step: the compiled configuration.
        constants: the constants of the prediction.
    """
    return simulate(step, cost_model(constants, step, step.configuration.machine), draws=1)


def step_s(step: CompiledPrograms, constants: Constants) -> float:
    """Return the predicted seconds of a step of a configuration."""
    seconds = simulate_configuration(step, constants).step_s.p50
    return seconds * constants.straggling_factor(step.configuration.nodes)
