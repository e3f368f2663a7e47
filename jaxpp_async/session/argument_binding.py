"""Bind the leaves of a call to a compiled step's arguments, and convert leaves to the form that is sent.

Everything that depends on the compiled step alone is prepared once, as a `Binding`; a call whose arrays are
all on the actors where the step uses them needs one pass over its leaves. The functions for leaves find the
type of a leaf, and convert host values to the form in which they are sent and back to what users get.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxpp_async.base.install_hints import page
from jaxpp_async.compiler.evaluate import value_type
from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.controller.host_values import HostValue
from jaxpp_async.errors import ArrayError
from jaxpp_async.jax_bridge import private_api
from jaxpp_async.jax_bridge.tracebacks import deliberate
from jaxpp_async.layout.array_parts import numpy_dtype
from jaxpp_async.program.instructions import ActorId
from jaxpp_async.session.remote_array import Owner, RemoteArray, is_remote

ArrayId: TypeAlias = int

HERE: ArrayId = -1
"""Stands in place of an id: the value is in this process and goes to the actors with the step."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One argument leaf or result leaf of a compiled step: its name, its type and its actors.

    Args:
        name: the leaf's name, such as `"state['w']"`.
        type: the leaf's type and sharding.
        actors: the actors on which the step uses the argument or makes the result; empty if the step does not
            use the argument, which then stays where it is.
        any_sharding: whether the array may have another sharding than `type` says.
        replaced_on: for an argument that the step does not use, the actors that make the result which
            continues it (its new value); otherwise empty.
    """

    name: str
    type: ValueType
    actors: tuple[ActorId, ...]
    any_sharding: bool = False
    replaced_on: tuple[ActorId, ...] = ()

    @property
    def home(self) -> tuple[ActorId, ...]:
        """The actors on which to make an array for this leaf; empty if the step has no use for it."""
        return self.actors or self.replaced_on


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one call of a step, in the form in which the controller sends them to the actors.

    Args:
        array_ids: for each actor that uses any argument, the array ids of its arguments, by position.
        puts: for each actor, the host values that are sent to it together with the step.
        frees_after: for each actor, the ids of arrays that it frees after this step.
        settling: the `RemoteArray`s whose values are still in this process and are sent with the step; for
            each, the actors to which it is sent, and its type from then on.
    """

    array_ids: dict[ActorId, dict[int, ArrayId]]
    puts: dict[ActorId, list[HostValue]] = field(default_factory=dict)
    frees_after: dict[ActorId, list[ArrayId]] = field(default_factory=dict)
    settling: list[tuple[RemoteArray, tuple[ActorId, ...], ValueType]] = field(default_factory=list)

    def settle(self) -> None:
        """Record that the arrays whose values were sent with the step are on actors from now on.

        Call this once the step has been sent. If it could not be sent, the values stay in this process.
        """
        for array, home, settled_type in self.settling:
            array.relocate(home, value_type=settled_type)


class Binding:
    """The mapping of one compiled step's arguments and results to its actors, prepared once for all calls.

    Args:
        inputs: the step's argument leaves, then its hidden arguments (captured arrays, microbatch indices).
        outputs: the step's result leaves.
        num_arguments: the number of inputs that are argument leaves.
        donated: positions of the argument leaves whose buffers the step reuses.
    """

    def __init__(
        self,
        inputs: Sequence[Slot],
        outputs: Sequence[Slot],
        num_arguments: int,
        donated: Collection[int] = (),
    ):
        self._inputs, self._donated = tuple(inputs), donated
        self._places = tuple(
            (slot.actors, None if slot.any_sharding else slot.type.aval.spec)
            for slot in inputs[:num_arguments]
        )
        self._dtypes = tuple(numpy_dtype(slot.type.aval.dtype) for slot in inputs)
        self._shapes = tuple(slot.type.aval.shape for slot in inputs)
        self._taken, self._made = _by_actor(inputs), _by_actor(outputs)

    def ids(self, owner: Owner, leaves: Sequence[Any]) -> list[ArrayId] | None:
        """Return the array id of each argument leaf, with `HERE` for host values.

        Args:
            owner: the mesh to which the arrays must belong.
            leaves: the argument leaves of the call.

        Returns:
            One id per leaf; None if an array must be moved first, if the call needs `bind_with_care`, or if
            a leaf is invalid.
        """
        found: list[ArrayId] = []
        remote: set[ArrayId] = set()
        for leaf, (actors, spec) in zip(leaves, self._places, strict=True):
            if type(leaf) is RemoteArray:
                array_id = leaf.id_at(owner, actors, spec)
                if array_id is None or array_id in remote:
                    return None
                remote.add(array_id)
                found.append(array_id)
            elif isinstance(leaf, jax.ShapeDtypeStruct):
                return None
            else:
                found.append(HERE)
        return found

    def bind(
        self,
        leaves: Sequence[Any],
        ids: list[ArrayId],
        hidden: Sequence[RemoteArray],
        new_id: Callable[[], ArrayId],
    ) -> Arguments:
        """Return the arguments to send to each actor, given the array ids that the method `ids` returned.

        Args:
            leaves: the argument leaves of the call.
            ids: the array ids; this method adds those of host values and hidden arguments to the list.
            hidden: the arrays of the hidden arguments (captured arrays, microbatch indices).
            new_id: returns an unused array id.

        Raises:
            ArrayError: a host value is not what the step was compiled for.
        """
        bound = Arguments({})
        for arg, array_id in enumerate(ids):
            if array_id == HERE and self._inputs[arg].actors:
                ids[arg] = new_id()
                self._send_along(arg, ids[arg], leaves[arg], self._inputs[arg].actors, bound)
        ids.extend(array.array_id for array in hidden)
        bound.array_ids.update({actor: {arg: ids[arg] for arg in args} for actor, args in self._taken})
        return bound

    def bind_with_care(
        self, leaves: Sequence[Any], hidden: Sequence[RemoteArray], new_id: Callable[[], ArrayId]
    ) -> Arguments:
        """Return the arguments to send, for any valid call whose arrays have been moved to their actors.

        Unlike `bind`, this method handles one array that is passed as several arguments, and an array of
        `mesh.put` whose value is still in this process. The handle of such an array changes only in
        `Arguments.settle`, because binding another argument may still fail.

        Args:
            leaves: the argument leaves of the call.
            hidden: the arrays of the hidden arguments (captured arrays, microbatch indices).
            new_id: returns an unused array id.
        """
        # An array that waits in this process may be several arguments, on different actors.
        homes: dict[ArrayId, set[ActorId]] = {}
        for leaf, slot in zip(leaves, self._inputs, strict=False):
            if is_remote(leaf):
                homes.setdefault(leaf.array_id, set()).update(slot.actors)
        ids: list[ArrayId] = []
        bound = Arguments({})
        sent: set[ArrayId] = set()
        for arg, (leaf, slot) in enumerate(zip(leaves, self._inputs, strict=False)):
            home = tuple(sorted(homes[leaf.array_id])) if is_remote(leaf) else slot.actors
            array_id = leaf.array_id if is_remote(leaf) else new_id()
            if home and (not is_remote(leaf) or (leaf.host is not None and array_id not in sent)):
                self._send_along(arg, array_id, leaf, home, bound)
                sent.add(array_id)
            ids.append(array_id)
        ids.extend(array.array_id for array in hidden)
        bound.array_ids.update({actor: {arg: ids[arg] for arg in args} for actor, args in self._taken})
        return bound

    def results(self, arrays: Sequence[RemoteArray]) -> dict[ActorId, dict[int, ArrayId]]:
        """Return, for each actor, the array ids of the results that it makes, by result position."""
        ids = [array.array_id for array in arrays]
        return {actor: {result: ids[result] for result in results} for actor, results in self._made}

    def _send_along(
        self, arg: int, array_id: ArrayId, leaf: Any, home: tuple[ActorId, ...], bound: Arguments
    ) -> None:
        """Add an argument whose value is in this process to the values that are sent with the step.

        Args:
            arg: the argument's position.
            array_id: the id under which the actors store the value.
            leaf: the argument.
            home: the actors to which the value is sent.
            bound: the arguments of the call; the value is added to them.
        """
        slot = self._inputs[arg]
        if is_remote(leaf):
            host = leaf.host
            assert host is not None
            bound.settling.append((leaf, home, replace(slot.type, weak=leaf.weak_type)))
        else:
            # Most often the value is in the form to send already; checking that costs less than converting.
            is_ready = (
                type(leaf) is np.ndarray and leaf.dtype == self._dtypes[arg] and leaf.flags.c_contiguous
            )
            host = leaf if is_ready else host_array(leaf)
            if arg not in self._donated:
                for actor in home:
                    bound.frees_after.setdefault(actor, []).append(array_id)
        self._check_unchanged(arg, host)
        value = HostValue(array_id, slot.type.aval, host)
        for actor in home:
            bound.puts.setdefault(actor, []).append(value)

    def waiting(self, arg: int, leaf: Any) -> tuple[ValueType, np.ndarray]:
        """Return the type and value of an argument in this process that the step returns unchanged.

        A host value of the user's is copied, since the user may change it afterwards.

        Args:
            arg: the argument's position.
            leaf: the argument.

        Raises:
            ArrayError: the value is not what the step was compiled for.
        """
        slot = self._inputs[arg]
        value_type = (
            slot.type if not slot.any_sharding else replace(slot.type, aval=replace(slot.type.aval, spec=()))
        )
        if is_remote(leaf):
            assert leaf.host is not None
            return replace(value_type, weak=leaf.weak_type), leaf.host
        host = host_array(leaf).copy()
        self._check_unchanged(arg, host)
        return value_type, host

    def _check_unchanged(self, arg: int, host: np.ndarray) -> None:
        slot = self._inputs[arg]
        if host.shape != self._shapes[arg] or host.dtype != self._dtypes[arg]:
            raise ArrayError(
                f"{slot.name} is {host.dtype}{list(host.shape)} now, but was {slot.type.aval.dtype}"
                f"{list(slot.type.aval.shape)} when the step was called; leave arguments alone until the "
                "step has them"
            )


def _by_actor(slots: Sequence[Slot]) -> tuple[tuple[ActorId, tuple[int, ...]], ...]:
    """Return, for each actor that any slot names, the positions of the slots that name it."""
    found: dict[ActorId, list[int]] = {}
    for k, slot in enumerate(slots):
        for actor in slot.actors:
            found.setdefault(actor, []).append(k)
    return tuple((actor, tuple(positions)) for actor, positions in sorted(found.items()))


# ---------------------------------------------------------------- leaves

LeafType: TypeAlias = tuple[tuple[int, ...], str, bool]
"""Shape, dtype, and whether weakly typed: the part of a leaf's type on which a compiled form depends."""


def shape_struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype with which a step is traced for this leaf.

    Raises:
        TypeError: JAX cannot compute with the leaf. The message lacks a subject: callers put the leaf's name
            before it.
    """
    if isinstance(leaf, RemoteArray):
        if leaf.value_type.key_impl is None and private_api.canonical_dtype(leaf.dtype) != leaf.dtype:
            raise deliberate(
                TypeError(
                    f"is {leaf.dtype}, made where jax_enable_x64 was on, and here it is off; call the step "
                    "inside `with jax.enable_x64(True)`, too, or switch it on for the whole program"
                )
            )
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
    if private_api.is_in_host_memory(leaf):
        raise deliberate(
            TypeError(
                "lies in host memory (jax.memory.Space.Host, memory_kind='pinned_host'), where actors keep "
                "no arrays; pass it as numpy, or jax.device_put(..., jax.memory.Space.Device)"
            )
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    aval = jax.typeof(leaf) if isinstance(leaf, jax.Array) else _host_aval(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def leaf_type(leaf: Any) -> LeafType:
    """Return the shape, dtype and weak type of a leaf, which are its part of a call's signature.

    Raises:
        TypeError: as `shape_struct`.
    """
    struct = shape_struct(leaf)
    return struct.shape, str(struct.dtype), struct.weak_type


def kind(leaf: Any) -> Any:
    """Return a value by which the types of two leaves can be compared, cheaper to compute than the type.

    Leaves of equal kinds have equal types, but leaves of equal types may have different kinds.

    Returns:
        The kind; None if a leaf has no such value, and only `leaf_type` can tell its type.
    """
    cls = type(leaf)
    if cls is RemoteArray:
        return leaf.value_type
    if cls is np.ndarray:
        return leaf.shape, leaf.dtype
    if cls in _SCALARS:
        return cls
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)  # key arrays have none
    return None


_SCALARS = frozenset((bool, int, float, complex))


def travelling_type(leaf: Any) -> ValueType:
    """Return the type with which a leaf is sent to actors: for PRNG keys, that of their `uint32` data.

    Raises:
        TypeError: as `shape_struct`.
    """
    struct = shape_struct(leaf)
    return value_type(private_api.ShapedArray(struct.shape, struct.dtype, weak_type=struct.weak_type))


def host_array(leaf: Any) -> np.ndarray:
    """Convert a host value to the form in which it is sent: C order, JAX's dtype, PRNG keys as their data.

    Returns:
        The array. It may share memory with `leaf`.

    Raises:
        TypeError: as `shape_struct`.
    """
    if isinstance(leaf, jax.Array):
        return np.asarray(jax.random.key_data(leaf) if private_api.is_key_dtype(leaf.dtype) else leaf)
    struct = shape_struct(leaf)
    return np.ascontiguousarray(np.asarray(leaf, dtype=struct.dtype)).reshape(struct.shape)


def as_user_sees(array: np.ndarray, value_type: ValueType) -> Any:
    """Convert an array that actors have sent to what the user gets: a numpy array, or a JAX key array."""
    if value_type.key_impl is None:
        return array
    return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=value_type.key_impl)


def _host_aval(leaf: Any) -> Any:
    if isinstance(leaf, bool | int | float | complex):
        return jax.typeof(leaf)
    array = np.asarray(leaf)
    if array.dtype.kind in "OUSMm":
        if inspect.isawaitable(leaf):
            raise deliberate(TypeError("is a coroutine or a step under way, and no array: `await` it first"))
        what = f"a {type(leaf).__name__}" + (
            f" of dtype {array.dtype}" if isinstance(leaf, np.ndarray) else ""
        )
        raise deliberate(
            TypeError(
                f"is {what}, which JAX cannot compute with; "
                + (
                    f"pass a model's arrays only and close over the rest ({page('models.md')})"
                    if callable(leaf)
                    else "make the argument static or leave it out"
                )
            )
        )
    return private_api.ShapedArray(array.shape, private_api.canonical_dtype(array.dtype))
