"""Assign a pipeline stage and a direction, forward or backward, to each operation of a microbatch loop.

Light operations get neither a stage nor a direction. These are cheap operations that read only inputs of the
loop's body and results of other light operations. Every task that needs the result of a light operation
repeats it, which costs less than keeping or sending the result. `DESIGN.md` 2 has the rules.

Source: the JaxPP paper, sections "Stage Marking" and "Placement Inference".
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import TypeAlias

from jaxpp_async.compiler.cond_split import SMALL_BYTES
from jaxpp_async.compiler.finish_tasks import BackwardOps, choose_finishes
from jaxpp_async.compiler.ir import Loop, Op, Ref, Types
from jaxpp_async.compiler.late_forward import ForwardOps, choose_late_forwards
from jaxpp_async.compiler.primitives import ENLARGING, LIGHT, MARKER, MARKER_SIDE
from jaxpp_async.errors import StageError, UnsupportedError

TaskKey: TypeAlias = tuple[str, int]
"""The kind and stage of a task, such as `("fwd", 0)`, `("bwd", 2)` or `("finish", 1)`."""

FORWARD, BACKWARD, LIGHTWEIGHT, MARK = "forward", "backward", "light", "mark"
FINISH = "finish"

MUCH_SMALLER = 16
"""By what factor a value has to be smaller than a gradient to be sent to it rather than the gradient."""

_TASK_KINDS = {FORWARD: "fwd", BACKWARD: "bwd", FINISH: "finish", MARK: "fwd"}


class StageAssignment:
    """The stage and direction of each operation of a loop's body, which the constructor computes.

    Operations are identified by their position in the body. Markers are operations that `pipeline_yield` adds
    at the end of each stage: a `MARKER` for the values themselves, and a `MARKER_SIDE` for their tangents or
    cotangents at the same stage boundary. A marker returns the values that it is given. Light operations are
    cheap: each task that needs the result of one computes it again.

    Args:
        loop: the microbatch loop.
        types: the type of each value.

    Attributes:
        kind: for each operation, one of `FORWARD`, `BACKWARD`, `FINISH` (an operation on gradients that waits
            for an earlier stage's backward; see `finish_tasks`), `LIGHTWEIGHT` (a light operation) and `MARK`
            (a marker of the forward).
        stage: the stage of each operation; None for light operations.
        alias: a dictionary. Its keys are the ids of the results of markers and of operations in `skipped`;
            its values are the values to read instead.
        forward_stages: a dictionary from the id of a value to the stages that make or use the value in the
            forward pass.
        num_uses: how often each value is read or returned, directly or as a marker's result.
        skipped: the positions of operations that do not run, since an earlier stage already made the same
            results.

    Raises:
        StageError: a stage needs a value of a later stage of the same microbatch.
        UnsupportedError: the marker of a gradient cannot be matched with its `pipeline_yield` in the forward.
    """

    def __init__(self, loop: Loop, types: Types) -> None:
        self.loop, self.body, self.types = loop, loop.body, types
        self.invariants = frozenset(loop.body_inputs()[0])
        self.ops: list[Op] = [op for op in loop.body.ops if isinstance(op, Op)]
        self.producer = {o: i for i, op in enumerate(self.ops) for o in op.outputs if o >= 0}
        self.users: dict[int, list[int]] = defaultdict(list)
        for i, op in enumerate(self.ops):
            for r in op.reads:
                self.users[r].append(i)
        self.markers = [i for i, op in enumerate(self.ops) if op.name == MARKER]
        self.marker_index = {i: k for k, i in enumerate(self.markers)}
        self.num_stages = len(self.markers) + 1
        self.stage_names = tuple(self.ops[i].params.get("name") for i in self.markers)
        self.alias = self._aliases()
        self.kind: list[str] = [FORWARD] * len(self.ops)
        self.stage: list[int | None] = [None] * len(self.ops)
        self.num_uses = self._count_uses()
        self._classify()
        self.forward_stages: dict[int, set[int]] = {}
        self._place_forward()
        self._move_late_forwards()
        self.forward_stages = self._find_forward_stages()
        self._place_backward()
        self._defer_finishes()
        self.skipped = self._find_skipped()
        if self.skipped:
            self.forward_stages = self._find_forward_stages()

    def _aliases(self) -> dict[int, Ref]:
        """Return the value that a stage marker was given for each of its results, by the id of the result."""
        alias: dict[int, Ref] = {}
        for op in self.ops:
            if op.name == MARKER:
                alias.update(zip(op.outputs[:-1], op.inputs, strict=True))
            elif op.name == MARKER_SIDE:
                alias.update(zip(op.outputs, op.inputs[1:], strict=True))
        return alias

    def _count_uses(self) -> Counter[int]:
        """Return how often each value is read or returned by the loop's body.

        A use of a stage marker's result counts as a use of the value that the marker was given.
        """
        reads = [r for op in self.ops if op.name not in (MARKER, MARKER_SIDE) for r in op.reads]
        reads += [r for r in self.body.outputs if isinstance(r, int)]
        return Counter([self.root(r) if r in self.alias else r for r in reads])

    def resolve(self, ref: Ref) -> Ref:
        """Return the value that an operand stands for, if stage markers are ignored.

        A stage marker returns the values that it is given. So if `ref` is the result of a marker, continue
        with the value that the marker was given, until the value is no marker's result. If no marker returned
        `ref`, return `ref`.
        """
        while isinstance(ref, int) and ref in self.alias:
            ref = self.alias[ref]
        return ref

    def _boundary_of(self, position: int) -> int:
        """Return the stage boundary of a marker of tangents or cotangents; 0 is between stages 0 and 1.

        Args:
            position: the position of the marker.
        """
        op = self.ops[position]
        token = op.inputs[0]
        source = self.producer.get(token) if isinstance(token, int) else None
        if source is None or source not in self.marker_index:
            raise UnsupportedError(
                f"{op.line}: the gradient of pipeline_yield was separated from its forward side (by a scan "
                "or a custom rule); move the pipeline_yield out of it"
            )
        return self.marker_index[source]

    # ---- forward, backward or light

    def _classify(self) -> None:
        """Set the kind of each operation in `kind`: forward, backward, light or marker.

        Light operations are cheap operations that every task that needs their results repeats.
        """
        ancestors = self._marker_ancestors()
        computed: set[int] = set()  # results of operations that are not light
        backward: set[int] = set()
        for i, op in enumerate(self.ops):
            reads = op.reads
            after = not backward.isdisjoint(reads)
            if after and op.name == MARKER_SIDE and op.params["side"] == "tangent":
                raise StageError(
                    f"{op.line}: the gradient of a gradient that goes through this pipeline_yield needs its "
                    "stages forward again, behind the backward pass of the same microbatch; take the inner "
                    "gradient without a pipeline_yield inside"
                )
            if op.name == MARKER or (op.name == MARKER_SIDE and op.params["side"] == "tangent"):
                kind = MARK
            elif after or op.name == MARKER_SIDE:
                kind = BACKWARD
            elif op.name in LIGHT and computed.isdisjoint(reads):
                kind = LIGHTWEIGHT
            elif op.transposed and i not in ancestors:
                kind = BACKWARD
            else:
                kind = FORWARD
            if i in ancestors and kind == BACKWARD:
                what = "the gradient of pipeline_yield" if op.name == MARKER_SIDE else f"`{op.name}`"
                raise StageError(
                    f"{op.line}: stage {ancestors[i]} needs {what}, which depends on the backward pass of a "
                    "later stage in the same microbatch; a stage may use only what earlier stages made: take "
                    "this gradient without a pipeline_yield inside, use it behind the last one, or make it "
                    "in an accumulate_grads loop of its own first, reduced by Stack(), and give the result "
                    "to this loop in its batch"
                )
            self.kind[i] = kind
            if kind == BACKWARD:
                backward.update(op.outputs)
            if kind != LIGHTWEIGHT:
                computed.update(op.outputs)

    def _marker_ancestors(self) -> dict[int, int]:
        """Find the operations whose results stage markers need, directly or through other operations.

        Returns:
            A dictionary. Its keys are the positions of these operations; its values are the first stage whose
            marker needs the operation.
        """
        found: dict[int, int] = {}
        for k, position in enumerate(self.markers):
            stack = list(self.ops[position].reads)
            while stack:
                i = self.producer.get(stack.pop())
                if i is None or i in found or i in self.marker_index:
                    continue
                found[i] = k
                stack.extend(self.ops[i].reads)
        self._ancestors = found
        return found

    # ---- stages of forward operations

    def _place_forward(self) -> None:
        """Choose the stage of each forward operation.

        An operation that stage markers need gets the first stage whose marker needs the operation. Any other
        operation gets the latest stage of its operands. If its operands have no stage (they are inputs), the
        operation gets a stage that uses the same weight, but no later stage than the operation's first user;
        see `_stage_beside_weights`.
        """
        for i, op in enumerate(self.ops):
            if op.name == MARKER:
                self.stage[i] = self.marker_index[i] + 1
            elif self.kind[i] == MARK:
                self.stage[i] = self._boundary_of(i) + 1
            elif self.kind[i] == FORWARD:
                self.stage[i] = self._ancestors[i] if i in self._ancestors else self._latest_operand(op)
        left = [i for i, kind in enumerate(self.kind) if kind == FORWARD and self.stage[i] is None]
        if left:
            self.forward_stages = self._find_forward_stages()
        for i in reversed(left):
            users = [self.stage[u] for o in self.ops[i].outputs for u in self._users(o)]
            limit = min((s for s in users if s is not None), default=None)
            if limit is not None:
                self.stage[i] = self._stage_beside_weights(self.ops[i], limit, limit)
        # A value that only the backward uses is made in the stage of its operands.
        for i in left:
            if self.stage[i] is None and (latest := self._latest_operand(self.ops[i])) is not None:
                self.stage[i] = latest
            elif self.stage[i] is None:
                self.stage[i] = self._stage_beside_weights(self.ops[i], self.num_stages - 1, 0)

    def _move_late_forwards(self) -> None:
        """Move forward operations whose results only later stages read to these stages, if this sends fewer
        bytes; see `late_forward`."""
        behind = list(itertools.accumulate(op.name == MARKER for op in self.ops))
        forward = {
            i: stage
            for i, (kind, stage) in enumerate(zip(self.kind, self.stage, strict=True))
            if kind == FORWARD and stage is not None
        }
        free = {
            i: behind[i]
            for i in forward
            if i not in self._ancestors and self._latest_operand(self.ops[i]) is not None
        }
        if not any(behind[i] > forward[i] for i in free):
            return
        moved = choose_late_forwards(
            ForwardOps(
                stage=forward,
                written_in=free,
                reads={i: self._made_forward(self.ops[i]) for i in forward},
                makes={i: [o for o in self.ops[i].outputs if o >= 0] for i in forward},
                users=self._users_behind_markers,
                weights={i: self._large_weights(self.ops[i]) for i in forward},
                sizes=self.types.sizes,
            )
        )
        self.stage = [moved.get(i, stage) for i, stage in enumerate(self.stage)]
        for i in free if moved else ():  # what reads the results of a moved operation is not earlier
            latest, own = self._latest_operand(self.ops[i]), self.stage[i]
            if latest is not None and own is not None:
                self.stage[i] = max(own, latest)

    def _made_forward(self, op: Op) -> list[int]:
        """Return the values of forward operations that an operation reads, also through light operations."""
        found: dict[int, None] = {}
        stack = list(op.reads)
        while stack:
            v = self.root(stack.pop())
            if (p := self.producer.get(v)) is None:
                continue
            if self.kind[p] == LIGHTWEIGHT:
                stack += self.ops[p].reads
            elif self.kind[p] == FORWARD:
                found[v] = None
        return list(found)

    def _large_weights(self, op: Op) -> set[int]:
        roots = {r for v in op.reads for r in self._roots(v) if r in self.invariants}
        return {r for r in roots if self.types.sizes[r] > SMALL_BYTES}

    def _users_behind_markers(self, value: int) -> list[int]:
        return self._users_of_root[value]

    @cached_property
    def _users_of_root(self) -> dict[int, list[int]]:
        """The positions of the operations that read each value, also as the result of stage markers."""
        found: dict[int, list[int]] = defaultdict(list)
        for i, op in enumerate(self.ops):
            if self.kind[i] not in (LIGHTWEIGHT, MARK) and op.name != MARKER_SIDE:
                for r in op.reads:
                    found[self.root(r)].append(i)
        return found

    def _latest_operand(self, op: Op) -> int | None:
        """Return the latest stage that makes an operand of `op`; None if no operand has a stage yet."""
        stages = [self.stage[p] for p in self._producers(op)]
        return max((s for s in stages if s is not None), default=None)

    def _stage_beside_weights(self, op: Op, limit: int, otherwise: int) -> int:
        """Return a stage that uses the same weight as an operation, such as the sum of squares in a penalty.

        A weight is here an input of the loop's body that is the same for all microbatches and is larger than
        the operation's result.

        Args:
            op: the operation.
            limit: the last stage that may be returned.
            otherwise: the stage to return if no stage up to `limit` uses such a weight.

        Returns:
            The last stage up to `limit` that uses the weight, or `otherwise`.
        """
        made = sum(self.types[o].aval.size_bytes for o in op.outputs if o >= 0)
        roots = {r for v in op.reads for r in self._roots(v) if r in self.invariants}
        large = [r for r in roots if self.types[r].aval.size_bytes > made]
        held = set[int]().union(*(self.forward_stages.get(r, ()) for r in large))
        return max((s for s in held if s <= limit), default=otherwise)

    def _roots(self, value: int) -> set[int]:
        """Return the ids of the body's inputs that `value` is computed from by cheap operations alone.

        If `value` is itself an input, only its id is returned. Inputs that reach `value` only through
        operations that are not cheap are left out.
        """
        found: set[int] = set()
        stack = [value]
        while stack:
            v = self.root(stack.pop())
            p = self.producer.get(v)
            if p is None:
                found.add(v)
            elif self.kind[p] == LIGHTWEIGHT:
                stack += self.ops[p].reads
        return found

    def _producers(self, op: Op) -> Iterable[int]:
        for r in op.reads:
            if (p := self.producer.get(r)) is not None and self.kind[p] != LIGHTWEIGHT:
                yield p

    def _users(self, value: int) -> list[int]:
        """Return the positions of the operations that use a value.

        A light operation (a cheap one, which tasks repeat) is replaced by the users of its results.
        """
        found = []
        for u in self.users.get(value, ()):
            if self.kind[u] == LIGHTWEIGHT:
                found += [v for o in self.ops[u].outputs for v in self._users(o)]
            else:
                found.append(u)
        return found

    # ---- stages of backward operations

    def _place_backward(self) -> None:
        """Choose the stage of each backward operation.

        An operation gets the latest stage whose forward makes or uses all of the operation's operands but the
        cotangents. But the stage is at most the lowest stage of the cotangents that the operation reads,
        since backward stages run in descending order. If an operation would then run after the operations
        that use its results, the operation gets the first of their stages to run instead.
        """
        for i, op in enumerate(self.ops):
            if self.kind[i] != BACKWARD:
                continue
            if op.name == MARKER_SIDE:
                self.stage[i] = self._boundary_of(i)
                continue
            limit = self._last_stage_allowed(op)
            if limit is None:
                continue
            last = self._last_forward_stage(op, limit)
            self.stage[i] = limit if last is None else last
        # Some operations read only inputs of the loop's body: a checkpoint repeats them, or their cotangent
        # is a constant, as that of a sum is. Such an operation belongs to the stage that uses it first. So
        # does an operation whose operands would put it in a stage that runs after its user's: its operands
        # are values of an early stage alone, which a later stage hands on.
        for i in reversed(range(len(self.ops))):
            if self.kind[i] != BACKWARD or self.ops[i].name == MARKER_SIDE:
                continue
            users = [self._stage_taking_from(u) for o in self.ops[i].outputs for u in self._users(o)]
            wanted = max((s for s in users if s is not None), default=None)
            stage = self.stage[i]
            if stage is None:
                last = self._last_forward_stage(self.ops[i], self.num_stages - 1)
                self.stage[i] = wanted if wanted is not None else last or 0
            elif wanted is not None:
                self.stage[i] = max(stage, wanted)

    def _defer_finishes(self) -> None:
        """Move operations that scale gradients by a scalar of an earlier stage's backward to finish tasks."""
        backward = {
            i: stage
            for i, (kind, stage) in enumerate(zip(self.kind, self.stage, strict=True))
            if kind == BACKWARD and self.ops[i].name != MARKER_SIDE and stage is not None
        }
        if not any(
            self.kind[p] == BACKWARD and (stage := self.stage[p]) is not None and stage > backward[i]
            for i in backward
            for r in self.ops[i].reads
            if (p := self.producer.get(self.root(r))) is not None
        ):
            return
        gradients, fits = dict[int, list[int]](), dict[int, bool]()
        unbound = self._unbound_forwards()
        for i in backward:
            made = [
                (v, p)
                for v in dict.fromkeys(map(self.root, self.ops[i].reads))
                if (p := self.producer.get(v)) is not None
                and self.kind[p] != LIGHTWEIGHT
                and p not in self._fills
                and p not in unbound
            ]
            small = max([SMALL_BYTES, *(self.types.sizes[v] // MUCH_SMALLER for v, _ in made)])
            large = [(v, p) for v, p in made if self.types.sizes[v] > small]
            gradients[i] = [v for v, p in large if p in backward]
            # What comes across a boundary is the gradient of an activation, and belongs to this stage.
            crosses = any(
                (p := self.producer.get(r)) is not None and self.ops[p].name == MARKER_SIDE
                for r in self.ops[i].reads
            )
            fits[i] = len(gradients[i]) == len(large) and not crosses
        found = choose_finishes(
            BackwardOps(backward, gradients, fits, self.producer.__getitem__, self._readers_of_results)
        )
        for i, stage in found.items():
            self.kind[i], self.stage[i] = FINISH, stage
        for i in sorted(unbound, reverse=True) if found else ():
            readers = self._readers_of_results(i) or ()
            homes = {(self.kind[u], self.stage[u]) for u in readers}
            if len(homes) == 1:
                self.kind[i], self.stage[i] = homes.pop()

    def _unbound_forwards(self) -> set[int]:
        """Return the positions of the forward operations that any task can run and that only a backward
        reads, such as noise that is added to gradients."""
        found: set[int] = set()
        for i, op in enumerate(self.ops):
            if self.kind[i] == FORWARD and i not in self._ancestors:
                made = self._made_forward(op)
                if all(self.producer[v] in found for v in made):
                    found.add(i)
        for i in sorted(found, reverse=True):
            readers = self._readers_of_results(i)
            if not readers or any(self.kind[u] != BACKWARD and u not in found for u in readers):
                found.remove(i)
        return found

    def _readers_of_results(self, position: int) -> list[int] | None:
        """Return the positions of the operations that read the results of an operation; None if a marker
        reads them, too."""
        made = [o for o in self.ops[position].outputs if o >= 0]
        if any(self.ops[u].name == MARKER_SIDE for o in made for u in self.users.get(o, ())):
            return None
        return [u for o in made for u in self._users_of_root[o]]

    @cached_property
    def _fills(self) -> frozenset[int]:
        """The positions of the operations that only fill an array with a value that is much smaller."""
        found: set[int] = set()
        for i, op in enumerate(self.ops):
            if op.name in ENLARGING and len(op.reads) == 1 and op.outputs[0] >= 0:
                source = self.root(op.reads[0])
                limit = max(SMALL_BYTES, self.types.sizes[op.outputs[0]] // MUCH_SMALLER)
                if self.producer.get(source) in found or self.types.sizes[source] <= limit:
                    found.add(i)
        return frozenset(found)

    def fills_for_finish(self) -> dict[int, Op]:
        """Return the operations that fill an array with a small value, which finish tasks repeat, by
        position."""
        if FINISH not in self.kind:
            return {}
        return {i: self.ops[i] for i in self._fills if self.kind[i] in (BACKWARD, FORWARD)}

    def _last_forward_stage(self, op: Op, limit: int) -> int | None:
        """Return the last stage whose forward makes or uses all operands of a backward operation.

        Operands that are cotangents are ignored.

        Args:
            op: the backward operation.
            limit: the last stage that may be returned.

        Returns:
            The stage. `limit` if no operand restricts the choice. None if no stage up to `limit` makes or
            uses all of these operands.
        """
        common: set[int] | None = None
        for r in op.reads:
            p = self.producer.get(r)
            if p is not None and self.kind[p] == BACKWARD:
                continue
            held = self.forward_stages.get(self.root(r) if r in self.alias else r)
            if held is not None:
                common = held if common is None or common is held else common & held
        if common is None:
            return limit
        return max([s for s in common if s <= limit], default=None)

    def _stage_taking_from(self, user: int) -> int | None:
        """Return the stage whose backward has to make a value that an operation reads.

        For the cotangent marker at the end of a stage, this is the next stage, from which the marker passes
        values on. For any other operation, this is the stage of that operation.

        Args:
            user: the position of the operation.

        Returns:
            The stage; None if the operation has no stage yet.
        """
        stage = self.stage[user]
        return stage + 1 if stage is not None and self.ops[user].name == MARKER_SIDE else stage

    def _last_stage_allowed(self, op: Op) -> int | None:
        """Return the last stage in whose backward an operation may run.

        If the operation reads cotangents, this is the lowest stage of these cotangents. Otherwise, this is
        the highest stage of the operation's operands.

        Returns:
            The stage; None if no operand has a stage yet.
        """
        first: int | None = None
        last: int | None = None
        for r in op.reads:
            p = self.producer.get(r)
            stage = None if p is None else self.stage[p]
            if p is None or stage is None:
                continue
            if self.kind[p] == BACKWARD:
                first = stage if first is None or stage < first else first
            elif last is None or stage > last:
                last = stage
        return last if first is None else first

    def root(self, value: int) -> int:
        """Return the id of the value that `value` stands for, if stage markers are ignored; see `resolve`.

        If `value` stands for a constant, which has no id, or if no marker returned `value`, return `value`.
        """
        resolved = self.resolve(value)
        return resolved if isinstance(resolved, int) else value

    def _find_forward_stages(self) -> dict[int, set[int]]:
        """Return the stages that make or use each value in the forward, by the value's id."""
        forward_stages: dict[int, set[int]] = defaultdict(set)
        for i, op in enumerate(self.ops):
            if self.kind[i] != FORWARD:
                continue
            if (stage := self.stage[i]) is None:
                continue
            for o in op.outputs:
                forward_stages[o].add(stage)
            for r in op.reads:
                if r in self.alias or stage not in forward_stages[r]:
                    self._add_forward_stage(forward_stages, r, stage)
        return forward_stages

    def _add_forward_stage(self, forward_stages: dict[int, set[int]], value: int, stage: int) -> None:
        stack = [value]
        while stack:
            root = self.root(stack.pop())
            if stage in forward_stages[root]:
                continue
            forward_stages[root].add(stage)
            p = self.producer.get(root)
            if p is not None and self.kind[p] == LIGHTWEIGHT:
                stack += self.ops[p].reads

    # ---- operations that a checkpoint need not repeat

    def _find_skipped(self) -> set[int]:
        """Return the positions of operations that need not run, since an earlier stage made the same results.

        A checkpoint repeats operations of the forward in the backward. If the original operation is in an
        earlier stage than its repetition, a skip connection has already sent the original's results to the
        stage of the repetition. This method adds entries to `alias` so that the results of the original are
        read instead of those of the repetition.
        """
        if not any("repeats" in op.params for op in self.ops):
            return set()
        first = {self._signature(op): i for i, op in enumerate(self.ops) if self.kind[i] == FORWARD}
        skipped: set[int] = set()
        for i, op in enumerate(self.ops):
            if (repeats := op.params.get("repeats")) is None or self.kind[i] == LIGHTWEIGHT:
                continue
            twin = first.get(self._signature(op))
            if twin is None or not self._is_in_earlier_stage(twin, i) or not repeats(self.ops[twin]):
                continue
            pairs = [(o, t) for o, t in zip(op.outputs, self.ops[twin].outputs, strict=True) if o >= 0]
            if any(t < 0 for _, t in pairs):
                continue
            self.alias.update(pairs)
            skipped.add(i)
        return skipped

    def _is_in_earlier_stage(self, a: int, b: int) -> bool:
        """Return whether the operation at position `a` is in an earlier stage than the one at `b`."""
        first, second = self.stage[a], self.stage[b]
        return first is not None and second is not None and first < second

    def _signature(self, op: Op) -> tuple:
        refs = (self.resolve(r) for r in op.inputs)
        return op.name, tuple(r if isinstance(r, int) else (str(r.value), str(type(r.value))) for r in refs)

    # ---- the result

    def task_of(self, value: Ref) -> TaskKey | None:
        """Return the task that makes a value.

        Returns:
            The kind and stage of the task. None for constants, inputs of the loop's body, and results of
            light operations (cheap ones, which tasks repeat).
        """
        p = self.producer.get(value) if isinstance(value, int) else None
        if p is None or self.kind[p] == LIGHTWEIGHT:
            return None
        stage = self.stage[p]
        assert stage is not None
        return (_TASK_KINDS[self.kind[p]], stage)
