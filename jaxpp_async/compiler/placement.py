"""compiler.placement: where everything outside the loops runs, and where arguments and results live. No jax.

In: a traced step and the actors that each loop's values need. Out: for each outer operation its actors and level, for
each input its home, for each result its homes. `docs/placement.md` has the rules and DESIGN 4 their reasons. A choice
between equals always goes to the lowest actor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxpp_async.compiler import conditions
from jaxpp_async.compiler.conditions import SCALAR_BYTES, SMALL_BYTES
from jaxpp_async.compiler.ir import Loop, Op, Types, used_ids
from jaxpp_async.compiler.levels import levels
from jaxpp_async.compiler.outer import Actors, OuterStep, replaced, without_dead
from jaxpp_async.compiler.primitives import CALLS, LAID_OUT
from jaxpp_async.compiler.regroup import Seen, regroup
from jaxpp_async.program import ActorId

__all__ = ["Actors", "OuterStep", "Placement", "place"]


@dataclass(frozen=True, eq=False)
class Placement:
    """Where things are.

    Args:
        items: the outer operations and loops: conds split, sums regrouped.
        op_actors: actors that run each operation, by position in `items`.
        levels: (position, actor) to the level of an operation's task; `loop_levels` for loops.
        input_homes: input id to the actors that hold it when the step starts.
        output_homes: for each result, the actors that hold it when the step ends.
        asked: results whose homes the caller gave.
    """

    items: tuple[Op | Loop, ...]
    op_actors: dict[int, Actors]
    levels: dict[tuple[int, ActorId], int]
    loop_levels: dict[int, int]
    input_homes: dict[int, Actors]
    output_homes: tuple[Actors, ...]
    num_levels: int
    asked: frozenset[int] = frozenset()


def place(step: OuterStep, types: Types) -> Placement:
    """Choose actors and levels for everything outside the loops."""
    step = _prepared(step, types)
    draft = _placed(step, types)
    while draft.joining:
        # What joins actors is taken apart; it may have held further conds, so this ends with the deepest.
        others = {i: conditions.opened(draft.op(i), types) for i in draft.joining}
        draft = _placed(_prepared(replaced(draft.step, others), types), types)
    regrouped = regroup(draft.seen())
    if regrouped is not None:
        draft = _placed(regrouped, types)
    if (met := _met(draft)) is not None:
        draft = _placed(met, types)
    found = levels(draft.step, draft.actors, draft.producer, draft.users)
    return Placement(
        items=draft.step.items,
        op_actors={i: frozenset(a) for i, a in draft.actors.items()},
        levels=found.of_ops,
        loop_levels=found.of_loops,
        input_homes={v: frozenset(draft.homes[v]) for v in step.inputs},
        output_homes=tuple(draft.output_homes),
        num_levels=found.depth,
        asked=frozenset(step.result_homes),
    )


def _prepared(step: OuterStep, types: Types) -> OuterStep:
    """Conds as one for each group of results. In a step with a loop, a pinned `jit` becomes what is inside it."""
    while ops := {
        i: conditions.opened(op, types)
        for i, op in enumerate(step.items)
        if isinstance(op, Op) and (conditions.is_decided(op) or (step.loop_needs and op.name in CALLS and op.expand))
    }:
        step = replaced(step, ops)
    used = used_ids((i for i in step.items if isinstance(i, Op)), step.outputs)
    used.update(v for needs in step.loop_needs.values() for v in needs)
    parts = {
        i: conditions.split(op, used, types)
        for i, op in enumerate(step.items)
        if isinstance(op, Op) and op.branches is not None
    }
    return without_dead(replaced(step, parts)) if parts else step


def _met(draft: _Placer) -> OuterStep | None:
    """Parts of one cond that run on the same actors, as one operation again; None if there are none."""
    parts: dict[tuple[int, Actors], list[int]] = defaultdict(list)
    for i, op in enumerate(draft.items):
        if isinstance(op, Op) and op.branches is not None and op.branches.whole is not None:
            parts[id(op.branches.whole), frozenset(draft.actors[i])].append(i)
    groups = [group for group in parts.values() if len(group) > 1]
    others = {group[0]: [conditions.merged([draft.op(i) for i in group])] for group in groups}
    return replaced(draft.step, others, {i for group in groups for i in group[1:]}) if groups else None


def _placed(step: OuterStep, types: Types) -> _Placer:
    placer = _Placer(step, types)
    placer.run()
    return placer


class _Placer:
    """Working state. Three kinds of operations:

    - `bound` ones depend on a loop's results. They run on one actor.
    - `anchored` ones do not, and take a scalar from large inputs (the norm of a parameter), or are conds over them.
      They run on one actor, where those inputs live, and do not draw them elsewhere.
    - all others are free: they run on every actor that needs them, and draw the inputs they read there.
    """

    def __init__(self, step: OuterStep, types: Types) -> None:
        self.step, self.types, self.size = step, types, types.sizes
        self.items = step.items
        self.ops = {i: op for i, op in enumerate(self.items) if isinstance(op, Op)}
        self.producer = {o: i for i, op in self.ops.items() for o in op.outputs if o >= 0}
        self.users: dict[int, list[int]] = defaultdict(list)
        for i, op in self.ops.items():
            for r in op.reads:
                self.users[r].append(i)
        self.can_open = {i for i, op in self.ops.items() if conditions.can_open(op)}
        self.loop_home = {v: a for makes in step.loop_makes.values() for v, a in makes.items()}
        self.bound = self._bound_ops()
        self.anchored = self._anchored_ops()
        self.single = self.bound | self.anchored
        self.owned = self._owned_ops()
        self.actors: dict[int, set[ActorId]] = {i: set() for i in self.ops}
        self.homes: dict[int, set[ActorId]] = defaultdict(set)  # of inputs
        self.wanted: dict[int, set[ActorId]] = defaultdict(set)  # of anchored operations: who needs them
        self.leans: dict[int, set[ActorId]] = {}  # where a free operation would run, were it for its operands only
        self.joining: list[int] = []  # can be opened, and read large values of several actors
        self.output_homes: list[Actors] = []

    def _bound_ops(self) -> set[int]:
        values, ops = set(self.loop_home), set()
        for i, op in self.ops.items():
            if not values.isdisjoint(op.reads):
                ops.add(i)
                values.update(op.outputs)
        return ops

    def _anchored_ops(self) -> set[int]:
        size = self.size
        heavy = {v for v in self.step.inputs if size[v] > SCALAR_BYTES}
        ops: set[int] = set()
        taken: set[int] = set()  # small values that anchored operations made
        for i, op in self.ops.items():
            if i in self.bound:
                continue
            made = max((size[o] for o in op.outputs if o >= 0), default=0)
            read = max((size[r] for r in op.reads if r in heavy), default=0)
            reduces = any(made <= limit < read for limit in (SCALAR_BYTES, SMALL_BYTES))
            follows = made <= SMALL_BYTES and any(r in taken for r in op.reads)
            if reduces or follows or (read and i in self.can_open):
                ops.add(i)
                taken.update(o for o in op.outputs if o >= 0 and size[o] <= SMALL_BYTES)
            if read:
                heavy.update(o for o in op.outputs if o >= 0 and size[o] > SCALAR_BYTES)
        return ops

    def _owned_ops(self) -> set[int]:
        """Free operations that make a floating result: computed once, then sent, so that copies are equal."""
        results = self.step.outputs[: self.step.num_results]  # a print changes nothing of how a value is made
        made = {self.producer[r] for r in results if isinstance(r, int) and r in self.producer}
        return {
            i
            for i in made - self.single
            if any(
                self.types[o].aval.dtype.startswith(("float", "bfloat", "complex"))
                for o in self.op(i).outputs
                if o >= 0
            )
        }

    def op(self, position: int) -> Op:
        return self.ops[position]

    def seen(self) -> Seen:
        """For regrouping."""
        return Seen(self.step, self.types, self.single, self.producer, self.users, self._where)

    # ---- the order of decisions

    def run(self) -> None:
        for needs in self.step.loop_needs.values():
            for value, actors in needs.items():
                self._need(value, actors)
        # What large values say first: it settles where most inputs live.
        large = [i for i in sorted(self.bound) if self._is_large(i)]
        deferred = {i for i in large if not self._choose(i, SMALL_BYTES)}
        self._lean()
        for i in sorted(self.single - set(large)):
            self._choose(i, SMALL_BYTES if i in self.bound else 0)
        for i in sorted(deferred, reverse=True):
            self._choose_by_users(i)
        self._place_results()

    def _is_large(self, position: int) -> bool:
        op, size = self.ops[position], self.size
        for v in op.outputs:
            if v >= 0 and size[v] > SMALL_BYTES:
                return True
        for v in op.reads:  # noqa: SIM110 - a generator takes twice as long, and each operation is asked
            if size[v] > SMALL_BYTES:
                return True
        return False

    def _need(self, value: int, actors: Iterable[ActorId]) -> None:
        """`value` is used on `actors`: free operations run there too, inputs live there."""
        stack = [(value, set(actors))]
        while stack:
            v, wanted = stack.pop()
            i = self.producer.get(v)
            if i is None:
                if v not in self.loop_home:
                    self.homes[v] |= wanted
                continue
            if i in self.single:
                self.wanted[i] |= wanted
                continue
            if i in self.owned:
                if self.actors[i]:
                    continue
                wanted = {min(wanted)}
            new = wanted - self.actors[i]
            if new:
                self.actors[i] |= new
                stack += [(r, new) for r in self.op(i).reads]

    # ---- operations on one actor

    def _where(self, value: int) -> set[ActorId]:
        i = self.producer.get(value)
        if i is not None:
            return self.actors[i] or self.leans.get(i) or set()
        if value in self.loop_home:
            return {self.loop_home[value]}
        return self.homes.get(value) or set()

    def _lean(self) -> None:
        """Where free operations that nobody needs yet would run: with most of their operands' bytes."""
        for i in sorted(self.actors.keys() - self.single):
            if not self.actors[i]:
                held = self._weights(self.op(i).reads)
                best = max(held.values(), default=0)
                self.leans[i] = {a for a in held if held[a] == best} if best > SCALAR_BYTES else set()

    def _weights(self, values: Sequence[int]) -> dict[ActorId, int]:
        """Bytes of `values` that each actor holds."""
        held: dict[ActorId, int] = {}
        for v in values:
            for a in self._where(v):
                held[a] = held.get(a, 0) + (self.size[v] or 1)
        return held

    def _choose(self, position: int, threshold: int) -> bool:
        """Run where most of the operands' bytes are. False: they are scalars, and the operation is large."""
        held = self._weights(self.ops[position].reads)
        best = max(held.values()) if held else 0
        if best <= threshold and position in self.bound and self._is_large(position):
            return False
        if len(held) == 1:
            (chosen,) = held
        else:
            wanted = [a for a in held if held[a] == best] or self.wanted[position]
            chosen = min(wanted, default=0)
        self._assign(position, {chosen})
        return True

    def _choose_by_users(self, position: int) -> None:
        op = self.op(position)
        held: dict[ActorId, int] = defaultdict(int)
        for o in op.outputs:
            for u in self.users.get(o, ()):
                for a in self.actors[u]:
                    held[a] += 1
        for a in self.wanted[position]:
            held[a] += 1
        if not held:
            best = self._weights(op.reads)
            self._assign(position, {min((a for a in best if best[a] == max(best.values())), default=0)})
        elif op.name in LAID_OUT:
            # Its operand is a scalar: that is sent, and not what is laid out from it.
            self._assign(position, set(held))
        else:
            self._assign(position, {min(a for a in held if held[a] == max(held.values()))})

    def _assign(self, position: int, actors: set[ActorId]) -> None:
        op = self.ops[position]
        if position in self.can_open and any(
            (where := self._where(r)) and not where & actors for r in op.reads if self.size[r] > SMALL_BYTES
        ):
            self.joining.append(position)
        self.actors[position] = actors
        for r in op.reads:
            i = self.producer.get(r)
            if i is not None and i in self.single:
                self.wanted[i] |= actors  # all there is to it, for nearly all
            else:
                self._need(r, actors)

    # ---- results

    def _place_results(self) -> None:
        """A result lives where the input it continues lives, else where it is made."""
        homes: list[set[ActorId]] = []
        continued = {k: self.step.inputs[arg] for k, arg in self.step.continues.items()}
        results = [r for r in self.step.outputs if isinstance(r, int)]
        assert len(results) == len(self.step.outputs), "constant results are made by an operation"
        for k, ref in enumerate(results):
            old = set(self.homes.get(continued[k], ())) if k in continued else set()
            homes.append(set(self.step.result_homes.get(k, ())) or old or self._made_at(ref) or {0})
            self._need(ref, homes[k])
            if k in continued:
                self._need(continued[k], homes[k])
        # A later result may have drawn an argument to more actors: what continues it goes there, too.
        changed = True
        while changed:
            changed = False
            for k, argument in continued.items():
                if self.homes[argument] - homes[k] and k not in self.step.result_homes:
                    homes[k] |= self.homes[argument]
                    self._need(results[k], homes[k])
                    changed = True
        for v in self.step.inputs:
            # Inputs nobody uses rest on actor 0.
            if not self.homes.get(v):
                self.homes[v] = {0}
        self.output_homes = [frozenset(home) for home in homes]

    def _made_at(self, ref: int) -> set[ActorId]:
        """Where a result is, or where its operands lie, if nobody has needed it so far."""
        i = self.producer.get(ref)
        where = self._where(ref)
        return where if i is None or self.actors[i] else {min(where)} if where else set()
