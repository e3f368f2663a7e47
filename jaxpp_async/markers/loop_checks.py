"""loop_checks: checks of a loop's batch, its `reduce` and its results, from names, types and the traced body alone.

Each error begins with the line of the `accumulate_grads` call. Nothing is run.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp_async.errors import StageError
from jaxpp_async.jax_bridge import private_api, tracebacks
from jaxpp_async.jax_bridge.tracebacks import deliberate
from jaxpp_async.markers.reductions import Reduction, Stack, Sum

# ---------------------------------------------------------------- the batch


def check_option(wanted: Any) -> int | None:
    """Check the option `num_microbatches` of `accumulate_grads`.

    Raises:
        TypeError, ValueError: it is no positive integer.
    """
    if wanted is None:
        return None
    if isinstance(wanted, bool) or not hasattr(wanted, "__index__"):
        raise deliberate(TypeError(f"num_microbatches is {wanted!r}; give an integer, or None"))
    count = operator.index(wanted)
    if count < 1:
        raise deliberate(ValueError(f"num_microbatches is {wanted!r}; give a number of at least 1, or None"))
    return count


def check_no_batch(schedule: Any, line: str) -> None:
    """What stands in a schedule's place is no batch; a schedule that is wrong in itself is found where it is used.

    Raises:
        TypeError: it is a mapping, or has arrays in it.
    """
    if hasattr(schedule, "tasks"):
        return
    if isinstance(schedule, Mapping) or any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(schedule)):
        raise deliberate(
            TypeError(
                f"{line}: argument 2 of accumulate_grads is a {type(schedule).__name__}, not a schedule; write "
                "`accumulate_grads(fn, Std1F1B(num_stages=2))(batch)`, with the schedule that you want: what "
                "accumulate_grads returns takes the batch"
            )
        )


def microbatch_count(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], wanted: int | None, line: str
) -> int:
    """How many microbatches a batch has: the size of the leading axis that all its leaves share.

    Args:
        names: of the batch's leaves, such as `"batch['x']"`.
        wanted: how many there have to be; None: any number.

    Raises:
        StageError: there is no such axis, or it has another size than is wanted.
    """
    if not shapes:
        raise StageError(
            f"{line}: accumulate_grads got a batch without arrays; pass leaves (num_microbatches, ...)"
        )
    for name, shape in zip(names, shapes, strict=True):
        if not shape:
            raise StageError(
                f"{line}: {name} is a scalar and has no microbatch axis; every leaf of the batch is "
                "(num_microbatches, ...); close over values that all microbatches share"
            )
        if wanted is not None and shape[0] != wanted:
            raise StageError(
                f"{line}: {name} has shape {shape}, which is {_microbatches(shape[0])}, but num_microbatches is "
                f"{wanted}; {_reshaped(name, shape, wanted)}"
            )
    sizes = {name: shape[0] for name, shape in zip(names, shapes, strict=True)}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise StageError(
            f"{line}: the batch's leaves have unequal numbers of microbatches ({listed}); every leaf is "
            "(num_microbatches, ...); close over values that all microbatches share"
        )
    if shapes[0][0] < 1:
        raise StageError(
            f"{line}: {names[0]} has shape {shapes[0]}: no microbatches to accumulate; pass at least one"
        )
    return shapes[0][0]


def _microbatches(count: int) -> str:
    return f"{count} microbatch{'es' * (count != 1)}"


def _reshaped(name: str, shape: tuple[int, ...], wanted: int) -> str:
    """Advise how to give a leaf the wanted number of microbatches."""
    if wanted in shape[1:]:
        return f"its axes may be in another order: `jnp.moveaxis({name}, {shape.index(wanted, 1)}, 0)` has that number"
    if shape[0] % wanted == 0:
        new = ", ".join(map(str, (wanted, shape[0] // wanted, *shape[1:])))
        return f"write `{name}.reshape({new})` if these are {shape[0]} rows of one batch"
    return f"its leading axis of {shape[0]} cannot be split into {wanted} of equal size: pass a multiple of {wanted}"


# ---------------------------------------------------------------- the results


def reductions_for(reduce: Any, shapes: Any, line: str) -> tuple[Reduction, ...]:
    """A reduction for each leaf of a function's results.

    Args:
        reduce: the user's: a tree prefix of `shapes`, or None.
        shapes: the results, with `.shape` and `.dtype`.

    Raises:
        TypeError: `reduce` does not fit, or its operators do not fit the values.
    """
    if reduce is None:
        reduce = (Sum(), *[Stack()] * (len(shapes) - 1)) if _is_several(shapes) else Sum()
    flat: list[Reduction] = []

    def spread(reduction, subtree):
        if isinstance(reduction, type) and issubclass(reduction, Reduction):
            raise deliberate(
                TypeError(f"{line}: reduce has the class {reduction.__name__}; write {reduction.__name__}()")
            )
        if not isinstance(reduction, Reduction):
            raise deliberate(
                TypeError(f"{line}: reduce has {reduction!r}; use Sum() Max() Min() Mean() Stack() Concat()")
            )
        flat.extend([reduction] * len(jax.tree.leaves(subtree)))

    try:
        jax.tree.map(spread, reduce, shapes, is_leaf=lambda x: isinstance(x, Reduction))
    except ValueError:
        raise deliberate(
            TypeError(
                f"{line}: reduce is not a tree prefix of the function's result {_tree_text(shapes)}: it is {reduce!r}; "
                "give an operator for every part, one standing for all that is below it"
            )
        ) from None
    named, _ = jax.tree_util.tree_flatten_with_path(shapes)
    for reduction, (path, leaf) in zip(flat, named, strict=True):
        if not private_api.is_float0(leaf) and (problem := reduction.check(leaf.dtype, len(leaf.shape))):
            raise deliberate(TypeError(f"{line}: result{jax.tree_util.keystr(path)}: {problem}"))
    return tuple(flat)


def _is_several(shapes: Any) -> bool:
    """Whether a result is "gradients and the rest". A NamedTuple is one value with named parts, such as gradients."""
    return type(shapes) is tuple and len(shapes) > 0


def _tree_text(shapes: Any) -> str:
    return str(jax.tree.structure(shapes)).removeprefix("PyTreeDef(").removesuffix(")")


def check_order(shapes: Any, body: Any, line: str) -> None:
    """Refuse `(loss, grads)`, the order of `jax.value_and_grad`, where the default reductions would sum the loss and
    stack the gradients, so that the parameters grow a dimension with each update.

    Args:
        shapes: the function's results.
        body: the function as a jaxpr: it tells gradients from whatever else stands beside a loss.

    Raises:
        TypeError: the first result is a scalar (or begins with one, as with `has_aux`), another has gradients that are
            arrays.
    """
    if not _is_several(shapes):
        return
    with_aux = type(shapes[0]) is tuple and len(shapes[0]) > 0
    head = shapes[0][0] if with_aux else shapes[0]
    if getattr(head, "shape", None) != () or not jnp.issubdtype(head.dtype, jnp.floating):
        return
    behind = jax.tree_util.tree_flatten_with_path(shapes[1:])[0]
    first = len(jax.tree.leaves(shapes[0]))
    if not any(leaf.shape for _, leaf in behind):
        return
    gradients = _gradients(body.jaxpr, [False] * len(body.jaxpr.invars), tracebacks.Origins())[first:]
    found = [(p, leaf) for (p, leaf), g in zip(behind, gradients, strict=True) if g and leaf.shape]
    if not found:
        return
    path, leaf = found[0]
    name = f"result[{path[0].idx + 1}]{jax.tree_util.keystr(path[1:])}"
    loss = "(loss, aux)" if with_aux else "loss"
    raise deliberate(
        TypeError(
            f"{line}: the function returns the loss first, as jax.value_and_grad does: without `reduce` the first "
            f"result is summed over the microbatches and each other one stacked, gradients such as {name} "
            f"({jnp.dtype(leaf.dtype).name}{list(leaf.shape)}) too. Return the gradients first:\n"
            f"  {loss}, grads = jax.value_and_grad(...)(...)\n"
            f"  return grads, {loss}\n"
            f"or keep this order and say how each is joined:\n"
            f"  {loss}, grads = accumulate_grads(..., reduce=(Stack(), Sum()))(batch)\n"
            "Stacked gradients, one for each microbatch, are reduce=(Sum(), Stack())"
        )
    )


_CONTRACTIONS = frozenset(("dot_general", "conv_general_dilated"))


def _gradients(jaxpr: Any, known: Sequence[bool], origins: tracebacks.Origins) -> list[bool]:
    """Which results of a jaxpr are gradients: made by a backward pass, or of those by casting, scaling, clipping
    or summing them, which makes nothing larger.

    Logits that a forward pass makes of adapted parameters depend on gradients, and are none: a product lies between.

    Args:
        known: which operands are.
    """
    found = {v for v, is_gradient in zip(jaxpr.invars, known, strict=True) if is_gradient}
    for eqn in jaxpr.eqns:
        from_gradients = [_in(a, found) for a in eqn.invars]
        if origins.of(eqn)[0]:
            found.update(eqn.outvars)
        elif (inner := _whole_body(eqn)) is not None:
            flags = _gradients(inner, from_gradients, origins)
            found.update(v for v, is_gradient in zip(eqn.outvars, flags, strict=True) if is_gradient)
        elif eqn.primitive.name not in _CONTRACTIONS:
            sizes = [
                a.aval.size for a, is_gradient in zip(eqn.invars, from_gradients, strict=True) if is_gradient
            ]
            found.update(v for v in eqn.outvars if v.aval.size <= max(sizes, default=-1))
    return [_in(a, found) for a in jaxpr.outvars]


def _in(atom: Any, found: Iterable[Any]) -> bool:
    return not isinstance(atom, private_api.Literal) and atom in found


def _whole_body(eqn: Any) -> Any:
    """The jaxpr that stands for an equation operand by operand and result by result (a call, a scan), or None."""
    inner = private_api.sub_jaxprs(eqn)
    if (
        len(inner) == 1
        and len(inner[0].invars) == len(eqn.invars)
        and len(inner[0].outvars) == len(eqn.outvars)
    ):
        return inner[0]
    return None
