"""Check the batch, the option `reduce` and the results of an accumulate loop, before the loop runs.

The checks use only names, types and the traced body. Each error message begins with the line of the
`accumulate_grads` call.
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


def check_num_microbatches(expected: Any) -> int | None:
    """Check the option `num_microbatches` of `accumulate_grads`, and return it as an int or None.

    Raises:
        TypeError: the option is neither an integer nor None.
        ValueError: the option is less than 1.
    """
    if expected is None:
        return None
    if isinstance(expected, bool) or not hasattr(expected, "__index__"):
        raise deliberate(TypeError(f"num_microbatches is {expected!r}; give an integer, or None"))
    count = operator.index(expected)
    if count < 1:
        raise deliberate(
            ValueError(f"num_microbatches is {expected!r}; give a number of at least 1, or None")
        )
    return count


def refuse_batch_as_schedule(schedule: Any, line: str) -> None:
    """Raise an error if a batch was passed to `accumulate_grads` in place of the schedule.

    Mistakes inside a schedule are found later, when the schedule is used.

    Args:
        schedule: the argument `schedule` of `accumulate_grads`.
        line: the user's source line, which begins the error message.

    Raises:
        TypeError: `schedule` is a mapping or contains arrays.
    """
    if hasattr(schedule, "tasks"):
        return
    if isinstance(schedule, Mapping) or any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(schedule)):
        raise deliberate(
            TypeError(
                f"{line}: argument 2 of accumulate_grads is a {type(schedule).__name__}, not a schedule; "
                "write `accumulate_grads(fn, Std1F1B(num_stages=2))(batch)`, with the schedule that you "
                "want: what accumulate_grads returns takes the batch"
            )
        )


def count_microbatches(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], expected: int | None, line: str
) -> int:
    """Return the number of microbatches of a batch: the size of the leading axis that all its leaves share.

    Args:
        names: one name per leaf of the batch, such as `"batch['x']"`.
        shapes: one shape per leaf.
        expected: the number of microbatches that the batch must have; None for any number.
        line: the user's source line, which begins each error message.

    Raises:
        StageError: the leaves share no leading axis, or its size is zero or not the expected one.
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
        if expected is not None and shape[0] != expected:
            raise StageError(
                f"{line}: {name} has shape {shape}, which is {shape[0]} microbatch{'es' * (shape[0] != 1)}, "
                f"but num_microbatches is {expected}; {_advise_reshape(name, shape, expected)}"
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


def _advise_reshape(name: str, shape: tuple[int, ...], expected: int) -> str:
    """Return advice, for an error message, on how to give a leaf the expected number of microbatches."""
    if expected in shape[1:]:
        moved = f"jnp.moveaxis({name}, {shape.index(expected, 1)}, 0)"
        return f"its axes may be in another order: `{moved}` has that number"
    if shape[0] % expected == 0:
        new = ", ".join(map(str, (expected, shape[0] // expected, *shape[1:])))
        return f"write `{name}.reshape({new})` if these are {shape[0]} rows of one batch"
    split = f"its leading axis of {shape[0]} cannot be split into {expected} of equal size"
    return f"{split}: pass a multiple of {expected}"


# ---------------------------------------------------------------- the results


def reductions_for(reduce: Any, shapes: Any, line: str) -> tuple[Reduction, ...]:
    """Return the reduction of each leaf of the results of the loop's function.

    Args:
        reduce: the option `reduce` of `accumulate_grads`: a tree prefix of `shapes` with `Reduction`s, or
            None for the defaults.
        shapes: the tree of results, whose leaves have `.shape` and `.dtype`.
        line: the user's source line, which begins each error message.

    Raises:
        TypeError: `reduce` is no tree prefix of the results, or a reduction does not apply to its values.
    """
    if reduce is None:
        reduce = (Sum(), *[Stack()] * (len(shapes) - 1)) if _has_several_parts(shapes) else Sum()
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
                f"{line}: reduce is not a tree prefix of the function's result {_tree_text(shapes)}: it is "
                f"{reduce!r}; give an operator for every part, one standing for all that is below it"
            )
        ) from None
    named, _ = jax.tree_util.tree_flatten_with_path(shapes)
    for reduction, (path, leaf) in zip(flat, named, strict=True):
        if not private_api.is_float0(leaf) and (problem := reduction.check(leaf.dtype, len(leaf.shape))):
            raise deliberate(TypeError(f"{line}: result{jax.tree_util.keystr(path)}: {problem}"))
    return tuple(flat)


def _has_several_parts(shapes: Any) -> bool:
    """Return whether a function's result is a nonempty tuple, whose elements have different default
    reductions.

    By default the first element (the gradients) is summed, and the other elements are stacked. A NamedTuple
    does not count as a tuple, since all of it may be gradients.
    """
    return type(shapes) is tuple and len(shapes) > 0


def _tree_text(shapes: Any) -> str:
    return str(jax.tree.structure(shapes)).removeprefix("PyTreeDef(").removesuffix(")")


def refuse_loss_before_gradients(shapes: Any, body: Any, line: str) -> None:
    """Raise an error if the loop's function returns `(loss, grads)`, the order of `jax.value_and_grad`.

    For this order the default reductions would sum the loss and stack the gradients, so that the parameters
    would get one more dimension with each update.

    Args:
        shapes: the tree of the function's results.
        body: the function as a closed jaxpr, which shows which results are gradients.
        line: the user's source line, which begins the error message.

    Raises:
        TypeError: the first result is a scalar (or begins with one, as with `has_aux`), and another result
            contains gradients that are arrays.
    """
    if not _has_several_parts(shapes):
        return
    with_aux = type(shapes[0]) is tuple and len(shapes[0]) > 0
    head = shapes[0][0] if with_aux else shapes[0]
    if getattr(head, "shape", None) != () or not jnp.issubdtype(head.dtype, jnp.floating):
        return
    behind = jax.tree_util.tree_flatten_with_path(shapes[1:])[0]
    first = len(jax.tree.leaves(shapes[0]))
    if not any(leaf.shape for _, leaf in behind):
        return
    is_gradient = _find_gradients(body.jaxpr, [False] * len(body.jaxpr.invars), tracebacks.Origins())[first:]
    found = [(p, leaf) for (p, leaf), g in zip(behind, is_gradient, strict=True) if g and leaf.shape]
    if not found:
        return
    path, leaf = found[0]
    name = f"result[{path[0].idx + 1}]{jax.tree_util.keystr(path[1:])}"
    loss = "(loss, aux)" if with_aux else "loss"
    raise deliberate(
        TypeError(
            f"{line}: the function returns the loss first, as jax.value_and_grad does: without `reduce` the "
            "first result is summed over the microbatches and each other one stacked, gradients such as "
            f"{name} ({jnp.dtype(leaf.dtype).name}{list(leaf.shape)}) too. Return the gradients first:\n"
            f"  {loss}, grads = jax.value_and_grad(...)(...)\n"
            f"  return grads, {loss}\n"
            f"or keep this order and say how each is joined:\n"
            f"  {loss}, grads = accumulate_grads(..., reduce=(Stack(), Sum()))(batch)\n"
            "Stacked gradients, one for each microbatch, are reduce=(Sum(), Stack())"
        )
    )


_CONTRACTIONS = frozenset(("dot_general", "conv_general_dilated"))


def _find_gradients(jaxpr: Any, known: Sequence[bool], origins: tracebacks.Origins) -> list[bool]:
    """Return for each result of a jaxpr whether it is a gradient.

    A value is a gradient if a backward pass makes it, or if operations that make no array larger, such as
    casting, scaling, clipping or summing, make it from gradients. The results of matrix products do not
    count. For example, logits that a forward pass computes from updated parameters depend on gradients, but
    are not gradients.

    Args:
        jaxpr: the jaxpr.
        known: for each operand of the jaxpr, whether it is a gradient.
        origins: tells which equations were made by reverse-mode differentiation.
    """
    found = {v for v, is_gradient in zip(jaxpr.invars, known, strict=True) if is_gradient}
    for eqn in jaxpr.eqns:
        from_gradients = [_is_in(a, found) for a in eqn.invars]
        if origins.of(eqn)[0]:
            found.update(eqn.outvars)
        elif (inner := _matching_inner_jaxpr(eqn)) is not None:
            flags = _find_gradients(inner, from_gradients, origins)
            found.update(v for v, is_gradient in zip(eqn.outvars, flags, strict=True) if is_gradient)
        elif eqn.primitive.name not in _CONTRACTIONS:
            sizes = [
                a.aval.size for a, is_gradient in zip(eqn.invars, from_gradients, strict=True) if is_gradient
            ]
            found.update(v for v in eqn.outvars if v.aval.size <= max(sizes, default=-1))
    return [_is_in(a, found) for a in jaxpr.outvars]


def _is_in(atom: Any, found: Iterable[Any]) -> bool:
    return not isinstance(atom, private_api.Literal) and atom in found


def _matching_inner_jaxpr(eqn: Any) -> Any:
    """Return the only jaxpr inside an equation, if it has as many operands and results as the equation.

    Returns:
        The jaxpr, such as the body of a call or a scan; None for any other equation.
    """
    inner = private_api.sub_jaxprs(eqn)
    lengths = [(len(jaxpr.invars), len(jaxpr.outvars)) for jaxpr in inner]
    return inner[0] if lengths == [(len(eqn.invars), len(eqn.outvars))] else None
