"""List the names of JAX's primitives by the properties that compiler passes ask for, such as cheap, linear or
associative.

The compiler recognises primitives by name, and this module has all lists of names.
`tests/compiler/test_primitives.py` compares the lists with the installed JAX, so that a test fails when JAX
changes a name. No other test would fail, since a missing name only makes programs slower or larger.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jaxpp_async.program.work import CollectiveKind


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MARKER, MARKER_SIDE, LOOP = "pipeline_yield", "pipeline_yield_side", "accumulate_grads"
"""The names of the primitives of the package `markers`, which mark stages and microbatch loops."""

STACK, INDEX = "stack_layers", "index_layer"
"""The names of two operations that the compiler makes itself when it unrolls a scan: `STACK` stacks the
values of all iterations, `INDEX` reads the value of one iteration from a stack."""

# ---------------------------------------------------------------- primitives that wrap other equations

CALLS = _names("jit pjit closed_call core_call eval_jaxpr")
"""Primitives that only call the equations inside them. These equations are inlined, so that a stage can end
between any two of them."""

CHECKPOINTS = _names("checkpoint remat remat2")
"""Primitives that contain equations which the backward computes again. Within a stage a checkpoint
stays one operation, since XLA would otherwise remove the recomputation."""

CUSTOM_RULES = _names("custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr")
"""Primitives with a custom rule of differentiation, which JAX has already applied when a step is compiled.
Within a stage such a call still stays one operation if there is no marker and no print inside, since the user
wrote it as one."""

CALLBACKS = _names("pure_callback io_callback debug_callback debug_print")
"""Primitives that run Python code on the host."""

PRINTS = _names("debug_print debug_callback")
"""Primitives that run Python code on the host and return nothing, so that the controller can run this code
when the step is over."""

LAID_OUT_BY_USER = _names("sharding_constraint device_put shard_map")
"""Primitives whose parameters may name devices or a mesh of devices that the user chose."""


def inlines(name: str, *, marked: bool, prints: bool, pinned: bool, in_loop: bool) -> bool:
    """Return whether to inline an equation, that is to replace it by the equations that it wraps.

    This applies to calls, functions with custom derivative rules, and checkpoints; others are never inlined.
    All three are inlined if there are stage markers or loops inside, and all but checkpoints if there are
    prints inside. Further, calls are inlined unless they are pinned, and functions with custom derivative
    rules are inlined outside microbatch loops.

    Args:
        name: the name of the equation's primitive.
        marked: whether there are stage markers or microbatch loops inside the equation.
        prints: whether there are prints inside the equation.
        pinned: whether the equation is a `jit` with its own shardings, which inlining would lose.
        in_loop: whether the equation is in the body of a microbatch loop.
    """
    if name in CALLS:
        return marked or prints or not pinned
    if name in CUSTOM_RULES:
        return marked or prints or not in_loop
    return name in CHECKPOINTS and marked


# ---------------------------------------------------------------- cheap primitives

TRANSCENDENTAL = _names(
    "acos acosh asin asinh atan atan2 atanh cos cosh sin sinh tan tanh"
    " cbrt erf erf_inv erfc exp exp2 expm1 log log1p log2 logistic polynomial pow"
)
"""Elementwise primitives that take some twenty instructions per element, where other elementwise primitives
take one."""

_KEYS = _names("random_fold_in random_seed random_split random_unwrap random_wrap")

LIGHT = TRANSCENDENTAL | _KEYS | {STACK, INDEX}
LIGHT |= _names(  # layout, casts, constants
    "bitcast_convert_type broadcast_in_dim concatenate convert_element_type copy dynamic_slice iota name pad"
    " reduce_precision reshape reshard rev shard sharding_constraint slice split squeeze stack stop_gradient "
    "tile transpose unstack"
)
LIGHT |= _names(  # arithmetic
    "abs add add_any ceil clamp complex conj cumsum div floor imag integer_pow max min mul mulhi neg "
    "nextafter one_minus_square real rem round rsqrt sign sqrt square sub"
)
LIGHT |= _names(  # choices and bits
    "and clz eq eq_to ge gt is_finite le le_to lt lt_to ne not or population_count select_n shift_left"
    " shift_right_arithmetic shift_right_logical xor"
)
"""Cheap primitives, which every task that uses their results repeats if they depend on no computed value:
layout changes, casts, elementwise arithmetic and constants. Products, reductions, random bits and control
flow are not among them, since computing those twice costs more than keeping a buffer."""

PER_CALL = (
    CALLBACKS
    | {MARKER, MARKER_SIDE, LOOP}
    | _names("random_bits random_gamma threefry2x32 rng_bit_generator")
)
"""Primitives that are never computed once for all microbatches. Random bits are cheap to draw again, and
would take four bytes an element to keep."""

CHEAP_OR_FIXED = (
    LIGHT | PER_CALL | CALLS | CUSTOM_RULES | LAID_OUT_BY_USER | _names("optimization_barrier pvary")
)
"""Primitives that stay in the loop even if their operands are the same for all microbatches: XLA fuses them
into their readers, or they hold what the user wants to be in one place."""

REPEATED = LIGHT - _KEYS - {STACK, INDEX}
REPEATED -= _names("concatenate cumsum pad reshard shard sharding_constraint stack unstack")
"""Light primitives that XLA fuses into their readers, so that running them again moves no bytes. Primitives
that may communicate between devices are not in the set."""

ENLARGING = _names("broadcast_in_dim convert_element_type copy iota reshape squeeze")
"""Primitives that fill a large value with a small one, and those that cast, copy or reshape the small value
first. The large value is not sent to other actors, which make it again from the small operand. Transposes and
slices are not in the set, since their operands are as large as their results."""

ELEMENTWISE = TRANSCENDENTAL | _names(
    "abs add add_any and bitcast_convert_type ceil clamp clz complex conj convert_element_type copy digamma"
    " div eq eq_to floor ge gt igamma igammac imag integer_pow is_finite le le_to lgamma lt lt_to max min mul"
    " mulhi ne neg nextafter not one_minus_square or polygamma population_count real reduce_precision"
    " regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic"
    " shift_right_logical sign sqrt square stop_gradient sub threefry2x32 xor zeta"
)
"""Primitives of which each element of the result depends on those at the same place of the operands."""

KEY_ARRAYS = _names("random_bits random_fold_in random_gamma random_split random_unwrap random_wrap")
"""Primitives that compute something for each key of an array of keys."""

BATCHED_MATRIX = _names("cholesky eigh householder_product lu qr schur svd triangular_solve tridiagonal")
"""Primitives that compute something for each matrix of a batch of matrices."""

# ---------------------------------------------------------------- sums

ADDITIONS = _names("add add_any")
"""Primitives that add two values; JAX adds gradients with `add_any`."""

DIFFERENCES = _names("sub")
"""Primitives that subtract the second of two values from the first."""

CHOICES = _names("select_n")
"""Primitives that take each element from one of several values. The first operand says from which."""

MOVES_ONLY = _names("broadcast_in_dim concatenate copy pad reshape rev slice squeeze stack transpose") | {
    STACK
}
"""Linear primitives that are exact, so that they may run once after the loop, on a sum over microbatches.
Casts are not in the set, since they round."""

SPLITS = _names("split unstack")
"""Linear primitives that are exact and have several results. The gradients of arrays that the loss joined
into one are made by them."""

LINEAR_IN_STAGE = _names("convert_element_type div mul neg reduce_sum")
"""Primitives for which f(a + b) = f(a) + f(b) up to rounding. Each stage applies them to its own part of a
sum, before accumulating."""

_POSITIONS = range(1024)

AFFINE: Mapping[str, frozenset[int]] = MappingProxyType(
    {
        **dict.fromkeys(_names("add add_any sub concatenate stack"), frozenset(_POSITIONS)),
        "select_n": frozenset(_POSITIONS[1:]),
        "scatter-add": frozenset({0, 2}),
        "dynamic_update_slice": frozenset({0, 1}),
        "pad": frozenset({0, 1}),
    }
)
"""The primitives that are linear in several operands together, and the positions of these operands. The sum
over microbatches of an operand that is the same for all of them is the operand times their number."""

LINEAR_IN_ONE: Mapping[str, frozenset[int]] = MappingProxyType(
    {
        **dict.fromkeys(
            _names(
                "neg copy reshape transpose broadcast_in_dim squeeze reduce_sum rev slice cumsum real imag"
                " gather dynamic_slice div split unstack sharding_constraint"
            ),
            frozenset({0}),
        ),
        "triangular_solve": frozenset({1}),
        **dict.fromkeys(_names("mul dot_general conv_general_dilated"), frozenset({0, 1})),
    }
)
"""The primitives that are linear in one operand while all others stay the same, and the positions where this
operand may stand."""

ASSOCIATIVE = _names("add add_any mul max min and or")
"""Associative primitives of two operands, so that each actor can combine its own values first."""

JOINS_PARTS = "joins_parts"
"""The entry in `Op.params` of an associative operation that joins what parts of an array were reduced to."""

REDUCTIONS = _names("reduce_sum reduce_prod reduce_max reduce_min reduce_and reduce_or")
"""Primitives that reduce the elements of one array by an associative operation, so that the elements may be
grouped in any way."""

# ---------------------------------------------------------------- work

LAYOUT = _names(
    "bitcast_convert_type broadcast_in_dim concatenate convert_element_type copy device_put"
    " dynamic_slice dynamic_update_slice gather iota optimization_barrier pad pvary random_wrap"
    " random_unwrap reshape reshard rev shard sharding_constraint slice split squeeze stack stop_gradient"
    " transpose unstack"
) | {MARKER, MARKER_SIDE, STACK, INDEX}
"""Primitives that count as no floating-point operation, since they only move, cast or repeat elements."""

READS_ALL = REDUCTIONS | _names(
    "reduce argmax argmin cumsum cumprod cummax cummin cumlogsumexp reduce_xor top_k"
)
"""Primitives with some operation for each element of the operand, and fewer results."""

CUMULATIVE = _names("cumsum cumprod cummax cummin cumlogsumexp")
"""Primitives that replace each element by a reduction of the elements before it, along one axis."""

NOT_FUSED = READS_ALL | _names(
    "approx_top_k cholesky conv_general_dilated dot_general eigh fft gather lu ragged_dot_general"
    " reduce_window reduce_window_max reduce_window_min reduce_window_sum scatter scatter-add scatter-max"
    " scatter-min scatter-mul select_and_gather_add select_and_scatter_add sort svd triangular_solve"
)
"""Primitives whose operands and results XLA reads from memory and writes to memory, while it fuses
elementwise primitives into their neighbours."""

RENAMES = _names(
    "copy device_put optimization_barrier pvary reshape reshard shard sharding_constraint squeeze"
    " stop_gradient"
)
"""Primitives whose results XLA keeps in the memory of their operands."""

EXCHANGES: dict[str, CollectiveKind] = {
    **{name: "all-reduce" for name in _names("psum psum_invariant unreduced_psum pmax pmin")},
    **{name: "all-gather" for name in _names("all_gather all_gather_invariant all_gather_reduced")},
    **{name: "reduce-scatter" for name in _names("reduce_scatter unreduced_reduce_scatter")},
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
"""The kind of exchange between devices that each primitive inside a `shard_map` makes."""
