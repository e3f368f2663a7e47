"""Convert a user's tree to named leaves, and decide in which form each leaf is saved and restored.

The functions of this module access no file and no actor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jaxpp_async.base.printable import listed, printable
from jaxpp_async.checkpoint.manifest import PLAIN_TYPES, ROOT, Array, Manifest, PlainValue
from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.errors import ArrayError, CheckpointError, MeshError
from jaxpp_async.jax_bridge import private_api
from jaxpp_async.layout.array_parts import numpy_dtype
from jaxpp_async.program.instructions import ActorId, Aval
from jaxpp_async.session.argument_binding import as_user_sees, sent_type
from jaxpp_async.session.leaf_division import DividedPlace
from jaxpp_async.session.remote_array import Owner, RemoteArray, is_remote
from jaxpp_async.session.step import DistributedStep, Slot

# ---------------------------------------------------------------- saving

_MOST_DIGITS = 4000
"""The most digits of a saved whole number; by default Python reads no number of more than 4300 digits."""

_TOO_LARGE = 10**_MOST_DIGITS


@dataclass(frozen=True, slots=True)
class Leaves:
    """The leaves of a tree to save, by path, in one dictionary for each way of saving.

    Args:
        remote: arrays on actors, which the actors write.
        host: arrays in this process, which this process writes.
        values: plain Python values, which are stored in the manifest.
        key_impls: for each PRNG key array in `remote` or `host`, the name of its PRNG implementation.
        host_parts: for arrays in `remote` that live in parts, the parts that are still in this process, which
            writes them.
    """

    remote: dict[str, RemoteArray]
    host: dict[str, np.ndarray]
    values: dict[str, PlainValue]
    key_impls: dict[str, str]
    host_parts: dict[str, list[HostPart]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HostPart:
    """A part of an array whose value is in this process.

    Args:
        start: the index of the part's first element in the array, one number per axis.
        value: the part's value.
    """

    start: tuple[int, ...]
    value: np.ndarray


def to_save(tree: Any, owner: Owner) -> Leaves:
    """Check a tree that is to be saved, and return its leaves, grouped by how each is saved.

    Host arrays are copied, because the user may change them while they are written.

    Args:
        tree: the user's tree.
        owner: the part of the saving mesh that must own the arrays.

    Raises:
        ArrayError: an array was donated, deleted, or belongs to another mesh.
        CheckpointError: a leaf cannot be saved, or two leaves have the same path; the message names them.
    """
    leaves = Leaves({}, {}, {}, {})
    for path, leaf in named_leaves(tree).items():
        if is_remote(leaf):
            leaf.check_usable(path, owner)
            if leaf.value_type.key_impl is not None:
                leaves.key_impls[path] = leaf.value_type.key_impl
            if (host := leaf.host) is not None:
                leaves.host[path] = np.array(host)
                continue
            leaves.remote[path] = leaf
            for piece, start in zip(leaf.pieces, leaf.starts, strict=True):
                if piece.host is not None:
                    leaves.host_parts.setdefault(path, []).append(HostPart(start, np.array(piece.host)))
        elif type(leaf) in PLAIN_TYPES:
            _check_value(path, leaf)
            leaves.values[path] = leaf
        else:
            leaves.host[path] = _host_copy(path, leaf, leaves.key_impls)
    return leaves


def named_leaves(tree: Any, is_leaf: Any = None) -> dict[str, Any]:
    """Return the leaves of a tree by their paths in a checkpoint, such as `"params/blocks/0/w"`.

    Args:
        tree: the tree.
        is_leaf: a function that returns whether to treat a node as a leaf, as for `jax.tree.leaves`, or None.

    Raises:
        CheckpointError: two leaves have the same path, or a path cannot be stored.
    """
    named: dict[str, Any] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        path = _path(keys)
        if path in named:
            raise CheckpointError(f"two leaves of the tree have the path {path!r}; rename one of their keys")
        if printable(path) != path:
            raise CheckpointError(f"{path!r}: this key of the tree is no text that UTF-8 can hold; rename it")
        if path == "__metadata__":
            raise CheckpointError(
                "a leaf of the tree is called '__metadata__', which safetensors keeps for itself"
            )
        named[path] = leaf
    return named


def _path(keys: Sequence[Any]) -> str:
    parts = (jax.tree_util.keystr((key,), simple=True) for key in keys)
    return "/".join(part.replace("~", "~0").replace("/", "~1") for part in parts) or ROOT


def _check_value(path: str, value: PlainValue) -> None:
    if isinstance(value, str) and printable(value) != value:
        raise CheckpointError(
            f"{path} is a str with surrogates in it, which UTF-8 cannot hold (a path, perhaps): save its "
            "bytes, as np.frombuffer(os.fsencode(path), np.uint8)"
        )
    if isinstance(value, int) and abs(value) >= _TOO_LARGE:
        raise CheckpointError(
            f"{path} is a whole number of more than {_MOST_DIGITS} digits; save it as a str"
        )


def _host_copy(path: str, leaf: Any, key_impls: dict[str, str]) -> np.ndarray:
    if isinstance(leaf, jax.Array):
        if private_api.is_key_dtype(leaf.dtype):
            key_impls[path] = private_api.key_impl(leaf.dtype)
            leaf = jax.random.key_data(leaf)
        return np.array(leaf)
    if not isinstance(leaf, np.ndarray | np.generic):
        raise CheckpointError(
            f"{path} is a {type(leaf).__name__}, which a checkpoint cannot hold; it holds arrays, PRNG keys, "
            "and Python's bool, int, float, complex and str"
        )
    array = np.array(leaf)
    try:
        numpy_dtype(array.dtype.name)
        known = array.dtype.kind in "biufcV" and array.dtype.names is None and array.dtype.name != "float128"
    except (TypeError, AttributeError):
        known = False
    if not known:
        raise CheckpointError(
            f"{path} is a numpy array of dtype {array.dtype}, which a checkpoint cannot hold"
        )
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


# ---------------------------------------------------------------- restoring


@dataclass(frozen=True, slots=True)
class RestoreTarget:
    """The form in which a leaf is restored: its type, and the actors that are to hold it.

    Args:
        value_type: the type with which the array is sent between processes; None for a plain value.
        actors: the actors that are to hold the array; empty if it stays in this process.
        like: the host value that the user gave for the leaf, whose Python type the restored value gets; None
            if the leaf is restored as a `RemoteArray`.
        divided: for a leaf that is to live in parts on actors, where each part is to live; else None.
    """

    value_type: ValueType | None
    actors: tuple[ActorId, ...] = ()
    like: Any = None
    divided: DividedPlace | None = None


def targets(like: Any) -> tuple[dict[str, RestoreTarget], Any]:
    """Return the form in which each leaf is to be restored, as the user's tree `like` says.

    Returns:
        The `RestoreTarget` of each leaf by path, and the structure of the tree of restored leaves.

    Raises:
        CheckpointError: a leaf of `like` has a type that cannot be restored, or a step in `like` was not
            compiled.
    """
    tree = jax.tree.map(_expanded, like, is_leaf=_is_argument)
    named = named_leaves(tree)
    keys = [jax.tree_util.keystr(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    wanted = {path: _target(key, leaf) for (path, leaf), key in zip(named.items(), keys, strict=True)}
    return wanted, jax.tree.structure(tree)


def _is_argument(node: Any) -> bool:
    """Return whether a node of `like` is a pair `(step, argnum)`, which stands for an argument of a step."""
    return isinstance(node, tuple) and len(node) == 2 and isinstance(node[0], DistributedStep)


def _expanded(node: Any) -> Any:
    """Replace a node `(step, argnum)` of `like` by the tree of that argument's types and actors.

    Returns:
        The tree, whose leaves are `Slot`s (type and actors of a leaf); any other node is returned unchanged.

    Raises:
        CheckpointError: the step was not compiled, or has no array argument with this number.
    """
    if not _is_argument(node):
        return node
    step, argnum = node
    try:
        return step.argument(argnum, f"`like` has (step, {argnum!r})")
    except ArrayError as error:
        raise CheckpointError(str(error)) from None
    except MeshError:
        raise CheckpointError(
            f"`like` has (step, {argnum}), but step {step.__name__!r} has not been compiled, so nobody knows "
            "where it keeps each leaf: give the shapes instead, `jax.eval_shape(init_fn)`, for arrays that "
            "wait on the controller for their first use; or compile it with them first, `await "
            "step.compile(shapes, batch)`, for actors that read what they are to hold"
        ) from None


def _target(key: str, leaf: Any) -> RestoreTarget:
    """Return the form in which one leaf is to be restored.

    Args:
        key: the Python expression that indexes the leaf in `like`, such as `"['w'][0]"`, for error messages;
            empty if the leaf is `like` itself.
        leaf: the leaf of `like`.

    Raises:
        CheckpointError: the leaf has a type that cannot be restored.
    """
    if isinstance(leaf, Slot):
        return RestoreTarget(leaf.type, leaf.home, divided=DividedPlace.of(leaf))
    if is_remote(leaf):
        kind = replace(leaf.value_type, weak=leaf.weak_type)
        return RestoreTarget(kind, leaf.actors, divided=DividedPlace.of(leaf))
    if type(leaf) in PLAIN_TYPES:
        return RestoreTarget(None, like=leaf)
    if isinstance(leaf, np.ndarray | np.generic):
        return RestoreTarget(ValueType(Aval(leaf.shape, leaf.dtype.name)), like=leaf)
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        like = leaf if isinstance(leaf, jax.Array) else None
        return RestoreTarget(sent_type(leaf), like=like)
    where = f"`like{key}`" if key else "`like` itself"
    if isinstance(leaf, DistributedStep):
        raise CheckpointError(
            f"{where} is a step; write `(step, 0)`, a tuple, to restore its argument 0 to where it keeps that"
        )
    raise CheckpointError(
        f"{where} is a {type(leaf).__name__}; give (step, argnum), RemoteArrays, ShapeDtypeStructs, or host "
        "values of the kind that is to come back"
    )


def check_matches(wanted: dict[str, RestoreTarget], manifest: Manifest) -> None:
    """Check that a checkpoint has exactly the leaves that the user asks for.

    Args:
        wanted: for each path, the form in which the leaf is to be restored.
        manifest: the description of the checkpoint.

    Raises:
        CheckpointError: a leaf is only in `wanted` or only in `manifest`, or its type, shape or dtype differs
            between them. The message names the first leaf that differs.
    """
    missing = [path for path in wanted if path not in manifest.arrays and path not in manifest.values]
    if missing:
        there = sorted(set(manifest.paths) - set(wanted))
        raise CheckpointError(
            f"`like` has {_type_text(wanted[missing[0]])} at {_named(missing[0])}, where the checkpoint has "
            f"nothing{_others(missing[1:])}{'; only the checkpoint has ' + _listed(there) if there else ''}; "
            "leave out of `like` what the checkpoint lacks, and take it from elsewhere (what `step.init` "
            "makes can be a `like`, too)"
        )
    if extra := [path for path in manifest.paths if path not in wanted]:
        raise CheckpointError(
            f"the checkpoint has {_stored_text(manifest, extra[0])} at {_named(extra[0])}, where `like` has "
            f"nothing{_others(extra[1:])}; add it to `like`, where a jax.ShapeDtypeStruct of that type "
            "is enough, and drop what comes back"
        )
    for path, target in wanted.items():
        if not _fits(target, manifest, path):
            stored, asked = _stored_text(manifest, path), _type_text(target)
            raise CheckpointError(f"{_named(path)} is {stored} in the checkpoint, but {asked} in `like`")


def _fits(target: RestoreTarget, manifest: Manifest, path: str) -> bool:
    if path in manifest.values:
        value = manifest.values[path]
        if target.value_type is None:
            return type(value) is type(target.like)
        return not isinstance(value, str) and _as_array_type(value) == target.value_type.aval
    stored = manifest.arrays[path]
    if target.value_type is None:
        return stored.shape == () and stored.key_impl is None and isinstance(target.like, _kind(stored.dtype))
    aval = target.value_type.aval
    return (stored.shape, stored.dtype, stored.key_impl) == (
        aval.shape,
        aval.dtype,
        target.value_type.key_impl,
    )


def _as_array_type(value: bool | int | float | complex) -> Aval | None:
    """Return the array type that JAX gives to a plain value; None for an int that is too large for JAX."""
    try:
        aval = sent_type(value).aval
    except OverflowError:  # an int that is too large for JAX's
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        info = np.iinfo(aval.dtype)
        return aval if info.min <= value <= info.max else None
    return aval


def _kind(dtype: str) -> type:
    """Return the Python type of one element of an array of this dtype."""
    return type(np.zeros((), numpy_dtype(dtype)).item())


def to_user_value(target: RestoreTarget, value: Any) -> Any:
    """Convert a restored value in this process to the Python type of the leaf in the user's `like`.

    Args:
        target: the form in which the leaf is restored.
        value: the plain value or numpy array that was read.
    """
    if target.value_type is None:
        return value.item() if isinstance(value, np.ndarray) else value
    array = np.asarray(value, numpy_dtype(target.value_type.aval.dtype))
    if isinstance(target.like, jax.Array):
        seen = as_user_sees(array, target.value_type)
        return seen if isinstance(seen, jax.Array) else jax.numpy.asarray(seen)
    if isinstance(target.like, np.generic):
        return array[()]
    return array


def _type_text(target: RestoreTarget) -> str:
    if target.value_type is None:
        return f"a Python {type(target.like).__name__}"
    return _array_text(target.value_type.aval.dtype, target.value_type.aval.shape, target.value_type.key_impl)


def _stored_text(manifest: Manifest, path: str) -> str:
    if path in manifest.values:
        value = manifest.values[path]
        size = f" of {bits} bits" if isinstance(value, int) and (bits := value.bit_length()) > 31 else ""
        return f"a Python {type(value).__name__}{size}"
    array: Array = manifest.arrays[path]
    return _array_text(array.dtype, array.shape, array.key_impl)


def _array_text(dtype: str, shape: Iterable[int], key_impl: str | None) -> str:
    text = f"{dtype}{list(shape)}"
    return text if key_impl is None else f"{text} (data of {key_impl} keys)"


def _others(paths: Sequence[str]) -> str:
    return f" (and so at {_listed(paths)})" if paths else ""


def _listed(paths: Sequence[str]) -> str:
    return listed([_named(path) for path in paths], 3)


def _named(path: str) -> str:
    """Return a leaf's path as text for an error message."""
    return "the root" if path == ROOT else repr(path)
