"""compiler.exportable: errors for steps that cannot be lowered, or whose arrays actors cannot keep.

Each is an `UnsupportedError` that names the operation, its task and the user's line.

Looks for the culprit only once something has failed: each operation is then lowered alone. Runs nothing.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

from jaxpp_async import jax_compat
from jaxpp_async.compiler.emit import Target, emit
from jaxpp_async.compiler.graph import PlacedStep
from jaxpp_async.compiler.ir import Op, Types
from jaxpp_async.compiler.recipes import Recipe
from jaxpp_async.errors import JaxppAsyncError, UnsupportedError

_NO_RULE = re.compile(r"rule for primitive '([^']+)' not found")
_FOREIGN = re.compile(r"custom_call @([\w.$-]+)")


@contextlib.contextmanager
def explained(recipes: Sequence[Recipe], types: Types, target: Target) -> Iterator[None]:
    """What JAX raises inside becomes an `UnsupportedError`, if one operation of the recipes is to blame.

    Args:
        recipes: of the step that is lowered inside, each with the operations of one task.
    """
    try:
        yield
    except JaxppAsyncError:
        raise
    except Exception as error:  # lowering rules are anybody's code and raise anything
        found = _culprit(recipes, types, target)
        if found is None:
            raise
        recipe, op, why = found
        raise UnsupportedError(_message(recipe, op, why)) from error


def refuse_host_memory(placed: PlacedStep) -> None:
    """Raise an `UnsupportedError` for a value in host memory that outlives its task: actors keep none there.

    A checkpoint that offloads makes one of each residual, unless its backward is in the same task.
    """
    crossing = {v for v in placed.value_ids if placed.types[v].on_host}
    for recipe in placed.recipes if crossing else ():
        for op in recipe.ops:
            if crossing.intersection(op.outputs):
                raise UnsupportedError(
                    f"{op.line}: `{op.name}` in task {recipe.name} puts an array into host memory, and another task, "
                    "or the step's caller, gets it; actors keep such arrays in their devices' memory alone. For a "
                    "checkpoint write a policy that saves or recomputes (save_only_these_names, nothing_saveable) in "
                    "place of one that offloads; leave jax.device_put(..., jax.memory.Space.Host) out of a state"
                )


def _culprit(recipes: Sequence[Recipe], types: Types, target: Target) -> tuple[Recipe, Op, Exception] | None:
    """The first operation that cannot be lowered on its own."""
    tried: set[tuple[str, str]] = set()
    for recipe in recipes:
        for op in recipe.ops:
            if (op.name, op.line) in tried:
                continue
            tried.add((op.name, op.line))
            alone = Recipe("alone", tuple(dict.fromkeys(op.reads)), tuple(o for o in op.outputs if o >= 0), (op,))
            try:
                emit(alone, types, {}, target)
            except Exception as error:  # as above
                return recipe, op, error
    return None


def _message(recipe: Recipe, op: Op, error: Exception) -> str:
    text = str(error)
    where = f"{op.line}: "
    if rule := _NO_RULE.search(text):
        around = f" (inside `{op.name}`)" if rule[1] != op.name else ""
        return (
            f"{where}`{rule[1]}`{around} in task {recipe.name} has no lowering for the actors' platform; register one "
            "(`jax.interpreters.mlir.register_lowering`), or write it with JAX's own operations"
        )
    if foreign := _FOREIGN.search(text):
        return (
            f"{where}`{op.name}` in task {recipe.name} calls foreign code, {foreign[1]!r}, which cannot be exported to "
            "the actors; write it with JAX's own operations"
        )
    if jax_compat.is_missing_gpu_error(error):
        return (
            f"{where}`{op.name}` in task {recipe.name} needs a GPU in this process to be lowered "
            f"({text.splitlines()[0]}); start it where there is one, or use an implementation that can do without"
        )
    why = text.splitlines()[0] if text else type(error).__name__
    return (
        f"{where}`{op.name}` in task {recipe.name} cannot be exported to the actors: {why}; "
        "write it with other operations"
    )
