"""Count the work of every executable of a compiled step: operations, bytes and exchanges, without running it.

Each recipe (the operations of one executable) is traced with abstract inputs, and the equations of its
jaxpr are counted one by one: `flop_counts` knows single primitives, `sharded_work` divides them over the
devices of an actor. Equal recipes are counted once. The iterations of a `while`, whose number is not known,
count as one; of the branches of a `cond`, the one with most operations counts.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from jaxpp_async.compiler.evaluate import recipe_function
from jaxpp_async.compiler.export import Target, input_types, lowering_context
from jaxpp_async.compiler.export_cache import Specs, recipe_keys
from jaxpp_async.compiler.ir import Op, Recipe, Types
from jaxpp_async.compiler.primitives import NOT_FUSED
from jaxpp_async.compiler.sharded_work import Axes, ShardedArray, Tally, count_equation, count_exchange
from jaxpp_async.jax_bridge import private_api
from jaxpp_async.markers import logical_axes
from jaxpp_async.program.work import TaskWork


class CountedWorks:
    """The work of each executable of a compiled step, counted when it is first asked for, and once.

    Until then an object of this class keeps the operations of the executables alive, but no executable, and
    nothing that lies on actors. So a timeline can hold it.

    Args:
        recipes: the recipes of the executables, in the order of the executables.
        types: the type of each value id.
        specs: the sharding of each value id.
        target: the mesh and platform that the step was compiled for.
        known: the work of recipes that were counted earlier, by their keys, to which those of this step are
            added; None if there are none.
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        types: Types,
        specs: Specs,
        target: Target,
        known: dict[Hashable, TaskWork] | None = None,
    ):
        self._todo: tuple[Sequence[Recipe], Types, Specs, Target] | None = recipes, types, specs, target
        self._works: tuple[TaskWork, ...] = ()
        self._known = known

    def __call__(self) -> tuple[TaskWork, ...]:
        """Return the work of each executable, for each device of an actor.

        The key of a work depends on the operations, types and shardings of the executable alone, so that
        equal tasks have equal keys in all steps, in all processes, and whether or not the step was lowered.
        """
        if (todo := self._todo) is not None:
            recipes, types, specs, target = todo
            keys = recipe_keys(recipes, types, specs, target, only_alike=self._known is None)
            known = {} if self._known is None else self._known
            works = list[TaskWork]()
            for key, recipe in zip(keys, recipes, strict=True):
                if (work := known.get(key)) is None:  # a key takes long to hash
                    work = known[key] = recipe_work(recipe, types, specs, target)
                works.append(work)
            self._works = tuple(works)
            self._todo = None
        return self._works


def recipe_work(recipe: Recipe, types: Types, specs: Specs, target: Target) -> TaskWork:
    """Return the work of one recipe (the operations of one executable), for each device of an actor.

    Args:
        recipe: the recipe to count.
        types: the type of each value id.
        specs: the sharding of each value id; ids without an entry are replicated.
        target: the mesh and platform that the recipe would be lowered for.
    """
    fn, sizes = recipe_function(recipe, types), target.axes
    with lowering_context(target):
        closed = jax.make_jaxpr(fn)(*input_types(recipe, types, specs, target))
        jaxpr, consts = private_api.open_jaxpr(closed)
        ins = [_axes(specs.get(v, ()), len(types[v].aval.shape)) for v in recipe.inputs]
        args = [_array(x.aval, axes) for x, axes in zip(jaxpr.invars, ins, strict=True)]
        tally = Tally(sizes)
        results = _count_jaxpr(tally, jaxpr, [_array(jax.typeof(c)) for c in consts], args)
        outs = [specs.get(v, ()) if isinstance(v, int) else () for v in recipe.outputs]
        pinned = [
            tally.reshard(x, _axes(s, len(x.shape))) if sizes else x
            for x, s in zip(results, outs, strict=True)
        ]
    slots = dict(zip(recipe.inputs, args, strict=True))
    sliced = {slots[whole] for whole, _ in recipe.slices if isinstance(whole, int)}
    for x in dict.fromkeys([*args, *pinned]):
        if x in tally.counted or (x in args and x not in tally.read):
            continue
        tally.touch(x, tally.local_bytes(x) / max(1, x.shape[0]) if x in sliced else None)
    text = repr((_ADDRESS.sub("", str(closed)), ins, outs, sizes, target.platform))
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    temp_bytes = tally.temp_bytes([*args, *pinned])
    return TaskWork(key, tally.flops, tally.size_bytes, tuple(tally.collectives), temp_bytes)


_ADDRESS = re.compile(r"\b0x[0-9a-f]+")


def count_flops(ops: Sequence[Op], types: Types) -> float:
    """Return the floating-point operations of some operations, on unsharded arrays.

    Call this inside `export.lowering_context`, since an operation may have to be traced.

    Args:
        ops: the operations, in any order.
        types: the type of each value id that the operations read.
    """
    return sum(_op_flops(op, types) for op in ops)


def _op_flops(op: Op, types: Types) -> float:
    tally = Tally({})
    run = op.run
    if isinstance(run, functools.partial) and run.func is private_api.bind_eqn:
        eqn = run.args[0]
        _count_eqn(tally, eqn, [_array(x.aval) for x in eqn.invars])
        return tally.flops
    alone = Recipe("alone", tuple(dict.fromkeys(op.reads)), tuple(o for o in op.outputs if o >= 0), (op,))
    avals = input_types(alone, types, {}, Target(None, "cpu", {}))
    jaxpr, consts = private_api.open_jaxpr(jax.make_jaxpr(recipe_function(alone, types))(*avals))
    _count_jaxpr(
        tally, jaxpr, [_array(jax.typeof(c)) for c in consts], [_array(v.aval) for v in jaxpr.invars]
    )
    return tally.flops


# ---------------------------------------------------------------- jaxprs


def _array(aval: Any, axes: Axes | None = None) -> ShardedArray:
    shape = tuple(getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", None)
    if dtype is not None and private_api.is_key_dtype(dtype):
        data = private_api.key_data_shape(aval)
        itemsize = 4 * int(np.prod(data[len(shape) :], dtype=np.int64))
    else:
        itemsize = getattr(dtype, "itemsize", 0)
    return ShardedArray(shape, itemsize, axes if axes is not None else ((),) * len(shape))


def _axes(spec: Sequence[Any], rank: int) -> Axes:
    entries = [(e,) if isinstance(e, str) else tuple(e or ()) for e in spec][:rank]
    return (*entries, *[()] * (rank - len(entries)))


def _count_jaxpr(
    tally: Tally, jaxpr: Any, consts: Sequence[ShardedArray], args: Sequence[ShardedArray]
) -> list[ShardedArray]:
    env: dict[Any, ShardedArray] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> ShardedArray:
        return _array(atom.aval) if isinstance(atom, private_api.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _count_eqn(tally, eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def _count_closed(tally: Tally, closed: Any, args: Sequence[ShardedArray]) -> list[ShardedArray]:
    jaxpr, consts = private_api.open_jaxpr(closed)
    return _count_jaxpr(tally, jaxpr, [_array(jax.typeof(c)) for c in consts], args)


def _count_eqn(tally: Tally, eqn: Any, operands: list[ShardedArray]) -> list[ShardedArray]:
    name = eqn.primitive.name
    if name == "scan":
        return _count_scan(tally, eqn, operands)
    if name == "while":
        return _count_while(tally, eqn, operands)
    if name == "cond":
        return _count_cond(tally, eqn, operands)
    inner = private_api.inner_jaxpr(eqn)
    if name == "shard_map":
        return _count_shard_map(tally, eqn, inner, operands)
    if inner is not None and len(inner.jaxpr.invars) == len(operands):
        return _count_call(tally, eqn, inner, operands)
    results = [_array(v.aval) for v in eqn.outvars]
    if name not in NOT_FUSED and (
        inside := private_api.sub_jaxprs(eqn)
    ):  # such as a custom linear solve: each jaxpr once
        for jaxpr in inside:
            _count_closed(tally, jaxpr, [_array(v.aval) for v in jaxpr.invars])
        tally.note("kernel", operands, results)
        return results
    if count_exchange(tally, name, eqn.params, operands, results):
        return results
    if tally.sizes and (wanted := _constrained(eqn, operands)) is not None:
        return [tally.reshard(operands[0], wanted)]
    if name == "reshard":
        return [_typed(tally, _summed(tally, operands[0], eqn), eqn.outvars[0].aval)]
    made = count_equation(tally, name, eqn.params, operands, results)
    return [_typed(tally, x, v.aval) for x, v in zip(made, eqn.outvars, strict=True)]


def _constrained(eqn: Any, operands: Sequence[ShardedArray]) -> Axes | None:
    """Return the sharding that an equation gives its operand, or None if it gives none."""
    if eqn.primitive.name == "sharding_constraint":
        now, spec = operands[0].axes, getattr(eqn.params["sharding"], "spec", None)
        if spec is None:
            return None
        free = eqn.params.get("unconstrained_dims", ())
        return tuple(now[d] if d in free else axes for d, axes in enumerate(_axes(spec, len(now))))
    if eqn.primitive.name == "shard":
        return logical_axes.constrained_axes(eqn.params["names"], operands[0].axes)
    return None


def _typed(tally: Tally, x: ShardedArray, aval: Any) -> ShardedArray:
    """Give an array the sharding in its type, which it has on a mesh with explicit axes."""
    if not tally.sizes or (known := logical_axes.explicit_sharding(aval)) is None:
        return x
    made = x
    if logical_axes.unreduced_axes(known) and x.exchange == len(tally.collectives) - 1 >= 0:
        tally.collectives.pop()  # each device keeps its part of the sum
        x = dataclasses.replace(x, summed=(), exchange=-1)
    explicit = logical_axes.explicit_axes(known.mesh)
    given = _axes(known.spec.partitions, len(x.shape))
    wanted = tuple(
        (*to, *(a for a in now if a not in explicit)) for to, now in zip(given, x.axes, strict=True)
    )
    typed = tally.reshard(x, wanted)
    if typed is not made:
        tally.note("alias", [made], [typed])
    return typed


def _summed(tally: Tally, x: ShardedArray, eqn: Any) -> ShardedArray:
    """Count the sum that a reshard makes of an operand of which each device had a part of a sum."""
    before, after = (
        logical_axes.unreduced_axes(logical_axes.explicit_sharding(v.aval))
        for v in (eqn.invars[0], eqn.outvars[0])
    )
    summed = tally.sum_over(x, tuple(a for a in before if a not in after))
    if summed is not x:
        tally.note("kernel", [x], [summed])
    return summed


def _count_call(tally: Tally, eqn: Any, inner: Any, operands: list[ShardedArray]) -> list[ShardedArray]:
    """Count a call, whose operands and results may have shardings of the user's."""
    before, after = private_api.pinned_shardings(eqn)

    def pinned(x: ShardedArray, sharding: Any) -> ShardedArray:
        spec = getattr(sharding, "spec", None)
        return tally.reshard(x, _axes(spec, len(x.shape))) if tally.sizes and spec is not None else x

    results = _count_closed(tally, inner, list(map(pinned, operands, before)))
    return list(map(pinned, results, after))


def _count_shard_map(tally: Tally, eqn: Any, inner: Any, operands: list[ShardedArray]) -> list[ShardedArray]:
    """Count a `shard_map`, in which shapes are those of one device's parts."""
    for x, spec in zip(operands, eqn.params["in_specs"], strict=True):
        tally.read.add(x)
        tally.reshard(x, _axes(spec, len(x.shape)))
    parts = _count_closed(tally, inner, [_array(v.aval) for v in inner.jaxpr.invars])
    specs = eqn.params["out_specs"]
    results = [_array(v.aval, _axes(spec, v.aval.ndim)) for v, spec in zip(eqn.outvars, specs, strict=True)]
    tally.note("alias", [*parts, *operands], results)
    return results


def _add(tally: Tally, inner: Tally, times: int = 1) -> None:
    tally.flops += times * inner.flops
    tally.size_bytes += times * inner.size_bytes
    tally.collectives += inner.collectives * times
    tally.read |= inner.read
    tally.counted |= inner.counted


def _free(arrays: Sequence[ShardedArray]) -> list[ShardedArray]:
    """Return arrays without the exchanges that made them, which belong to the tally of a loop's body."""
    return [dataclasses.replace(x, summed=(), exchange=-1) for x in arrays]


def _without_leading(x: ShardedArray) -> ShardedArray:
    return ShardedArray(x.shape[1:], x.itemsize, x.axes[1:])


def _common(a: ShardedArray, b: ShardedArray) -> ShardedArray:
    """Return an array with only those axes that split both of two arrays of one shape."""
    axes = tuple(x if x == y else () for x, y in zip(a.axes, b.axes, strict=True))
    return ShardedArray(a.shape, a.itemsize, axes)


def _count_scan(tally: Tally, eqn: Any, operands: list[ShardedArray]) -> list[ShardedArray]:
    parts = private_api.scan_parts(eqn)
    consts, carry = operands[: parts.num_consts], operands[parts.num_consts : parts.first_x]
    xs = operands[parts.first_x :]
    while True:
        inner = Tally(tally.sizes)
        begun = _free(carry)
        ended = _count_closed(inner, parts.body, [*_free(consts), *begun, *map(_without_leading, xs)])
        settled = [_common(a, b) for a, b in zip(begun, ended, strict=False)]
        if [x.axes for x in settled] == [x.axes for x in begun]:
            break
        carry = settled
    _add(tally, inner, parts.length)
    tally.size_bytes += 2 * parts.length * sum(map(tally.local_bytes, settled))
    stacked = [
        ShardedArray((parts.length, *x.shape), x.itemsize, ((), *x.axes)) for x in ended[parts.num_carry :]
    ]
    for x in (*xs, *stacked):
        tally.touch(x)
    tally.read.update(operands)
    tally.counted.update(carry)
    tally.note("kernel", operands, [*settled, *stacked], inner.temp_bytes(ended[parts.num_carry :]))
    return [*settled, *stacked]


def _count_while(tally: Tally, eqn: Any, operands: list[ShardedArray]) -> list[ShardedArray]:
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    consts, carry = operands[first : first + second], operands[first + second :]
    inner = Tally(tally.sizes)
    ended = _count_closed(inner, eqn.params["body_jaxpr"], [*_free(consts), *_free(carry)])
    _add(tally, inner)
    tally.read.update(operands)
    results = _free(ended) if len(ended) == len(eqn.outvars) else [_array(v.aval) for v in eqn.outvars]
    tally.note("kernel", operands, results, inner.temp_bytes(()))
    return results


def _count_cond(tally: Tally, eqn: Any, operands: list[ShardedArray]) -> list[ShardedArray]:
    tallies, ends = [], list[list[ShardedArray]]()
    for branch in eqn.params["branches"]:
        inner = Tally(tally.sizes)
        ends.append(_count_closed(inner, branch, _free(operands[1:])))
        tallies.append(inner)
    _add(tally, max(tallies, key=lambda t: t.flops))
    tally.read.update(operands)
    made = [functools.reduce(_common, found) for found in zip(*map(_free, ends), strict=True)]
    inside = max(t.temp_bytes(ended) for t, ended in zip(tallies, ends, strict=True))
    tally.note("kernel", operands, made, inside)
    return made
