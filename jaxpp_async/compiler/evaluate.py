"""Turn operations, recipes and branches of a cond into functions of arrays that JAX can trace.

A recipe describes the computation of one executable. Executables take and return PRNG keys as their uint32
data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from jaxpp_async.compiler.ir import Branches, Flat, Lit, Op, Recipe, Ref, Types, ValueType
from jaxpp_async.jax_bridge import private_api
from jaxpp_async.markers import logical_axes
from jaxpp_async.markers.nonfinite import NonfiniteChecker
from jaxpp_async.program.instructions import Aval


def recipe_function(recipe: Recipe, types: Types) -> Callable[..., list[Any]]:
    """Return the computation of a recipe (the operations of one executable) as a function for `jax.jit`.

    The function takes the recipe's inputs and returns its outputs.
    """
    return lambda *args: _run_recipe(recipe, types, args, None)


def checked_function(recipe: Recipe, types: Types) -> Callable[..., tuple[list[Any], dict[str, Any]]]:
    """Return a function that runs a recipe (an executable's operations) and reports NaNs and infinities.

    Returns:
        A function of the recipe's inputs. This function returns the recipe's results and a dictionary with
        one entry. The checked values are each input (for a batch leaf, the microbatch that is read), then the
        result of each operation. The entry's key is one description per checked value, joined by newlines.
        The entry's value is an integer vector with one code per checked value, which stands for a NaN, an
        infinity or neither; see `nonfinite.NonfiniteChecker.found`.
    """

    def run(*args: Any) -> tuple[list[Any], dict[str, Any]]:
        checker = NonfiniteChecker()
        results = _run_recipe(recipe, types, args, checker)
        return results, {"\n".join(checker.places): checker.found()}

    return run


def _run_recipe(
    recipe: Recipe, types: Types, args: Sequence[Any], checker: NonfiniteChecker | None
) -> list[Any]:
    env: dict[int, Any] = {v: lit.value for v, lit in recipe.literals.items()}
    env.update((v, wrap_input(types[v], x)) for v, x in zip(recipe.inputs, args, strict=True))
    index = env[recipe.index] if recipe.index is not None else None
    for whole, part in recipe.slices:
        env[part] = lax.dynamic_index_in_dim(read_operand(env, whole), index, 0, keepdims=False)
    for start in recipe.starts:
        dtype = jnp.dtype(start.aval.dtype)
        accumulator = start.reduction.start(start.aval.shape, dtype, start.num_microbatches)
        env[start.result] = wrap_input(types[start.result], accumulator)
    if checker is None:
        run_ops(recipe.ops, env)
    else:
        cut = {whole: part for whole, part in recipe.slices}
        for v in recipe.inputs:
            checker.check_argument(env[cut.get(v, v)])
        _run_ops_checked(recipe.ops, env, checker)
    for a in recipe.accumulates:
        old = key_data(env[a.accumulator])
        value = jnp.asarray(read_operand(env, a.value))
        env[a.result] = a.reduction.step(old, key_data(value), index)
        if checker is not None:
            checker.check_result(env[a.result], "accumulate_grads", repr(a.reduction))
    return [unwrap_result(env[r]) if isinstance(r, int) else jnp.asarray(r.value) for r in recipe.outputs]


def run_ops(ops: Sequence[Op], env: dict[int, Any]) -> None:
    """Run operations under a JAX trace.

    Args:
        ops: the operations, in program order.
        env: a dictionary from value id to array. Operands are read from it, and results are written to it.
    """
    for op in ops:
        results = op.run([read_operand(env, r) for r in op.inputs])
        env.update((o, x) for o, x in zip(op.outputs, results, strict=True) if o >= 0)


def _run_ops_checked(ops: Sequence[Op], env: dict[int, Any], checker: NonfiniteChecker) -> None:
    """Run operations as `run_ops` does, and check each value that they make, also inside calls and scans."""
    for op in ops:
        operands, run = [read_operand(env, r) for r in op.inputs], op.run
        if isinstance(run, functools.partial) and run.func is private_api.bind_eqn:
            results = checker.run_equation(run.args[0], operands, op.line)
        else:
            results = op.run(operands)
            for value in results:
                checker.check_result(jnp.asarray(value), op.line, op.name)
        env.update((o, x) for o, x in zip(op.outputs, results, strict=True) if o >= 0)


def read_operand(env: Mapping[int, Any], ref: Ref) -> Any:
    """Return the array of an operand: its constant, or its entry in `env`, which maps value ids to arrays."""
    return ref.value if isinstance(ref, Lit) else env[ref]


def wrap_input(value_type: ValueType, x: Any) -> Any:
    """Convert an argument of an executable into the array that the executable's operations use.

    Key data is wrapped as PRNG keys, and the array is resharded to the sharding in `value_type`, if there is
    one.
    """
    keyed = jax.random.wrap_key_data(x, impl=value_type.key_impl) if value_type.key_impl else x
    return logical_axes.reshard_to(keyed, value_type.sharding)


def unwrap_result(x: Any) -> Any:
    """Convert a result of an executable's operations into the array that the executable returns.

    PRNG keys become their uint32 data. If the sharding in an array's type says "reduced", the array becomes a
    replicated one, since each device already has the whole array.
    """
    x = jnp.asarray(x)
    mesh, known = jax.sharding.get_abstract_mesh(), logical_axes.explicit_sharding(jax.typeof(x))
    if known is not None and (known.mesh != mesh or known.spec.reduced):
        x = logical_axes.reshard_to(x, NamedSharding(mesh, known.spec.update(reduced=frozenset())))
    return key_data(x)


def key_data(x: Any) -> Any:
    """Convert an array of PRNG keys to its uint32 data; return any other array unchanged."""
    return jax.random.key_data(x) if private_api.is_key_dtype(x.dtype) else x


def value_type(aval: Any) -> ValueType:
    """Return the `ValueType` of a JAX aval.

    The type does not say how automatic mesh axes split the value; `compiler.sharding_propagation` finds that
    later.
    """
    weak, types = bool(getattr(aval, "weak_type", False)), logical_axes.explicit_sharding(aval)
    on_host = private_api.is_host_memory(aval)
    if private_api.is_key_dtype(aval.dtype):
        data, impl = Aval(private_api.key_data_shape(aval), "uint32"), private_api.key_impl(aval.dtype)
        return ValueType(data, impl, weak, types, on_host)
    return ValueType(Aval(tuple(aval.shape), private_api.dtype_name(aval.dtype)), None, weak, types, on_host)


# ---------------------------------------------------------------- branches of a cond


def branches(bodies: Sequence[Flat], types: Types, *, terminates: bool) -> Branches:
    """Make the `Branches` of a `cond`, from which passes can build smaller conds.

    Args:
        bodies: one body per branch; all return the same number and types of results.
        types: the type of every value id, including ids that are added to bodies later.
        terminates: whether every branch is certain to end, that is, none contains a `while`.
    """
    return Branches(tuple(bodies), lambda chosen: _choose_branch(chosen, types), _select, terminates)


def _choose_branch(bodies: Sequence[Flat], types: Types) -> Callable[[Sequence[Any]], Sequence[Any]]:
    dtypes = [_dtype(refs, types) for refs in zip(*(body.outputs for body in bodies), strict=True)]

    def run_body(body: Flat, *args: Any) -> list[Any]:
        env: dict[int, Any] = dict(zip(body.inputs, args, strict=True))
        # No branch has a `Loop`, since tracing refuses that.
        run_ops([op for op in body.ops if isinstance(op, Op)], env)
        results = zip((read_operand(env, r) for r in body.outputs), dtypes, strict=True)
        # A constant may be a Python number, whose dtype would follow the configuration.
        return [x if dtype is None else jnp.asarray(x, dtype) for x, dtype in results]

    cases = [functools.partial(run_body, body) for body in bodies]
    return lambda xs: lax.switch(xs[0], cases, *xs[1:])


def _dtype(refs: Sequence[Ref], types: Types) -> Any:
    """Return the dtype of one result of a cond, which is the same in every branch.

    Args:
        refs: the result in each branch.
        types: the type of every value id.

    Returns:
        The dtype; None for PRNG keys.
    """
    value_id = next((r for r in refs if isinstance(r, int)), None)
    if value_id is None:
        return _constant_dtype(refs[0].value) if isinstance(refs[0], Lit) else None
    return None if types[value_id].key_impl else jnp.dtype(types[value_id].aval.dtype)


def _select(xs: Sequence[Any]) -> list[Any]:
    """Return the value that an index selects from several computed values, for `Branches.select`.

    Args:
        xs: the index, then the values to select from. Constants among these are converted to the dtype of the
            others.

    Returns:
        A list with the selected value.
    """
    position, *cases = xs
    arrays = [x for x in cases if isinstance(x, jax.Array)]
    dtype = arrays[0].dtype if arrays else _constant_dtype(cases[0])
    cases = [x if isinstance(x, jax.Array) else jnp.asarray(x, dtype) for x in cases]
    return [lax.select_n(position, *cases)]


def _constant_dtype(value: Any) -> Any:
    return private_api.canonical_dtype(np.asarray(value).dtype)
