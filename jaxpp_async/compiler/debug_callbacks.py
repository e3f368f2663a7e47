"""Make `jax.debug.print` and `jax.debug.callback` work in a step, and refuse any other host code.

Host code is never sent to an actor. Instead the printed values become hidden results of the step's tasks, and
the controller calls the prints with these values once the step is over. A "print" below is a call of either
function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpp_async.compiler.ir import Lit, LoopPrints, Print, PrintOperand, Ref, Types, stacked_type
from jaxpp_async.compiler.primitives import CALLBACKS, CALLS, CHECKPOINTS, CUSTOM_RULES, PRINTS
from jaxpp_async.errors import UnsupportedError
from jaxpp_async.jax_bridge import private_api, tracebacks
from jaxpp_async.markers.nonfinite import evaluate_jaxpr


def make_print(eqn: Any, operands: Sequence[Ref], line: str) -> Print:
    """Describe an equation that prints as a `Print`, so that the controller can call the print after the
    step.

    Args:
        eqn: the equation of a `jax.debug.print` or `jax.debug.callback`.
        operands: the value ids and constants to print.
        line: `file:line` of the user's code.
    """
    return Print(
        functools.partial(private_api.call_host, eqn), tuple(PrintOperand(r) for r in operands), line
    )


def refuse_host_code(eqn: Any, line: str, stage: Callable[[], int] | None) -> None:
    """Raise an error if an equation runs host code or has side effects, since actors cannot run host code.

    Args:
        eqn: the equation to check.
        line: `file:line` of the equation in the user's code.
        stage: a function that returns the equation's stage, for the error message; None for an equation
            outside the loops. The function walks over a loop's whole body, so it is called only if there is
            an error.

    Raises:
        UnsupportedError: the equation runs host code or has side effects.
    """
    name = eqn.primitive.name
    found, around = private_api.find_inside(eqn, CALLBACKS)
    if found is None and not private_api.has_effects(eqn):
        return
    around = [n for n in around if n not in CALLS | CHECKPOINTS | CUSTOM_RULES]
    what = found.primitive.name if found is not None else name
    stage_text = "" if stage is None else f" in stage {stage()}"
    where = f"`{what}`" + (f" inside `{around[-1]}`" if around else "") + stage_text
    if found is not None and (own := tracebacks.source_line(found)) != "unknown line":
        line = own
    if what in PRINTS:
        raise UnsupportedError(
            f"{line}: {where}: prints are made by the controller from results of the step, and values inside "
            f"a `{around[-1] if around else name}` are none; print before or after it, return the values "
            "from its body and print them there, or write it as Python code"
        )
    raise UnsupportedError(
        f"{line}: {where} runs Python on the host, or has side effects there, which a task on an actor "
        "cannot; return the value and use it in your process when the step is over, or show it with "
        "`jax.debug.print` or `jax.debug.callback`"
    )


# ---------------------------------------------------------------- inside a checkpoint


def is_checkpoint_with_prints(eqn: Any) -> bool:
    """Return whether an equation is a checkpoint (`jax.checkpoint`) with prints inside it."""
    return eqn.primitive.name in CHECKPOINTS and _has_prints(eqn)


def _has_prints(eqn: Any) -> bool:
    return any(private_api.primitives_inside(inner) & PRINTS for inner in private_api.sub_jaxprs(eqn))


def lift_prints(eqn: Any) -> tuple[Any, list[Any], list[tuple[Any, list[Any]]]]:
    """Return a copy of a checkpoint without prints; the printed values become extra results.

    A print is a `jax.debug.print` or `jax.debug.callback`. Prints inside a scan or a cond within the
    checkpoint are not moved.

    Args:
        eqn: the equation of the checkpoint (`jax.checkpoint`).

    Returns:
        Three values: the equation without prints; the constants to pass before its operands; and a list of
        pairs (equation of a print, the print's operands). Each operand of a print is a literal or the number
        of a result of the new equation.
    """
    jaxpr = private_api.inner_jaxpr(eqn)
    lifted: list[tuple[Any, list[Any]]] = []

    def without_prints(*args: Any) -> list[Any]:
        lifted.clear()
        found: list[tuple[Any, list[Any]]] = []
        results = _evaluate(jaxpr, args, found)
        for inner, operands in found:
            first = len(results)
            results += [operand for operand in operands if not isinstance(operand, private_api.Literal)]
            numbers = iter(range(first, len(results)))
            taken = [x if isinstance(x, private_api.Literal) else next(numbers) for x in operands]
            lifted.append((inner, taken))
        return results

    return (*private_api.with_inner(eqn, without_prints), lifted)


def _evaluate(closed: Any, args: Sequence[Any], found: list[tuple[Any, list[Any]]]) -> list[Any]:
    """Run a jaxpr under a JAX trace without its prints, and return its results.

    Args:
        closed: the closed jaxpr.
        args: the arguments of the jaxpr.
        found: the list to which a pair (equation of a print, the print's operands) is appended for each
            print.
    """

    def run_equation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name in PRINTS:
            shown = zip(eqn.invars, operands, strict=True)
            found.append((eqn, [a if isinstance(a, private_api.Literal) else x for a, x in shown]))
            return []
        if is_checkpoint_with_prints(eqn):
            without, constants, inside = lift_prints(eqn)
            results = private_api.bind_eqn(without, [*constants, *operands])
            found.extend((e, [results[o] if isinstance(o, int) else o for o in taken]) for e, taken in inside)
            return results  # these are more than those of `eqn`: the values to print are at the end
        if eqn.primitive.name in CALLS | CUSTOM_RULES and _has_prints(eqn):
            return _evaluate(private_api.inner_jaxpr(eqn), operands, found)
        return private_api.bind_eqn(eqn, operands)

    return evaluate_jaxpr(closed, args, run_equation)


# ---------------------------------------------------------------- inside a loop


def move_prints_out(
    prints: Sequence[Print], inside: Mapping[int, PrintOperand], types: Types, num_microbatches: int
) -> tuple[LoopPrints, dict[int, int]]:
    """Rewrite the prints of a loop's body so that they read values outside the loop.

    A printed value that is computed in the body becomes a new result of the loop, stacked over microbatches.

    Args:
        prints: the prints in the body; their operands are value ids of the body.
        inside: a dictionary. Its keys are the ids of the body's inputs; its values are print operands that
            stand for these inputs outside the loop.
        types: the type of every value id; the stacked values are added to it.
        num_microbatches: the number of microbatches of the loop.

    Returns:
        The rewritten prints, and a dictionary of the values that the loop has to stack. Its keys are value
        ids in the body; its values are the ids of the stacked results.
    """
    stacked: dict[int, int] = {}

    def outside(shown: PrintOperand) -> PrintOperand:
        if not isinstance(shown.ref, int):
            return shown
        if shown.ref in inside:
            return inside[shown.ref]
        if shown.ref not in stacked:
            stacked[shown.ref] = types.new(stacked_type(types[shown.ref], num_microbatches))
        return PrintOperand(stacked[shown.ref], per_microbatch=True)

    moved = tuple(Print(p.call, tuple(outside(o) for o in p.operands), p.line) for p in prints)
    return LoopPrints(moved, num_microbatches), stacked


# ---------------------------------------------------------------- when the step is over


def hidden_results(prints: Sequence[Print | LoopPrints]) -> tuple[int, ...]:
    """List the ids of the values that debug prints show, which the step returns as hidden results.

    Each id is listed once, in order of first use.
    """
    each = (q for p in prints for q in (p.prints if isinstance(p, LoopPrints) else (p,)))
    refs = (o.ref for p in each for o in p.operands)
    return tuple(dict.fromkeys(r for r in refs if isinstance(r, int)))


def print_calls(
    prints: Sequence[Print | LoopPrints], values: Mapping[int, Any]
) -> Iterator[tuple[Print, list[Any]]]:
    """Yield, in program order, each print to call and the list of operands to call it with.

    The prints of a loop are called once per microbatch, all prints of a microbatch before those of the next.

    Args:
        prints: the prints of the step.
        values: a dictionary from value id to host array; PRNG keys are key arrays.
    """
    for p in prints:
        inside, count = ((p,), 1) if isinstance(p, Print) else (p.prints, p.num_microbatches)
        for i in range(count):
            for inner in inside:
                yield inner, [_value(o, values, i) for o in inner.operands]


def _value(shown: PrintOperand, values: Mapping[int, Any], microbatch: int) -> Any:
    if shown.ref is None:
        return np.int32(microbatch)
    value = np.asarray(shown.ref.value) if isinstance(shown.ref, Lit) else values[shown.ref]
    return value[microbatch] if shown.per_microbatch else value
