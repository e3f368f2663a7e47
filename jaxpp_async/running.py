"""running: compiles steps, loads them on the actors and runs them. In: steps and arguments. Out: `StepFuture`s.

Decides which array goes where and what is freed when; where compiler and controller meet. Touches no device, no socket.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxpp_async import jax_compat, moves
from jaxpp_async.actors.controller import Controller
from jaxpp_async.actors.host_data import HostValue
from jaxpp_async.actors.messages import Loaded, StepStats
from jaxpp_async.actors.rpc import StepHandle
from jaxpp_async.arrays import DONATED, FAILED, RemoteArray, is_remote
from jaxpp_async.compiler.emit import Emitted, Target
from jaxpp_async.compiler.ir import Traced
from jaxpp_async.compiler.passes import StepRequest, compile_step
from jaxpp_async.errors import ArrayError, MeshError
from jaxpp_async.leaves import host_array
from jaxpp_async.printing import Printer
from jaxpp_async.program import ActorId, ActorProgram, runs
from jaxpp_async.recording import Recording
from jaxpp_async.step import CompiledStep, DistributedStep, Slot, StepOptions, hidden_values, slots
from jaxpp_async.timeline import Timeline
from jaxpp_async.values import RemoteValues

_LOG = logging.getLogger("jaxpp_async")


class StepFuture:
    """A step that has been admitted; from `mesh.submit`.

    Attributes:
        outputs: the step's result tree of `RemoteArray`s, valid at once: they may be passed to the next step.
        moves: arguments that lay elsewhere and were carried to where the step needs them.

    Awaiting it waits until every actor has finished the step, and raises its error.
    """

    def __init__(
        self,
        outputs: Any,
        recording: Recording,
        printing: asyncio.Task[None] | None = None,
        moved: tuple[moves.Moved, ...] = (),
    ):
        self.outputs, self.moves, self._recording, self._printing = outputs, moved, recording, printing
        self._handle = recording.handle

    def __await__(self) -> Generator[Any, None, Any]:
        yield from self._handle.__await__()
        if self._printing is not None:
            yield from asyncio.shield(self._printing).__await__()
        return self.outputs

    def done(self) -> bool:
        """Whether the step has finished and printed what it prints, or failed."""
        return self._handle.done and (self._printing is None or self._printing.done())

    @property
    def stats(self) -> list[StepStats]:
        """Where each actor's time went in this step, and what its buffers held.

        Raises:
            MeshError: it has not finished.
        """
        if not self._handle.done or self._handle.error is not None:
            raise MeshError("a step has stats once it has finished; await it first")
        return _by_actor(self._handle.result())

    def timeline(self) -> Timeline:
        """What each actor did in this step, instruction by instruction. See docs/timeline.md.

        Raises:
            MeshError: it has not finished, or failed.
        """
        return self._recording.timeline()

    async def wait_sent(self) -> None:
        """Wait until the step's host arguments have left: they may change again."""
        await self._handle.wait_sent()


@dataclass(frozen=True, slots=True)
class _Arguments:
    """What the actors of one step are told about its arguments.

    Args:
        array_ids: for each actor, the array of each argument.
        puts: host values that go to each actor with the step.
        frees_after: arrays of each actor that live for this step only.
    """

    array_ids: dict[ActorId, dict[int, int]]
    puts: dict[ActorId, list[HostValue]]
    frees_after: dict[ActorId, list[int]]


class StepRunner:
    """Compiles and runs the steps of one mesh; their `step.Runner`.

    Args:
        controller: gives the mesh's controller, or raises `MeshError` if the mesh has not started.
        values: the mesh's arrays.
        num_actors: how many there are.
        target: the devices of one actor.
        max_inflight: how many steps may be under way at once.

    Attributes:
        last_stats: of the last step that finished, by actor.
        last: the last step that finished.
    """

    def __init__(
        self,
        controller: Callable[[], Controller],
        values: RemoteValues,
        *,
        num_actors: int,
        target: Target,
        max_inflight: int,
    ):
        self._controller, self._values = controller, values
        self.num_actors, self.target = num_actors, target
        self.last_stats: list[StepStats] = []
        self.last: Recording | None = None
        self._admission = asyncio.Semaphore(max_inflight)
        self._compile_lock, self._start_lock = asyncio.Lock(), asyncio.Lock()
        self._move_programs: dict[moves.Move, int] = {}
        self._printer = Printer(values)

    async def run(self, step: DistributedStep, args: Sequence[Any]) -> Any:
        """See `RemoteMesh.run`."""
        return await (await self.submit(step, args))

    async def submit(self, step: DistributedStep, args: Sequence[Any]) -> StepFuture:
        """See `RemoteMesh.submit`."""
        compiled = await self.compile(step, args)
        future = await self._admit(step, compiled, step.leaves(args))
        # The step's host values may change again once they have left.
        await future.wait_sent()
        return future

    # ---------------------------------------------------------------- compiling

    async def compile(self, step: DistributedStep, args: Sequence[Any]) -> CompiledStep:
        """See `DistributedStep.compile`."""
        self._controller()
        signature = step.signature(args)
        if (found := step.find(signature)) is not None:
            return found
        async with self._compile_lock:
            if (found := step.find(signature)) is not None:  # another call compiled it meanwhile
                return found
            compiled = await self._load(step.request(args), step)
            step.keep(signature, compiled)
            return compiled

    async def init(self, step: DistributedStep, argnum: int, fn: Callable, args: Sequence[Any]) -> Any:
        """See `DistributedStep.init`: `fn` becomes a step whose results are placed as `step` takes them."""
        wanted = step.latest("step.init").argument_slots(argnum)
        name = getattr(fn, "__name__", "init")
        maker = DistributedStep(self, fn, StepOptions(None, None, (), ()))
        request = replace(
            maker.request(args),
            result_homes={k: frozenset(s.actors) for k, s in enumerate(wanted)},
            out_specs=lambda traced: _checked_out_specs(traced, wanted, name),
        )
        compiled = await self._load(request, maker)
        return await (await self._admit(maker, compiled, maker.leaves(args)))

    async def _load(self, request: StepRequest, step: DistributedStep) -> CompiledStep:
        start_s = time.perf_counter()
        compiled = compile_step(request)
        if compiled.placed.loops and (idle := _idle(compiled.programs)):
            _LOG.warning(
                "step %r leaves actors %s of %d idle: its schedule has fewer actors than the mesh; make more stages, "
                "or a mesh of as many actors as the schedule uses",
                step.__name__,
                idle,
                self.num_actors,
            )
        program_id, loaded = await self._load_programs(compiled.programs, compiled.executables)
        seconds = time.perf_counter() - start_s
        self._controller().telling.compiled(step.__name__, seconds, len(compiled.placed.graph.nodes))
        inputs, outputs = slots(compiled)
        return CompiledStep(
            compiled=compiled,
            program_id=program_id,
            inputs=inputs,
            outputs=outputs,
            donated=tuple(arg in request.donated for arg in compiled.traced.arg_of),
            compile_s={a: reply.compile_s for a, reply in loaded.items()},
            temp_bytes={a: reply.temp_bytes for a, reply in loaded.items()},
            hidden_values=hidden_values(compiled),
        )

    async def _load_programs(
        self, programs: Sequence[ActorProgram], executables: Sequence[Emitted]
    ) -> tuple[int, dict[ActorId, Loaded]]:
        controller = self._controller()
        program_id = controller.new_program_id()
        parts = {p.actor: p for p in programs if p.instructions}
        keys = {
            a: {r.executable: executables[r.executable].key for r in runs(p.instructions)} for a, p in parts.items()
        }
        blobs = {e.key: e.blob for e in executables}
        return program_id, await controller.load(program_id, parts, keys, blobs)

    # ---------------------------------------------------------------- arguments

    def _check_leaves(self, leaves: Sequence[Any], compiled: CompiledStep) -> None:
        donated: dict[int, str] = {}
        seen: dict[int, Slot] = {}
        for leaf, slot, gives in zip(leaves, compiled.inputs, compiled.donated, strict=False):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise ArrayError(f"{slot.name} is a ShapeDtypeStruct, which has no values; pass an array")
            if not is_remote(leaf):
                continue
            leaf.check_usable(slot.name, self._values)
            if id(leaf) in donated or (gives and sum(x is leaf for x in leaves) > 1):
                raise ArrayError(f"{slot.name} is donated and passed twice in one call; donate it once or pass a copy")
            if gives:
                donated[id(leaf)] = slot.name
            first = seen.setdefault(id(leaf), slot)
            if first.type.aval.spec != slot.type.aval.spec:
                raise ArrayError(
                    f"{first.name} and {slot.name} are one array, but their shardings differ ({first.type.aval.spec} "
                    f"and {slot.type.aval.spec}); pass a copy"
                )

    async def _place_hidden(self, compiled: CompiledStep) -> None:
        """Captured arrays and microbatch indices go to the actors once, before the first run."""
        if compiled.hidden or not compiled.hidden_values:
            return
        places = compiled.inputs[len(compiled.inputs) - len(compiled.hidden_values) :]
        arrays = [self._values.new_array(slot.type, slot.actors) for slot in places]
        hosts = [host_array(value) for value in compiled.hidden_values]
        await self._values.fill(list(zip(arrays, hosts, strict=True)))
        compiled.hidden.extend(arrays)

    async def _move_in(self, leaves: Sequence[Any], compiled: CompiledStep) -> tuple[moves.Moved, ...]:
        """Bring arrays that lie elsewhere to where the step needs them, actor to actor."""
        moved = []
        for leaf, slot in zip(leaves, compiled.inputs, strict=False):
            if not is_remote(leaf) or leaf.host is not None:
                continue
            missing = tuple(a for a in slot.actors if a not in leaf.actors)
            source = leaf.actors[0]
            if leaf.spec != slot.type.aval.spec:
                await self._reshard(leaf, slot)
                moved.append(moves.Moved(slot.name, leaf.nbytes, source, slot.actors, resharded=True))
            elif missing:
                await self._move(leaf, missing, slot)
                moved.append(moves.Moved(slot.name, leaf.nbytes, source, missing))
        return tuple(moved)

    async def _move(self, leaf: RemoteArray, to: tuple[ActorId, ...], slot: Slot) -> None:
        move = moves.Move(replace(leaf.value_type, weak=False), leaf.actors[0], to, leaf.spec)
        _LOG.info("moving %s (%d bytes) from actor %d to %s", slot.name, leaf.nbytes, leaf.actors[0], list(to))
        handle = await self._start_move(move, leaf, leaf.array_id, slot)
        # Before anything is awaited: a cancelled or deleted one must know its copies.
        leaf.relocate(tuple(sorted({*leaf.actors, *to})))
        await handle

    async def _reshard(self, leaf: RemoteArray, slot: Slot) -> None:
        """Give an array another sharding. The handle then stands for the new copies; the old ones are freed."""
        move = moves.Move(replace(leaf.value_type, weak=False), leaf.actors[0], slot.actors, slot.type.aval.spec)
        _LOG.info("resharding %s from %s to %s", slot.name, leaf.spec, slot.type.aval.spec)
        new_id = self._controller().new_array_id()
        handle = await self._start_move(move, leaf, new_id, slot)
        self._values.release(leaf)
        resharded = replace(leaf.value_type, aval=replace(leaf.value_type.aval, spec=slot.type.aval.spec))
        leaf.relocate(slot.actors, array_id=new_id, value_type=resharded)
        await handle

    async def _start_move(self, move: moves.Move, leaf: RemoteArray, result_id: int, slot: Slot) -> StepHandle:
        if move not in self._move_programs:
            program = moves.build(move, self.num_actors, self.target)
            self._move_programs[move], _ = await self._load_programs(program.programs, program.executables)
        leaf.check_usable(slot.name, self._values)  # the user may have deleted it meanwhile
        inputs = {move.source: {0: leaf.array_id}}
        outputs = {a: {0: result_id} for a in move.to}
        return self._controller().start_step(self._move_programs[move], inputs, outputs)

    # ---------------------------------------------------------------- running

    async def _admit(self, step: DistributedStep, compiled: CompiledStep, leaves: Sequence[Any]) -> StepFuture:
        """Wait for a place among the steps under way, bring the arguments where they belong, and start the step."""
        self._check_leaves(leaves, compiled)
        await self._admission.acquire()
        try:
            # One at a time: two steps that start together must not both move the same array.
            async with self._start_lock:
                self._check_leaves(leaves, compiled)  # another step may have been given them meanwhile
                await self._place_hidden(compiled)
                moved = await self._move_in(leaves, compiled)
                if moved:
                    _LOG.info(moves.summary(moved, step.__name__))
                self._check_leaves(leaves, compiled)  # the user may have deleted one meanwhile
                return self._start(step, compiled, leaves, moved)
        except BaseException:  # also a cancellation: the place goes to the next step
            self._admission.release()
            raise

    def _start(
        self, step: DistributedStep, compiled: CompiledStep, leaves: Sequence[Any], moved: tuple[moves.Moved, ...]
    ) -> StepFuture:
        """Send the step to its actors; from here on nothing is awaited until it has left."""
        arguments = self._bind(compiled, leaves)
        results = [self._values.new_array(slot.type, slot.actors) for slot in compiled.outputs]
        outputs: dict[ActorId, dict[int, int]] = {a: {} for a in range(self.num_actors)}
        for k, array in enumerate(results):
            for a in array.actors:
                outputs[a][k] = array.array_id
        handle = self._controller().start_step(
            compiled.program_id, arguments.array_ids, outputs, puts=arguments.puts, frees_after=arguments.frees_after
        )
        donated = self._retire_donated(step, compiled, leaves)
        recording = Recording(step.__name__, handle, compiled.compiled.programs, self._controller)
        handle.when_done(lambda: self._finished(recording, results, donated))
        traced = compiled.compiled.traced
        count = len(traced.out_names)
        printing = self._printer.start(traced, results[count:], handle) if traced.prints else None
        return StepFuture(jax.tree.unflatten(traced.out_tree, results[:count]), recording, printing, moved)

    def _bind(self, compiled: CompiledStep, leaves: Sequence[Any]) -> _Arguments:
        """Find an array for every argument; host values get one, and go with the step."""
        actors = range(self.num_actors)
        # One that lies here may be several arguments, on different actors.
        homes: dict[int, set[ActorId]] = {}
        for leaf, slot in zip(leaves, compiled.inputs, strict=False):
            if is_remote(leaf):
                homes.setdefault(leaf.array_id, set()).update(slot.actors)
        found = _Arguments({a: {} for a in actors}, {a: [] for a in actors}, {a: [] for a in actors})
        for arg, (leaf, slot) in enumerate(zip([*leaves, *compiled.hidden], compiled.inputs, strict=True)):
            donated = arg < len(compiled.donated) and compiled.donated[arg]
            home = homes[leaf.array_id] if arg < len(leaves) and is_remote(leaf) else slot.actors
            array_id = self._bind_one(leaf, slot, tuple(sorted(home)), donated, found)
            for a in slot.actors:
                found.array_ids[a][arg] = array_id
        return found

    def _bind_one(self, leaf: Any, slot: Slot, home: tuple[ActorId, ...], donated: bool, found: _Arguments) -> int:
        """The id under which the actors in `home` find an argument; host values are added to `found`."""
        if is_remote(leaf):
            array_id, host = leaf.array_id, leaf.host
            if host is None:
                return array_id
            leaf.relocate(home, value_type=replace(slot.type, weak=leaf.weak_type))
        else:
            array_id, host = self._controller().new_array_id(), host_array(leaf)
            if not donated:
                for a in home:
                    found.frees_after[a].append(array_id)
        for a in home:
            found.puts[a].append(HostValue(array_id, slot.type.aval, host))
        return array_id

    def _retire_donated(
        self, step: DistributedStep, compiled: CompiledStep, leaves: Sequence[Any]
    ) -> list[RemoteArray]:
        donated_arrays: list[RemoteArray] = []
        for leaf, slot, donated in zip(leaves, compiled.inputs, compiled.donated, strict=False):
            if not donated or not is_remote(leaf):
                continue
            leaf.retire(DONATED, f"it was donated to step {step.__name__!r}; use the step's result instead")
            donated_arrays.append(leaf)
            # The step frees it where it uses it; no program names the copies elsewhere.
            for a in leaf.actors:
                if a not in slot.actors:
                    self._controller().free(a, leaf.array_id)
        return donated_arrays

    def _finished(self, ran: Recording, results: Sequence[RemoteArray], donated: Sequence[RemoteArray]) -> None:
        handle = ran.handle
        self._admission.release()
        if handle.error is None:
            self.last_stats, self.last = _by_actor(handle.result()), ran
            return
        why = next(iter(str(handle.error).splitlines()), type(handle.error).__name__)
        for array in results:
            if not array.is_deleted():
                array.retire(FAILED, f"its step failed: {why}")
        for array in donated:
            array.retire(DONATED, f"it was donated to step {ran.name!r}, which failed: {why}")


def _idle(programs: Sequence[ActorProgram]) -> list[ActorId]:
    """Actors that run nothing."""
    return [p.actor for p in programs if not runs(p.instructions)]


def _by_actor(stats: Mapping[ActorId, StepStats]) -> list[StepStats]:
    return [stats[a] for a in sorted(stats)]


def _checked_out_specs(traced: Traced, wanted: Sequence[Slot], name: str) -> list:
    """The specs of `wanted`, if the traced function makes just that."""
    made = [_out_type(traced, ref) for ref in traced.flat.outputs[: len(traced.out_names)]]
    types = [(s.type.aval.shape, s.type.aval.dtype) for s in wanted]
    if made != types:
        differ = next((k for k, (a, b) in enumerate(zip(made, types, strict=False)) if a != b), None)
        what = (
            f"it makes {len(made)} leaves, the argument has {len(types)}"
            if differ is None
            else f"{traced.out_names[differ]} is {made[differ]}, but {wanted[differ].name} is {types[differ]}"
        )
        raise ArrayError(f"step.init: {name} does not make what the step takes: {what}")
    return [s.type.aval.spec for s in wanted]


def _out_type(traced: Traced, ref: Any) -> tuple:
    if isinstance(ref, int):
        aval = traced.types[ref].aval
        return aval.shape, aval.dtype
    return tuple(np.shape(ref.value)), str(jax_compat.canonical_dtype(np.asarray(ref.value).dtype))
