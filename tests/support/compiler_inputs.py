"""compiler_inputs: operations written as text, so that a test of one pass reads like the program it is about.

    body = Body(w=(3, 3), x=(2, 3))
    body.add("h[2,3] = dot_general x w", "y = mul h #2.0 '")
    body.show(ops)              # the same notation, with `v1`, `v2`, ... for the values that a pass made

A line is `results = primitive operands`, and a `'` at its end marks what reverse-mode differentiation made. A
result is `name`, `name[shape]` or `name:dtype[shape]`: what is left out is as in the first operand that is a
value. `_` is a result that nobody wants, `#1.0` a constant. The operation of line k stands at
`model.py:k`. Payloads are those of numpy, so that what a pass made of operations can be run and compared.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxpp_async import schedules
from jaxpp_async.compiler.continued_arguments import continued_arguments
from jaxpp_async.compiler.evaluate import value_type
from jaxpp_async.compiler.ir import Flat, Lit, Loop, Op, Ref, Traced, Types, ValueType
from jaxpp_async.compiler.partition import partition
from jaxpp_async.compiler.task_graph import PlacedStep, StepBuilder
from jaxpp_async.compiler.task_variants import ScheduledLoop, schedule_loop
from jaxpp_async.compiler.trace import trace
from jaxpp_async.jax_bridge import private_api
from jaxpp_async.markers.reductions import Sum
from jaxpp_async.program.instructions import Aval

_RESULT = re.compile(r"(?P<name>\w+)(?::(?P<dtype>\w+))?(?:\[(?P<shape>[\d,]*)\])?$")
_PARAMS = ("side", "repeats", "joins_parts")

_RUNS = {
    "add": lambda xs: [xs[0] + xs[1]],
    "add_any": lambda xs: [xs[0] + xs[1]],
    "add_partial": lambda xs: [xs[0] + xs[1]],
    "sub": lambda xs: [xs[0] - xs[1]],
    "mul": lambda xs: [xs[0] * xs[1]],
    "neg": lambda xs: [-xs[0]],
    "copy": list,
    "constant": list,
    "concatenate": lambda xs: [np.concatenate(xs)],
    "dot_general": lambda xs: [xs[0] @ xs[1]],
    "reduce_sum": lambda xs: [np.sum(xs[0])],
    "reduce_max": lambda xs: [np.max(xs[0])],
    "transpose": lambda xs: [np.transpose(xs[0])],
}


class Body:
    """Operations over named values, for the inside of a loop, of a branch, or of a whole step.

    Args:
        types: where the values' types go; several bodies may have them in common. None: new ones.
        inputs: name to shape (of float32), `Aval` or `ValueType`, in order.
    """

    def __init__(self, types: Types | None = None, **inputs: Any) -> None:
        self.types = Types() if types is None else types
        self.ops: list[Op | Loop] = []
        self._ids: dict[str, int] = {}
        self._names: dict[int, str] = {-1: "_"}
        self.inputs = tuple([self.value(name, given) for name, given in inputs.items()])

    def value(self, name: str, given: Any) -> int:
        """A new value of a shape (of float32), an `Aval` or a `ValueType`."""
        aval = (
            given
            if isinstance(given, Aval)
            else Aval(tuple(given), "float32")
            if type(given) is tuple
            else None
        )
        value = self._ids[name] = self.types.new(given if aval is None else ValueType(aval))
        self._names[value] = name
        return value

    def add(self, *lines: str, name: str | None = None, **attributes: Any) -> Op:
        """Append operations.

        Args:
            lines: one an operation.
            name: the user's, of a marker.
            attributes: `side` and `repeats` are parameters of the operations, others are fields of `Op`.

        Returns:
            The last operation.
        """
        for line in lines:
            left, right = line.split(" = ")
            primitive, *words = right.split()
            transposed = bool(words) and words[-1] == "'"
            inputs = tuple([self.ref(w) for w in words if w != "'"])
            first = next((r for r in inputs if isinstance(r, int)), None)
            outputs = tuple([self._result(w, first) for w in left.split()])
            params = {k: v for k, v in attributes.items() if k in _PARAMS}
            params |= {"name": name} if primitive.startswith("pipeline_yield") else {}
            fields = {k: v for k, v in attributes.items() if k not in _PARAMS}
            fields = {
                "run": _RUNS.get(primitive, _not_run),
                "line": f"model.py:{len(self.ops) + 1}",
                **fields,
            }
            op = Op(primitive, inputs, outputs, transposed=transposed, params=params, **fields)
            self.ops.append(op)
        return op

    def inside(self) -> Body:
        """A body without inputs that reads and makes values of this one, as what is inside a call does."""
        body = Body(self.types)
        body._ids, body._names = self._ids, self._names
        return body

    def _result(self, word: str, first: int | None) -> int:
        if word == "_":
            return -1
        found = _RESULT.match(word)
        assert found is not None, f"{word!r} is no result"
        like = Aval((), "float32") if first is None else self.types[first].aval
        sizes = found["shape"]
        shape = like.shape if sizes is None else tuple(int(n) for n in sizes.split(",") if n)
        return self.value(found["name"], Aval(shape, found["dtype"] or like.dtype))

    def ref(self, word: str) -> Ref:
        """A value by its name, or `#` and a constant."""
        return Lit(np.float32(ast.literal_eval(word[1:]))) if word.startswith("#") else self._ids[word]

    def refs(self, words: str) -> tuple[Ref, ...]:
        return tuple([self.ref(word) for word in words.split()])

    def name(self, ref: Ref) -> str:
        """How `show` writes an operand: new values are `v1`, `v2`, ... in the order they come."""
        if isinstance(ref, Lit):
            return f"#{np.asarray(ref.value).tolist()}"
        return self._names.setdefault(
            ref, f"v{sum(n[:1] == 'v' and n[1:].isdigit() for n in self._names.values()) + 1}"
        )

    def names(self, refs: Iterable[Ref]) -> str:
        return " ".join(map(self.name, refs))

    def show(self, ops: Iterable[Any]) -> list[str]:
        """Operations as lines."""
        marks = {False: "", True: " '"}
        return [
            f"{self.names(op.outputs)} = {op.name} {self.names(op.inputs)}{marks[op.transposed]}".rstrip()
            for op in ops
        ]

    def flat(self, outputs: str) -> Flat:
        return Flat(self.inputs, tuple(self.ops), self.refs(outputs))

    def loop(self, outputs: str, *, batch: int = 1, reductions: Any = None, microbatches: int = 2) -> Loop:
        """An accumulate loop with this body.

        Args:
            outputs: the body's results, by name; all are added up unless `reductions` says otherwise.
            batch: so many inputs before the last one are leaves of a microbatch; the last one is the index.
        """
        flat = self.flat(outputs)
        types = [self.types[v] for v in self.inputs]
        first = len(types) - 1 - batch
        whole = [Aval((microbatches, *t.aval.shape), t.aval.dtype) for t in types[first:-1]]
        results = [
            self.types[r] if isinstance(r, int) else ValueType(Aval((), "float32")) for r in flat.outputs
        ]
        return Loop(
            body=flat,
            invariants=tuple([self.types.new(t) for t in types[:first]]),
            batch=tuple([self.types.new(ValueType(aval)) for aval in whole]),
            outputs=tuple([self.types.new(t) for t in results]),
            reductions=tuple(reductions or [Sum()] * len(results)),
            schedule=None,
            num_microbatches=microbatches,
            line="train.py:1",
        )


def _not_run(xs: Sequence[Any]) -> list[Any]:
    raise AssertionError("this operation is only looked at")


def two_stages(**more: Any) -> Body:
    """A loop's body of two stages that share `w`, whose gradients are `a` in stage 1 and `b` in stage 0."""
    body = Body(w=(3, 3), **more, x=(2, 3), i=Aval((), "int32"))
    body.add("h[2,3] = dot_general x w", "y t[0] = pipeline_yield h", "z = dot_general y w")
    body.add("loss[] = reduce_sum z", "a[3,3] = dot_general y z '", "dy[2,3] = dot_general z w '")
    body.add("dh = pipeline_yield_side t dy '", side="cotangent")
    body.add("b[3,3] = dot_general x dh '")
    return body


# ---------------------------------------------------------------- what JAX traced


class Inliner:
    """Flattens jaxprs of plain equations for the passes that are given a flattener."""

    def __init__(self) -> None:
        self.types = Types()
        self.stacks: dict[int, list[Ref]] = {}

    def known_integers(self, ref: Ref) -> None:
        return None

    def inline(self, closed: Any, inputs: Sequence[Ref], ops: list, where: Any) -> list[Ref]:
        jaxpr, consts = private_api.open_jaxpr(closed)
        env: dict[Any, Ref] = dict(zip(jaxpr.constvars, map(Lit, consts), strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Ref:
            return Lit(atom.val) if isinstance(atom, private_api.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            made = tuple([self.types.new(value_type(v.aval)) for v in eqn.outvars])
            run = jax.tree_util.Partial(private_api.bind_eqn, eqn)
            ops.append(
                Op(eqn.primitive.name, tuple(map(read, eqn.invars)), made, run, where.line, where.transposed)
            )
            env.update(zip(eqn.outvars, made, strict=True))
        return list(map(read, jaxpr.outvars))

    def flatten_body(self, closed: Any, where: Any) -> Flat:
        inputs = [self.types.new(value_type(v.aval)) for v in private_api.open_jaxpr(closed)[0].invars]
        ops: list[Op | Loop] = []
        outputs = self.inline(closed, inputs, ops, where)
        return Flat(tuple(inputs), tuple(ops), tuple(outputs))


def scheduled(loop: Loop, types: Types, schedule: Any, num_actors: int) -> ScheduledLoop:
    """A loop, cut and under a schedule."""
    staged = partition(loop, types)
    tasks = schedules.resolve(
        schedule,
        num_stages=staged.num_stages,
        num_microbatches=loop.num_microbatches,
        num_actors=num_actors,
        where=loop.line,
        forward_only=not any(ty == "bwd" for ty, _ in staged.tasks),
    )
    return schedule_loop(staged, tasks, types)


def placed_step(
    fn: Any, *args: Any, actors: int = 2, donated: bool = False, result_homes: Any = None
) -> tuple[Traced, PlacedStep]:
    """A step function, traced and placed, its loops under their own schedules; nothing is lowered."""
    traced = trace(fn, args, argument_names=tuple(f"arg{k}" for k in range(len(args))))
    loops = {
        position: scheduled(op, traced.types, op.schedule, actors)
        for position, op in enumerate(traced.flat.ops)
        if isinstance(op, Loop)
    }
    done = StepBuilder(
        traced,
        loops,
        num_actors=actors,
        continues=continued_arguments(traced),
        donated=[donated] * len(traced.arg_of),
        result_homes=result_homes or {},
    ).build()
    return traced, done
