"""Define `RemoteArray`, the user's handle of an array whose value is on actors and has to be fetched."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import jax
import numpy as np

from jaxpp_async.base.printable import first_line, listed
from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.errors import ArrayError
from jaxpp_async.jax_bridge import private_api
from jaxpp_async.jax_bridge.tracebacks import HiddenFrames, deliberate
from jaxpp_async.program.instructions import ActorId, Aval, SpecEntry
from jaxpp_async.program.leaf_parts import Parts
from jaxpp_async.session.awaiting import says_to_await
from jaxpp_async.view import format_held, to_html_table


class Owner(Protocol):
    """The interface of the part of a mesh that fetches and frees the values of `RemoteArray`s."""

    async def fetch(self, tree: Any) -> Any: ...

    def release(self, array: RemoteArray) -> None:
        """Free the array on its actors with the next message to them; any thread may call this."""
        ...

    def sharding_of(self, aval: Aval) -> jax.sharding.NamedSharding: ...


LIVE, DONATED, DELETED, FAILED = "live", "donated", "deleted", "failed"


def _needs_fetch(what: str) -> Any:
    """Return a method for `RemoteArray` that raises an error, which tells the user to fetch the value first.

    The method stands for an operation that needs the array's value.

    Args:
        what: the operation, such as `"len()"`, for the error message.
    """

    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        with HiddenFrames():
            raise deliberate(TypeError(_needs_value(what, self)))

    return refuse


def _needs_value(what: str, array: RemoteArray) -> str:
    return (
        f"{what} needs the value of {array!r}, which lies on the actors: `await` the array first "
        "(`value = await array`), or compute with it inside a step that takes it as an argument"
    )


_OF_A_JAX_ARRAY = frozenset(
    ("addressable_data", "addressable_shards", "at", "block_until_ready", "copy_to_host_async")
)


@dataclass(frozen=True, slots=True)
class PartArrays:
    """The parts in which an array lives that stacks layers.

    Args:
        parts: the rows of each part.
        arrays: the handle of each part. A part is an array of its own, which the user does not see.
    """

    parts: Parts
    arrays: tuple[RemoteArray, ...]

    def join(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Return the whole array, from the value of each part; the values are copied."""
        whole = np.empty(self.parts.whole_shape(values[0].shape), values[0].dtype)
        for index, value in zip(self.parts.slices, values, strict=True):
            whole[index] = value
        return whole


class RemoteArray:
    """The handle of an array on one or more actors of a mesh.

    Each of these actors holds the whole array, sharded over the actor's devices. An array that stacks layers
    may instead live in parts, each on the actors that use its layers; to the user it stays one array.

    `mesh.run`, `mesh.put` and `step.init` return `RemoteArray`s. `await array` fetches the value as numpy (a
    PRNG key as a JAX key array). When the last reference to this handle is gone, the buffers are freed with
    the next message to the actors.

    Attributes:
        shape: global shape.
        dtype: dtype as JAX has it; key arrays have a key dtype.
        actors: ids of the actors that hold the array or a part of it; empty while its value is still in the
            controller's process, before the first step that uses it.
        weak_type: whether the array is weakly typed.
    """

    __slots__ = ("_actors", "_division", "_host", "_id", "_owner", "_state", "_type", "_why", "weak_type")

    def __init__(
        self,
        owner: Owner,
        array_id: int,
        value_type: ValueType,
        actors: tuple[ActorId, ...],
        *,
        host: np.ndarray | None = None,
    ):
        self._owner, self._id, self._type = owner, array_id, value_type
        # None for an array in parts, which no list of actors equals; its parts have their own.
        self._actors: tuple[ActorId, ...] | None = actors
        self._host = host
        self._division: PartArrays | None = None
        self._state, self._why = LIVE, ""
        self.weak_type = value_type.weak

    @classmethod
    def in_parts(cls, owner: Owner, value_type: ValueType, division: PartArrays) -> RemoteArray:
        """Return the handle of an array that lives in parts; only the mesh calls this.

        The parts alone know whether the array may be used, and free their buffers.

        Args:
            owner: the part of the mesh that fetches and frees the parts.
            value_type: the type of the whole array.
            division: the parts.
        """
        array = cls(owner, division.arrays[0].array_id, value_type, ())
        array._actors, array._division = None, division
        return array

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self._type.aval.shape
        return shape if self._type.key_impl is None else shape[: len(shape) - self._key_ndim()]

    def _key_ndim(self) -> int:
        return len(jax.random.key_data(jax.random.key(0, impl=self._type.key_impl)).shape)

    @property
    def dtype(self) -> Any:
        if self._type.key_impl is not None:
            return jax.random.key(0, impl=self._type.key_impl).dtype
        return np.dtype(jax.numpy.dtype(self._type.aval.dtype))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self._type.aval.size_bytes

    @property
    def actors(self) -> tuple[ActorId, ...]:
        if self._actors is None:
            return tuple(sorted({actor for piece in self.pieces for actor in piece.actors}))
        return self._actors

    @property
    def sharding(self) -> jax.sharding.NamedSharding:
        """The sharding of the array over the devices of each actor that holds it."""
        return self._owner.sharding_of(self.pieces[0].value_type.aval)

    @property
    def spec(self) -> tuple[SpecEntry, ...]:
        return self.pieces[0].value_type.aval.spec

    @property
    def array_id(self) -> int:
        """The id by which the actors know the array; only the mesh uses it."""
        return self._id

    @property
    def value_type(self) -> ValueType:
        """The type and sharding with which the array is sent between processes; only the mesh uses it."""
        return self._type

    @property
    def host(self) -> np.ndarray | None:
        """The array's value while it is still in the controller's process; None once the array is on actors.

        Of an array in parts this is a copy, and None once a part is on actors. Only the mesh uses this.
        """
        if self._division is None:
            return self._host
        values = [piece.host for piece in self._division.arrays]
        here = [value for value in values if value is not None]
        return self._division.join(here) if len(here) == len(values) else None

    @property
    def division(self) -> PartArrays | None:
        """The parts in which the array lives; None if it is whole. Only the mesh uses this."""
        return self._division

    @property
    def pieces(self) -> tuple[RemoteArray, ...]:
        """The arrays that actors know: the array's parts, or the array itself. Only the mesh uses this."""
        return (self,) if self._division is None else self._division.arrays

    @property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """The index of each piece's first element in the array, one number per axis; for the mesh alone."""
        ndim = len(self._type.aval.shape)
        return ((0,) * ndim,) if self._division is None else self._division.parts.starts(ndim)

    def with_pieces(self, pieces: Sequence[RemoteArray]) -> RemoteArray:
        """Return the handle of an array that is divided as this one is, and consists of other arrays.

        Only the mesh calls this.
        """
        if self._division is None:
            return pieces[0]
        division = PartArrays(self._division.parts, tuple(pieces))
        return RemoteArray.in_parts(self._owner, self._type, division)

    def is_deleted(self) -> bool:
        """Return whether the array was donated to a step, deleted, or lost to a failure."""
        return any(piece._state != LIVE for piece in self.pieces)

    def __await__(self) -> Generator[Any, None, Any]:
        with HiddenFrames():
            return (yield from self._owner.fetch(self).__await__())

    @says_to_await
    async def delete(self) -> None:
        """Free the array's buffers on its actors. Deleting an array twice does nothing."""
        if not self.is_deleted():
            self.retire(DELETED, "it was deleted")
            self._owner.release(self)

    def relocate(
        self, actors: tuple[ActorId, ...], *, array_id: int | None = None, value_type: ValueType | None = None
    ) -> None:
        """Record that the array's buffers are now on `actors`, and drop the value if it was in this process.

        Only the mesh calls this.

        Args:
            actors: the actors that hold the array from now on.
            array_id: the array's new id on these actors; None: the same id.
            value_type: the array's new type, which may differ in sharding; None: the same type.
        """
        self._actors, self._host = actors, None
        self._id = self._id if array_id is None else array_id
        self._type = value_type or self._type

    def take_over(self, result: RemoteArray) -> None:
        """Make this handle refer to the array of the handle `result`, and make `result` unusable.

        The mesh calls this on a donated argument if the caller of the step was cancelled and so never got
        `result`, the argument's new value; and on an array that is divided, joined or divided anew.
        """
        for name in self.__slots__:
            setattr(self, name, getattr(result, name))
        if result._division is not None:  # this handle has the parts now
            result._division, result._actors = None, ()
        result.retire(DELETED, "an argument of its step stands for it")

    def retire(self, state: str, why: str) -> None:
        """Mark the array unusable. Only the mesh calls this.

        Args:
            state: `DONATED`, `DELETED` or `FAILED`.
            why: the reason, for later errors.
        """
        for piece in (self,) if self._division is None else self._division.arrays:
            piece._state, piece._why, piece._host = state, why, None

    def is_of(self, owner: Owner) -> bool:
        """Return whether the array belongs to `owner`. Only the mesh calls this."""
        return self._owner is owner

    def check_usable(self, name: str, owner: Owner) -> None:
        """Check that the array belongs to `owner` and may still be used. Only the mesh calls this.

        Args:
            name: the name by which the user knows the array, for the error message.
            owner: the part of the mesh that must own the array.

        Raises:
            ArrayError: the array belongs to another mesh, or was donated, deleted or lost.
        """
        if not self.is_of(owner):
            raise ArrayError(
                f"{name} is a RemoteArray of another mesh; fetch it there (`await mesh.fetch(...)`) and pass "
                "the numpy value"
            )
        for piece in self.pieces:
            if piece._state != LIVE:
                raise ArrayError(f"{name} cannot be used: {piece._why}")

    def id_at(
        self, owner: Owner, actors: tuple[ActorId, ...], spec: tuple[SpecEntry, ...] | None
    ) -> int | None:
        """Return the array's id if a step can use the array where it is, without a move; otherwise None.

        Only the mesh calls this.

        Args:
            owner: the part of a mesh that must own the array.
            actors: the actors that must hold the array; may be empty.
            spec: the sharding that the array must have; None: any.
        """
        if self._state != LIVE or self._owner is not owner or (self._host is not None and actors):
            return None
        if self._actors != actors:
            if self._actors is None:
                return None if actors or spec is not None or self.is_deleted() else self._id
            if not set(actors) <= set(self._actors):
                return None
        return self._id if spec is None or self._type.aval.spec == spec else None

    # Without these methods Python would answer wrongly (`if loss`), or its error would not mention actors.
    __bool__, __int__, __float__, __complex__, __index__ = map(
        _needs_fetch, ("bool()", "int()", "float()", "complex()", "use as an index")
    )
    __len__, __iter__, __getitem__, __contains__ = map(
        _needs_fetch, ("len()", "iteration", "indexing", "`in`")
    )
    __array__ = _needs_fetch("conversion to numpy")
    __lt__, __le__, __gt__, __ge__ = map(_needs_fetch, ("`<`", "`<=`", "`>`", "`>=`"))
    __add__ = __radd__ = _needs_fetch("`+`")
    __sub__ = __rsub__ = _needs_fetch("`-`")
    __mul__ = __rmul__ = _needs_fetch("`*`")
    __matmul__ = __rmatmul__ = _needs_fetch("`@`")
    __truediv__ = __rtruediv__ = _needs_fetch("`/`")
    __floordiv__ = __rfloordiv__ = _needs_fetch("`//`")
    __mod__ = __rmod__ = _needs_fetch("`%`")
    __pow__ = __rpow__ = _needs_fetch("`**`")
    __neg__, __pos__, __abs__, __round__ = map(_needs_fetch, ("`-`", "`+`", "abs()", "round()"))
    # A copy would be a second handle of the same buffers, and the first to be collected would free them.
    __copy__, __deepcopy__, __reduce_ex__ = map(_needs_fetch, ("copy.copy()", "copy.deepcopy()", "pickling"))

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is the same handle; False if `other` is None or a string.

        Raises:
            TypeError: `other` is any other value. To compare values, the user has to fetch the array first.
        """
        if self is other or other is None or isinstance(other, RemoteArray | str):
            return self is other
        return _needs_fetch("`==`")(self)

    __hash__ = object.__hash__

    @property
    def __jax_array__(self) -> Any:
        """The attribute from which JAX gets an object's value as an array; reading it always raises an error.

        Raises:
            ArrayError: JAX is about to compute with the array. (The error is no TypeError, because JAX would
                conclude from a TypeError that this object is no array.)
            AttributeError: other code asks whether the attribute exists.
        """
        if private_api.takes_a_value(sys._getframe(1)):
            raise ArrayError(_needs_value("a function of JAX", self))
        raise AttributeError("__jax_array__", name="__jax_array__", obj=self)

    def __getattr__(self, name: str) -> Any:
        what = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name in _OF_A_JAX_ARRAY or (not name.startswith("_") and hasattr(np.ndarray, name)):
            what += ": its value lies on the actors; `await` the array first (`value = await array`)"
        raise AttributeError(what, name=name, obj=self)

    def __format__(self, spec: str) -> str:
        return _needs_fetch(f"the format {spec!r}")(self) if spec else str(self)

    def __repr__(self) -> str:
        where = _where(self)
        if self._division is not None:
            where = _listed_parts(self._division, _where)
        state = "" if self._current_state == LIVE else f", {self._current_state}"
        return f"RemoteArray({self.dtype}{list(self.shape)}, {where}{state})"

    @property
    def _current_state(self) -> str:
        return next((piece._state for piece in self.pieces if piece._state != LIVE), LIVE)

    def _repr_html_(self) -> str:
        """Return the facts that a notebook shows."""
        places = _places(self)
        if self._division is not None:
            places = _listed_parts(self._division, _places)
        facts = [
            ("shape", self.shape),
            ("dtype", self.dtype),
            ("size", format_held(self.nbytes, "bytes")),
            ("sharding", self.spec),
            ("lies on", places),
            ("state", self._current_state),
        ]
        return to_html_table("RemoteArray", (), facts)

    def __del__(self) -> None:
        # Any thread may run this, also while the interpreter ends: `release` only appends to a list.
        if getattr(self, "_state", None) == LIVE and self._actors:
            self._owner.release(self)


_MOST_PARTS = 4
"""The most parts of an array whose places are shown."""


def _listed_parts(division: PartArrays, place: Callable[[RemoteArray], str]) -> str:
    """Return the rows of an array and their places as text; neighbours of one place are shown as one part."""
    places = [place(part) for part in division.arrays]
    joined = division.parts.joined(places)
    if joined.count == 1:
        return places[0]
    firsts = (places[division.parts.bounds.index(start)] for start, _ in joined.ranges)
    return listed([f"{row} {at}" for row, at in zip(joined.names(""), firsts, strict=True)], _MOST_PARTS)


def _where(array: RemoteArray) -> str:
    return f"actors={list(array.actors)}" if array.actors else "on the controller"


def _places(array: RemoteArray) -> str:
    return ", ".join(f"actor {actor}" for actor in array.actors) or "the controller"


def is_remote(leaf: Any) -> TypeGuard[RemoteArray]:
    """Return whether a leaf of a user's tree is a `RemoteArray`."""
    return isinstance(leaf, RemoteArray)


def retire_failed(arrays: Sequence[RemoteArray], made: str, error: Exception | None) -> None:
    """Retire the arrays of a step that has ended with an error; do nothing after a step without one.

    Args:
        arrays: the arrays that the step was to make; those that are deleted already stay so.
        made: what the step was to do with them, such as `"copied"`, for the error of a later use.
        error: the error with which the step ended; None if it has finished.
    """
    if error is None:
        return
    for array in arrays:
        if not array.is_deleted():
            array.retire(FAILED, f"it could not be {made}: {first_line(error)}")
