"""Run a planned step in this process, operation by operation: no actors, nothing exported, little compiled.

Two stages take 6 ms and six stages 16 ms, once each operation's shape has been compiled; with `jax.jit`
around each executable it is 80 and 200 ms. What `check_step` costs beyond that is the plain `jax.jit` it
compares with.

For a test that compares a step with plain JAX, on several schedules, at the price of planning it:

    from interpret import check_step

    def test_tied_weights():
        gpipe, std = check_step(train_step, params, batch, actors=2, schedules=(jpp.GPipe(2), jpp.Std1F1B(2)))
        assert sent(std) == ...                       # the plans come back; `planning` has more to ask them

    run_plan(plan_step(train_step, params, batch), params, batch)      # just the results

In: a `CompilePlan` (see `planning.plan_step`) and arguments: numpy or jax arrays, keys, scalars, static
    values. Out: results
as numpy arrays, keys as key arrays. What an actor's program may not do (read a slot that is empty, donated or
deleted, wait for ever, make another shape than declared) fails, and so do copies of a result that differ
between actors.

Not here: meshes inside actors (`spmd_mesh`), prints, memory; those need real actors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from eager import control_flow
from planning import plan_step

from jaxpp_async.compiler.evaluate import recipe_function
from jaxpp_async.compiler.pipeline import CompilePlan
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import BufferId, Delete, Input, Output, Recv, Run, Send
from jaxpp_async.program.leaf_parts import Parts
from jaxpp_async.session.argument_binding import host_array
from jaxpp_async.testing import assert_close

RunOne = Callable[[int], Callable[..., Sequence[Any]]]
"""From the number of an executable to the function that it computes."""


class InterpreterError(AssertionError):
    """A program did what no program may do."""


def run_plan(done: CompilePlan, *args: Any, static: Sequence[int] = ()) -> Any:
    """Run every actor's program on `args`.

    Args:
        done: of a step without a mesh inside the actors.
        args: the step's arguments, all of them.
        static: numbers of the static ones.

    Returns:
        The step's result tree; numpy arrays, or key arrays.

    Raises:
        InterpreterError: a program breaks a rule, or copies of a result on several actors are not the same
            bits.
    """
    dynamic = tuple(a for i, a in enumerate(args) if i not in static)
    leaves, tree = jax.tree.flatten(dynamic)
    if tree != done.traced.in_tree:
        raise InterpreterError(f"the plan is for arguments {done.traced.in_tree}, not {tree}")
    hidden = [c.value for c in done.traced.captured]
    hidden += [np.int32(i) for i in range(done.placed.num_indices)]
    leaves = _in_parts(leaves, done.traced.argument_parts)
    inputs = [jnp.asarray(host_array(x)) for x in (*leaves, *hidden)]
    with control_flow():
        copies = run_programs(done.programs, inputs, _functions(done))
    ids = {o.result: done.placed.value_ids[o.value] for o in done.placed.graph.outputs}
    leaf_of = {v: arg for arg, v in enumerate(done.traced.flat.inputs)}
    results = []
    for k, name in enumerate(done.traced.out_names):
        if (v := done.placed.placement.handed_back.get(k)) is not None:
            leaf = leaves[leaf_of[v]]
            results.append(leaf if done.traced.types[v].key_impl else host_array(leaf))
            continue
        array = _one_of(copies.get(k, {}), name)
        impl = done.traced.types[ids[k]].key_impl
        results.append(jax.random.wrap_key_data(array, impl=impl) if impl else array)
    return jax.tree.unflatten(done.traced.out_tree, _joined(results, done.traced.result_parts))


def _in_parts(leaves: Sequence[Any], parts: Sequence[Parts | None]) -> list[Any]:
    """Leaves, with the parts of each divided one in its place."""
    pairs = zip(leaves, parts or [None] * len(leaves), strict=True)
    return [
        leaf if index is None else leaf[index]
        for leaf, of_leaf in pairs
        for index in ([None] if of_leaf is None else of_leaf.slices)
    ]


def _joined(results: Sequence[Any], parts: Sequence[Parts | None]) -> list[Any]:
    """Results, with each divided one in the place of its parts."""
    rest, found = iter(results), []
    for of_leaf in parts or [None] * len(results):
        made = [next(rest) for _ in range(1 if of_leaf is None else of_leaf.count)]
        found.append(made[0] if of_leaf is None else jnp.concatenate(made, of_leaf.axis))
    return found


def check_step(
    fn: Callable,
    *args: Any,
    actors: int = 2,
    schedules: Sequence[Any] = (None,),
    steps: int = 1,
    donate: tuple[int, ...] = (),
    static: tuple[int, ...] = (),
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> list[CompilePlan]:
    """Check that a step computes what plain `jax.jit` computes.

    Args:
        fn, args: the step.
        schedules: one run each; None is the step's own.
        steps: how often it runs; with more than one, its result (of a tuple, the first element) is argument 0
            of the next run, and it is not planned again.
        donate, static: numbers of arguments.
        rtol, atol: see `jaxpp_async.testing.assert_close`.

    Returns:
        A plan for each schedule.

    Raises:
        AssertionError: a result differs in structure, shape, dtype or value; or as `run_plan`.
    """
    # A strict reference: what is cast to bfloat16 is rounded to it.
    plain = jax.jit(fn, static_argnums=static, compiler_options={"xla_allow_excess_precision": False})
    expected = list(_states(plain, args, steps))
    plans = []
    for schedule in schedules:
        done = plan_step(fn, *args, actors=actors, donate=donate, static=static, schedule=schedule)
        run = lambda *xs, done=done: run_plan(done, *xs, static=static)  # noqa: E731
        for got, want in zip(_states(run, args, steps), expected, strict=True):
            assert_close(got, want, rtol=rtol, atol=atol)
        plans.append(done)
    return plans


def _states(run: Callable, args: Sequence[Any], steps: int) -> Any:
    """Results of one step after the other."""
    for _ in range(steps):
        result = run(*args)
        yield result
        args = (result[0] if type(result) is tuple else result, *args[1:])


def _functions(done: CompilePlan) -> RunOne:
    known: dict[int, Callable] = {}

    def get(index: int) -> Callable:
        if index not in known:
            known[index] = recipe_function(done.placed.recipes[index], done.traced.types)
        return known[index]

    return get


def _one_of(copies: dict[int, jax.Array], name: str) -> np.ndarray:
    """A result that several actors hold, which must be the same everywhere."""
    if not copies:
        raise InterpreterError(f"{name} is made on no actor")
    (first, array), *others = ((actor, np.asarray(x)) for actor, x in copies.items())
    for actor, other in others:
        if other.tobytes() != array.tobytes():
            raise InterpreterError(f"{name} on actor {first} is {array}, on actor {actor} {other}")
    return array


# ---------------------------------------------------------------- programs


def run_programs(
    programs: Sequence[ActorProgram], inputs: Sequence[jax.Array], functions: RunOne
) -> dict[int, dict[int, jax.Array]]:
    """Run all programs, turn by turn. Returns for each result its copy on each actor."""
    sent: dict[int, jax.Array] = {}
    results: dict[int, dict[int, jax.Array]] = {}
    running = [_Actor(p, inputs, functions, sent, results) for p in programs]
    while any(not actor.ended for actor in running):
        if not any([actor.advance() for actor in running]):
            waits = "; ".join(actor.where() for actor in running if not actor.ended)
            raise InterpreterError(f"deadlock: {waits}")
    return results


class _Actor:
    """One actor's program under way."""

    def __init__(
        self,
        program: ActorProgram,
        inputs: Sequence[jax.Array],
        functions: RunOne,
        sent: dict[int, jax.Array],
        results: dict[int, dict[int, jax.Array]],
    ):
        self.program, self.inputs, self.functions = program, inputs, functions
        self.sent, self.results = sent, results
        self.at = 0
        self.slots: dict[BufferId, jax.Array] = {}
        self.posted: dict[BufferId, int] = {}  # slots whose data is not in yet, to its tag
        self.gone: dict[BufferId, str] = {}
        self.left: dict[BufferId, jax.Array] = {}  # slots that became results

    @property
    def ended(self) -> bool:
        return self.at == len(self.program.instructions)

    def where(self) -> str:
        return f"actor {self.program.actor} waits at {self.at}: {self.program.instructions[self.at]}"

    def advance(self) -> bool:
        """Run until something has to be waited for. Returns whether anything ran."""
        start = self.at
        while not self.ended and self._arrived():
            self._do(self.program.instructions[self.at])
            self.at += 1
        return self.at > start

    def _arrived(self) -> bool:
        """Take what has arrived of what the next instruction reads; whether that is all of it."""
        i = self.program.instructions[self.at]
        reads = (
            i.inputs if isinstance(i, Run) else (i.buffer,) if isinstance(i, Send | Delete | Output) else ()
        )
        for b in reads:
            if self.posted.get(b) in self.sent:
                self.slots[b] = self.sent.pop(self.posted.pop(b))
        return not any(b in self.posted for b in reads)

    def _fail(self, message: str) -> None:
        raise InterpreterError(
            f"actor {self.program.actor}, instruction {self.at}, "
            f"{self.program.instructions[self.at]}: {message}"
        )

    def _read(self, b: BufferId) -> jax.Array:
        if b not in self.slots:
            self._fail(f"b{b} {self.gone.get(b, 'is empty')}")
        return self.slots[b]

    def _write(self, b: BufferId, value: jax.Array) -> None:
        aval = self.program.avals[b]
        if (value.shape, value.dtype.name) != (aval.shape, aval.dtype):
            self._fail(f"b{b} is {aval.dtype}{aval.shape}, and gets {value.dtype}{value.shape}")
        if b in self.slots or b in self.gone:
            self._fail(f"b{b} is written twice")
        self.slots[b] = value

    def _end(self, b: BufferId, fate: str) -> None:
        self._read(b)
        del self.slots[b]
        self.gone[b] = fate

    def _do(self, i: Any) -> None:
        if isinstance(i, Input):
            self._write(i.buffer, self.inputs[i.arg])
        elif isinstance(i, Run):
            self._run(i)
        elif isinstance(i, Send):
            self.sent[i.tag] = self._read(i.buffer)
        elif isinstance(i, Recv):
            self.posted[i.buffer] = i.tag
        elif isinstance(i, Delete):
            self._end(i.buffer, "was deleted")
        elif isinstance(i, Output):
            self._give(i)
        else:
            self._fail("is no instruction that the interpreter knows")

    def _run(self, i: Run) -> None:
        results = self.functions(i.executable)(*[self._read(b) for b in i.inputs])
        for p in i.donated:
            self._end(i.inputs[p], "was donated")
        for b, value in zip(i.outputs, results, strict=True):
            self._write(b, value)

    def _give(self, i: Output) -> None:
        if i.buffer not in self.left:  # one slot may be several results
            self.left[i.buffer] = self._read(i.buffer)
            self._end(i.buffer, "has left as a result")
        self.results.setdefault(i.result, {})[self.program.actor] = self.left[i.buffer]
