"""Run compiled steps: admit each in its turn, bring its arguments to the actors, and send it.

`StepRunner` decides which arrays are moved before a step, and when arrays are freed. Its `MeshStepCompiler`
decides which form of a step a call uses.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpp_async.base.printable import first_line, listed
from jaxpp_async.compiler.export import Target
from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.submitted_step import SubmittedStep, UnfinishedSteps
from jaxpp_async.errors import ArrayError
from jaxpp_async.program.instructions import ActorId
from jaxpp_async.protocol.messages import RunKind
from jaxpp_async.session import move_programs, report
from jaxpp_async.session.argument_binding import Slot, host_array
from jaxpp_async.session.array_moves import Mover
from jaxpp_async.session.host_transfers import RemoteValues
from jaxpp_async.session.leaf_division import join_moves
from jaxpp_async.session.progress import MeshProgress
from jaxpp_async.session.redivider import Redivider
from jaxpp_async.session.remote_array import DELETED, RemoteArray, is_remote
from jaxpp_async.session.step import CompiledStep, DistributedStep
from jaxpp_async.session.step_compiler import MeshStepCompiler
from jaxpp_async.session.step_future import Printer, StepArrays, StepFuture
from jaxpp_async.session.step_init import init_request

_LOG = logging.getLogger("jaxpp_async")

_STEPS_KEPT = 8
"""The number of finished steps whose timelines can still be read."""


class StepRunner:
    """The part of a mesh that runs its steps.

    A runner owns a semaphore and a lock. The semaphore admits as many steps as may be under way. The start
    lock is taken inside it, for one admitted step at a time, from the look at where its arguments lie until
    the step is sent; `Mover` and `Redivider` are called under it alone. A step is compiled before it takes
    either of them, under the lock of `MeshStepCompiler`.

    Args:
        controller: a function that returns the mesh's controller, or raises `MeshError` if the mesh has not
            started.
        values: the part of the mesh that creates, fills, fetches and frees arrays.
        compiler: the part of the mesh that compiles steps.
        num_actors: number of actors.
        target: the devices of one actor.
        max_inflight: the number of steps that may be under way at the same time.
        progress: tells the user of the first step of each compiled form; None to tell nothing.
        on_step_end: called with each step that has ended without an error, and its compiled form.

    Attributes:
        values, compiler, num_actors, target: as given.
        recent: the last steps that finished, all of one program, the latest one at the end.
    """

    def __init__(
        self,
        controller: Callable[[], Controller],
        values: RemoteValues,
        compiler: MeshStepCompiler,
        *,
        num_actors: int,
        target: Target,
        max_inflight: int,
        progress: MeshProgress | None = None,
        on_step_end: Callable[[SubmittedStep, CompiledStep], None] = lambda step, compiled: None,
    ):
        self._progress = progress or MeshProgress("silent")
        self._on_step_end = on_step_end
        self._controller, self.values, self.compiler = controller, values, compiler
        self.num_actors, self.target = num_actors, target
        self.recent: deque[SubmittedStep] = deque(maxlen=_STEPS_KEPT)
        self._admission, self._start_lock = asyncio.Semaphore(max_inflight), asyncio.Lock()
        self._mover = Mover(controller, values, num_actors, target)
        self._redivider = Redivider(controller, values, num_actors, target)
        self._printer = Printer(values)
        self._begun: weakref.WeakSet[CompiledStep] = weakref.WeakSet()  # whose first step has begun
        self._called: weakref.WeakSet[CompiledStep] = weakref.WeakSet()  # that have been called
        self._warned: weakref.WeakSet[CompiledStep] = weakref.WeakSet()  # their large moves are logged
        self._unfinished_steps = UnfinishedSteps(
            lambda ahead, waiting: controller().mesh_events.waiting(waiting.name, ahead.id)
        )

    @property
    def last(self) -> SubmittedStep | None:
        """The last step that finished; None if no step has finished yet."""
        return self.recent[-1] if self.recent else None

    async def run(self, step: DistributedStep, args: Sequence[Any]) -> Any:
        """Run a step, and return its results when every actor has finished it; see `RemoteMesh.run`."""
        future = await self._begin(step, args)
        try:
            await future.wait_sent()
            return await future
        except BaseException as error:  # also of a closed coroutine: in any case nobody gets the results
            self._abandon(future, "run", error)
            raise

    async def submit(self, step: DistributedStep, args: Sequence[Any]) -> StepFuture:
        """Start a step, and return its future once its host values are sent; see `RemoteMesh.submit`."""
        future = await self._begin(step, args)
        try:
            await future.wait_sent()  # the step's host values may change again once they have left
        except BaseException as error:  # as in `run`
            self._abandon(future, "submit", error)
            raise
        return future

    async def init(self, step: DistributedStep, argnum: int, fn: Callable, args: Sequence[Any]) -> Any:
        """Make argument `argnum` of `step` on the actors by running `fn(*args)`; see `DistributedStep.init`.

        The function `fn` is compiled and run like another step. Its results are made on the actors on which
        `step` uses them.
        """
        maker, request = init_request(step, argnum, fn, args)
        leaves = jax.tree.leaves(tuple(args))
        compiled = await self.compiler.load(request, maker)
        future = await self._admit(maker, compiled, leaves, "init")
        try:
            return await future
        except BaseException as error:  # as in `run`
            self._abandon(future, "step.init", error)
            raise

    def _abandon(self, future: StepFuture, call: str, error: BaseException) -> None:
        """Record that a step runs on although its caller has ended with an error and gets no results.

        The step's donated arguments then refer to their new values, and the log says so.

        Args:
            future: the step's future.
            call: the user's call that ended, such as `"run"`, for the log.
            error: the error with which the call ended, most often a cancellation.
        """
        if future._step.error is not None:  # the caller gets this error
            return
        if (became := future._arrays.abandon()) is not None:
            what, why = future._step.title, type(error).__name__
            _LOG.warning("%s runs on, though its `%s` ended by %s: %s", what, call, why, became)
        self._unfinished_steps.mark_abandoned(future._step)

    async def _begin(self, step: DistributedStep, args: Sequence[Any]) -> StepFuture:
        """Compile a step if that is needed, wait for its turn, start it, and return its future."""
        # From here on only the leaves found now count: while this waits, its caller may change the trees.
        leaves, found = step.recall(args)
        if isinstance(found, CompiledStep):
            compiled = found if found.auto is None else await self.compiler.choose_form(step, found, args)
        else:
            compiled = await self.compiler.compile(step, args)
            if found is not None:
                step.remember(found, compiled)
            if compiled not in self._begun:
                return await self._begin_first(step, compiled, leaves)
        return await self._admit(step, compiled, leaves)

    async def _begin_first(
        self, step: DistributedStep, compiled: CompiledStep, leaves: Sequence[Any]
    ) -> StepFuture:
        """Start the first step of a compiled form, and tell the user of it until it ends."""
        self._begun.add(compiled)
        phase = self._progress.begin(f"first step of {step.__name__}")
        try:
            future = await self._admit(step, compiled, leaves)
        except BaseException:  # also a cancellation: the phase has ended
            self._progress.end(phase, is_done=False)
            raise
        submitted = future._step
        submitted.when_done(lambda: self._progress.end(phase, is_done=submitted.error is None))
        return future

    # ---------------------------------------------------------------- arguments

    def _check_leaves(self, leaves: Sequence[Any], compiled: CompiledStep) -> None:
        self._controller().check_usable()  # why arrays are lost is the mesh's failure, not theirs
        seen: dict[int, Slot] = {}
        positions = compiled.compiled.traced.argument_positions
        for k, leaf, slot in zip(positions, leaves, compiled.arguments, strict=True):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise ArrayError(f"{slot.name} is a ShapeDtypeStruct, which has no values; pass an array")
            if not is_remote(leaf):
                continue
            leaf.check_usable(slot.name, self.values)
            if k in compiled.donated and sum(x is leaf for x in leaves) > 1:
                raise ArrayError(
                    f"{slot.name} is donated and passed twice in one call; donate it once or pass a copy"
                )
            _check_alike(seen.setdefault(id(leaf), slot), slot)

    async def _place_hidden(self, compiled: CompiledStep) -> None:
        """Before a step's first run, send its captured arrays and microbatch indices to the actors."""
        if compiled.hidden or not compiled.hidden_values:
            return
        places = compiled.inputs[len(compiled.inputs) - len(compiled.hidden_values) :]
        arrays = [self.values.new_array(slot.type, slot.actors) for slot in places]
        await self.values.fill(list(zip(arrays, map(host_array, compiled.hidden_values), strict=True)))
        compiled.hidden.extend(arrays)

    # ---------------------------------------------------------------- running

    async def _admit(
        self, step: DistributedStep, compiled: CompiledStep, leaves: Sequence[Any], kind: RunKind = "step"
    ) -> StepFuture:
        """Wait until the step is admitted, move its arguments to the actors that use them, and start it.

        A step is admitted when fewer than `max_inflight` steps are under way.

        Returns:
            The future of the step.
        """
        binding = compiled.binding
        if (self._admission.locked() or self._start_lock.locked()) and (
            (inputs := compiled.divide(leaves)) is None or binding.ids(self.values, inputs) is None
        ):
            # errors in the arguments are raised immediately, not after the steps under way
            self._check_leaves(leaves, compiled)
        submitted = SubmittedStep(
            compiled.program_id,
            step.__name__,
            kind,
            compiled.compiled.count_works,
            compiled.compiled.find_cut,
            compiled.compiled.cut_choice,
        )
        self._unfinished_steps.add(submitted)
        try:
            await self._admission.acquire()
            submitted.when_done(self._admission.release)
            # One at a time: two steps that start together must not both move the same array.
            async with self._start_lock:
                moved: tuple[move_programs.Moved, ...] = ()
                copies: dict[int, RemoteArray] = {}
                inputs = compiled.divide(leaves)
                ids = None if inputs is None else binding.ids(self.values, inputs)
                is_placed = len(compiled.hidden) == len(compiled.hidden_values)
                if inputs is None or ids is None or not is_placed or _to_copy(compiled, inputs):
                    moved, inputs = await self._prepare_arguments(step, compiled, leaves)
                    copies = await self._copies(compiled, inputs, _to_copy(compiled, inputs))
                    self._check_leaves(leaves, compiled)  # the user may have deleted one meanwhile
                    ids = binding.ids(self.values, inputs)
                return self._start(submitted, compiled, inputs, ids, moved, copies)
        except BaseException:  # also a cancellation: the next step is admitted instead
            submitted.withdraw()
            raise

    async def _prepare_arguments(
        self, step: DistributedStep, compiled: CompiledStep, leaves: Sequence[Any]
    ) -> tuple[tuple[move_programs.Moved, ...], Sequence[Any]]:
        """Check a step's arguments, and divide arrays and move them to the actors that use them.

        Before the first run, also send hidden arguments (captured arrays, microbatch indices).

        Returns:
            The arguments that were moved, resharded or divided; and the arguments as the step's programs take
            them, see `CompiledStep.divide`.
        """
        self._check_leaves(leaves, compiled)
        await self._place_hidden(compiled)
        divided = await self._redivider.divide(leaves, compiled.arguments, step.__name__)
        self._check_leaves(leaves, compiled)  # the user may have deleted one meanwhile
        inputs = compiled.divide(leaves)
        assert inputs is not None
        brought = await self._mover.bring(inputs, compiled.inputs, step.__name__)
        named = join_moves((*divided, *brought), compiled.arguments)
        moved = tuple(named)
        if moved:
            _LOG.info(move_programs.summary(moved, step.__name__))
        # The state of a planned step moves once, in the first call.
        is_first = step.plan is not None and compiled not in self._called
        self._called.add(compiled)
        is_new = compiled not in self._warned and compiled.plan is None and not is_first
        if is_new and move_programs.carried_bytes(moved) > move_programs.WARN_BYTES:
            self._warned.add(compiled)
            firsts = {one.name: first for one, first in named.items()}

            def why(name: str) -> str:
                return report.why_taken(compiled.compiled, firsts[name])

            _LOG.warning(move_programs.warning(moved, step.__name__, why))
        return moved, inputs

    async def _copies(
        self, compiled: CompiledStep, leaves: Sequence[Any], results: Sequence[int]
    ) -> dict[int, RemoteArray]:
        """Copy the arguments that a step returns unchanged and that its caller keeps.

        Each such result needs buffers of its own, because the caller may free the argument and the result
        separately.

        Args:
            compiled: the step's compiled form.
            leaves: the argument leaves of the call, as the step's programs take them.
            results: positions of the results that are such arguments; see `_to_copy`.

        Returns:
            A dictionary. Its keys are the positions in `results`; its values are the handles of the copies.
        """
        if not results:
            return {}
        kept = [compiled.handed_back[result] for result in results]
        of_actors = [(compiled.inputs[arg].name, p) for arg in kept for p in leaves[arg].pieces if p.actors]
        copies = iter(await self._mover.copy(of_actors))
        return {
            result: leaves[arg].with_pieces(
                [
                    next(copies) if piece.actors else self.values.new_host_array(piece.value_type, piece.host)
                    for piece in leaves[arg].pieces
                ]
            )
            for result, arg in zip(results, kept, strict=True)
        }

    def _start(
        self,
        step: SubmittedStep,
        compiled: CompiledStep,
        leaves: Sequence[Any],
        ids: list[int] | None,
        moved: tuple[move_programs.Moved, ...],
        copies: dict[int, RemoteArray],
    ) -> StepFuture:
        """Bind the arguments, send the step to its actors without awaiting anything, and return its future.

        Args:
            step: the step, whose turn has come.
            compiled: its compiled form for this call.
            leaves: the argument leaves of the call, as the step's programs take them.
            ids: the return value of `Binding.ids`; if it is None, the leaves need `bind_with_care`.
            moved: the arguments that were moved before the step; the future lists them.
            copies: copies of arguments that the step returns unchanged, by position of the result.
        """
        controller, binding = self._controller(), compiled.binding
        new_id, hidden = controller.new_array_id, compiled.hidden
        if ids is not None:
            arguments = binding.bind(leaves, ids, hidden, new_id)
        else:
            arguments = binding.bind_with_care(leaves, hidden, new_id)
        results = self.values.new_arrays(compiled.outputs)
        taken_over: list[RemoteArray] = []
        for result, arg in compiled.handed_back.items():
            if result in copies:
                results[result] = copies[result]
            elif is_remote(leaf := leaves[arg]) and leaf.host is None:
                same = [
                    RemoteArray(self.values, p.array_id, p.value_type, p.actors, host=p.host)
                    for p in leaf.pieces
                ]
                results[result] = leaf.with_pieces(same)
                taken_over.append(results[result])
            else:
                results[result] = self.values.new_host_array(*binding.returned_host_value(arg, leaf))
        traced = compiled.compiled.traced
        count = len(traced.out_names)
        try:
            of_user = (
                results[:count] if compiled.division is None else compiled.division.join(self.values, results)
            )
            outputs = jax.tree.unflatten(traced.out_tree, of_user)  # may run code of the user's
            controller.start_step(
                step,
                arguments.array_ids,
                binding.results(results),
                puts=arguments.puts,
                frees_before=_unused_donations(compiled, leaves),
                frees_after=arguments.frees_after,
            )
        except BaseException:  # also an interrupt: whatever ended it, the step was not sent
            for array in taken_over:  # the argument's handle keeps the buffers
                array.retire(DELETED, "its step was not sent")
            raise
        arguments.mark_sent()
        arrays = StepArrays(step.name, compiled, leaves, results)
        step.when_done(lambda: self._note_end(step, compiled, arrays))
        printing = self._printer.start(traced, results[count:], step) if traced.prints else None
        return StepFuture(outputs, step, arrays, printing, moved)

    def _note_end(self, step: SubmittedStep, compiled: CompiledStep, arrays: StepArrays) -> None:
        if step.error is None:
            if compiled.auto is not None:
                compiled.auto.note_end(step)
            if self.recent and self.recent[-1].program_id != step.program_id:
                self.recent.clear()  # they keep the arrays of another compiled step
            self.recent.append(step)
            self._on_step_end(step, compiled)
        else:
            arrays.fail(first_line(step.error))


def _unused_donations(compiled: CompiledStep, leaves: Sequence[Any]) -> dict[ActorId, list[int]]:
    """Return, for each actor, the ids of donated arrays that the actor holds but does not use in the step.

    The step's programs do not free these buffers, so the controller has to.

    Returns:
        A dictionary. Its keys are actors; its values are lists of array ids.
    """
    found: dict[ActorId, list[int]] = {}
    back = compiled.handed_back.values()
    for k in compiled.donated:
        leaf, taken = leaves[k], compiled.inputs[k].actors
        if is_remote(leaf) and leaf.actors != taken and (taken or k not in back):
            for piece in leaf.pieces:
                for actor in set(piece.actors).difference(taken):
                    found.setdefault(actor, []).append(piece.array_id)
    return found


def _check_alike(first: Slot, slot: Slot) -> None:
    """Check that one array can be two arguments of a call.

    Args:
        first, slot: the slots of both arguments.

    Raises:
        ArrayError: the step takes the array in two shardings, or divided in two ways.
    """
    if any(s.any_sharding and not s.actors for s in (first, slot)):
        return
    if first.parts != slot.parts:
        raise ArrayError(
            f"{first.name} and {slot.name} are one array, but the step divides its layers between actors "
            f"differently ({_parts_text(first)} and {_parts_text(slot)}); pass a copy"
        )
    for one, other in zip(first.pieces, slot.pieces, strict=True):
        if one.type.aval.spec != other.type.aval.spec and not (one.any_sharding or other.any_sharding):
            raise ArrayError(
                f"{one.name} and {other.name} are one array, but their shardings differ "
                f"({one.type.aval.spec} and {other.type.aval.spec}); pass a copy"
            )


def _parts_text(slot: Slot) -> str:
    return "not at all" if slot.parts is None else listed(slot.parts.names(""), 4)


def _to_copy(compiled: CompiledStep, leaves: Sequence[Any]) -> list[int]:
    """Return the positions of the results that have to be copies of arguments.

    Such a result is an argument on actors that the step returns without using it. If the argument is not
    donated, the caller keeps the argument, so the result has to be a copy.
    """
    return [
        result
        for result, arg in compiled.handed_back.items()
        if arg not in compiled.donated and is_remote(leaf := leaves[arg]) and leaf.host is None
    ]
