"""Choose the actors that run the operations outside the microbatch loops and store the arguments and results.

`place` takes a step in which each loop is a single item. The actors on which a loop reads and makes values
are given. For each operation, `place` chooses the actors that run the operation, and its level (see below).
For each input and each result of the step, `place` chooses the homes, that is the actors that store the
array. `docs/placement.md` has the rules and DESIGN 4 their reasons. If several actors are equally good, the
one with the lowest number is chosen.

Operations outside the loops are grouped into levels, which run one after the other. On each actor one level
is one task, and a new level begins where data has to be sent to another actor. Levels are found in one
forward and one backward pass over the operations, in time linear in the number of operands.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from jaxpp_async.compiler import cond_split
from jaxpp_async.compiler.cond_split import SCALAR_BYTES, SMALL_BYTES
from jaxpp_async.compiler.ir import (
    Actors,
    Loop,
    Op,
    OuterStep,
    Types,
    replaced,
    source_actor,
    used_ids,
    without_dead,
)
from jaxpp_async.compiler.loop_invariants import HOISTED
from jaxpp_async.compiler.primitives import ASSOCIATIVE, CALLS, ELEMENTWISE, ENLARGING, LAYOUT
from jaxpp_async.compiler.reduction_grouping import GroupingInputs, regroup_reductions
from jaxpp_async.program.instructions import ActorId

_CHEAP = ELEMENTWISE | ENLARGING

_MOST_ROOTS = 4
"""From more values than this nothing is made again on another actor (see `_Placer.roots`)."""


@dataclass(frozen=True, eq=False)
class Placement:
    """The result of `place`: the actors of a step's inputs, results and operations outside the loops.

    Args:
        items: the loops, and the operations outside them after conds were split and sums regrouped.
        op_actors: a dictionary. Its keys are positions of operations in `items`; its values are the actors
            that run the operation.
        levels: a dictionary. Its keys are pairs (position of an operation in `items`, actor); its values are
            the levels in which the operation runs on the actor. Levels count from 0. On each actor, the
            operations of one level are one task.
        loop_levels: a dictionary. Its keys are positions of loops in `items`; its values are the loops'
            levels.
        input_homes: a dictionary. Its keys are the ids of inputs; its values are the actors that store the
            input when the step starts, or no actors if the step does not use the input.
        output_homes: for each result, the actors that store the result when the step ends; no actors if the
            result is in `handed_back`.
        num_levels: the number of levels.
        caller_placed_results: the positions of the results for which the caller chose the actors.
        handed_back: a dictionary for the results that are unchanged inputs and that no actor has to store
            anew. Its keys are positions of results; its values are ids of inputs. The caller gets the array
            that was passed as the input back as the result, on the actors that already store it.
    """

    items: tuple[Op | Loop, ...]
    op_actors: dict[int, Actors]
    levels: dict[tuple[int, ActorId], int]
    loop_levels: dict[int, int]
    input_homes: dict[int, Actors]
    output_homes: tuple[Actors, ...]
    num_levels: int
    caller_placed_results: frozenset[int]
    handed_back: dict[int, int]


def place(step: OuterStep, types: Types) -> Placement:
    """Choose the actors and levels of all operations outside the loops, and the actors of inputs and results.

    Args:
        step: the step, in which each loop is a single item.
        types: the type of each value; types of newly created values are added to it.
    """
    step = _split_conds(step, types)
    draft = _Placer(step, types)
    while draft.to_expand:
        # Expand the operations that read large values of several actors. Further conds may be inside them, so
        # this is repeated until the deepest are expanded.
        others = {i: cond_split.expand_op(draft.ops[i], types) for i in draft.to_expand}
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
        caller_placed_results=frozenset(step.result_homes),
        handed_back=draft.handed_back,
    )


def _split_conds(step: OuterStep, types: Types) -> OuterStep:
    """Return a step in which each cond is split, so that conds share no computed arrays (see `split_cond`).

    If the choice of a cond's branch is a constant, the cond is replaced by the operations of that branch. If
    the step has a loop, each `jit` that has its own shardings is replaced by the operations inside it.
    """
    while ops := {
        i: cond_split.expand_op(op, types)
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
    """Merge parts of a split cond into one cond again if they run on the same actors.

    Args:
        draft: a placement of the step whose conds were split.

    Returns:
        The step with merged conds; None if no parts can be merged.
    """
    parts: dict[tuple[int, Actors], list[int]] = defaultdict(list)
    actors = draft.actors()
    for i, op in enumerate(draft.items):
        if isinstance(op, Op) and op.branches is not None and op.branches.whole is not None:
            parts[id(op.branches.whole), actors[i]].append(i)
    groups = [group for group in parts.values() if len(group) > 1]
    others = {group[0]: [cond_split.merge_parts([draft.ops[i] for i in group])] for group in groups}
    return replaced(draft.step, others, {i for group in groups for i in group[1:]}) if groups else None


class _Placer:
    """A solver whose constructor chooses the actors of every operation, input and result of a step.

    Parts of the training state have an actor of their own: loop results, arguments, and what is computed in
    place from them (see `_choose`). A value that joins those of several actors, such as a statistic of all
    layers, has none: it is a common value, and draws no part to where it was made.

    There are three kinds of operations:

    - Bound operations (`bound`) depend on a loop's results. Each runs on one actor.
    - Anchored operations (`anchored`) depend on no loop, and compute a small value from large inputs (the
      norm of a parameter), or a value that a loop reads and that is not larger than the inputs (a Cholesky
      factor), or are conds over large inputs, or join weights of several actors. Each runs on one actor that
      stores these inputs, so that no other actor has to store a copy of them.
    - All others are free (`free`). Free operations run on every actor that needs their results, and the
      inputs that they read are put on these actors too. An operation on weights is an exception: it runs
      on their actors only (`limits`), and its result is sent to the others.
    """

    def __init__(self, step: OuterStep, types: Types) -> None:
        # The size of a part is that of its array, so that a decision does not depend on the number of parts.
        self.step, self.types, self.size = step, types, types.origin_sizes
        self.items = step.items
        self.ops = {i: op for i, op in enumerate(self.items) if isinstance(op, Op)}
        self.producer = {o: i for i, op in self.ops.items() for o in op.outputs if o >= 0}
        self.users: dict[int, list[int]] = defaultdict(list)
        for i, op in self.ops.items():
            for r in op.reads:
                self.users[r].append(i)
        self.can_expand = {i for i, op in self.ops.items() if cond_split.can_expand(op)}
        self.large = {v for v in (*self.users, *self.producer) if self.size[v] > SMALL_BYTES}
        self.alone = {a: frozenset((a,)) for a in range(step.num_actors)}
        loop_home = {v: self.alone[a] for makes in step.loop_makes.values() for v, a in makes.items()}
        self.bound = self._bound_ops(loop_home)
        self.anchored = self._anchored_ops()
        self.results = {r for r in step.outputs if isinstance(r, int)}
        self.common = set[int]()  # large values that no actor is the natural one for
        self.joined = set[int]()  # those of them that an operation made from values of several actors
        # Large common values that are cheap to make from smaller ones, and the smaller ones. The smaller ones
        # are sent, and each actor makes the large value itself.
        self.roots: dict[int, tuple[int, ...]] = {}
        self.limits = self._limit_free_ops()
        self.one_actor_ops = self.bound | self.anchored
        self.owned = self._owned_ops()
        self.free: dict[int, set[ActorId]] = {i: set() for i in self.ops.keys() - self.one_actor_ops}
        self.chosen: dict[int, Actors] = {}  # the actors of operations in `one_actor_ops`, once decided
        self.homes: dict[int, set[ActorId]] = {}  # the actors of each input, by id
        # The actors that have each value. The sets are the same objects as in `homes` and `free`, so that
        # they grow together. For the results of free operations that nobody needs yet, these are the actors
        # on which they would run.
        self.at: dict[int, Set[ActorId]] = dict(loop_home)
        self.at.update((o, here) for i, here in self.limits.items() for o in self.ops[i].outputs)
        # Values whose actors do not depend on which actors read them.
        self.fixed_values = {o for i in self.one_actor_ops for o in self.ops[i].outputs} | loop_home.keys()
        # Operations that can be expanded and read large values of several actors.
        self.to_expand: list[int] = []
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
            if reduces or follows or (read and i in self.can_expand) or self._is_sent_to_loop(op):
                ops.add(i)
                taken.update(o for o in op.outputs if o >= 0 and size[o] <= SMALL_BYTES)
            if read:
                heavy.update(o for o in op.outputs if o >= 0 and size[o] > SCALAR_BYTES)
        return ops

    def _weights_in_loops(self) -> dict[int, set[ActorId]]:
        """Return the actors on which a loop reads each weight, or reads a cast or another layout of it.

        A weight is here a value that is the same for all microbatches; leaves of the batch are not included.
        """
        found: dict[int, set[ActorId]] = defaultdict(set)
        for i, needs in self.step.loop_needs.items():
            loop = self.items[i]
            assert isinstance(loop, Loop)
            for v in self.large.intersection(loop.invariants).intersection(needs):
                found[v].update(needs[v])
        for i in sorted(self.ops.keys() - self.bound - self.anchored, reverse=True):
            op = self.ops[i]
            if op.name in ELEMENTWISE or op.name in LAYOUT:
                for here in [found[o] for o in op.outputs if o in found]:
                    for r in self.large.intersection(op.reads):
                        found[r] |= here
        return found

    def _limit_free_ops(self) -> dict[int, Actors]:
        """Return the free operations that only run on certain actors, and these actors.

        These are operations that compute in place from weights that live on these actors, or reduce them. An
        operation that joins weights of several actors becomes anchored.
        """
        limits: dict[int, Actors] = {}
        weights = self._weights_in_loops()
        lives = {v: frozenset(weights[v]) for v in self.step.inputs if v in weights}
        for i, op in self.ops.items():
            if i in self.bound or i in self.anchored:
                continue
            here = [lives[r] for r in op.reads if r in lives]
            shared = frozenset[ActorId]().union(*here[:1]).intersection(*here)
            if here and (not shared or self._continues_sum(op)):
                self.anchored.add(i)
                self._add_joined(op)
            elif here and (op.name in ELEMENTWISE or not self._enlarges(op, lives)):
                limits[i] = shared
                lives.update(dict.fromkeys(self.large.intersection(op.outputs), shared))
            else:
                self.common.update(op.outputs)
                self._find_roots(op)
        return limits

    def _add_joined(self, op: Op) -> None:
        self.common.update(op.outputs)
        self.joined.update(op.outputs)

    def _continues_sum(self, op: Op) -> bool:
        """Return whether an operation adds to a sum over actors, or continues another reduction over them."""
        return op.name in ASSOCIATIVE and any(
            r in self.joined and self.ops[self.producer[r]].name == op.name for r in op.reads
        )

    def _enlarges(self, op: Op, operands: Container[int]) -> bool:
        size = self.size
        return sum(size[o] for o in op.outputs if o >= 0) > sum(size[r] for r in op.reads if r in operands)

    def _find_roots(self, op: Op) -> bool:
        """Record the smaller values that a large value is made from, if it is cheap to make.

        Returns:
            True if there are such smaller values.
        """
        if op.name not in _CHEAP or not self.results.isdisjoint(op.outputs):
            return False
        found = {root for r in op.reads for root in self.roots.get(r, (r,))}
        made = sum(self.size[o] for o in op.outputs if o >= 0)
        if not made or len(found) > _MOST_ROOTS or 2 * sum(self.size[r] for r in found) > made:
            return False
        self.roots.update(dict.fromkeys(op.outputs, tuple(found)))
        return True

    def _is_sent_to_loop(self, op: Op) -> bool:
        """Return whether a loop reads the result of an operation, and sending it to all actors that read it
        costs no more than sending the arguments from which it is computed."""
        root_bytes = op.params.get(HOISTED)
        if root_bytes is None:
            return False
        readers = set[ActorId]().union(
            *(needs.get(o, ()) for needs in self.step.loop_needs.values() for o in op.outputs)
        )
        made = sum(self.size[o] for o in op.outputs if o >= 0)
        return len(readers) > 0 and SMALL_BYTES < made <= root_bytes

    def _owned_ops(self) -> set[int]:
        """Return the positions of the free operations that make a floating-point result of the step.

        Free operations normally run on every actor that needs their results. The operations returned are an
        exception: each runs on one actor, which sends the result to the others, so that all copies of the
        result are equal.
        """
        results = self.step.outputs[: self.step.num_results]  # printing a value does not change who makes it
        made = {self.producer[r] for r in results if isinstance(r, int) and r in self.producer}
        return {
            i
            for i in made - self.one_actor_ops
            if any(
                self.types[o].aval.dtype.startswith(("float", "bfloat", "complex"))
                for o in self.ops[i].outputs
                if o >= 0
            )
        }

    def actors(self) -> dict[int, Actors]:
        """Return the actors that run each operation, by the operation's position."""
        chosen, free = self.chosen, self.free
        return {i: chosen[i] if i in chosen else frozenset(free[i]) for i in self.ops}

    def grouping_inputs(self) -> GroupingInputs:
        """Return the input of `regroup_reductions`: the step and the actors chosen so far."""
        single = self.one_actor_ops
        return GroupingInputs(self.step, self.types, single, self.producer, self.users, self._where)

    # ---- the order of decisions

    def _decide(self) -> None:
        for needs in self.step.loop_needs.values():
            for value, actors in needs.items():
                self._need(value, actors)
        # Operations on large values go first: they decide which actors hold most inputs.
        large = [i for i in sorted(self.bound) if self._is_large(self.ops[i])]
        deferred = {i for i in large if not self._choose(i, SMALL_BYTES)}
        self._guess_free_ops()
        for i in sorted(self.one_actor_ops - set(large)):
            self._choose(i, SMALL_BYTES if i in self.bound else 0)
        for i in sorted(deferred, reverse=True):
            self._choose_by_users(i)
        self._place_results()

    def _is_large(self, op: Op) -> bool:
        return not (self.large.isdisjoint(op.reads) and self.large.isdisjoint(op.outputs))

    def _need(self, value: int, actors: Iterable[ActorId]) -> None:
        """Record that a value is used on some actors.

        If the value is an input, these actors also have to store it. If a free operation makes the value
        (free operations run on every actor that needs their results), the operation also runs on these
        actors, and its operands are used on them.
        """
        stack = [(value, set(actors))]
        while stack:
            v, wanted = stack.pop()
            if v in self.fixed_values:
                continue
            if (i := self.producer.get(v)) is None:
                home = self.at[v] = self.homes.setdefault(v, set())
                home |= wanted
                continue
            here = self.free[i]
            if (limit := self.limits.get(i)) is not None and not wanted <= limit:
                wanted = wanted & limit or ({min(limit)} if not here else set())
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
        """Guess the actors of the free operations whose results no actor needs yet.

        Free operations run on every actor that needs their results. The guess is the actors that have the
        most bytes of an operation's operands. The guess is stored in `at` for the operation's results, and
        helps to place the operations that read these results.
        """
        for i in sorted(self.free):
            if not self.free[i] and i not in self.limits:
                held = self._weights(self.ops[i].reads)
                best = max(held.values(), default=0)
                if best > SCALAR_BYTES:
                    likely = {a for a in held if held[a] == best}
                    self.at.update(dict.fromkeys(self.ops[i].outputs, likely))

    def _weights(self, values: Sequence[int]) -> dict[ActorId, int]:
        """Return how many bytes of `values` each actor has, for the actors that have any of `values`.

        Instead of a value that is cheap to make, what it is made from counts, since that would be sent.
        """
        at, size, roots = self.at, self.size, self.roots
        if not roots.keys().isdisjoint(values):
            values = tuple(dict.fromkeys(root for v in values for root in roots.get(v, (v,))))
        held: dict[ActorId, int] = {}
        for v in values:
            if where := at.get(v):
                weight = size[v] or 1
                for a in where:
                    held[a] = held.get(a, 0) + weight
        return held

    def _choose(self, position: int, threshold: int) -> bool:
        """Choose the actor of an operation: the one with the most bytes of the operation's operands.

        In an elementwise operation, common values (`common`) only count if there are no others: an update
        runs where the weight and its gradient are, however many statistics it reads.

        Args:
            position: the position of the operation.
            threshold: a number of bytes. If no actor has more bytes of the operands than this, an operation
                that depends on a loop and reads or makes a large value is left undecided.

        Returns:
            True if an actor was chosen; False if the operation was left undecided.
        """
        op = self.ops[position]
        held = self._weights(op.reads)
        undecidable = position in self.bound and self._is_large(op)
        own = [r for r in op.reads if r in self.large and r not in self.common and self.at.get(r)]
        if not own or self._repeats(op):
            self.common.update(op.outputs)
            if undecidable and self._find_roots(op):
                return False
        elif self._continues_sum(op):
            self._add_joined(op)
            own = []
        if len(held) == 1:  # nearly always
            ((chosen, best),) = held.items()
        else:
            best = max(held.values(), default=0)
            if not held:
                chosen = min(self._wanted(position), default=0)
            else:
                parts = self._weights(own)
                first, second = (parts, held) if op.name in ELEMENTWISE else (held, parts)
                chosen = min(held, key=lambda a: (-first.get(a, 0), -second.get(a, 0), a))
            if any(chosen not in self.at[r] for r in own):
                self._add_joined(op)
        if best <= threshold and undecidable:
            return False
        self._assign(position, self.alone[chosen])
        return True

    def _repeats(self, op: Op) -> bool:
        """Return whether an operation fills a large value with a smaller one."""
        return op.name == "broadcast_in_dim" and self._enlarges(op, op.reads)

    def _wanted(self, position: int) -> set[ActorId]:
        """Return the actors that are known so far to need a result of an operation."""
        made = self.ops[position].outputs
        found = {a for o in made for u in self.users.get(o, ()) for a in self._run_on(u)}
        return found.union(*(needs.get(o, ()) for needs in self.step.loop_needs.values() for o in made))

    def _where(self, value: int) -> Set[ActorId]:
        return self.at.get(value, frozenset())

    def _run_on(self, position: int) -> Set[ActorId]:
        """Return the actors that were chosen so far to run an operation; empty if there are none yet."""
        return self.free[position] if position in self.free else self.chosen.get(position, frozenset())

    def _choose_by_users(self, position: int) -> None:
        op = self.ops[position]
        held = Counter(a for o in op.outputs for u in self.users.get(o, ()) for a in self._run_on(u))
        held.update(self._wanted(position))
        if not held:
            best = self._weights(op.reads)
            actors = {min((a for a in best if best[a] == max(best.values())), default=0)}
        elif op.name in ENLARGING or not self.roots.keys().isdisjoint(op.outputs):
            # The small values from which this one is made are sent, rather than this one.
            actors = held
        else:
            actors = {min(a for a in held if held[a] == max(held.values()))}
        self._assign(position, frozenset(actors))

    def _assign(self, position: int, actors: Actors) -> None:
        op = self.ops[position]
        if position in self.can_expand and any(
            (where := self.at.get(r)) and not where & actors for r in op.reads if r in self.large
        ):
            self.to_expand.append(position)
        self.chosen[position] = actors
        for o in op.outputs:
            self.at[o] = actors
        if not self.fixed_values.issuperset(op.reads):
            for r in op.reads:
                self._need(r, actors)

    # ---- results

    def _place_results(self) -> None:
        """Choose the actors that store each result.

        If the caller asked for certain actors, these are chosen. Otherwise, if the result is the next value
        of an input (such as a training state), the actors of this input are chosen. Otherwise, the actors
        that make the result are chosen. If a result is an unchanged input for which no actors are known yet,
        none are chosen: the result stays on the actors that already store the input, and is recorded in
        `handed_back`.
        """
        results = [r for r in self.step.outputs if isinstance(r, int)]
        assert len(results) == len(self.step.outputs), "constant results are made by an operation"
        continued = {k: self.step.inputs[arg] for k, arg in self.step.continues.items()}
        homes: list[set[ActorId]] = [set() for _ in results]
        untouched = self.step.untouched
        for k in sorted(range(len(results)), key=untouched.__contains__):
            # Untouched results come last, since another result may put their input on actors.
            old = self.homes.get(continued[k], ()) if k in continued else ()
            wanted = self.step.result_homes.get(k, ())
            if k in untouched and not (wanted or old or untouched[k] in self.homes):
                self.handed_back[k] = untouched[k]
                continue
            homes[k] = set(wanted) or set(old) or set(self._actors_having(results[k])) or {0}
            self._need(results[k], homes[k])
            if old:
                self._need(continued[k], homes[k])
        # A later result may have put an argument on more actors: the result that continues it goes to these,
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

    def _actors_having(self, ref: int) -> Set[ActorId]:
        """Return the actors that have a result of the step.

        If no actor has needed the result so far, return one actor that is likely to make it, if any is known.
        """
        i = self.producer.get(ref)
        where = self._where(ref)
        return where if not where or i is None or self._run_on(i) else {min(where)}


# ---------------------------------------------------------------- levels


def _find_levels(
    step: OuterStep, actors: Mapping[int, Actors], producer: Mapping[int, int], users: Mapping[int, list[int]]
) -> tuple[dict[tuple[int, ActorId], int], dict[int, int], int]:
    """Assign a level to each operation and loop, so that data is sent to other actors only between levels.

    If several levels are possible, an operation gets the last one, since an early result would occupy memory
    until it is used.

    Args:
        step: the step, in which each loop is a single item.
        actors: the actors that run each operation, by its position.
        producer: a dictionary from the id of a value to the position of the operation that makes it.
        users: a dictionary from the id of a value to the positions of the operations that read it.

    Returns:
        A tuple of three: a dictionary from (position of an operation, actor) to the operation's level on the
        actor; a dictionary from the position of a loop to the loop's level; and the number of levels.
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
        """Return the first level at which an operation that runs on `actor` can read `value`."""
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
