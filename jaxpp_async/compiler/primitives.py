"""compiler.primitives: what the compiler knows of JAX's primitives, by name; every list of such names is here. No jax.

`tests/compiler/test_primitives.py` holds them against the installed JAX: a name that JAX changes is noticed there, and nowhere
else, since a missing one only makes programs slower or larger.
"""

from __future__ import annotations

MARKER, MARKER_SIDE, LOOP = "pipeline_yield", "pipeline_yield_side", "accumulate_grads"
"""The primitives of `markers`."""

STACK, INDEX = "stack_layers", "index_layer"
"""Operations of ours, between the iterations of an unrolled scan: over values of all of them, and of one."""

# ---------------------------------------------------------------- what wraps other equations

CALLS = frozenset(("jit", "pjit", "closed_call", "core_call", "eval_jaxpr"))
"""Mean what is inside them: inlined, so that stages are cut between equations and not between blocks."""

CHECKPOINTS = frozenset(("checkpoint", "remat", "remat2"))
"""Hold what the backward computes again: whole in a stage, so that XLA keeps the recomputation."""

CUSTOM_RULES = frozenset(("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"))
"""Carry a rule of differentiation. Nothing is differentiated any more in a step that is compiled; in a stage they stay
whole all the same, where nothing inside asks for more: they are what the user wrote as one."""

CALLBACKS = frozenset(("pure_callback", "io_callback", "debug_callback", "debug_print"))
"""Run Python on the host."""

PRINTS = frozenset(("debug_print", "debug_callback"))
"""Callbacks that return nothing: the controller can make them when the step is over."""

LAID_OUT_BY_USER = frozenset(("sharding_constraint", "device_put", "shard_map"))
"""Name devices, or a mesh of them, as the user wrote it."""


def inlines(name: str, *, marked: bool, prints: bool, pinned: bool, in_loop: bool) -> bool:
    """Whether what an equation wraps takes its place.

    Args:
        name: of its primitive.
        marked: it has markers or loops inside.
        prints: it has prints inside.
        pinned: it is a `jit` with shardings of its own, which would be lost.
        in_loop: it stands in a loop's body.
    """
    if name in CALLS:
        return marked or prints or not pinned
    if name in CUSTOM_RULES:
        return marked or prints or not in_loop
    return name in CHECKPOINTS and marked


# ---------------------------------------------------------------- what is cheap

TRANSCENDENTAL = frozenset().union(
    ("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "sin", "sinh", "tan", "tanh"),
    (
        "cbrt",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "log2",
        "logistic",
        "polynomial",
        "pow",
    ),
)
"""Elementwise, and some twenty instructions an element where other light operations are one."""

LIGHT = frozenset().union(
    # layout, casts, constants
    (
        "bitcast_convert_type",
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "dynamic_slice",
    ),
    (
        "iota",
        "name",
        "pad",
        "reduce_precision",
        "reshape",
        "reshard",
        "rev",
        "shard",
        "sharding_constraint",
        "slice",
    ),
    ("split", "squeeze", "stack", "stop_gradient", "tile", "transpose", "unstack", STACK, INDEX),
    # arithmetic
    (
        "abs",
        "add",
        "add_any",
        "ceil",
        "clamp",
        "complex",
        "conj",
        "cumsum",
        "div",
        "floor",
        "imag",
        "integer_pow",
    ),
    (
        "max",
        "min",
        "mul",
        "mulhi",
        "neg",
        "nextafter",
        "one_minus_square",
        "real",
        "rem",
        "round",
        "rsqrt",
        "sign",
    ),
    ("sqrt", "square", "sub"),
    TRANSCENDENTAL,
    # choices and bits
    ("and", "clz", "eq", "eq_to", "ge", "gt", "is_finite", "le", "le_to", "lt", "lt_to", "ne", "not", "or"),
    ("population_count", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "xor"),
    # keys
    ("random_fold_in", "random_seed", "random_split", "random_unwrap", "random_wrap"),
)
"""Repeated where they are used, where they depend on no computed value: layout changes, casts, elementwise arithmetic
and constants. Products, reductions, random bits and control flow are not here: computing those twice costs more than a
buffer."""

REPEATED = (
    LIGHT
    - {
        "concatenate",
        "cumsum",
        "pad",
        "reshard",
        "shard",
        "sharding_constraint",
        "stack",
        "unstack",
        STACK,
        INDEX,
    }
    - {"random_fold_in", "random_seed", "random_split", "random_unwrap", "random_wrap"}
)
"""Light ones that XLA fuses into what reads them, so that running them again moves no bytes; never one that may
communicate between devices."""

LAID_OUT = frozenset(("broadcast_in_dim", "convert_element_type", "copy", "iota", "reshape", "squeeze"))
"""Make something large of something small: made again from the small operand, wherever it is needed, rather than sent.
A transpose or a slice is not here, whose operand is as large."""

# ---------------------------------------------------------------- sums

ADDITIONS = frozenset(("add", "add_any"))
"""Of two values; what JAX adds gradients with is the second one."""

MOVES_ONLY = frozenset().union(
    (
        "broadcast_in_dim",
        "concatenate",
        "copy",
        "pad",
        "reshape",
        "rev",
        "slice",
        "squeeze",
        "transpose",
        STACK,
    )
)
"""Exact whatever they are given, so they may run once, behind the loop, on a sum. A cast is not here: it rounds."""

SPLITS = frozenset(("split", "unstack"))
"""The same, with several results: the gradient of arrays that the loss joined into one."""

LINEAR_IN_STAGE = frozenset(("convert_element_type", "div", "mul", "neg", "reduce_sum"))
"""f(a + b) = f(a) + f(b), up to rounding: done in each stage on its part of a sum, before accumulating."""

ASSOCIATIVE = frozenset(("add", "add_any", "mul", "max", "min", "and", "or"))
"""Of two values, in any grouping: each actor joins its own values first."""

REDUCTIONS = frozenset(("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or"))
"""The same of one array's elements."""
