"""Convert the arguments of a call to what the controller sends, and find the types of argument leaves.

The arguments of a call are pytrees whose leaves are host values or `RemoteArray`s. A `Binding`, which is made
once for each compiled step, says on which actors the step uses each argument leaf and makes each result leaf.
With a `Binding`, a call whose arrays are already on these actors needs only one pass over its leaves.

The functions at the end of the module find the type of a leaf, convert host values to the form in which they
are sent, and convert received arrays to the form that users get.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import numpy as np
from msgspec import structs

from jaxpp_async.base.install_hints import page
from jaxpp_async.compiler.evaluate import value_type
from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.controller.host_values import HostValue
from jaxpp_async.errors import ArrayError
from jaxpp_async.jax_bridge import private_api
from jaxpp_async.jax_bridge.tracebacks import deliberate
from jaxpp_async.layout.array_parts import numpy_dtype
from jaxpp_async.program.instructions import ActorId
from jaxpp_async.program.leaf_parts import Parts
from jaxpp_async.session.remote_array import Owner, RemoteArray, is_remote

ArrayId: TypeAlias = int

HOST_VALUE: ArrayId = -1
"""A placeholder for the array id of an argument whose value is in this process and is sent with the step."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The description of one argument leaf or result leaf of a compiled step: its name, type and actors.

    Args:
        name: the leaf's name, such as `"state['w']"`.
        type: the leaf's type and sharding.
        actors: the actors on which the step uses the argument or makes the result. Empty for an argument that
            the step does not use; such an argument is not moved.
        any_sharding: whether the step accepts the array with any sharding; otherwise an array is given the
            sharding of `type` before the step.
        replaced_on: if the step does not use the argument but returns a new value for it, the actors that
            make the new value; otherwise empty.
        parts: the parts in which the step takes or makes a leaf that is divided; None for any other leaf.
        part_slots: the slot of each of these parts, in which the step's programs know them.
    """

    name: str
    type: ValueType
    actors: tuple[ActorId, ...]
    any_sharding: bool = False
    replaced_on: tuple[ActorId, ...] = ()
    parts: Parts | None = None
    part_slots: tuple[Slot, ...] = ()

    @property
    def pieces(self) -> tuple[Slot, ...]:
        """The slots of the arrays that actors know: those of the leaf's parts, or the slot itself."""
        return self.part_slots or (self,)

    @property
    def home(self) -> tuple[ActorId, ...]:
        """The actors that are to hold this leaf's array: `actors`, or `replaced_on` if `actors` is empty."""
        return self.actors or self.replaced_on


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one call of a step, in the form in which the controller sends them to the actors.

    Args:
        array_ids: a dictionary. Its keys are the actors that use an argument; its values are dictionaries
            from an argument's position to its array id.
        puts: for each actor, the host values that are sent to it together with the step.
        frees_after: for each actor, the ids of arrays that it frees after this step.
        sent_arrays: one tuple for each `RemoteArray` whose value is still in this process and is sent with
            the step: the array, the actors that receive the value, and the array's type from then on.
    """

    array_ids: dict[ActorId, dict[int, ArrayId]]
    puts: dict[ActorId, list[HostValue]] = field(default_factory=dict)
    frees_after: dict[ActorId, list[ArrayId]] = field(default_factory=dict)
    sent_arrays: list[tuple[RemoteArray, tuple[ActorId, ...], ValueType]] = field(default_factory=list)

    def mark_sent(self) -> None:
        """Update the handles of the arrays whose values were sent with the step and are now on actors.

        Call this once the step has been sent, and not if sending failed, because then the values are still
        only in this process.
        """
        for array, home, sent in self.sent_arrays:
            array.relocate(home, value_type=sent)


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
        """Return the array ids of a call's argument leaves, or None if the call needs preparation.

        Args:
            owner: the part of the mesh that must own the arrays.
            leaves: the argument leaves of the call.

        Returns:
            One id per leaf, which is `HOST_VALUE` for a host value. None if an array must be moved first, if
            the call needs `bind_with_care`, or if a leaf is invalid.
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
                found.append(HOST_VALUE)
        return found

    def bind(
        self,
        leaves: Sequence[Any],
        ids: list[ArrayId],
        hidden: Sequence[RemoteArray],
        new_id: Callable[[], ArrayId],
    ) -> Arguments:
        """Return the arguments to send to each actor, for a call for which `ids` returned a list.

        Args:
            leaves: the argument leaves of the call.
            ids: the list that the method `ids` returned. This method replaces `HOST_VALUE` by new ids, and
                appends the ids of the hidden arguments.
            hidden: the arrays of the hidden arguments (captured arrays, microbatch indices).
            new_id: a function that returns an unused array id.

        Raises:
            ArrayError: the shape or dtype of a host value is not the one for which the step was compiled.
        """
        bound = Arguments({})
        for arg, array_id in enumerate(ids):
            if array_id == HOST_VALUE and self._inputs[arg].actors:
                ids[arg] = new_id()
                self._send_along(arg, ids[arg], leaves[arg], self._inputs[arg].actors, bound)
        ids.extend(array.array_id for array in hidden)
        bound.array_ids.update({actor: {arg: ids[arg] for arg in args} for actor, args in self._taken})
        return bound

    def bind_with_care(
        self, leaves: Sequence[Any], hidden: Sequence[RemoteArray], new_id: Callable[[], ArrayId]
    ) -> Arguments:
        """Return the arguments to send to each actor, for any valid call whose arrays need no move.

        Unlike `bind`, this method accepts one array that is passed as several arguments, and an array made by
        `mesh.put` whose value is still in this process. In the latter case the array's handle changes only in
        `Arguments.mark_sent`, because binding another argument may still fail.

        Args:
            leaves: the argument leaves of the call.
            hidden: the arrays of the hidden arguments (captured arrays, microbatch indices).
            new_id: a function that returns an unused array id.
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
        """Return the array ids under which the actors are to store the results of a call.

        Args:
            arrays: the handles of all results.

        Returns:
            A dictionary. Its keys are the actors that make a result; its values are dictionaries from the
            position of a result to its array id.
        """
        ids = [array.array_id for array in arrays]
        return {actor: {result: ids[result] for result in results} for actor, results in self._made}

    def _send_along(
        self, arg: int, array_id: ArrayId, leaf: Any, home: tuple[ActorId, ...], bound: Arguments
    ) -> None:
        """Add an argument's value, which is in this process, to the values that are sent with the step.

        Args:
            arg: the argument's position.
            array_id: the id under which the actors store the value.
            leaf: the argument leaf: a host value, or a `RemoteArray` whose value is still in this process.
            home: the actors to which the value is sent.
            bound: the arguments of the call, to which the value is added.
        """
        slot = self._inputs[arg]
        if is_remote(leaf):
            host = leaf.host
            assert host is not None
            bound.sent_arrays.append((leaf, home, replace(slot.type, weak=leaf.weak_type)))
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

    def returned_host_value(self, arg: int, leaf: Any) -> tuple[ValueType, np.ndarray]:
        """Return the type and value of an argument that the step returns unchanged.

        The value is in this process: the argument is a host value, or an array that has not been sent to
        actors.

        Args:
            arg: the argument's position.
            leaf: the argument leaf: a host value, or a `RemoteArray` whose value is still in this process.

        Returns:
            The type and the value. A host value is copied, since the user may change the original afterwards.

        Raises:
            ArrayError: the shape or dtype of the value is not the one for which the step was compiled.
        """
        slot = self._inputs[arg]
        value_type = (
            slot.type
            if not slot.any_sharding
            else replace(slot.type, aval=structs.replace(slot.type.aval, spec=()))
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
    """Group slots (each describes one argument or result leaf) by the actors that use or make the leaf.

    Returns:
        One pair per actor: the actor, and the positions in `slots` of its slots.
    """
    found: dict[ActorId, list[int]] = {}
    for k, slot in enumerate(slots):
        for actor in slot.actors:
            found.setdefault(actor, []).append(k)
    return tuple((actor, tuple(positions)) for actor, positions in sorted(found.items()))


# ---------------------------------------------------------------- leaves

LeafType: TypeAlias = tuple[tuple[int, ...], str, bool]
"""A leaf's shape, its dtype, and whether it is weakly typed; a compiled form of a step depends on these."""


def shape_struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an argument leaf, with which a step is traced.

    Raises:
        TypeError: JAX cannot compute with the leaf. The message does not name the leaf; the caller puts the
            leaf's name before it.
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
    """Return the properties of an argument leaf on which a step's compiled form depends (see `LeafType`).

    Raises:
        TypeError: JAX cannot compute with the leaf; see `shape_struct`.
    """
    struct = shape_struct(leaf)
    return struct.shape, str(struct.dtype), struct.weak_type


def type_key(leaf: Any) -> Any:
    """Return a key for a leaf's type that is cheaper to compute than the type itself.

    If two leaves have equal keys, they have equal types. Leaves of equal types may nevertheless have
    different keys.

    Returns:
        The key; None if there is no cheap key for the leaf, so that its type has to be found by `leaf_type`.
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


def sent_type(leaf: Any) -> ValueType:
    """Return the type with which a leaf is sent to actors; a PRNG key is sent as its `uint32` data.

    Raises:
        TypeError: JAX cannot compute with the leaf; see `shape_struct`.
    """
    struct = shape_struct(leaf)
    return value_type(private_api.ShapedArray(struct.shape, struct.dtype, weak_type=struct.weak_type))


def host_array(leaf: Any) -> np.ndarray:
    """Convert a host value to the form in which it is sent to actors.

    This form is a numpy array in C order that has the dtype that JAX would use. A PRNG key array is converted
    to an array of its `uint32` data.

    Returns:
        The array, which may share memory with `leaf`.

    Raises:
        TypeError: JAX cannot compute with the leaf; see `shape_struct`.
    """
    if isinstance(leaf, jax.Array):
        return np.asarray(jax.random.key_data(leaf) if private_api.is_key_dtype(leaf.dtype) else leaf)
    struct = shape_struct(leaf)
    return np.ascontiguousarray(np.asarray(leaf, dtype=struct.dtype)).reshape(struct.shape)


def as_user_sees(array: np.ndarray, value_type: ValueType) -> Any:
    """Convert an array sent by an actor to the form that users get: a numpy array or a JAX key array."""
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
        dtype = f" of dtype {array.dtype}" if isinstance(leaf, np.ndarray) else ""
        advice = "make the argument static or leave it out"
        if callable(leaf):
            advice = f"pass a model's arrays only and close over the rest ({page('models.md')})"
        what = f"is a {type(leaf).__name__}{dtype}, which JAX cannot compute with"
        raise deliberate(TypeError(f"{what}; {advice}"))
    return private_api.ShapedArray(array.shape, private_api.canonical_dtype(array.dtype))
