"""compiler.stages: a loop's flat body in, a stage and a direction for each operation out. No jax, no schedule.

Forward, backward, or light: what is light depends on no computed value and is repeated wherever it is used, because
computing it again is cheaper than keeping or sending it. `DESIGN.md` 2 has the rules.

Source: the JaxPP paper, sections "Stage Marking" and "Placement Inference".
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TypeAlias

from jaxpp_async.compiler.ir import Loop, Op, Ref, Types
from jaxpp_async.compiler.primitives import LIGHT, MARKER, MARKER_SIDE
from jaxpp_async.errors import StageError, UnsupportedError

TaskKey: TypeAlias = tuple[str, int]
"""Kind and stage: `("fwd", 0)`, `("bwd", 2)`."""

FORWARD, BACKWARD, LIGHTWEIGHT, MARK = "forward", "backward", "light", "mark"


class Stages:
    """A stage for each operation of a loop's body. Operations are named by their position in the body.

    Args:
        loop: the loop.
        types: of its values.

    Raises:
        StageError: a stage needs a value of a later stage of the same microbatch.
        UnsupportedError: a cotangent marker's forward side cannot be found.
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
        markers = [i for i, op in enumerate(self.ops) if op.name == MARKER]
        self.marker_index = {i: k for k, i in enumerate(markers)}
        self.markers = markers
        self.num_stages = len(markers) + 1
        self.stage_names = tuple(self.ops[i].params.get("name") for i in markers)
        self.alias = self._aliases()
        self.kind: list[str] = [FORWARD] * len(self.ops)
        self.stage: list[int | None] = [None] * len(self.ops)
        self.num_uses = self._count_uses()
        self._classify()
        self._place_forward()
        self.held_in = self.homes()
        self._place_backward()
        self.reused = self._reuse()
        if self.reused:
            self.held_in = self.homes()

    def _aliases(self) -> dict[int, Ref]:
        """Results of markers to the values they mark."""
        alias: dict[int, Ref] = {}
        for op in self.ops:
            if op.name == MARKER:
                alias.update(zip(op.outputs[:-1], op.inputs, strict=True))
            elif op.name == MARKER_SIDE:
                alias.update(zip(op.outputs, op.inputs[1:], strict=True))
        return alias

    def _count_uses(self) -> Counter[int]:
        """How often each value is read or returned, under its own name or behind markers."""
        reads = [r for op in self.ops if op.name not in (MARKER, MARKER_SIDE) for r in op.reads]
        reads += [r for r in self.body.outputs if isinstance(r, int)]
        return Counter([self.root(r) if r in self.alias else r for r in reads])

    def resolve(self, ref: Ref) -> Ref:
        while isinstance(ref, int) and ref in self.alias:
            ref = self.alias[ref]
        return ref

    def _token_marker(self, position: int) -> int:
        """The stage boundary that a side marker belongs to."""
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
        """Tell forward, backward and light operations apart."""
        ancestors = self._marker_ancestors()
        computed: set[int] = set()  # values that are neither roots nor light
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
        """Operations that some marker depends on, with the first such marker's stage."""
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
        """The earliest stage whose marker needs it; else the latest of its operands; else its first "
        "user's."""
        for i, op in enumerate(self.ops):
            if op.name == MARKER:
                self.stage[i] = self.marker_index[i] + 1
            elif self.kind[i] == MARK:
                self.stage[i] = self._token_marker(i) + 1
            elif self.kind[i] == FORWARD:
                self.stage[i] = self._ancestors[i] if i in self._ancestors else self._latest_operand(op)
        left = [i for i, kind in enumerate(self.kind) if kind == FORWARD and self.stage[i] is None]
        homes = self.homes() if left else {}
        for i in reversed(left):
            users = [self.stage[u] for o in self.ops[i].outputs for u in self._users(o)]
            limit = min((s for s in users if s is not None), default=None)
            self.stage[i] = limit if limit is None else self._beside_weights(self.ops[i], homes, limit, limit)
        # What only the backward uses is made beside its operands.
        for i in left:
            if self.stage[i] is None:
                op, latest = self.ops[i], self._latest_operand(self.ops[i])
                self.stage[i] = (
                    self._beside_weights(op, homes, self.num_stages - 1, 0) if latest is None else latest
                )

    def _latest_operand(self, op: Op) -> int | None:
        """The last stage that makes an operand; None if none is known to."""
        stages = [self.stage[p] for p in self._producers(op)]
        return max((s for s in stages if s is not None), default=None)

    def _beside_weights(self, op: Op, homes: dict[int, set[int]], limit: int, otherwise: int) -> int:
        """The latest stage up to `limit` that holds a weight of which `op` makes less (a penalty's sum)."""
        made = sum(self.types[o].aval.size_bytes for o in op.outputs if o >= 0)
        roots = {r for v in op.reads for r in self._roots(v) if r in self.invariants}
        large = [r for r in roots if self.types[r].aval.size_bytes > made]
        held = set[int]().union(*(homes.get(r, ()) for r in large))
        return max((s for s in held if s <= limit), default=otherwise)

    def _roots(self, value: int) -> set[int]:
        """The loop's operands behind a light value."""
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
        """Who uses a value, looking through light operations."""
        found = []
        for u in self.users.get(value, ()):
            if self.kind[u] == LIGHTWEIGHT:
                found += [v for o in self.ops[u].outputs for v in self._users(o)]
            else:
                found.append(u)
        return found

    # ---- stages of backward operations

    def _place_backward(self) -> None:
        """The latest stage, not later than its cotangents', that already holds its other operands."""
        homes = self.held_in
        for i, op in enumerate(self.ops):
            if self.kind[i] != BACKWARD:
                continue
            if op.name == MARKER_SIDE:
                self.stage[i] = self._token_marker(i)
                continue
            limit = self._limit(op)
            if limit is None:
                continue
            last = self._last_home(op, homes, limit)
            self.stage[i] = limit if last is None else last
        # What comes from roots alone (a checkpoint computes it again, or the cotangent is a constant, as a
        # sum's is) belongs to whoever uses it first. So does what its operands would put behind its user:
        # values of an early stage alone, handed on at a later one.
        for i in reversed(range(len(self.ops))):
            if self.kind[i] != BACKWARD or self.ops[i].name == MARKER_SIDE:
                continue
            users = [self._wanted_by(u) for o in self.ops[i].outputs for u in self._users(o)]
            wanted = max((s for s in users if s is not None), default=None)
            stage = self.stage[i]
            if stage is None:
                last = self._last_home(self.ops[i], homes, self.num_stages - 1)
                self.stage[i] = wanted if wanted is not None else last or 0
            elif wanted is not None:
                self.stage[i] = max(stage, wanted)

    def _last_home(self, op: Op, homes: dict[int, set[int]], limit: int) -> int | None:
        """The last stage up to `limit` whose forward holds every operand of `op` that is no cotangent."""
        common: set[int] | None = None
        for r in op.reads:
            p = self.producer.get(r)
            if p is not None and self.kind[p] == BACKWARD:
                continue
            held = homes.get(self.root(r) if r in self.alias else r)
            if held is not None:
                common = held if common is None or common is held else common & held
        if common is None:
            return limit
        return max([s for s in common if s <= limit], default=None)

    def _wanted_by(self, user: int) -> int | None:
        """The stage whose backward hands a value to `user`: a cotangent marker takes it from the stage "
        "behind it."""
        stage = self.stage[user]
        return stage + 1 if stage is not None and self.ops[user].name == MARKER_SIDE else stage

    def _limit(self, op: Op) -> int | None:
        """The last stage whose backward may hold `op`: the first of its cotangents', or else the last of its other
        operands'. None when they do not say."""
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
        """The value behind markers."""
        resolved = self.resolve(value)
        return resolved if isinstance(resolved, int) else value

    def homes(self) -> dict[int, set[int]]:
        """Stages that hold a value in the forward pass: where it is made and where it is used."""
        homes: dict[int, set[int]] = defaultdict(set)
        for i, op in enumerate(self.ops):
            if self.kind[i] != FORWARD:
                continue
            stage = self.stage[i]
            if stage is None:
                continue
            for o in op.outputs:
                homes[o].add(stage)
            for r in op.reads:
                if r in self.alias or stage not in homes[r]:
                    self._add_home(homes, r, stage)
        return homes

    def _add_home(self, homes: dict[int, set[int]], value: int, stage: int) -> None:
        stack = [value]
        while stack:
            root = self.root(stack.pop())
            if stage in homes[root]:
                continue
            homes[root].add(stage)
            p = self.producer.get(root)
            if p is not None and self.kind[p] == LIGHTWEIGHT:
                stack += self.ops[p].reads

    # ---- what a checkpoint need not compute again

    def _reuse(self) -> set[int]:
        """Positions of operations that a checkpoint repeats of an earlier stage: that stage's values take their place.

        They are at home where the repetition would run: a skip connection brought them there.
        """
        if not any("repeats" in op.params for op in self.ops):
            return set()
        first = {self._signature(op): i for i, op in enumerate(self.ops) if self.kind[i] == FORWARD}
        reused: set[int] = set()
        for i, op in enumerate(self.ops):
            if (repeats := op.params.get("repeats")) is None or self.kind[i] == LIGHTWEIGHT:
                continue
            twin = first.get(self._signature(op))
            if twin is None or not self._is_earlier(twin, i) or not repeats(self.ops[twin]):
                continue
            pairs = [(o, t) for o, t in zip(op.outputs, self.ops[twin].outputs, strict=True) if o >= 0]
            if any(t < 0 for _, t in pairs):
                continue
            self.alias.update(pairs)
            reused.add(i)
        return reused

    def _is_earlier(self, a: int, b: int) -> bool:
        """Whether `a` stands in an earlier stage than `b`."""
        first, second = self.stage[a], self.stage[b]
        return first is not None and second is not None and first < second

    def _signature(self, op: Op) -> tuple:
        refs = (self.resolve(r) for r in op.inputs)
        return op.name, tuple(r if isinstance(r, int) else (str(r.value), str(type(r.value))) for r in refs)

    # ---- what came of it

    def task_of(self, value: Ref) -> TaskKey | None:
        """The task that makes a value; None for roots, constants and light values."""
        p = self.producer.get(value) if isinstance(value, int) else None
        if p is None or self.kind[p] == LIGHTWEIGHT:
            return None
        stage = self.stage[p]
        assert stage is not None
        return ("bwd" if self.kind[p] == BACKWARD else "fwd", stage)
