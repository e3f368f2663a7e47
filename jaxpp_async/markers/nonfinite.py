"""Find the operation that makes the first NaN or infinity of a computation.

A `NonfiniteChecker` evaluates a computation under a JAX trace and adds a second result, which tells for each
floating value whether it has a NaN or an infinity. `describe_origin` turns that result into a message. The
accumulate loop uses the checker in plain JAX, and `compiler.evaluate` uses it for the tasks that run on
actors. The checker looks for NaNs, infinities or both, as JAX's options (`jax_debug_nans`, `jax_debug_infs`)
say at trace time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpp_async.jax_bridge import jax_config, private_api, tracebacks

_NAN, _INF = 1, 2
_WORDS = {_NAN: "nan", _INF: "inf"}

CALLS = frozenset().union(
    ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "checkpoint", "remat", "remat2"),
    ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
)
"""Primitives that only run the jaxpr inside them, whose equations are therefore checked one by one. The same
names are in `compiler.primitives`, there in one set for each purpose."""


def forbids_nonfinite() -> bool:
    """Return whether JAX's options forbid NaNs or infinities."""
    return jax_config.forbids_nans() or jax_config.forbids_infs()


def evaluate_jaxpr(
    closed: Any, args: Sequence[Any], run_equation: Callable[[Any, list[Any]], Sequence[Any]]
) -> list[Any]:
    """Evaluate a closed jaxpr on `args` under a JAX trace, equation by equation, and return its results.

    Args:
        closed: the closed jaxpr.
        args: the arguments of the jaxpr.
        run_equation: a function that takes an equation and the values of its operands, and returns the
            equation's results. Results beyond those of the equation are ignored.
    """
    jaxpr, consts = private_api.open_jaxpr(closed)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, private_api.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, run_equation(eqn, [read(a) for a in eqn.invars]), strict=False))
    return [read(a) for a in jaxpr.outvars]


class NonfiniteChecker:
    """An evaluator of equations under a JAX trace that checks each floating value that the equations make.

    Attributes:
        places: one text per checked value, in program order: the line and the operation that made the value;
            empty for an argument.
    """

    def __init__(self) -> None:
        self.places: list[str] = []
        self._found: list[Any] = []

    def found(self) -> Any:
        """Return the results of all checks, as an integer vector with one entry per item of `places`.

        An entry is 0 for a finite value, `_NAN` for a NaN and `_INF` for an infinity. `describe_origin` reads
        the vector.
        """
        return jnp.stack(self._found) if self._found else jnp.zeros((0,), jnp.uint8)

    def check_argument(self, value: Any) -> None:
        """Check an argument of the computation, if it is floating, and add an empty text to `places`."""
        self.places.append("")
        self._found.append(_worst_value(value) if _is_floating(value) else jnp.uint8(0))

    def check_result(self, value: Any, line: str, operation: str) -> None:
        """Check the result of an operation if it is a floating value, and add the operation to `places`.

        Args:
            value: the result.
            line: the user's line of the operation.
            operation: the operation's name.
        """
        if _is_floating(value):
            self.places.append(f"{line}: {operation}")
            self._found.append(_worst_value(value))

    def run_closed(self, closed: Any, args: Sequence[Any], around: str) -> list[Any]:
        """Evaluate a closed jaxpr on `args`, check each value that an equation makes, and return the results.

        Args:
            closed: the closed jaxpr.
            args: the arguments of the jaxpr.
            around: the source line to report for an equation that has no line in the user's code.
        """
        return evaluate_jaxpr(closed, args, lambda eqn, operands: self.run_equation(eqn, operands, around))

    def run_equation(self, eqn: Any, operands: Sequence[Any], around: str) -> list[Any]:
        """Evaluate an equation, check the values that it makes, and return them.

        Equations inside calls and scans are checked one by one. Any other equation that has jaxprs inside is
        checked as one operation.

        Args:
            eqn: the equation.
            operands: the values of the equation's operands.
            around: the source line to report if the equation has no line in the user's code.
        """
        line = tracebacks.source_line(eqn)
        line = around if line == "unknown line" else line
        if eqn.primitive.name == "scan":
            return self._scan(private_api.scan_parts(eqn), operands, line)
        if eqn.primitive.name in CALLS and (inner := private_api.inner_jaxpr(eqn)) is not None:
            return self.run_closed(inner, operands, line)
        results = private_api.bind_eqn(eqn, operands)
        for value in results:
            self.check_result(value, line, eqn.primitive.name)
        return results

    def _scan(self, parts: private_api.ScanParts, operands: Sequence[Any], line: str) -> list[Any]:
        consts = operands[: parts.num_consts]
        inside = NonfiniteChecker()

        def body(carry: list[Any], xs: list[Any]) -> Any:
            inside.__init__()  # JAX may trace `body` twice
            results = inside.run_closed(parts.body, [*consts, *carry, *xs], line)
            return results[: parts.num_carry], (results[parts.num_carry :], inside.found())

        start, xs = list(operands[parts.num_consts : parts.first_x]), list(operands[parts.first_x :])
        carry, (stacked, found) = lax.scan(body, start, xs, length=parts.length, reverse=parts.reverse)
        self.places += inside.places
        self._found += list(found.max(axis=0, initial=0)) if inside.places else []
        return [*carry, *stacked]


def _is_floating(value: Any) -> bool:
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return False
    spec = jax.typeof(value).sharding.spec
    # JAX cannot compute `any` of an array that is unreduced or reduced over a mesh axis.
    return not spec.unreduced and not spec.reduced


def _worst_value(value: Any) -> Any:
    """Check a value for NaNs and infinities that JAX's options forbid, and return a code as a traced integer.

    Returns:
        `_NAN` if the value contains a NaN, else `_INF` if it contains an infinity, else 0.
    """
    value = value.astype(jnp.float32) if value.dtype.itemsize < 2 else value  # 8-bit floats
    seen = jnp.uint8(0)
    if jax_config.forbids_infs():
        seen = jnp.where(jnp.any(jnp.isinf(value)), jnp.uint8(_INF), seen)
    if jax_config.forbids_nans():
        seen = jnp.where(jnp.any(jnp.isnan(value)), jnp.uint8(_NAN), seen)
    return seen


def describe_origin(
    found: Any, places: Sequence[str], names: Sequence[str | None], where: str = ""
) -> str | None:
    """Describe the first operation that made a NaN or an infinity, and the arguments that already had one.

    Args:
        found: the result of `NonfiniteChecker.found`, as a host array.
        places: the attribute `places` of the `NonfiniteChecker`.
        names: the user's name of each checked argument; None for an argument without a name.
        where: text to put after the operation, such as `", microbatch 2"`.

    Returns:
        A message in the style of JAX's own messages; None if there is neither a NaN nor an infinity.
    """
    seen = list(zip(places, np.asarray(found).tolist(), strict=True))
    given = [(name, kind) for name, (_, kind) in zip(names, seen, strict=False) if kind]
    made = next(((place, kind) for place, kind in seen if kind and place), None)
    came = ", ".join(dict.fromkeys(name for name, _ in given if name))
    if made is None:
        return f"{came} had an invalid value ({_WORDS[given[0][1]]}) already{where}" if came else None
    line, _, operation = made[0].rpartition(": ")
    text = f"{line}: invalid value ({_WORDS[made[1]]}) encountered in {operation}{where}"
    return f"{text}; {came} had one already" if came else text


def describe_origin_in_loop(
    body: Any, operands: Sequence[Any], num_consts: int, num_microbatches: int, names: Sequence[str]
) -> str | None:
    """Describe the operation in a loop's body, and the microbatch, that first made a NaN or an infinity.

    The body is run again, one microbatch at a time, with checks.

    Args:
        body: the loop's body as a closed jaxpr; its operands are the invariants, one microbatch's leaves and
            the microbatch's index.
        operands: the invariants, then the batch's leaves, each `(num_microbatches, ...)`.
        num_consts: the number of invariants.
        num_microbatches: the number of microbatches.
        names: the user's name of each leaf of the batch.

    Returns:
        A message; None if no microbatch has a NaN or an infinity when the microbatches are run one at a time.
    """
    checker = NonfiniteChecker()

    @jax.jit
    def check_microbatch(operands: list[Any], index: Any) -> Any:
        checker.__init__()
        leaves = [lax.dynamic_index_in_dim(x, index, 0, keepdims=False) for x in operands[num_consts:]]
        args = [*operands[:num_consts], *leaves]
        for arg in args:
            checker.check_argument(arg)
        checker.run_closed(body, [*args, index], "unknown line")
        return checker.found()

    named = [*["a value that the loop's function closes over"] * num_consts, *names]
    for i in range(num_microbatches):
        found = check_microbatch(list(operands), np.int32(i))
        if text := describe_origin(found, checker.places, named, f", microbatch {i}"):
            return text
    return None
