"""mesh: `RemoteMesh`, where compiler and controller meet. In: the user's steps and values. Out: `RemoteArray`s.

Decides which arrays go where and which program runs; never touches a device, a socket or a jaxpr itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxpp_async import jax_compat, mesh_options, moves
from jaxpp_async import step as steps
from jaxpp_async.actors.controller import Controller
from jaxpp_async.actors.failure import ActorInfo
from jaxpp_async.actors.host_data import HostValue
from jaxpp_async.actors.messages import StepStats
from jaxpp_async.arrays import DONATED, FAILED, LIVE, RemoteArray, is_remote
from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.compiler.passes import Compiled, StepRequest
from jaxpp_async.errors import ArrayError, MeshError
from jaxpp_async.program import ActorId, Aval, runs
from jaxpp_async.step import CompiledStep, DistributedStep, Slot

_LOG = logging.getLogger("jaxpp_async")


class StepFuture:
    """A step that has been admitted; from `mesh.submit`.

    Attributes:
        outputs: the step's result tree of `RemoteArray`s, valid at once: they may be passed to the next step.

    Awaiting it waits until every actor has finished the step, and raises its error.
    """

    def __init__(self, outputs: Any, handle: Any):
        self.outputs, self._handle = outputs, handle

    def __await__(self) -> Generator[Any, None, Any]:
        yield from self._handle.__await__()
        return self.outputs

    def done(self) -> bool:
        """Whether the step has finished or failed."""
        return self._handle.done

    @property
    def stats(self) -> list[StepStats]:
        """Where each actor's time went in this step, and what its buffers held.

        Raises:
            MeshError: it has not finished.
        """
        future = self._handle.future
        if not future.done() or future.cancelled() or future.exception() is not None:
            raise MeshError("a step has stats once it has finished; await it first")
        return [stats for _, stats in sorted(future.result().items())]


class RemoteMesh:
    """A group of actors, each a group of devices that run one SPMD program; an async context manager that owns them.

    Args:
        num_actors: how many, an int or a tuple of one.
        spmd_mesh: shape of each actor: axis name to size, or sizes (axes `"data"`, `"model"`). Empty: one device.
        axis_types: `"auto"` (the default) or `"explicit"`, by axis name.
        axis_rules: logical axis name to mesh axis, for `shard` and shardings by name.
        launcher: `"local"` (a process an actor, the default), `"inline"` (actors inside this process), or a `Launcher`.
        transport: `"ucx"` (the default) or `"memory"` (inline only).
        platform: `"cpu"` (the default) or `"cuda"`.
        setup: `"module:function"` called in each actor before JAX starts.
        env: environment variables of the actors' processes.
        max_inflight: how many steps may be under way at once.
        compilation_cache: folder of JAX's persistent compilation cache, None for none; default: a folder of this host
            in the user's cache folder.
        launch_timeout_s: until every actor is ready.

    Raises:
        MeshError: options that contradict each other, or ask for what there is not.
        ShardingError: a rule that names an unknown axis.
    """

    def __init__(
        self,
        num_actors: int | tuple[int],
        *,
        spmd_mesh: Mapping[str, int] | tuple[int, ...] = {},
        axis_types: Mapping[str, str] | Sequence[str] = {},
        axis_rules: Mapping[str, Any] = {},
        hosts: Any = None,
        launcher: Any = None,
        transport: str | None = None,
        platform: str | None = None,
        setup: str | None = None,
        env: Mapping[str, str] = {},
        processes_per_actor: int | None = None,
        max_restarts: int = 0,
        max_inflight: int = 2,
        compilation_cache: str | None = mesh_options.DEFAULT_CACHE,
        launch_timeout_s: float = 120.0,
    ):
        mesh_options.refuse_unbuilt(hosts, processes_per_actor, max_restarts)
        self.num_actors = mesh_options.actor_count(num_actors)
        self.spmd_mesh = mesh_options.axes(spmd_mesh)
        self.axis_rules = mesh_options.checked_rules(axis_rules, self.spmd_mesh)
        self._axis_types = mesh_options.axis_types(axis_types, self.spmd_mesh)
        self._launcher, inline = mesh_options.make_launcher(launcher)
        self._transport = mesh_options.transport(transport, inline)
        self._config = mesh_options.actor_config(
            spmd_mesh=self.spmd_mesh,
            axis_types=self._axis_types,
            platform=mesh_options.platform(platform),
            setup=setup,
            env=env,
            cache_dir=mesh_options.cache_dir(compilation_cache),
            transport=self._transport,
            inline=inline,
        )
        if max_inflight < 1:
            raise MeshError(f"max_inflight is {max_inflight}; at least one step has to be under way")
        self._target = mesh_options.target(self.spmd_mesh, self._axis_types, self.axis_rules, self._config.platform)
        self._max_inflight, self._launch_timeout_s = max_inflight, launch_timeout_s
        self._controller: Controller | None = None
        self._admission = asyncio.Semaphore(max_inflight)
        self._compile_lock, self._start_lock = asyncio.Lock(), asyncio.Lock()
        self._move_programs: dict[moves.Move, int] = {}
        self._last_stats: dict[ActorId, StepStats] = {}

    # ---------------------------------------------------------------- life

    async def __aenter__(self) -> RemoteMesh:
        if self._controller is not None:
            raise MeshError("this mesh has been entered before; make a new RemoteMesh for another run")
        self._controller = await Controller.start(
            self.num_actors, self._launcher, self._config, launch_timeout_s=self._launch_timeout_s
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the actors. Arrays of the mesh cannot be used afterwards. A second call does nothing."""
        if self._controller is not None:
            await self._controller.aclose()

    @property
    def is_closed(self) -> bool:
        """Whether it has closed or failed: nothing can be run on it any more."""
        return self._controller is not None and self._controller.is_closed

    @property
    def actors(self) -> tuple[ActorInfo, ...]:
        """One entry an actor: `id host pid devices state`."""
        return tuple(self._running().actors)

    def _running(self) -> Controller:
        if self._controller is None:
            raise MeshError("this mesh has not started; use it inside `async with RemoteMesh(...) as mesh:`")
        return self._controller

    # ---------------------------------------------------------------- steps

    def distributed(
        self,
        fn: Callable,
        *,
        in_shardings: Any = None,
        out_shardings: Any = None,
        donate_argnums: int | Sequence[int] = (),
        static_argnums: int | Sequence[int] = (),
        name: str | None = None,
    ) -> DistributedStep:
        """A step for this mesh, traced and compiled at its first run for each set of shapes, dtypes and static values.

        Args:
            fn: an ordinary step function; with `accumulate_grads` in it, its loops are pipelined.
            in_shardings: over one actor's devices: a tree prefix of the arguments made of `PartitionSpec`s,
                `NamedSharding`s, tuples of logical names, and None (inferred).
            out_shardings: the same for the results.
            donate_argnums: arguments whose buffers the step may reuse; they cannot be used afterwards. A host value is
                never touched.
            static_argnums: hashable arguments that are part of the program.
        """
        if not callable(fn):
            raise TypeError(f"mesh.distributed takes a step function; got {fn!r}")
        step = DistributedStep(
            self,
            fn,
            steps._Options(
                in_shardings,
                out_shardings,
                _argnums("donate_argnums", donate_argnums),
                _argnums("static_argnums", static_argnums),
            ),
        )
        step.__name__ = name or step.__name__
        return step

    async def run(self, step: DistributedStep, *args: Any) -> Any:
        """Run one step; returns when every actor has finished it.

        A cancelled `run` leaves its step running; the mesh stays usable.

        Returns:
            `fn`'s result tree, of `RemoteArray`s.

        Raises:
            ActorError: an actor died or its code failed.
            ArrayError, and the errors of `step.compile`: before any actor runs.
        """
        return await (await self.submit(step, *args))

    async def submit(self, step: DistributedStep, *args: Any) -> StepFuture:
        """Start one step; returns once it is compiled and admitted (at most `max_inflight` are under way)."""
        self._check_step(step)
        compiled = await self._compile(step, args)
        leaves = step.leaves(args)
        future = await self._admit(step, compiled, leaves)
        # The step's host values may change again once they have left.
        await future._handle.wait_sent()
        return future

    def last_step_stats(self) -> list[StepStats]:
        """Where each actor's time went in the last finished step, and what its buffers held."""
        return [self._last_stats[a] for a in sorted(self._last_stats)]

    def _check_step(self, step: DistributedStep) -> None:
        self._running()
        if not isinstance(step, DistributedStep) or step.mesh is not self:
            what = "a step of another mesh" if isinstance(step, DistributedStep) else "no step of this mesh"
            raise MeshError(f"{step!r} is {what}; make one with `mesh.distributed(fn)`")

    # ---------------------------------------------------------------- compiling

    async def _compile(self, step: DistributedStep, args: Sequence[Any]) -> CompiledStep:
        self._running()
        signature = step.signature(args)
        found = step._compiled.get(signature)
        if found is None:
            async with self._compile_lock:
                found = step._compiled.get(signature)
                if found is None:
                    found = await self._load(step.request(args), step)
                    step._compiled[signature] = found
                    # From the second step on a state may have lost the weak types that it began with.
                    step._compiled[steps.settled_signature(signature, found.compiled.settled)] = found
        step._latest = found
        return found

    async def _load(self, request: StepRequest, step: DistributedStep) -> CompiledStep:
        compiled, seconds = steps.compile_request(request)
        _LOG.info("compiled %s in %.1f s: %d tasks", step.__name__, seconds, len(compiled.placed.graph.nodes))
        program_id, loaded = await self._load_programs(compiled.programs, compiled.executables)
        inputs, outputs = steps.slots(compiled)
        donated = tuple(arg in request.donated for arg in compiled.traced.arg_of)
        return CompiledStep(
            compiled=compiled,
            program_id=program_id,
            inputs=inputs,
            outputs=outputs,
            donated=donated,
            compile_s={a: reply.compile_s for a, reply in loaded.items()},
            temp_bytes={a: reply.temp_bytes for a, reply in loaded.items()},
            hidden_values=steps.hidden_values(compiled),
        )

    async def _load_programs(self, programs: Sequence[Any], executables: Sequence[Any]) -> tuple[int, dict]:
        controller = self._running()
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
        for leaf, slot, gives in zip(leaves, compiled.inputs, compiled.donated, strict=False):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise ArrayError(f"{slot.name} is a ShapeDtypeStruct, which has no values; pass an array")
            if not is_remote(leaf):
                continue
            leaf.check_usable(slot.name, self)
            if id(leaf) in donated or (gives and sum(x is leaf for x in leaves) > 1):
                raise ArrayError(f"{slot.name} is donated and passed twice in one call; donate it once or pass a copy")
            if gives:
                donated[id(leaf)] = slot.name

    async def _place_hidden(self, compiled: CompiledStep) -> None:
        """Captured arrays and microbatch indices go to the actors once, before the first run."""
        if compiled.hidden or not compiled.hidden_values:
            return
        slots = compiled.inputs[len(compiled.inputs) - len(compiled.hidden_values) :]
        arrays = [self._new_array(slot.type, slot.actors) for slot in slots]
        await self._put_arrays(
            [(array, _host_array(value)) for array, value in zip(arrays, compiled.hidden_values, strict=True)]
        )
        compiled.hidden.extend(arrays)

    async def _move_in(self, leaves: Sequence[Any], compiled: CompiledStep) -> None:
        """Bring arrays that lie elsewhere to where the step needs them, actor to actor."""
        for leaf, slot in zip(leaves, compiled.inputs, strict=False):
            if not is_remote(leaf) or leaf._host is not None:
                continue
            missing = tuple(a for a in slot.actors if a not in leaf.actors)
            if leaf.spec != slot.type.aval.spec:
                await self._reshard(leaf, slot)
            elif missing:
                await self._move(leaf, missing, slot)

    async def _move(self, leaf: RemoteArray, to: tuple[ActorId, ...], slot: Slot) -> None:
        move = moves.Move(replace(leaf._type, weak=False), leaf.actors[0], to, leaf.spec)
        _LOG.info("moving %s (%d bytes) from actor %d to %s", slot.name, leaf.nbytes, leaf.actors[0], list(to))
        await self._run_move(move, leaf, leaf._id)
        leaf._actors = tuple(sorted({*leaf.actors, *to}))

    async def _reshard(self, leaf: RemoteArray, slot: Slot) -> None:
        """Give an array another sharding. The handle then stands for the new copies; the old ones are freed."""
        move = moves.Move(replace(leaf._type, weak=False), leaf.actors[0], slot.actors, slot.type.aval.spec)
        _LOG.info("resharding %s from %s to %s", slot.name, leaf.spec, slot.type.aval.spec)
        new_id = self._running().new_array_id()
        await self._run_move(move, leaf, new_id)
        self.release(leaf)
        leaf._id, leaf._actors = new_id, slot.actors
        leaf._type = replace(leaf._type, aval=replace(leaf._type.aval, spec=slot.type.aval.spec))

    async def _run_move(self, move: moves.Move, leaf: RemoteArray, result_id: int) -> None:
        if move not in self._move_programs:
            program = moves.build(move, self.num_actors, self._target)
            self._move_programs[move], _ = await self._load_programs(program.programs, program.executables)
        inputs = {move.source: {0: leaf._id}}
        outputs = {a: {0: result_id} for a in move.to}
        await self._running().start_step(self._move_programs[move], inputs, outputs)

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
                await self._move_in(leaves, compiled)
                return self._start(step, compiled, leaves)
        except BaseException:
            self._admission.release()
            raise

    def _start(self, step: DistributedStep, compiled: CompiledStep, leaves: Sequence[Any]) -> StepFuture:
        """Send the step to its actors; from here on nothing is awaited until it has left."""
        inputs: dict[ActorId, dict[int, int]] = {a: {} for a in range(self.num_actors)}
        puts: dict[ActorId, list[HostValue]] = {a: [] for a in range(self.num_actors)}
        after: dict[ActorId, list[int]] = {a: [] for a in range(self.num_actors)}
        values = [*leaves, *compiled.hidden]
        for arg, (leaf, slot) in enumerate(zip(values, compiled.inputs, strict=True)):
            donated = arg < len(compiled.donated) and compiled.donated[arg]
            array_id = self._argument(leaf, slot, donated, puts, after)
            for a in slot.actors:
                inputs[a][arg] = array_id
        results = [self._new_array(slot.type, slot.actors) for slot in compiled.outputs]
        outputs: dict[ActorId, dict[int, int]] = {a: {} for a in range(self.num_actors)}
        for k, array in enumerate(results):
            for a in array.actors:
                outputs[a][k] = array._id
        handle = self._running().start_step(compiled.program_id, inputs, outputs, puts=puts, frees_after=after)
        self._retire_donated(step, compiled, leaves)
        handle.future.add_done_callback(lambda future: self._finished(future, results))
        return StepFuture(jax.tree.unflatten(compiled.compiled.traced.out_tree, results), handle)

    def _argument(
        self, leaf: Any, slot: Slot, donated: bool, puts: dict[ActorId, list], after: dict[ActorId, list]
    ) -> int:
        """The id under which an argument's actors find it; host values are added to `puts`."""
        if is_remote(leaf) and leaf._host is None:
            return leaf._id
        if is_remote(leaf):
            host, array_id = leaf._host, leaf._id
            leaf._host, leaf._actors, leaf._type = None, slot.actors, replace(slot.type, weak=leaf.weak_type)
        else:
            host, array_id = _host_array(leaf), self._running().new_array_id()
            if not donated:
                for a in slot.actors:
                    after[a].append(array_id)
        for a in slot.actors:
            puts[a].append(HostValue(array_id, slot.type.aval, host))
        return array_id

    def _retire_donated(self, step: DistributedStep, compiled: CompiledStep, leaves: Sequence[Any]) -> None:
        for leaf, slot, donated in zip(leaves, compiled.inputs, compiled.donated, strict=False):
            if not donated or not is_remote(leaf):
                continue
            elsewhere = tuple(a for a in leaf.actors if a not in slot.actors)
            leaf.retire(DONATED, f"it was donated to step {step.__name__!r}; use the step's result instead")
            for a in elsewhere:
                self._running().free(a, leaf._id)

    def _finished(self, future: asyncio.Future, results: Sequence[RemoteArray]) -> None:
        self._admission.release()
        error = None if future.cancelled() else future.exception()
        if future.cancelled() or error is not None:
            why = f"its step failed: {error or 'cancelled'}"
            for array in results:
                if array._state == LIVE:
                    array.retire(FAILED, why)
        else:
            self._last_stats = future.result()

    # ---------------------------------------------------------------- values

    def _new_array(self, value_type: ValueType, actors: Iterable[ActorId]) -> RemoteArray:
        return RemoteArray(self, self._running().new_array_id(), value_type, tuple(actors))

    async def _put_arrays(self, pairs: Sequence[tuple[RemoteArray, np.ndarray]]) -> None:
        by_actor: dict[ActorId, list[HostValue]] = {}
        for array, value in pairs:
            for a in array.actors:
                by_actor.setdefault(a, []).append(HostValue(array._id, array._type.aval, value))
        await self._running().put(by_actor)

    async def put(self, tree: Any, like: Any = None) -> Any:
        """Host values to actors.

        Args:
            tree: arrays, scalars, keys.
            like: `(step, argnum)`: where that step (compiled before) keeps that argument; or a tree of `RemoteArray`s
                of the same structure. None: they stay here until their first use.

        Returns:
            The tree, of `RemoteArray`s.
        """
        self._running()
        leaves, treedef = jax.tree.flatten(tree)
        types = [steps.struct_type(x) for x in leaves]
        hosts = [_host_array(x).copy() for x in leaves]
        if like is None:
            arrays = [
                RemoteArray(self, self._running().new_array_id(), t, (), host=h)
                for t, h in zip(types, hosts, strict=True)
            ]
            return jax.tree.unflatten(treedef, arrays)
        places = self._places(like, len(leaves))
        arrays = []
        for leaf_type, (spec, actors, name) in zip(types, places, strict=True):
            arrays.append(self._new_array(replace(leaf_type, aval=replace(leaf_type.aval, spec=spec)), actors))
            self._check_divides(arrays[-1]._type.aval, name)
        await self._put_arrays(list(zip(arrays, hosts, strict=True)))
        return jax.tree.unflatten(treedef, arrays)

    def _places(self, like: Any, count: int) -> list[tuple[tuple, tuple[ActorId, ...], str]]:
        """Spec, actors and name for each leaf."""
        if isinstance(like, tuple) and len(like) == 2 and isinstance(like[0], DistributedStep):
            slots = like[0].latest("mesh.put(like=(step, argnum))").argument_slots(like[1])
            places = [(s.type.aval.spec, s.actors, s.name) for s in slots]
        else:
            arrays = jax.tree.leaves(like)
            if not all(is_remote(a) for a in arrays):
                raise ArrayError("mesh.put: like is neither (step, argnum) nor a tree of RemoteArrays")
            places = [(a.spec, a.actors, repr(a)) for a in arrays]
        if len(places) != count:
            raise ArrayError(f"mesh.put: the values have {count} leaves, like has {len(places)}")
        return places

    def _check_divides(self, aval: Aval, name: str) -> None:
        for n, entry in zip(aval.shape, aval.spec, strict=False):
            for axis in (entry,) if isinstance(entry, str) else entry or ():
                if n % self.spmd_mesh[axis]:
                    raise ArrayError(f"{name}: shape {aval.shape} is not divisible by axis {axis!r}")

    async def fetch(self, tree: Any) -> Any:
        """`RemoteArray`s to numpy (PRNG keys to JAX key arrays). Other leaves stay as they are."""
        leaves, treedef = jax.tree.flatten(tree)
        remote: list[int] = []
        values: list[Any] = list(leaves)
        for k, leaf in enumerate(leaves):
            if not is_remote(leaf):
                continue
            leaf.check_usable(f"array {k} of the tree" if len(leaves) > 1 else "the array", self)
            if leaf._host is not None:
                values[k] = _as_user_sees(leaf._host, leaf._type)
            else:
                remote.append(k)
        if remote:
            wanted = [(leaves[k].actors[0], leaves[k]._id, leaves[k]._type.aval) for k in remote]
            for k, array in zip(remote, await self._running().fetch(wanted), strict=True):
                values[k] = _as_user_sees(array, leaves[k]._type)
        return jax.tree.unflatten(treedef, values)

    def release(self, array: RemoteArray) -> None:
        """See `arrays.Owner`; called from any thread."""
        if self._controller is not None:
            for actor in array._actors:
                self._controller.free(actor, array._id)

    def sharding_of(self, aval: Aval) -> jax.sharding.NamedSharding:
        """The sharding of `aval` over one actor's devices."""
        return mesh_options.named_sharding(self._target, self.spmd_mesh, aval)

    # ---------------------------------------------------------------- init

    async def _init(self, step: DistributedStep, argnum: int, fn: Callable, args: Sequence[Any]) -> Any:
        slots = step.latest("step.init").argument_slots(argnum)
        names = getattr(fn, "__name__", "init")
        maker = DistributedStep(self, fn, steps._Options(None, None, (), ()))
        request = maker.request(args)
        request = replace(
            request,
            result_homes={k: frozenset(s.actors) for k, s in enumerate(slots)},
            out_specs=lambda traced: _checked_out_specs(traced, slots, names),
        )
        compiled = await self._load(request, maker)
        return await (await self._admit(maker, compiled, maker.leaves(args)))


def _checked_out_specs(traced: Any, slots: Sequence[Slot], name: str) -> list:
    made = [_out_type(traced, ref) for ref in traced.flat.outputs]
    wanted = [(s.type.aval.shape, s.type.aval.dtype) for s in slots]
    if made != wanted:
        differ = next((k for k, (a, b) in enumerate(zip(made, wanted, strict=False)) if a != b), None)
        what = (
            f"it makes {len(made)} leaves, the argument has {len(wanted)}"
            if differ is None
            else f"{traced.out_names[differ]} is {made[differ]}, but {slots[differ].name} is {wanted[differ]}"
        )
        raise ArrayError(f"step.init: {name} does not make what the step takes: {what}")
    return [s.type.aval.spec for s in slots]


def _out_type(traced: Any, ref: Any) -> tuple:
    if isinstance(ref, int):
        aval = traced.types[ref].aval
        return aval.shape, aval.dtype
    return tuple(np.shape(ref.value)), str(np.asarray(ref.value).dtype)


def _argnums(name: str, value: int | Sequence[int]) -> tuple[int, ...]:
    found = (value,) if isinstance(value, int) else tuple(value)
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in found):
        raise ValueError(f"{name} is {value!r}; give positions of arguments, counted from 0")
    return found


def _host_array(leaf: Any) -> np.ndarray:
    """A host value as it travels: C order, JAX's dtype, keys as their data."""
    if isinstance(leaf, RemoteArray):
        assert leaf._host is not None
        return leaf._host
    if isinstance(leaf, jax.Array):
        return np.asarray(jax.random.key_data(leaf) if jax_compat.is_key_dtype(leaf.dtype) else leaf)
    struct = steps._shape_struct(leaf)
    return np.ascontiguousarray(np.asarray(leaf, dtype=struct.dtype)).reshape(struct.shape)


def _as_user_sees(array: np.ndarray, value_type: ValueType) -> Any:
    if value_type.key_impl is None:
        return array
    return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=value_type.key_impl)


__all__ = ["Compiled", "RemoteMesh", "StepFuture"]
