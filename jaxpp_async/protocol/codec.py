"""Encode frozen dataclasses as msgpack, and decode them with a check of every field's type.

A message is an array: the name of its type, then its fields in order. A nested dataclass is an array of its
fields. The type hints say which dataclass a field holds, and where a tuple or an integer key is expected. The
encoder does not check types, because it gets only objects that this process has made. The decoder trusts no
input: it also checks the lengths that a header announces and the depth of nesting. Nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import msgpack

from jaxpp_async.errors import MeshError, ProtocolError

Decode: TypeAlias = Callable[[Any], Any]
T = TypeVar("T")

MAX_DEPTH = 32
"""The depth to which values of type `Any` may be nested; deeper values could exceed Python's recursion limit.
"""

_PLAIN = (int, str, bytes, bool, float)
_SCALARS = frozenset({type(None), *_PLAIN})

_UNSEEN_ELEMENTS = 256
"""The length of the longest array that is decoded without a check that the message contains all its elements.
msgpack allocates an array before it has seen the elements, for up to a thousand nested arrays: 4 KiB of
headers would take 32 MiB of memory without this limit, and take 2 MiB with it.
"""

_KEEP_BYTES = 1 << 20
"""The length in bytes of the longest message after which an encoder keeps its buffer for the next one."""


class _BadValue(Exception):
    """The error for a decoded value that has the wrong type. As the error propagates out of nested values,
    each level adds its field to `path`, so that the final message names the whole path of the field.
    """

    def __init__(self, expected: str, value: object, got: str = ""):
        super().__init__(expected)
        self.expected, self.got, self.path = expected, got or type(value).__name__, ""


def pack(values: object) -> bytes:
    """Encode plain values and frozen dataclasses as msgpack; a dataclass becomes an array of its fields.

    Raises:
        TypeError: a value has a type that msgpack cannot carry (a bug of this package, never a peer's fault).
    """
    packed = msgpack.packb(values, default=fields_of)
    assert packed is not None  # the stubs allow None, for subclasses that write to a stream
    return packed


def encode(message: object) -> bytes:
    """Encode a message as bytes: the name of its type, then its fields."""
    return pack(named(message))


def named(message: object) -> tuple[Any, ...]:
    """Return a message as the tuple that `pack` encodes: the name of its type, then its fields."""
    cls = type(message)
    return cls.__name__, *_fields_getter(cls)(message)


class Encoder:
    """An encoder of messages that works like the function `encode`, but reuses one buffer for all messages.
    Only one thread may use it.

    Args:
        max_bytes: the largest size of an encoded message, in bytes.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._packer: msgpack.Packer | None = None  # made with the first message, since it takes memory

    def encode(self, message: object) -> bytes:
        """Encode a message as bytes: the name of its type, then its fields.

        Raises:
            MeshError: the message is too long, or has text or numbers that msgpack cannot carry. The buffer
                is empty then, so that the encoder can still be used.
        """
        packer = self._packer or msgpack.Packer(default=fields_of)
        self._packer = packer
        try:
            payload = packer.pack(named(message))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            self._packer = None
            raise MeshError(f"{type(message).__name__} cannot be sent: {_reason(error)}") from None
        assert payload is not None  # the stubs allow None, for packers that do not reset themselves
        if len(payload) > _KEEP_BYTES:
            self._packer = None
        if len(payload) > self._max_bytes:
            raise MeshError(
                f"{type(message).__name__} takes {len(payload)} bytes, a frame at most {self._max_bytes}; "
                "raise max_frame_bytes"
            )
        return payload


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object[:80]!r} is no text that UTF-8 can hold; leave out its surrogates"
    return str(error) or "it is nested too deep"


def decode(data: bytes | memoryview, known: Mapping[str, type]) -> Any:
    """Decode a message, which must be of one of the `known` types.

    Args:
        data: the encoded message.
        known: the accepted message types, by name.

    Raises:
        ProtocolError: the bytes are not msgpack, the message is unknown, fields are missing or too many, or a
            field has a wrong type.
    """
    values = _unpack(data)
    if type(values) is not tuple or not values or type(values[0]) is not str:
        raise ProtocolError("a frame is not a message: expected an array that begins with the message's name")
    cls = known.get(values[0])
    if cls is None:
        raise ProtocolError(f"unknown message {values[0][:60]!r}; expected one of {', '.join(sorted(known))}")
    try:
        return _decoder(cls)(values[1:])
    except _BadValue as bad:
        raise _refused(cls, bad) from None


def decode_as(cls: type[T], data: bytes | memoryview) -> T:
    """Decode a dataclass from an encoded array of its fields; both sides know its type from the context.

    Args:
        cls: the dataclass.
        data: the encoded array.

    Raises:
        ProtocolError: the bytes are not msgpack, fields are missing or too many, or a field has a wrong type.
    """
    return build(cls, _unpack(data))


def build(cls: type[T], values: Any) -> T:
    """Create an instance of a dataclass from plain values, and check the type of every field.

    Args:
        cls: the dataclass.
        values: the values of the dataclass's fields in order, as a tuple. Inner arrays are tuples and inner
            maps are dicts.

    Raises:
        ProtocolError: fields are missing or too many, or a field has a wrong type.
    """
    try:
        return _decoder(cls)(values)
    except _BadValue as bad:
        raise _refused(cls, bad) from None


def _refused(cls: type, bad: _BadValue) -> ProtocolError:
    return ProtocolError(f"{cls.__name__}{bad.path}: expected {bad.expected}, got {bad.got}")


def fields_of(value: object) -> tuple[Any, ...]:
    """Return the values of a dataclass instance's fields, in order, as a tuple. A field that is itself a
    dataclass instance is not converted.

    Raises:
        TypeError: the value is not a dataclass.
    """
    return _fields_getter(type(value))(value)


def message_types(union: Any) -> dict[str, type]:
    """Return the members of a union of dataclasses (or a single dataclass), by class name."""
    return {cls.__name__: cls for cls in typing.get_args(union) or (union,)}


def _unpack(data: bytes | memoryview) -> Any:
    try:
        return msgpack.unpackb(data, use_list=False, strict_map_key=False, max_array_len=_UNSEEN_ELEMENTS)
    except _UNPACK_ERRORS as error:
        # The message may have an array longer than `_UNSEEN_ELEMENTS`, which is valid.
        if len(data) <= _UNSEEN_ELEMENTS or isinstance(error, msgpack.exceptions.StackError):
            raise _not_msgpack(error) from None
    try:
        skipper = msgpack.Unpacker(max_buffer_size=len(data))
        skipper.feed(data)
        skipper.skip()  # creates nothing, and fails if an element is missing that a header announces
        return msgpack.unpackb(data, use_list=False, strict_map_key=False, max_array_len=len(data))
    except _UNPACK_ERRORS as error:
        raise _not_msgpack(error) from None


_UNPACK_ERRORS = (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException)


def _not_msgpack(error: Exception) -> ProtocolError:
    return ProtocolError(f"a frame is not msgpack ({type(error).__name__})")


@cache  # by class: bounded by the number of message types (a call that raises is not cached)
def _fields_getter(cls: type) -> Callable[[object], tuple[Any, ...]]:
    if cls is int:  # msgpack calls `fields_of` for an integer that it cannot encode
        raise OverflowError("it has a whole number of more than 64 bits")
    if not dataclasses.is_dataclass(cls):
        raise TypeError(
            f"a message cannot carry a {cls.__module__}.{cls.__qualname__}; convert it to a plain value"
        )
    names = [f.name for f in dataclasses.fields(cls)]
    if not names:
        return lambda value: ()
    getter = attrgetter(*names)
    return getter if len(names) > 1 else lambda value: (getter(value),)


@cache  # by type hint: bounded by what the message types mention
def _decoder(hint: Any) -> Decode:
    if hint in _PLAIN:
        return _float if hint is float else _exactly(hint)
    if hint is type(None):
        return _exactly(type(None))
    if hint is Any:
        return _anything
    if dataclasses.is_dataclass(hint):
        return _dataclass_decoder(typing.cast(type, hint))
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and args[-1:] == (Ellipsis,):
        return _sequence_decoder(args[0])
    if origin is tuple:
        return _tuple_decoder(args)
    if origin in (dict, Mapping):
        return _dict_decoder(*args)
    if origin is typing.Literal:
        return _literal_decoder(args)
    if origin in (typing.Union, types.UnionType):
        return _union_decoder(args)
    raise TypeError(f"messages cannot carry {hint!r}; teach protocol.codec about it")


def _exactly(cls: type) -> Decode:
    def decode_exactly(value: Any) -> Any:
        if type(value) is not cls:
            raise _BadValue(cls.__name__, value)
        return value

    return decode_exactly


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int:  # a count of seconds may be given as 0
        return float(value)
    raise _BadValue("float", value)


def _anything(value: Any, depth: int = 0) -> Any:
    """Check a decoded value whose type hint is `Any`, and return it. Allowed are plain values, and tuples and
    dicts of plain values (lists were decoded as tuples).

    Raises:
        _BadValue: the value is not plain, or is nested more than `MAX_DEPTH` levels deep.
    """
    cls = type(value)
    if cls in _SCALARS:
        return value
    if depth == MAX_DEPTH:
        raise _BadValue(f"at most {MAX_DEPTH} levels", value)
    if cls is tuple:
        return tuple(_anything(v, depth + 1) for v in value)
    if cls is dict:
        return {_anything(k, depth + 1): _anything(v, depth + 1) for k, v in value.items()}
    raise _BadValue("a plain value", value)


def _dataclass_decoder(cls: type) -> Decode:
    hints = typing.get_type_hints(cls)
    names = tuple(f.name for f in dataclasses.fields(cls))
    decoders = tuple(_decoder(hints[name]) for name in names)
    usual = tuple(_wire_type(hints[name]) for name in names)
    # Where every field has exactly the type of its hint, plain fields need no check of their own, and neither
    # do empty arrays and maps.
    fields = [(k, decoders[k], _may_be_empty(hints[name])) for k, name in enumerate(names)]
    not_plain = tuple(field for field in fields if hints[names[field[0]]] not in _PLAIN)
    unusual = tuple((k, decode_field, False) for k, decode_field in enumerate(decoders))

    def decode_dataclass(values: Any) -> Any:
        if type(values) is not tuple or len(values) != len(names):
            got = f"{len(values)} fields" if type(values) is tuple else ""
            raise _BadValue(f"{len(names)} fields ({', '.join(names)})", values, got)
        checked = not_plain if tuple(map(type, values)) == usual else unusual
        if not checked:
            return cls(*values)
        position, decoded = 0, list(values)
        try:
            for position, decode_field, may_be_empty in checked:
                value = values[position]
                if value or not may_be_empty:
                    decoded[position] = decode_field(value)
        except _BadValue as bad:
            bad.path = f".{names[position]}{bad.path}"
            raise
        return cls(*decoded)

    return decode_dataclass


def _may_be_empty(hint: Any) -> bool:
    """Return whether an empty msgpack array or map is always a valid value for a type hint."""
    origin = typing.get_origin(hint)
    return origin in (dict, Mapping) or (origin is tuple and typing.get_args(hint)[-1:] == (Ellipsis,))


def _sequence_decoder(item: Any) -> Decode:
    decode_item, only = _decoder(item), {item}

    def decode_sequence(values: Any) -> Any:
        if type(values) is not tuple:
            raise _BadValue("an array", values)
        if item in _PLAIN and only.issuperset(map(type, values)):
            # The usual case on the hot path, checked at C speed.
            return values
        return tuple(map(decode_item, values))

    return decode_sequence


def _tuple_decoder(items: tuple[Any, ...]) -> Decode:
    decoders = tuple(_decoder(item) for item in items)

    def decode_tuple(values: Any) -> Any:
        if type(values) is not tuple or len(values) != len(items):
            raise _BadValue(f"an array of {len(items)}", values)
        if tuple(map(type, values)) == items:
            return values
        return tuple(decode_item(value) for decode_item, value in zip(decoders, values, strict=True))

    return decode_tuple if items else _exactly(tuple)


def _dict_decoder(key: Any, value: Any) -> Decode:
    decode_key, decode_value = _decoder(key), _decoder(value)
    plain, keys, values = key in _PLAIN and value in _PLAIN, {key}, {value}

    def decode_dict(mapping: Any) -> Any:
        if type(mapping) is not dict:
            raise _BadValue("a map", mapping)
        if plain and keys.issuperset(map(type, mapping)) and values.issuperset(map(type, mapping.values())):
            return mapping
        return {decode_key(k): decode_value(v) for k, v in mapping.items()}

    return decode_dict


def _literal_decoder(allowed: tuple[Any, ...]) -> Decode:
    def decode_literal(value: Any) -> Any:
        if type(value) not in _SCALARS or value not in allowed:
            raise _BadValue(f"one of {allowed}", value)
        return value

    return decode_literal


def _union_decoder(members: tuple[Any, ...]) -> Decode:
    by_type = {_wire_type(member): _decoder(member) for member in members}
    if len(by_type) != len(members):
        raise TypeError(f"the members of {members} look alike in msgpack; a message cannot carry that union")
    expected = " or ".join(getattr(m, "__name__", str(m)) for m in members)

    def decode_union(value: Any) -> Any:
        decode_member = by_type.get(type(value))
        if decode_member is None:
            raise _BadValue(expected, value)
        return decode_member(value)

    return decode_union


def _wire_type(hint: Any) -> type:
    """Return the Python type to which msgpack decodes a value with this type hint."""
    if dataclasses.is_dataclass(hint):
        return tuple
    return typing.get_origin(hint) or hint
