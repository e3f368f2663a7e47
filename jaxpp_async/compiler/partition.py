"""compiler.partition: a loop's flat body in, its stages' forward and backward tasks out. No jax, no schedule.

Every operation goes to exactly one task, except light ones that depend on no computed value: those are repeated
wherever they are used, because computing them again is cheaper than keeping or sending them. `DESIGN.md` 2 has the
rules.

Source: the JaxPP paper, sections "Stage Marking", "Placement Inference" and "Weight Sharing".
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from jaxpp_async.compiler.ir import Lit, Loop, Op, Ref
from jaxpp_async.errors import StageError, UnsupportedError
from jaxpp_async.program import TaskType

MARKER, MARKER_SIDE = "pipeline_yield", "pipeline_yield_side"

TaskKey: TypeAlias = tuple[TaskType, int]

# Layout changes, casts, elementwise arithmetic and constants. Products, reductions, random bits and control flow are
# not here: computing those twice costs more than a buffer.
LIGHT = frozenset(
    [
        "abs",
        "add",
        "add_any",
        "and",
        "broadcast_in_dim",
        "ceil",
        "clamp",
        "concatenate",
        "convert_element_type",
        "copy",
        "copy_p",
        "cos",
        "cumsum",
        "div",
        "eq",
        "exp",
        "expand_dims",
        "floor",
        "ge",
        "gt",
        "integer_pow",
        "iota",
        "is_finite",
        "le",
        "log",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "not",
        "or",
        "pad",
        "pow",
        "random_fold_in",
        "random_split",
        "random_unwrap",
        "random_wrap",
        "random_seed",
        "reduce_precision",
        "rem",
        "reshape",
        "rev",
        "round",
        "rsqrt",
        "select_n",
        "sign",
        "sin",
        "slice",
        "split",
        "sqrt",
        "square",
        "squeeze",
        "stop_gradient",
        "sub",
        "tan",
        "tanh",
        "transpose",
        "xor",
        "sharding_constraint",
        "shard",
        "shift_left",
        "shift_right_logical",
        "full",
    ]
)


@dataclass(frozen=True, eq=False)
class StageTask:
    """What one task of the schedule computes, the same for every microbatch. `ops` are in program order."""

    key: TaskKey
    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class OutputPart:
    """A value that one task adds to one result of the loop."""

    value: Ref
    task: TaskKey


@dataclass(frozen=True, eq=False)
class StagedLoop:
    """A loop, cut.

    Args:
        num_stages: markers + 1.
        tasks: the non-empty ones.
        outputs: for each result of the loop, the partial values that are accumulated apart and added at the end.
        loop: where it came from.
        stage_names: the user's names for the markers, one a stage boundary (None: unnamed).
    """

    num_stages: int
    tasks: dict[TaskKey, StageTask]
    outputs: tuple[tuple[OutputPart, ...], ...]
    loop: Loop
    stage_names: tuple[str | None, ...]


def partition(loop: Loop) -> StagedLoop:
    """Cut a loop's body at its markers.

    Raises:
        StageError: a stage needs a value of a later stage of the same microbatch.
        UnsupportedError: a cotangent marker's forward side cannot be found.
    """
    cut = _Partition(loop)
    cut.classify()
    cut.place_forward()
    cut.place_backward()
    outputs = tuple(cut.output_parts(i) for i in range(len(loop.outputs)))
    return StagedLoop(cut.num_stages, cut.tasks(outputs), outputs, loop, cut.stage_names)


FORWARD, BACKWARD, LIGHTWEIGHT, MARK = "forward", "backward", "light", "mark"


class _Partition:
    """The working state of one cut. Operations are named by their position in the body."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.body = loop, loop.body
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
        self.dropped: set[int] = set()
        self.num_uses = self._count_uses()

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
        return Counter(self._root(r) for r in [*reads, *self.body.outputs] if isinstance(r, int))

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
                f"{op.line}: the gradient of pipeline_yield was separated from its forward side (by a scan or a custom "
                "rule); move the pipeline_yield out of it"
            )
        return self.marker_index[source]

    # ---- forward, backward or light

    def classify(self) -> None:
        """Tell forward, backward and light operations apart."""
        ancestors = self._marker_ancestors()
        computed: set[int] = set()  # values that are neither roots nor light
        backward: set[int] = set()
        for i, op in enumerate(self.ops):
            reads = op.reads
            if op.name == MARKER_SIDE and op.params["side"] == "tangent" and any(r in backward for r in reads):
                raise StageError(
                    f"{op.line}: the gradient of a gradient that goes through this pipeline_yield needs its stages "
                    "forward again, behind the backward pass of the same microbatch; take the inner gradient without a "
                    "pipeline_yield inside"
                )
            if op.name == MARKER or (op.name == MARKER_SIDE and op.params["side"] == "tangent"):
                kind = MARK
            elif op.name == MARKER_SIDE or any(r in backward for r in reads):
                kind = BACKWARD
            elif op.name in LIGHT and not any(r in computed for r in reads):
                kind = LIGHTWEIGHT
            elif op.transposed and i not in ancestors:
                kind = BACKWARD
            else:
                kind = FORWARD
            if i in ancestors and kind == BACKWARD:
                what = "the gradient of pipeline_yield" if op.name == MARKER_SIDE else f"`{op.name}`"
                raise StageError(
                    f"{op.line}: stage {ancestors[i]} needs {what}, which depends on the backward pass of a later "
                    "stage in the same microbatch; a stage may use only what earlier stages made: take this gradient "
                    "without a pipeline_yield inside, or use it behind the last one"
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

    def place_forward(self) -> None:
        """The earliest stage whose marker needs it; else the latest of its operands; else its first user's."""
        for i, op in enumerate(self.ops):
            if op.name == MARKER:
                self.stage[i] = self.marker_index[i] + 1
            elif self.kind[i] == MARK:
                self.stage[i] = self._token_marker(i) + 1
            elif self.kind[i] == FORWARD:
                operands = [self.stage[p] for p in self._producers(op) if self.stage[p] is not None]
                latest = max((s for s in operands if s is not None), default=None)
                self.stage[i] = self._ancestors.get(i, latest)
        for i in reversed(range(len(self.ops))):
            if self.kind[i] == FORWARD and self.stage[i] is None:
                users = [self.stage[u] for o in self.ops[i].outputs for u in self._users(o)]
                self.stage[i] = min((s for s in users if s is not None), default=None)
        # What only the backward uses is made beside its operands.
        for i, op in enumerate(self.ops):
            if self.kind[i] == FORWARD and self.stage[i] is None:
                operands = [self.stage[p] for p in self._producers(op)]
                self.stage[i] = max((s for s in operands if s is not None), default=0)

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

    def place_backward(self) -> None:
        """The latest stage, not later than its cotangents', that already holds its other operands."""
        homes = self._homes()
        for i, op in enumerate(self.ops):
            if self.kind[i] != BACKWARD:
                continue
            if op.name == MARKER_SIDE:
                self.stage[i] = self._token_marker(i)
                continue
            placed = [r for r in op.reads if self._stage_of(r) is not None]
            cotangents = [r for r in placed if self._kind_of(r) == BACKWARD]
            limit = self._limit(cotangents, placed)
            if limit is None:
                continue
            self.stage[i] = max(self._common_homes(op, homes, limit), default=limit)
        # What comes from roots alone (a checkpoint computes it again, or the cotangent is a constant, as a sum's is)
        # belongs to whoever uses it first.
        for i in reversed(range(len(self.ops))):
            if self.kind[i] == BACKWARD and self.stage[i] is None:
                users = [self._wanted_by(u) for o in self.ops[i].outputs for u in self._users(o)]
                held = self._common_homes(self.ops[i], homes, self.num_stages - 1)
                self.stage[i] = max((s for s in users if s is not None), default=max(held, default=0))

    def _common_homes(self, op: Op, homes: dict[int, set[int]], limit: int) -> set[int]:
        """Stages up to `limit` whose forward holds every operand of `op` that is no cotangent."""
        common = set(range(limit + 1))
        for r in op.reads:
            if self._kind_of(r) != BACKWARD:
                common &= homes.get(self._root(r), common)
        return common

    def _wanted_by(self, user: int) -> int | None:
        """The stage whose backward hands a value to `user`: a cotangent marker takes it from the stage behind it."""
        stage = self.stage[user]
        return stage + 1 if stage is not None and self.ops[user].name == MARKER_SIDE else stage

    def _limit(self, cotangents: list[int], placed: list[int]) -> int | None:
        """The last stage whose backward may hold an operation, by its operands; None when they do not say."""
        if cotangents:
            return min(s for r in cotangents if (s := self._stage_of(r)) is not None)
        return max((s for r in placed if (s := self._stage_of(r)) is not None), default=None)

    def _kind_of(self, value: int) -> str | None:
        p = self.producer.get(value)
        return None if p is None else FORWARD if self.kind[p] == MARK else self.kind[p]

    def _stage_of(self, value: int) -> int | None:
        p = self.producer.get(value)
        return None if p is None else self.stage[p]

    def _root(self, value: int) -> int:
        """The value behind markers."""
        resolved = self.resolve(value)
        return resolved if isinstance(resolved, int) else value

    def _homes(self) -> dict[int, set[int]]:
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
                self._add_home(homes, r, stage)
        return homes

    def _add_home(self, homes: dict[int, set[int]], value: int, stage: int) -> None:
        root = self._root(value)
        homes[root].add(stage)
        p = self.producer.get(root)
        if p is not None and self.kind[p] == LIGHTWEIGHT:
            for r in self.ops[p].reads:
                self._add_home(homes, r, stage)

    # ---- results of the loop

    def task_of(self, value: Ref) -> TaskKey | None:
        """The task that makes a value; None for roots, constants and light values."""
        p = self.producer.get(value) if isinstance(value, int) else None
        if p is None or self.kind[p] == LIGHTWEIGHT:
            return None
        stage = self.stage[p]
        assert stage is not None
        return ("bwd" if self.kind[p] == BACKWARD else "fwd", stage)

    def output_parts(self, index: int) -> tuple[OutputPart, ...]:
        """The parts of one result: a sum of several stages' values is accumulated in each and added at the end."""
        value = self.resolve(self.body.outputs[index])
        if not self.loop.reductions[index].commutes_with_add:
            return (self._part(value),)
        leaves = self._addends(value)
        if len({self._part(v).task for v in leaves}) == 1:
            return (self._part(value),)
        by_task: dict[TaskKey, list[Ref]] = defaultdict(list)
        for v in leaves:
            by_task[self._part(v).task].append(v)
        self._drop_sum(value, leaves)
        return tuple(OutputPart(v, task) for task, values in by_task.items() for v in values)

    def _part(self, value: Ref) -> OutputPart:
        # A light value costs nothing anywhere; stage 0 it is.
        return OutputPart(value, self.task_of(value) or ("fwd", 0))

    def _addends(self, value: Ref) -> list[Ref]:
        """Leaves of the tree of additions that makes `value`, as far as nothing else uses the partial sums."""
        p = self.producer.get(value) if isinstance(value, int) else None
        if p is None or self.ops[p].name not in ("add_any", "add"):
            return [value]
        op = self.ops[p]
        if any(isinstance(r, Lit) for r in op.inputs) or self.num_uses[self._root(op.outputs[0])] != 1:
            return [value]
        return [leaf for r in op.inputs for leaf in self._addends(self.resolve(r))]

    def _drop_sum(self, value: Ref, leaves: list[Ref]) -> None:
        stop = {v for v in leaves if isinstance(v, int)}
        stack = [value]
        while stack:
            v = stack.pop()
            if isinstance(v, int) and v not in stop:
                position = self.producer[v]
                self.dropped.add(position)
                stack.extend(self.resolve(r) for r in self.ops[position].inputs)

    # ---- tasks

    def tasks(self, outputs: tuple[tuple[OutputPart, ...], ...]) -> dict[TaskKey, StageTask]:
        members: dict[TaskKey, list[int]] = defaultdict(list)
        for i, op in enumerate(self.ops):
            if i in self.dropped or op.name in (MARKER, MARKER_SIDE) or self.kind[i] == LIGHTWEIGHT:
                continue
            key = self.task_of(op.outputs[0] if op.outputs[0] >= 0 else next(o for o in op.outputs if o >= 0))
            assert key is not None
            members[key].append(i)
        needed_light: dict[TaskKey, set[int]] = defaultdict(set)
        for key, positions in members.items():
            for i in positions:
                for r in self.ops[i].reads:
                    self._need_light(r, needed_light[key])
        for parts in outputs:
            for part in parts:
                members[part.task]  # a task may do nothing but return a constant
                if isinstance(part.value, int):
                    self._need_light(part.value, needed_light[part.task])
        return {
            key: StageTask(key, tuple(self._rewritten(i) for i in sorted({*positions, *needed_light[key]})))
            for key, positions in sorted(members.items(), key=lambda item: _order(item[0]))
        }

    def _need_light(self, value: int, needed: set[int]) -> None:
        root = self._root(value)
        p = self.producer.get(root)
        if p is None or self.kind[p] != LIGHTWEIGHT or p in needed:
            return
        needed.add(p)
        for r in self.ops[p].reads:
            self._need_light(r, needed)

    def _rewritten(self, position: int) -> Op:
        op = self.ops[position]
        inputs = tuple(self.resolve(r) for r in op.inputs)
        if inputs == op.inputs:
            return op
        return Op(op.name, inputs, op.outputs, op.run, op.line, op.transposed, op.params)


def _order(key: TaskKey) -> tuple[int, int]:
    """Forward stages upward, then backward stages downward."""
    ty, stage = key
    return (0, stage) if ty == "fwd" else (1, -stage)


def cross_task_values(staged: StagedLoop) -> dict[TaskKey, tuple[list[int], list[int]]]:
    """For each task, the values it takes from other tasks and those it makes for them, in order of first use."""
    made_by: dict[int, TaskKey] = {}
    local: dict[TaskKey, set[int]] = {}
    for key, task in staged.tasks.items():
        local[key] = {o for op in task.ops for o in op.outputs if o >= 0}
    light_or_root: set[int] = set(staged.loop.body.inputs)
    for key, task in staged.tasks.items():
        for op in task.ops:
            for o in op.outputs:
                made_by.setdefault(o, key)
    takes: dict[TaskKey, list[int]] = {key: [] for key in staged.tasks}
    makes: dict[TaskKey, list[int]] = {key: [] for key in staged.tasks}
    wanted: list[tuple[TaskKey, int]] = [
        (key, r) for key, task in staged.tasks.items() for op in task.ops for r in op.reads
    ]
    wanted += [(p.task, p.value) for parts in staged.outputs for p in parts if isinstance(p.value, int)]
    for key, r in wanted:
        if r in local[key] or r in light_or_root:
            continue
        if r not in takes[key]:
            takes[key].append(r)
        if r not in makes[made_by[r]]:
            makes[made_by[r]].append(r)
    return {key: (takes[key], makes[key]) for key in staged.tasks}
