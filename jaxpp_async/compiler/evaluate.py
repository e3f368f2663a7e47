"""compiler.evaluate: operations and recipes as functions of arrays, to be called under a JAX trace. Lowers nothing.

At a recipe's boundary PRNG keys stand as their data.

compiler.avals: JAX's avals in, `ValueType`s out. Never looks at a value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from jaxpp_async.compiler.ir import Lit, Op, Ref, Types, ValueType
from jaxpp_async.compiler.recipes import Recipe
from jaxpp_async.jax_bridge import private_api
from jaxpp_async.markers import logical_axes
from jaxpp_async.markers.nonfinite import NonfiniteChecker
from jaxpp_async.program.instructions import Aval


def recipe_function(recipe: Recipe, types: Types) -> Callable[..., list[Any]]:
    """The recipe as a function of its inputs."""

    def run(*args: Any) -> list[Any]:
        return _run(recipe, types, args, None)

    return run


def checked_function(recipe: Recipe, types: Types) -> Callable[..., tuple[list[Any], dict[str, Any]]]:
    """The recipe as a function of its inputs that also says which operations make NaNs or infinities.

    Returns:
        A function to the results and, under the places joined by newlines, what was seen there: first in each input (of
        a batch: in the microbatch), then in what each operation made. See `nonfinite.Checker`.
    """

    def run(*args: Any) -> tuple[list[Any], dict[str, Any]]:
        checker = NonfiniteChecker()
        results = _run(recipe, types, args, checker)
        return results, {"\n".join(checker.places): checker.found()}

    return run


def _run(recipe: Recipe, types: Types, args: Sequence[Any], checker: NonfiniteChecker | None) -> list[Any]:
    env: dict[int, Any] = {v: lit.value for v, lit in recipe.literals.items()}
    env.update((v, wrap(types[v], x)) for v, x in zip(recipe.inputs, args, strict=True))
    index = env[recipe.index] if recipe.index is not None else None
    for whole, part in recipe.slices:
        env[part] = lax.dynamic_index_in_dim(read(env, whole), index, 0, keepdims=False)
    for start in recipe.starts:
        dtype = jnp.dtype(start.aval.dtype)
        accumulator = start.reduction.start(start.aval.shape, dtype, start.num_microbatches)
        env[start.result] = wrap(types[start.result], accumulator)
    if checker is None:
        run_ops(recipe.ops, env)
    else:
        cut = {whole: part for whole, part in recipe.slices}
        for v in recipe.inputs:
            checker.check_argument(env[cut.get(v, v)])
        _run_checked(recipe.ops, env, checker)
    for a in recipe.accumulates:
        old = unwrap(env[a.accumulator])
        value = jnp.asarray(read(env, a.value))
        env[a.result] = a.reduction.step(old, unwrap(value), index)
        if checker is not None:
            checker.check_result(env[a.result], "accumulate_grads", repr(a.reduction))
    return [leave(env[r]) if isinstance(r, int) else jnp.asarray(r.value) for r in recipe.outputs]


def run_ops(ops: Sequence[Op], env: dict[int, Any]) -> None:
    """Run operations under a JAX trace, reading and writing `env`."""
    for op in ops:
        results = op.run([read(env, r) for r in op.inputs])
        env.update((o, x) for o, x in zip(op.outputs, results, strict=True) if o >= 0)


def _run_checked(ops: Sequence[Op], env: dict[int, Any], checker: NonfiniteChecker) -> None:
    """As `run_ops`, looking at each value that is made, also inside what an operation wraps."""
    for op in ops:
        operands, run = [read(env, r) for r in op.inputs], op.run
        if isinstance(run, functools.partial) and run.func is private_api.bind_eqn:
            results = checker.run_equation(run.args[0], operands, op.line)
        else:
            results = op.run(operands)
            for value in results:
                checker.check_result(jnp.asarray(value), op.line, op.name)
        env.update((o, x) for o, x in zip(op.outputs, results, strict=True) if o >= 0)


def read(env: Mapping[int, Any], ref: Ref) -> Any:
    """An operand's array."""
    return ref.value if isinstance(ref, Lit) else env[ref]


def wrap(value_type: ValueType, x: Any) -> Any:
    """A value at the boundary as its operations know it: key data as keys, with the sharding of its type."""
    keyed = jax.random.wrap_key_data(x, impl=value_type.key_impl) if value_type.key_impl else x
    return logical_axes.reshard_to(keyed, value_type.sharding)


def leave(x: Any) -> Any:
    """The reverse of `wrap`: keys as key data; what is whole on every device, for whatever use, is just whole."""
    x = jnp.asarray(x)
    mesh, known = jax.sharding.get_abstract_mesh(), logical_axes.explicit_sharding(jax.typeof(x))
    if known is not None and (known.mesh != mesh or known.spec.reduced):
        x = logical_axes.reshard_to(x, NamedSharding(mesh, known.spec.update(reduced=frozenset())))
    return unwrap(x)


def unwrap(x: Any) -> Any:
    """Keys to key data; anything else as it is."""
    return jax.random.key_data(x) if private_api.is_key_dtype(x.dtype) else x


# ---------------------------------------------------------------- avals


def value_type(aval: Any) -> ValueType:
    """The `ValueType` of a JAX aval (sharding is filled in later)."""
    weak, types = bool(getattr(aval, "weak_type", False)), logical_axes.explicit_sharding(aval)
    on_host = private_api.is_host_memory(aval)
    if private_api.is_key_dtype(aval.dtype):
        data, impl = Aval(private_api.key_data_shape(aval), "uint32"), private_api.key_impl(aval.dtype)
        return ValueType(data, impl, weak, types, on_host)
    return ValueType(Aval(tuple(aval.shape), private_api.dtype_name(aval.dtype)), None, weak, types, on_host)
