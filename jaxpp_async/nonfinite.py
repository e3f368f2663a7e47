"""nonfinite: computations that also say which of their operations make a NaN or an infinity.

The loop in plain JAX uses them and, by `compiler.emit`, so do tasks on actors, where `actors.devices.special_values`
reads what they say. They look only for what JAX's options forbid when they are traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpp_async import jax_compat, jax_config, jax_origins

_NAN, _INF = 1, 2
_WORDS = {_NAN: "nan", _INF: "inf"}

CALLS = frozenset().union(
    ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "checkpoint", "remat", "remat2"),
    ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
)
"""Primitives that mean what is inside them. `compiler.primitives` has the same names, by what they are for."""


def wanted() -> bool:
    """Whether JAX's options forbid NaNs or infinities."""
    return jax_config.forbids_nans() or jax_config.forbids_infs()


class Checker:
    """Evaluates equations under a trace and looks at each floating value that they make.

    Attributes:
        places: where and by what each value was made that was looked at, in program order.
    """

    def __init__(self) -> None:
        self.places: list[str] = []
        self._found: list[Any] = []

    def found(self) -> Any:
        """A vector with a small integer for each of `places`: what its value has, 0 for nothing. `blame` reads it."""
        return jnp.stack(self._found) if self._found else jnp.zeros((0,), jnp.uint8)

    def check_argument(self, value: Any) -> None:
        """Look at a value that came in: it has a place without words."""
        self.places.append("")
        self._found.append(_seen(value) if _is_floating(value) else jnp.uint8(0))

    def check_result(self, value: Any, line: str, operation: str) -> None:
        """Look at a value that an operation made, if it is a floating one."""
        if _is_floating(value):
            self.places.append(f"{line}: {operation}")
            self._found.append(_seen(value))

    def run_closed(self, closed: Any, args: Sequence[Any], around: str) -> list[Any]:
        """The results of a closed jaxpr; `around` is the line of what has no line of its own."""
        env: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(closed.jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, jax_compat.Literal) else env[atom]

        for eqn in closed.jaxpr.eqns:
            results = self.run_equation(eqn, [read(a) for a in eqn.invars], around)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(a) for a in closed.jaxpr.outvars]

    def run_equation(self, eqn: Any, operands: Sequence[Any], around: str) -> list[Any]:
        """The results of an equation. Calls and scans are entered; what else has jaxprs inside is looked at as one."""
        line = jax_origins.source_line(eqn)
        line = around if line == "unknown line" else line
        if eqn.primitive.name == "scan":
            return self._scan(jax_compat.scan_parts(eqn), operands, line)
        if eqn.primitive.name in CALLS and (inner := jax_compat.inner_jaxpr(eqn)) is not None:
            return self.run_closed(inner, operands, line)
        results = jax_compat.bind_eqn(eqn, operands)
        for value in results:
            self.check_result(value, line, eqn.primitive.name)
        return results

    def _scan(self, parts: jax_compat.ScanParts, operands: Sequence[Any], line: str) -> list[Any]:
        consts = operands[: parts.num_consts]
        inside = Checker()

        def body(carry: list[Any], xs: list[Any]) -> Any:
            inside.__init__()  # JAX may trace it twice
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
    return not spec.unreduced and not spec.reduced  # of sums over devices, pending or made, JAX computes no `any`


def _seen(value: Any) -> Any:
    """Find the worst that a value has: `_NAN`, `_INF` or 0."""
    value = value.astype(jnp.float32) if value.dtype.itemsize < 2 else value  # of 8 bits
    seen = jnp.uint8(0)
    if jax_config.forbids_infs():
        seen = jnp.where(jnp.any(jnp.isinf(value)), jnp.uint8(_INF), seen)
    if jax_config.forbids_nans():
        seen = jnp.where(jnp.any(jnp.isnan(value)), jnp.uint8(_NAN), seen)
    return seen


def blame(found: Any, places: Sequence[str], names: Sequence[str | None], where: str = "") -> str | None:
    """Name the first operation that made a NaN or an infinity, in JAX's words, and the arguments that came with one.

    Args:
        found, places: as `Checker` has them.
        names: of the arguments that were looked at, the user's; None: it has none.
        where: said behind the operation, such as `", microbatch 2"`.

    Returns:
        None: there is neither.
    """
    seen = [(place, kind) for place, kind in zip(places, np.asarray(found).tolist(), strict=True)]
    given = [(name, kind) for name, (_, kind) in zip(names, seen, strict=False) if kind]
    made = next(((place, kind) for place, kind in seen if kind and place), None)
    came = ", ".join(dict.fromkeys(name for name, _ in given if name))
    if made is None:
        return f"{came} had an invalid value ({_WORDS[given[0][1]]}) already{where}" if came else None
    line, _, operation = made[0].rpartition(": ")
    text = f"{line}: invalid value ({_WORDS[made[1]]}) encountered in {operation}{where}"
    return f"{text}; {came} had one already" if came else text


def blame_in_loop(
    body: Any, operands: Sequence[Any], num_consts: int, num_microbatches: int, names: Sequence[str]
) -> str | None:
    """Name the operation of a loop's body, and the microbatch, that make a NaN or an infinity.

    Args:
        body: closed jaxpr of invariants, one microbatch's leaves and its index.
        operands: the invariants, then the batch's leaves, each with a leading axis of microbatches.
        names: of the leaves.

    Returns:
        None: no operation of the body does it by itself.
    """
    checker = Checker()

    @jax.jit
    def look_at(operands: list[Any], index: Any) -> Any:
        checker.__init__()
        leaves = [lax.dynamic_index_in_dim(x, index, 0, keepdims=False) for x in operands[num_consts:]]
        args = [*operands[:num_consts], *leaves]
        for arg in args:
            checker.check_argument(arg)
        checker.run_closed(body, [*args, index], "unknown line")
        return checker.found()

    named = [*["a value that the loop's function closes over"] * num_consts, *names]
    for i in range(num_microbatches):
        found = look_at(list(operands), np.int32(i))
        if text := blame(found, checker.places, named, f", microbatch {i}"):
            return text
    return None
