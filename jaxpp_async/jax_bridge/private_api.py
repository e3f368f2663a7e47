"""Wrap private or unstable parts of JAX (`jax._src`, `jax.extend`, interpreter tables) in stable functions.

The functions take and return jaxprs, equations and primitives, and have no state. When JAX changes, only this
module has to. Settings and the compilation cache are in `jax_config`. Tested with JAX 0.10 and 0.12.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src import source_info_util as source_info
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.interpreters import pxla as _pxla
from jax.extend import core as _extend
from jax.interpreters import ad, batching, mlir

Primitive = _extend.Primitive
# JAX 0.12: another name of `Jaxpr`, hidden from type checkers
ClosedJaxpr: Any = vars(_extend)["ClosedJaxpr"]
Jaxpr = _extend.Jaxpr
JaxprEqn = _extend.JaxprEqn
Literal = _extend.Literal
ShapedArray = _core.ShapedArray
ShardingTypeError = _core.ShardingTypeError
Zero = ad.Zero
DropVar = _extend.DropVar

TOKEN_SHAPE, TOKEN_DTYPE = (0,), jnp.int32


# ---------------------------------------------------------------- primitives


def new_primitive(
    name: str,
    *,
    abstract_eval: Callable,
    reference: Callable,
    jvp: Callable | None = None,
    transpose: Callable | None = None,
    batch: Callable | None = None,
    effects: Callable | None = None,
) -> Any:
    """Return a new primitive with multiple results, which plain JAX runs as the function `reference`.

    Args:
        name: the primitive's name, as printed in jaxprs.
        abstract_eval: a function from operand avals and params to result avals.
        reference: the same computation in plain JAX; it runs eagerly and under `jit`, and the JVP and
            batching rules are derived from it if they are not given.
        jvp: the JVP rule, `(primals, tangents, **params) -> (primals_out, tangents_out)`.
        transpose: the transpose rule, `(cotangents, *operands, **params) -> cotangents_in`; None: no rule.
        batch: the batching rule, `(operands, dims, **params) -> (results, dims_out)`.
        effects: a function from `**params` to the JAX effects of the computation; None: there are none.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    if effects is None:
        primitive.def_abstract_eval(abstract_eval)
    else:
        primitive.def_effectful_abstract_eval(
            lambda *avals, **ps: (abstract_eval(*avals, **ps), effects(**ps))
        )
    primitive.def_impl(reference)
    mlir.register_lowering(primitive, mlir.lower_fun(reference, multiple_results=True))
    ad.primitive_jvps[primitive] = jvp or _reference_jvp(reference)
    if transpose:
        ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch or _reference_batch(reference)
    return primitive


def _reference_jvp(reference: Callable) -> Callable:
    def rule(primals, tangents, **params):
        tangents = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(lambda *xs: reference(*xs, **params), tuple(primals), tuple(tangents))

    return rule


def _reference_batch(reference: Callable) -> Callable:
    def rule(operands, dims, **params):
        axes = tuple(dims)  # None where an operand has no batch dimension, as vmap takes it
        results = jax.vmap(lambda *xs: reference(*xs, **params), in_axes=axes)(*operands)
        return results, [0] * len(results)

    return rule


def always_save_in_checkpoint(primitive: Any) -> None:
    """Make `jax.checkpoint` save a primitive's results as residuals, rather than compute them again."""

    def rule(saveable, unknown_in, instantiated_in, eqn):
        num_out = len(eqn.outvars)
        if any(unknown_in):
            needed = [
                v
                for v, instantiated in zip(eqn.invars, instantiated_in, strict=True)
                if type(v) is _core.Var and not instantiated
            ]
            return None, eqn, [True] * num_out, [True] * num_out, needed
        return eqn, None, [False] * num_out, [False] * num_out, []

    _partial_eval.partial_eval_jaxpr_custom_rules[primitive] = rule


def float0_zero(aval: Any) -> Any:
    """Return the symbolic zero tangent of a value of this aval, of type `float0` for integers."""
    return Zero(aval.to_tangent_aval())


def is_float0(x: Any) -> bool:
    """Return whether a value or an aval has the dtype `float0`, which gradients of integers have."""
    return getattr(x, "dtype", None) == jax.dtypes.float0


def float0_array(shape: tuple[int, ...]) -> np.ndarray:
    """Return the gradient of an integer array of this shape, as `jax.grad` returns it: zeros of `float0`."""
    return np.zeros(shape, jax.dtypes.float0)


def with_results(closed: Any, positions: Sequence[int]) -> Any:
    """Return a copy of a closed jaxpr that returns only the results at `positions`."""
    jaxpr = closed.jaxpr
    if len(positions) == len(jaxpr.outvars):
        return closed
    names = jaxpr.debug_info.with_unknown_names()
    outvars = [jaxpr.outvars[k] for k in positions]
    if names.result_paths:
        names = names._replace(result_paths=tuple(names.result_paths[k] for k in positions))
    return ClosedJaxpr(jaxpr.replace(outvars=outvars, debug_info=names), closed.consts)


# ---------------------------------------------------------------- dtypes and keys


@functools.cache
def is_key_dtype(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def key_impl(dtype: Any) -> str:
    """Return the name of a key dtype's PRNG implementation, such as `"threefry2x32"`."""
    return dtype._impl.name


def key_data_shape(aval: Any) -> tuple[int, ...]:
    """Return the shape of the `uint32` data of a PRNG key array."""
    return tuple(aval.shape) + tuple(aval.dtype._impl.key_shape)


@functools.cache  # numpy builds the name again on each call
def dtype_name(dtype: Any) -> str:
    return np.dtype(dtype).name


def canonical_dtype(dtype: Any) -> Any:
    """Return the dtype that JAX uses for host values of `dtype` (32-bit for 64-bit ones unless x64 is on)."""
    return _dtypes.canonicalize_dtype(dtype)


_TAKES_VALUES = frozenset(("typeof", "_arraylike"))


def takes_a_value(frame: FrameType) -> bool:
    """Return whether code of JAX that reads an array's attribute `__jax_array__` needs the array's value.

    Functions that compute with the value, such as `jnp.mean` and `jax.jit(f)`, read the attribute in a few
    internal functions of JAX, which are recognized by name. Code that does not need the value reads the
    attribute too: `jax.eval_shape`, which needs only a shape; C++ code, which prints the error that a
    property raises; and `jnp.size`, which calls the same internal functions and is recognized among the
    callers.

    Args:
        frame: the frame of the function that reads the attribute.
    """
    if frame.f_code.co_name not in _TAKES_VALUES or not frame.f_globals.get("__name__", "").startswith(
        "jax."
    ):
        return False
    return not any(f.f_code is jnp.size.__code__ for f in itertools.islice(_callers(frame), _FRAMES_TO_SIZE))


_FRAMES_TO_SIZE = 3
"""The number of callers of a frame among which `jnp.size` is looked for: between the two frames there are
only the frames of a check and of a generator expression."""


def _callers(frame: FrameType) -> Iterator[FrameType]:
    caller = frame.f_back
    while caller is not None:
        yield caller
        caller = caller.f_back


# ---------------------------------------------------------------- memory and devices


def is_host_memory(aval: Any) -> bool:
    """Return whether values of this aval are in host memory (`jax.memory.Space.Host`), not device memory."""
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def is_host_kind(kind: str | None) -> bool:
    """Return whether a sharding's memory kind, such as `"pinned_host"`, means host and not device memory.

    The result is False for the normal memory of a CPU device, although some versions of JAX give this memory
    a name like that of host memory.
    """
    return (
        kind is not None
        and kind.endswith("_host")
        and kind != jax.local_devices(backend="cpu")[0].default_memory().kind
    )


def is_in_host_memory(leaf: Any) -> bool:
    """Return whether `leaf` is a JAX array or `jax.ShapeDtypeStruct` whose sharding asks for host memory."""
    sharding = leaf.sharding if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else None
    return is_host_kind(getattr(sharding, "memory_kind", None))


def meshes_named(eqn: Any) -> list[Any]:
    """Return all nonempty meshes in an equation's parameters, such as those of shardings or a `shard_map`."""
    found: list[Any] = []
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, jax.sharding.NamedSharding):
                found.append(each.mesh)
            elif isinstance(each, jax.sharding.Mesh | jax.sharding.AbstractMesh):
                found.append(each)
    return [mesh for mesh in found if not mesh.empty]  # a `jit` under no mesh has an empty one


# ---------------------------------------------------------------- host values


def quick_put(
    shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding
) -> Callable[[np.ndarray], jax.Array]:
    """Return a fast replacement of `jax.device_put` for host arrays of one shape and dtype to one device.

    The returned function takes a tenth of the time of `jax.device_put`, which spends most of its time on
    values that are the same for all such arrays and that it computes in each call.

    Args:
        shape: the shape of the arrays.
        dtype: the dtype of the arrays, which must be one that JAX does not convert to another.
        sharding: the sharding that names the device.
    """
    aval = jax.device_put(np.zeros(shape, dtype), sharding).aval
    devices = list(sharding.device_set)

    def put(host: np.ndarray) -> jax.Array:
        return _pxla.batched_device_put(aval, sharding, [host], devices)

    return put


# ---------------------------------------------------------------- equations


def inner_jaxpr(eqn: Any) -> Any:
    """Return the closed jaxpr that a call-like equation (such as `jit`) runs; None for other equations."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(name)
        if isinstance(inner, ClosedJaxpr):
            return inner
        if isinstance(inner, Jaxpr):
            return ClosedJaxpr(inner, ())
    return None


def pins_shardings(eqn: Any) -> bool:
    """Return whether a `jit` equation declares a sharding of an operand or result.

    Such an equation must not be inlined, since the declaration would be lost.
    """
    pinned = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(isinstance(s, jax.sharding.Sharding) for s in pinned)


def pinned_shardings(eqn: Any) -> tuple[list[Any], list[Any]]:
    """Return the shardings that a call-like equation declares for its operands and for its results.

    Returns:
        Two lists: one entry per operand, and one entry per result. An entry is None if the equation declares
        no sharding for that operand or result.
    """
    found = []
    for name, atoms in (("in_shardings", eqn.invars), ("out_shardings", eqn.outvars)):
        pins = eqn.params.get(name, (None,) * len(atoms))
        found.append([s if isinstance(s, jax.sharding.Sharding) else None for s in pins])
    return found[0], found[1]


def sub_jaxprs(eqn: Any) -> list[Any]:
    """Return every jaxpr among an equation's parameters, each as an open jaxpr (without its constants)."""
    found: list[Any] = []
    for value in eqn.params.values():
        kind = type(value)  # not isinstance: every equation of every step comes through here
        if kind is ClosedJaxpr or kind is Jaxpr:
            found.append(value)
        elif kind is tuple or kind is list:
            found += [v for v in value if type(v) is ClosedJaxpr or type(v) is Jaxpr]
    return [v.jaxpr if type(v) is ClosedJaxpr else v for v in found] if found else found


def is_simple(eqn: Any) -> bool:
    """Return whether an equation has no jaxprs in its parameters and no effects."""
    if eqn.effects:
        return False
    for value in eqn.params.values():
        kind = type(value)
        if kind is ClosedJaxpr or kind is Jaxpr:
            return False
        if kind is tuple or kind is list:
            for v in value:
                if type(v) is ClosedJaxpr or type(v) is Jaxpr:
                    return False
    return True


def primitives_inside(jaxpr: Any) -> set[str]:
    """Return the names of all primitives in `jaxpr`, at any depth."""
    found = set()
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for inner in sub_jaxprs(eqn):
            found |= primitives_inside(inner)
    return found


@dataclass(frozen=True, eq=False)
class ScanParts:
    """The body of a `scan` equation, and the counts that tell which of its operands are constants or carries.

    The operands are constants, carries and stacked operands, in this order; the results are carries and
    stacked results.

    Attributes:
        body: the closed jaxpr of one iteration.
        num_consts: the number of constants.
        num_carry: the number of carries.
        length: the number of iterations.
        reverse: whether the scan runs from the last index to the first.
    """

    body: Any
    num_consts: int
    num_carry: int
    length: int
    reverse: bool

    @property
    def first_x(self) -> int:
        """The position of the first stacked operand among all operands."""
        return self.num_consts + self.num_carry


def scan_parts(eqn: Any) -> ScanParts:
    """Return the body and the counts of constants and carries of a `scan` equation."""
    p = eqn.params
    if "num_consts" in p:
        num_consts, num_carry = p["num_consts"], p["num_carry"]
    else:  # JAX 0.12: trees of operands instead of counts
        num_consts, num_carry, _ = (len(list(part)) for part in p["ft_in"].update(eqn.invars).unpack())
    return ScanParts(p["jaxpr"], num_consts, num_carry, p["length"], p["reverse"])


def rows_taken_inside(eqn: Any) -> set[int]:
    """Return the operands of a `scan` or a call of which the equations inside take some rows by an index.

    Args:
        eqn: the equation.

    Returns:
        The positions of these operands. Of a scan, only values that all iterations share are looked at.
    """
    is_scan = eqn.primitive.name == "scan"
    inner = scan_parts(eqn).body if is_scan else inner_jaxpr(eqn)
    if inner is None:
        return set()
    jaxpr, _ = open_jaxpr(inner)
    shared = scan_parts(eqn).num_consts if is_scan else len(jaxpr.invars)
    positions = {var: k for k, var in enumerate(jaxpr.invars[:shared])}
    found: set[int] = set()
    for sub in jaxpr.eqns:
        taken = {0} if sub.primitive.name in ("dynamic_slice", "gather") else rows_taken_inside(sub)
        read = (sub.invars[k] for k in taken)
        found |= {positions[var] for var in read if not isinstance(var, Literal) and var in positions}
    return found


def largest_constant_inside(eqn: Any) -> int:
    """Return the size in bytes of the largest constant in the jaxprs inside an equation, at any depth."""
    sizes = [0]
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, ClosedJaxpr):
                sizes += [getattr(c, "nbytes", 0) for c in inner.consts]
    for inner in sub_jaxprs(eqn):
        for sub in inner.eqns:
            sizes += [getattr(a.val, "nbytes", 0) for a in sub.invars if isinstance(a, Literal)]
            sizes.append(largest_constant_inside(sub))
    return max(sizes)


def find_inside(eqn: Any, names: Collection[str]) -> tuple[Any, list[str]]:
    """Find the first equation with a primitive of one of these names: `eqn` itself or one inside it.

    Returns:
        The equation, and the primitive names of the equations that enclose it, outermost first. If there is
        no such equation: None and an empty list.
    """
    if eqn.primitive.name in names:
        return eqn, []
    for inner in sub_jaxprs(eqn):
        for each in inner.eqns:
            found, around = find_inside(each, names)
            if found is not None:
                return found, [eqn.primitive.name, *around]
    return None, []


def bind_eqn(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Run one equation on `args` (tracers or arrays) and return its results.

    The equation's source line is kept, for error messages and profiles.
    """
    params = eqn.primitive.get_bind_params(eqn.params)
    name_stack = source_info.current_name_stack() + eqn.source_info.name_stack
    with source_info.user_context(eqn.source_info.traceback, name_stack=name_stack), eqn.ctx.manager:
        result = eqn.primitive.bind(*args, **params)
    return list(result) if eqn.primitive.multiple_results else [result]


def in_place_of(eqn: Any, fn: Any, avals: Sequence[Any]) -> Any:
    """Trace a function that takes the place of an equation, and return its closed jaxpr.

    The new equations have the source line of the old one.

    Args:
        eqn: the equation.
        fn: the function.
        avals: the types of the function's arguments.
    """
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    known = source_info.user_context(eqn.source_info.traceback, name_stack=eqn.source_info.name_stack)
    with known, eqn.ctx.manager:
        return jax.make_jaxpr(fn)(*arguments)


def call_host(eqn: Any, operands: Sequence[Any]) -> None:
    """Call the host code of a `jax.debug.print` or `jax.debug.callback` equation, as JAX itself would."""
    eqn.primitive.impl(*operands, **eqn.params)


def with_inner(eqn: Any, fn: Callable) -> tuple[Any, list[Any]]:
    """Return a copy of a `jax.checkpoint` equation that runs `fn` in place of the equation's jaxpr.

    Args:
        eqn: the equation.
        fn: a function of the equation's operands. Its first results replace those of the equation, and
            further results are added to the equation.

    Returns:
        The new equation, and the constants of `fn`, which are the first operands of the new equation.
    """
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in eqn.invars]
    lifted, consts = lift_consts(jax.make_jaxpr(fn)(*avals))
    more = [_core.Var(a) for a in lifted.out_avals[len(eqn.outvars) :]]
    params = {**eqn.params, "jaxpr": lifted.jaxpr}
    invars = [*(Literal(c, jax.typeof(c)) for c in consts), *eqn.invars]
    outvars = [*eqn.outvars, *more]
    return eqn.replace(params=params, invars=invars, outvars=outvars, effects=lifted.effects), consts


def same_computation(a: Any, b: Any) -> bool:
    """Return whether two equations certainly compute the same from equal operands; False when in doubt."""
    if a.primitive is not b.primitive or a.params.keys() != b.params.keys():
        return False
    try:
        return all(a.params[k] is b.params[k] or bool(a.params[k] == b.params[k]) for k in a.params)
    except (TypeError, ValueError):  # parameters that cannot be compared, such as arrays
        return False


def has_effects(eqn: Any) -> bool:
    return bool(eqn.effects)


# ---------------------------------------------------------------- errors


def is_unknown_axis_error(error: BaseException) -> bool:
    """Return whether an error of JAX says that a sharding names an axis that the mesh in context lacks."""
    # Recognized by the text: the type is a plain ValueError or RuntimeError, and JAX removes its frames.
    text = str(error)
    return (
        ("Resource axis" in text and "not found in mesh" in text)
        or "requires a non-empty mesh in context" in text
        or is_other_mesh_error(error)
        or re.search(r"axis_names=\S+ to be a subset of mesh.axis_names=", text) is not None
        or any(
            axis not in jax.sharding.get_abstract_mesh().shape for axis in _SPLIT_BY_SHARD_MAP.findall(text)
        )
    )


_SPLIT_BY_SHARD_MAP = re.compile(r"^  (?:in|out)_specs\S* refers to '(\w+)'", re.MULTILINE)


def is_other_mesh_error(error: BaseException) -> bool:
    """Return whether an error of JAX says that `shard_map` got another mesh than the one in context."""
    return "should match the mesh passed to shard_map" in str(error)


_NEEDS_GPU = re.compile(
    r"cuDNN is not detected\.$|Unknown backend: '(gpu|cuda)' requested, but no platforms |"
    r"Unknown backend (gpu|cuda)\. Available backends are |Backend '(gpu|cuda)' failed to initialize: |"
    r"Unable to initialize backend '(gpu|cuda)': "
)


def is_missing_gpu_error(error: BaseException) -> bool:
    """Return whether an error says that JAX needs a GPU to trace or lower, which this process lacks."""
    # Recognized by the beginning of the text, because users' errors may mention GPUs too.
    return _NEEDS_GPU.match(str(error)) is not None


# ---------------------------------------------------------------- jaxprs


def open_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """Split a jaxpr, which may be closed, into the open jaxpr and its constants.

    Args:
        jaxpr: the jaxpr. In JAX 0.10 a closed jaxpr is an object around an open one. In JAX 0.12 every jaxpr
            contains its constants, and its attribute `.jaxpr` is the jaxpr itself.

    Returns:
        The jaxpr that has the equations, and the values of its `constvars`.
    """
    return getattr(jaxpr, "jaxpr", jaxpr), list(getattr(jaxpr, "consts", ()))


def closed_call(closed: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluate a closed jaxpr on `args` with plain JAX, and return its results."""
    # Not `jaxpr_as_fun`: it turns `jax_debug_nans` off; JAX 0.10 then checks less in this thread for good.
    return _core.eval_jaxpr(closed.jaxpr, closed.consts, *args)


def lift_consts(closed: Any) -> tuple[Any, list[Any]]:
    """Turn the constants of a closed jaxpr into leading operands.

    Returns:
        The new jaxpr, which is closed but has no constants, and the values of the former constants.
    """
    consts = list(closed.consts)
    jaxpr = _partial_eval.convert_constvars_jaxpr(closed.jaxpr)
    return ClosedJaxpr(jaxpr, ()), consts


# ---------------------------------------------------------------- lowering


def unspecified() -> Any:
    """Return the value that, as a sharding for `jax.jit`, means that JAX is to infer the sharding."""
    from jax._src import named_sharding

    return named_sharding.UNSPECIFIED


def propagated_specs(jitted: Any, avals: Sequence[Any], platform: str) -> tuple[list[tuple], list[tuple]]:
    """Return the shardings that XLA's propagation (Shardy) gives a jitted function's arguments and results.

    This needs no devices: the function is lowered on the abstract mesh in context.

    Args:
        jitted: the jitted function.
        avals: the types of the function's arguments.
        platform: the platform to lower for.

    Returns:
        Two lists: one spec per argument, and one spec per result. A spec is a tuple with one entry per
        dimension, as in `PartitionSpec`.
    """
    from jaxlib.mlir import passmanager

    module = jitted.trace(*avals).lower(lowering_platforms=(platform,)).compiler_ir()
    with module.context:
        # One constant for all its uses first: Shardy splits them again, but only those that are used.
        passes = passmanager.PassManager.parse("builtin.module(canonicalize,sdy-propagation-pipeline)")
        passes.enable_verifier(False)  # it checks the whole module after each pass: 2/3 of the time
        passes.run(module.operation)
    main = next(op for op in module.body.operations if "main" in str(getattr(op, "name", "")))
    ranks = [len(t.shape) for t in main.type.inputs], [len(t.shape) for t in main.type.results]
    return (
        [_spec_of(attrs, rank) for attrs, rank in zip(main.attributes["arg_attrs"], ranks[0], strict=True)],
        [_spec_of(attrs, rank) for attrs, rank in zip(main.attributes["res_attrs"], ranks[1], strict=True)],
    )


def _spec_of(attrs: Any, rank: int) -> tuple:
    from jaxlib.mlir.dialects import sdy

    found = {a.name: a.attr for a in attrs}.get("sdy.sharding")
    if found is None:
        return (None,) * rank
    spec = []
    for dimension in sdy.TensorShardingAttr(found).dimension_shardings:
        axes = [sdy.AxisRefAttr(a) for a in sdy.DimensionShardingAttr(dimension).axes]
        # Half an axis has no name in a PartitionSpec; such a dimension stays whole at the boundary.
        names = tuple(a.name for a in axes if a.sub_axis_info is None)
        spec.append(None if not names or len(names) < len(axes) else names[0] if len(names) == 1 else names)
    return tuple(spec)
