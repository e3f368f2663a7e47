"""Choose where everything outside the loops runs, and where arguments and results live.

`place` takes a traced step and the actors that each loop's values need. It finds the actors and the level of
each outer operation, the homes of each input and the homes of each result. `docs/placement.md` has the rules
and DESIGN 4 their reasons. A choice between equals always goes to the lowest actor.

A level is a task outside the loops on each actor: it ends where data has to cross actors. Levels take one
pass up and one pass down, linear in operations and their operands.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from jaxpp_async.compiler import cond_split
from jaxpp_async.compiler.cond_split import SCALAR_BYTES, SMALL_BYTES
from jaxpp_async.compiler.ir import Loop, Op, Types, used_ids
from jaxpp_async.compiler.outer_ops import Actors, OuterStep, replaced, source_actor, without_dead
from jaxpp_async.compiler.primitives import CALLS, LAID_OUT
from jaxpp_async.compiler.reduction_grouping import GroupingInputs, regroup_reductions
from jaxpp_async.program.instructions import ActorId


@dataclass(frozen=True, eq=False)
class Placement:
    """The places that `place` chose for the outside of a step's loops.

    Args:
        items: the outer operations and loops, with conds split and sums regrouped.
        op_actors: actors that run each operation, by position in `items`.
        levels: (position, actor) to the level of an operation's task, counted from 0.
        loop_levels: position to the level of a loop.
        input_homes: input id to the actors that hold it when the step starts; none, where the step does not
            use it.
        output_homes: for each result, the actors that hold it when the step ends; none, where it is handed
            back.
        num_levels: how many levels there are.
        asked: results whose homes the caller gave.
        handed_back: result position to the input that the caller gets back as the result, wherever that input
            lies.
    """

    items: tuple[Op | Loop, ...]
    op_actors: dict[int, Actors]
    levels: dict[tuple[int, ActorId], int]
    loop_levels: dict[int, int]
    input_homes: dict[int, Actors]
    output_homes: tuple[Actors, ...]
    num_levels: int
    asked: frozenset[int]
    handed_back: dict[int, int]


def place(step: OuterStep, types: Types) -> Placement:
    """Choose actors and levels for everything outside the loops.

    Args:
        step: the step as it looks from outside its loops.
        types: the type of every value id; new ids are made here.
    """
    step = _split_conds(step, types)
    draft = _Placer(step, types)
    while draft.joining:
        # Open the operations that join actors. They may hold further conds, so this ends with the deepest.
        others = {i: cond_split.expanded(draft.ops[i], types) for i in draft.joining}
        draft = _Placer(_split_conds(replaced(draft.step, others), types), types)
    regrouped = regroup_reductions(draft.grouping_inputs())
    if regrouped is not None:
        draft = _Placer(regrouped, types)
    if (merged := _merge_conds(draft)) is not None:
        draft = _Placer(merged, types)
    actors = draft.actors()
    levels, loop_levels, num_levels = _find_levels(draft.step, actors, draft.producer, draft.users)
    return Placement(
        items=draft.step.items,
        op_actors=actors,
        levels=levels,
        loop_levels=loop_levels,
        input_homes={v: frozenset(draft.homes.get(v, ())) for v in step.inputs},
        output_homes=tuple(draft.output_homes),
        num_levels=num_levels,
        asked=frozenset(step.result_homes),
        handed_back=draft.handed_back,
    )


def _split_conds(step: OuterStep, types: Types) -> OuterStep:
    """Split each cond into one for each group of results.

    In a step with a loop, a `jit` with shardings of its own becomes the operations inside it.
    """
    while ops := {
        i: cond_split.expanded(op, types)
        for i, op in enumerate(step.items)
        if isinstance(op, Op)
        and (cond_split.has_constant_choice(op) or (step.loop_needs and op.name in CALLS and op.expand))
    }:
        step = replaced(step, ops)
    used = used_ids((i for i in step.items if isinstance(i, Op)), step.outputs)
    used.update(v for needs in step.loop_needs.values() for v in needs)
    parts = {
        i: cond_split.split_cond(op, used, types)
        for i, op in enumerate(step.items)
        if isinstance(op, Op) and op.branches is not None
    }
    return without_dead(replaced(step, parts)) if parts else step


def _merge_conds(draft: _Placer) -> OuterStep | None:
    """Merge the parts of one cond that run on the same actors into one operation; None if there are none."""
    parts: dict[tuple[int, Actors], list[int]] = defaultdict(list)
    actors = draft.actors()
    for i, op in enumerate(draft.items):
        if isinstance(op, Op) and op.branches is not None and op.branches.whole is not None:
            parts[id(op.branches.whole), actors[i]].append(i)
    groups = [group for group in parts.values() if len(group) > 1]
    others = {group[0]: [cond_split.merge_parts([draft.ops[i] for i in group])] for group in groups}
    return replaced(draft.step, others, {i for group in groups for i in group[1:]}) if groups else None


class _Placer:
    """Decides where everything runs. There are three kinds of operations:

    - `bound` ones depend on a loop's results. They run on one actor.
    - `anchored` ones do not, and take a scalar from large inputs (the norm of a parameter), or are conds over
      them. They run on one actor, where those inputs live, and do not draw these inputs to other actors.
    - all others are free: they run on every actor that needs them, and draw the inputs that they read there.
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
        self.can_open = {i for i, op in self.ops.items() if cond_split.can_expand(op)}
        self.large = {v for v in (*self.users, *self.producer) if self.size[v] > SMALL_BYTES}
        self.alone = {a: frozenset((a,)) for a in range(step.num_actors)}
        loop_home = {v: self.alone[a] for makes in step.loop_makes.values() for v, a in makes.items()}
        self.bound = self._bound_ops(loop_home)
        self.anchored = self._anchored_ops()
        self.single = self.bound | self.anchored
        self.owned = self._owned_ops()
        self.free: dict[int, set[ActorId]] = {i: set() for i in self.ops.keys() - self.single}
        self.chosen: dict[int, Actors] = {}  # the actors of single operations, once decided
        self.homes: dict[int, set[ActorId]] = {}  # of inputs
        # Where values are, as the very sets above; for free operations that nobody needs yet, where they
        # would run.
        self.at: dict[int, Set[ActorId]] = dict(loop_home)
        # Values whose makers run where they run, whoever reads the values.
        self.settled = {o for i in self.single for o in self.ops[i].outputs} | loop_home.keys()
        self.joining: list[int] = []  # operations that can be opened and read large values of several actors
        self.output_homes: list[Actors] = []
        self.handed_back: dict[int, int] = {}
        self._decide()

    def _bound_ops(self, made_in_loops: Iterable[int]) -> set[int]:
        values, ops = set(made_in_loops), set()
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
        """Find the free operations that make a floating result.

        Each of them runs once and its value is sent, so that copies are equal.
        """
        results = self.step.outputs[: self.step.num_results]  # a print changes nothing of how a value is made
        made = {self.producer[r] for r in results if isinstance(r, int) and r in self.producer}
        return {
            i
            for i in made - self.single
            if any(
                self.types[o].aval.dtype.startswith(("float", "bfloat", "complex"))
                for o in self.ops[i].outputs
                if o >= 0
            )
        }

    def actors(self) -> dict[int, Actors]:
        """Return the actors of every operation, by position."""
        chosen, free = self.chosen, self.free
        return {i: chosen[i] if i in chosen else frozenset(free[i]) for i in self.ops}

    def grouping_inputs(self) -> GroupingInputs:
        """Return the facts that regrouping needs."""
        return GroupingInputs(self.step, self.types, self.single, self.producer, self.users, self._where)

    # ---- the order of decisions

    def _decide(self) -> None:
        for needs in self.step.loop_needs.values():
            for value, actors in needs.items():
                self._need(value, actors)
        # Operations on large values go first: they settle where most inputs live.
        large = [i for i in sorted(self.bound) if self._is_large(self.ops[i])]
        deferred = {i for i in large if not self._choose(i, SMALL_BYTES)}
        self._guess_free_ops()
        for i in sorted(self.single - set(large)):
            self._choose(i, SMALL_BYTES if i in self.bound else 0)
        for i in sorted(deferred, reverse=True):
            self._choose_by_users(i)
        self._place_results()

    def _is_large(self, op: Op) -> bool:
        return not (self.large.isdisjoint(op.reads) and self.large.isdisjoint(op.outputs))

    def _need(self, value: int, actors: Iterable[ActorId]) -> None:
        """Record that `value` is used on `actors`: free operations run there too, and inputs live there."""
        stack = [(value, set(actors))]
        while stack:
            v, wanted = stack.pop()
            if v in self.settled:
                continue
            if (i := self.producer.get(v)) is None:
                home = self.at[v] = self.homes.setdefault(v, set())
                home |= wanted
                continue
            here = self.free[i]
            if i in self.owned:
                if here:
                    continue
                wanted = {min(wanted)}
            if new := wanted - here:
                here |= new
                self.at.update(dict.fromkeys(self.ops[i].outputs, here))
                stack += [(r, new) for r in self.ops[i].reads]

    # ---- operations on one actor

    def _guess_free_ops(self) -> None:
        """Guess where free operations that nobody needs yet would run: with most of their operands' bytes."""
        for i in sorted(self.free):
            if not self.free[i]:
                held = self._weights(self.ops[i].reads)
                best = max(held.values(), default=0)
                if best > SCALAR_BYTES:
                    likely = {a for a in held if held[a] == best}
                    self.at.update(dict.fromkeys(self.ops[i].outputs, likely))

    def _weights(self, values: Sequence[int]) -> dict[ActorId, int]:
        """Add up the bytes of `values` that each actor holds."""
        at, size = self.at, self.size
        held: dict[ActorId, int] = {}
        for v in values:
            if where := at.get(v):
                weight = size[v] or 1
                for a in where:
                    held[a] = held.get(a, 0) + weight
        return held

    def _choose(self, position: int, threshold: int) -> bool:
        """Run an operation where most of its operands' bytes are.

        Returns:
            False, where it is not decided: the operands are scalars, and the operation is large.
        """
        op = self.ops[position]
        held = self._weights(op.reads)
        if len(held) == 1:  # nearly always
            ((chosen, best),) = held.items()
        else:
            best = max(held.values(), default=0)
            chosen = min((a for a in held if held[a] == best) if held else self._wanted(position), default=0)
        if best <= threshold and position in self.bound and self._is_large(op):
            return False
        self._assign(position, self.alone[chosen])
        return True

    def _wanted(self, position: int) -> set[ActorId]:
        """Find the actors that are known to need the results of an operation."""
        made = self.ops[position].outputs
        found = {a for o in made for u in self.users.get(o, ()) for a in self._run_on(u)}
        return found.union(*(needs.get(o, ()) for needs in self.step.loop_needs.values() for o in made))

    def _where(self, value: int) -> Set[ActorId]:
        return self.at.get(value, frozenset())

    def _run_on(self, position: int) -> Set[ActorId]:
        """Return where an operation runs, as far as that is decided."""
        return self.free[position] if position in self.free else self.chosen.get(position, frozenset())

    def _choose_by_users(self, position: int) -> None:
        op = self.ops[position]
        held = Counter(a for o in op.outputs for u in self.users.get(o, ()) for a in self._run_on(u))
        held.update(self._wanted(position))
        if not held:
            best = self._weights(op.reads)
            actors = {min((a for a in best if best[a] == max(best.values())), default=0)}
        elif op.name in LAID_OUT:
            # Its operand is a scalar: the scalar is sent, and not the array that is made of it.
            actors = held
        else:
            actors = {min(a for a in held if held[a] == max(held.values()))}
        self._assign(position, frozenset(actors))

    def _assign(self, position: int, actors: Actors) -> None:
        op = self.ops[position]
        if position in self.can_open and any(
            (where := self.at.get(r)) and not where & actors for r in op.reads if r in self.large
        ):
            self.joining.append(position)
        self.chosen[position] = actors
        for o in op.outputs:
            self.at[o] = actors
        if not self.settled.issuperset(op.reads):
            for r in op.reads:
                self._need(r, actors)

    # ---- results

    def _place_results(self) -> None:
        """Place each result where the input that it continues lives, or else where it is made.

        An input that only a result asks for is handed back as that result, and lies where it lies.
        """
        results = [r for r in self.step.outputs if isinstance(r, int)]
        assert len(results) == len(self.step.outputs), "constant results are made by an operation"
        continued = {k: self.step.inputs[arg] for k, arg in self.step.continues.items()}
        homes: list[set[ActorId]] = [set() for _ in results]
        untouched = self.step.untouched
        for k in sorted(range(len(results)), key=untouched.__contains__):
            # untouched ones come last: others may use the input
            old = self.homes.get(continued[k], ()) if k in continued else ()
            asked = self.step.result_homes.get(k, ())
            if k in untouched and not (asked or old or untouched[k] in self.homes):
                self.handed_back[k] = untouched[k]
                continue
            homes[k] = set(asked) or set(old) or set(self._made_at(results[k])) or {0}
            self._need(results[k], homes[k])
            if old:
                self._need(continued[k], homes[k])
        # A later result may have drawn an argument to more actors: the result that continues it goes there,
        # too.
        changed = True
        while changed:
            changed = False
            for k, argument in continued.items():
                here = self.homes.get(argument, set())
                if here - homes[k] and k not in self.step.result_homes and k not in self.handed_back:
                    homes[k] |= here
                    self._need(results[k], homes[k])
                    changed = True
        self.output_homes = [frozenset(home) for home in homes]

    def _made_at(self, ref: int) -> Set[ActorId]:
        """Return where a result is, or where its operands lie, if nobody has needed it so far."""
        i = self.producer.get(ref)
        where = self._where(ref)
        return where if not where or i is None or self._run_on(i) else {min(where)}


# ---------------------------------------------------------------- levels


def _find_levels(
    step: OuterStep, actors: Mapping[int, Actors], producer: Mapping[int, int], users: Mapping[int, list[int]]
) -> tuple[dict[tuple[int, ActorId], int], dict[int, int], int]:
    """Group operations by how many times data has to cross actors first.

    Each operation runs as late as possible, since an early result is a buffer to keep.

    Args:
        step: the step as it looks from outside its loops.
        actors: of each operation, by position.
        producer: value id to the position of the operation that makes it.
        users: value id to the positions of the operations that read it.

    Returns:
        (position, actor) to level for operations, position to level for loops, and the number of levels.
    """
    early, loops = _earliest(step, actors, producer)
    last = max([*early.values(), *(n + 1 for n in loops.values())], default=0)
    return _latest(step, actors, users, loops, last), loops, last + 1


def _earliest(
    step: OuterStep, actors: Mapping[int, Actors], producer: Mapping[int, int]
) -> tuple[dict[tuple[int, ActorId], int], dict[int, int]]:
    early: dict[tuple[int, ActorId], int] = {}
    loops: dict[int, int] = {}
    made_in: dict[int, int] = {}
    last_loop = -1

    def available(value: int, actor: ActorId) -> int:
        """Return the first level at which an operation on `actor` can read `value`."""
        i = producer.get(value)
        if i is None:
            return made_in.get(value, -1) + 1
        if actor in actors[i]:
            return early[i, actor]
        return early[i, source_actor(actors[i], actor)] + 1

    for i, op in enumerate(step.items):
        if isinstance(op, Op):
            for a in actors[i]:
                first = 0
                for r in op.reads:
                    if r in producer and (made := early.get((producer[r], a))) is not None:
                        level = made
                    else:
                        level = available(r, a)
                    if level > first:
                        first = level
                early[i, a] = first
            continue
        before = [
            # An operation's result enters the loop one level after the operation, on any actor.
            max((available(v, a) for a in needing), default=0) + (1 if v in producer else 0)
            for v, needing in step.loop_needs[i].items()
        ]
        loops[i] = last_loop = max([last_loop + 1, *before])
        for v in step.loop_makes[i]:
            made_in[v] = last_loop
    return early, loops


def _latest(
    step: OuterStep,
    actors: Mapping[int, Actors],
    users: Mapping[int, list[int]],
    loops: Mapping[int, int],
    last: int,
) -> dict[tuple[int, ActorId], int]:
    late: dict[tuple[int, ActorId], int] = {}
    in_loops: dict[int, dict[ActorId, int]] = defaultdict(dict)  # the latest level for each actor of a loop
    for i, needs in step.loop_needs.items():
        for value, needing in needs.items():
            for a in needing:
                in_loops[value][a] = min(in_loops[value].get(a, last), loops[i] - 1)
    for i in reversed(range(len(step.items))):
        op = step.items[i]
        if not isinstance(op, Op):
            continue
        here = actors[i]
        limits = dict.fromkeys(here, last)
        for o in op.outputs:
            for u in users.get(o, ()):
                for b in actors[u]:
                    if b in here:
                        a, limit = b, late[u, b]
                    else:
                        a, limit = source_actor(here, b), late[u, b] - 1
                    if limit < limits[a]:
                        limits[a] = limit
            if o in in_loops:
                for b, limit in in_loops[o].items():
                    a = source_actor(here, b)
                    limits[a] = min(limits[a], limit)
        for a, limit in limits.items():
            late[i, a] = limit
    return late
