"""Encode messages as msgpack, and decode them with a check of every field's type. The work is msgspec's.

On a connection a message travels in an envelope: an array of the number of the request that the message makes
or answers, and of the message. The number is None if the message belongs to no request. A message is an array
of its class's name and its fields, and a `messages.MessagePart` is an array of its fields.

The encoder does not check types, because it gets only objects that this process has made. The decoder trusts
no input. A header may announce any length, but msgspec allocates at most 16 elements of an array before it
has seen them. No field has the type `Any`, so the fields' types limit the depth of nesting. Nothing is
pickled.
"""

from __future__ import annotations

import functools
import re
from typing import Any, TypeAlias, TypeVar, Union

import msgspec
from msgspec import inspect, msgpack

from jaxpp_async.errors import MeshError, ProtocolError
from jaxpp_async.protocol.messages import Message

T = TypeVar("T")

Envelope: TypeAlias = tuple[int | None, Any]
"""The number of a request, or None, and the message that makes or answers the request."""

_NUMBER_BYTES = 10
"""The most bytes by which an envelope is longer than its message."""

_SHOWN_CHARS = 300
"""The most characters of a decoding error that are quoted, since a peer may have chosen some of them."""


def pack(values: object) -> bytes:
    """Encode plain values and parts of messages as msgpack.

    Raises:
        TypeError: a value has a type that messages cannot carry (a bug of this package, never a peer's
            fault).
    """
    return _ENCODER.encode(values)


def _as_plain(value: object) -> object:
    """Convert a value whose type msgspec does not know, such as `numpy.float64`, to the plain type from which
    its own type is derived.
    """
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    cls = type(value)
    raise TypeError(
        f"a message cannot carry a {cls.__module__}.{cls.__qualname__}; convert it to a plain value"
    )


_ENCODER = msgpack.Encoder(enc_hook=_as_plain)


class Encoder:
    """An encoder of messages for one connection.

    Args:
        max_bytes: the largest size of an encoded envelope, in bytes.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes

    def encode_message(self, message: Message) -> msgspec.Raw:
        """Encode a message without its envelope, for a later call of `encode`.

        Raises:
            MeshError: the message is too long, or has text or numbers that msgpack cannot carry.
        """
        payload = _encode(message, message)
        self._check_size(message, len(payload) + _NUMBER_BYTES)
        return msgspec.Raw(payload)

    def encode(self, message: Message | msgspec.Raw, number: int | None) -> bytes:
        """Encode an envelope.

        Args:
            message: the message, or what `encode_message` returned for it.
            number: the number of the request that the message makes or answers, or None.

        Raises:
            MeshError: the message is too long, or has text or numbers that msgpack cannot carry. The encoder
                can still be used.
        """
        payload = _encode((number, message), message)
        self._check_size(message, len(payload))
        return payload

    def _check_size(self, message: object, size_bytes: int) -> None:
        if size_bytes > self._max_bytes:
            what = f"{type(message).__name__} takes {size_bytes} bytes"
            raise MeshError(f"{what}, a frame at most {self._max_bytes}; raise max_frame_bytes")


def _encode(values: object, message: object) -> bytes:
    try:
        return _ENCODER.encode(values)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MeshError(f"{type(message).__name__} cannot be sent: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object[:80]!r} is no text that UTF-8 can hold; leave out its surrogates"
    if isinstance(error, OverflowError):
        return "it has a whole number of more than 64 bits"
    return str(error) or "it is nested too deep"


# ---------------------------------------------------------------- decoding


class Decoder:
    """A decoder of envelopes that accepts some types of messages and no others.

    Args:
        accepted: the types of the messages; with none, every envelope is refused.
    """

    def __init__(self, accepted: tuple[type[Message], ...]):
        self._accepted = {cls.__name__: cls for cls in accepted}
        self._decoder = msgpack.Decoder(tuple[int | None, Union[accepted]]) if accepted else None  # noqa: UP007

    def decode(self, data: bytes | memoryview) -> Envelope:
        """Decode an envelope.

        Raises:
            ProtocolError: the bytes are not msgpack, the message is unknown, fields are missing or too many,
                or a field has a wrong type.
        """
        if self._decoder is None:
            raise ProtocolError("a message came, and none is expected")
        try:
            return self._decoder.decode(data)
        except _DECODE_ERRORS as error:
            raise self._refusal(data, error) from None

    def _refusal(self, data: bytes | memoryview, cause: Exception) -> ProtocolError:
        if not isinstance(cause, msgspec.ValidationError):
            return _not_msgpack(cause)
        try:
            name = _ENVELOPE_HEAD.decode(data).message.name
        except _DECODE_ERRORS:
            what = "expected a number and an array that begins with the message's name"
            return ProtocolError(f"a frame is not a message: {what}")
        if name not in self._accepted:
            known = ", ".join(sorted(self._accepted))
            return ProtocolError(f"unknown message {name[:60]!r}; expected one of {known}")
        return _wrong_field(self._accepted[name], cause, depth=1)


@functools.cache  # by types: bounded by the kinds of connections
def decoder_of(accepted: tuple[type[Message], ...]) -> Decoder:
    """Return the decoder of envelopes with messages of the accepted types. All callers share it."""
    return Decoder(accepted)


def decode_as(cls: type[T], data: bytes | memoryview) -> T:
    """Decode a part from an encoded array of its fields; both sides know its type from the context.

    Args:
        cls: the type of the part.
        data: the encoded array.

    Raises:
        ProtocolError: the bytes are not msgpack, fields are missing or too many, or a field has a wrong type.
    """
    try:
        return msgpack.decode(data, type=cls)
    except msgspec.ValidationError as error:
        raise _wrong_field(cls, error, depth=0) from None
    except _DECODE_ERRORS as error:
        raise _not_msgpack(error) from None


class _MessageHead(msgspec.Struct, array_like=True):
    """The beginning of any message; the decoder skips the fields that follow."""

    name: str


class _EnvelopeHead(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The beginning of any envelope."""

    number: int | None
    message: _MessageHead


_ENVELOPE_HEAD = msgpack.Decoder(_EnvelopeHead)

_DECODE_ERRORS = (msgspec.DecodeError, ValueError, RecursionError)
"""The errors of the decoder: those of msgspec, of text that is not UTF-8, and of too deep a nesting."""


def _not_msgpack(error: Exception) -> ProtocolError:
    return ProtocolError(f"a frame is not msgpack ({type(error).__name__})")


def _wrong_field(cls: type, error: msgspec.ValidationError, depth: int) -> ProtocolError:
    """Return the error about a field that has a wrong type, with the path of the field.

    Args:
        cls: the class of the message or part.
        error: the error of msgspec, which counts positions: "Expected `int`, got `str` - at `$[1][3][0]`".
        depth: how many of these positions lie outside of the message.
    """
    text, _, place = str(error).rpartition(" - at ")
    if not text:
        text, place = place, ""
    info, path = inspect.type_info(cls), ""
    for position in re.findall(r"\[(\d+|\.\.\.)\]", place)[depth:]:
        info, step = _inside(info, position)
        path += step
    text = text.replace("`", "")[:_SHOWN_CHARS]
    if isinstance(info, inspect.StructType) and "array of at" in text:
        names = ", ".join(field.name for field in info.fields)
        text = f"expected {len(info.fields)} fields ({names}), got {'more' if 'most' in text else 'fewer'}"
    key = " (a key)" if place.startswith("`key`") else ""
    return ProtocolError(f"{cls.__name__}{path}{key}: {text[:1].lower()}{text[1:]}")


def _inside(info: inspect.Type | None, position: str) -> tuple[inspect.Type | None, str]:
    """Return the type of one element of a value, and the step in the path of a field that leads to it.

    Args:
        info: the type of the value; None if it is not known.
        position: the position of the element in the encoded array, or `"..."` for any value of a map.
    """
    if isinstance(info, inspect.UnionType):  # of the members, at most one is an array or a map
        inner = [member for member in info.types if isinstance(member, _CONTAINERS)]
        info = inner[0] if len(inner) == 1 else None
    match info:
        case inspect.StructType():
            index = int(position) - (info.tag is not None)
            if index >= 0:
                return info.fields[index].type, f".{info.fields[index].name}"
        case inspect.TupleType():
            return info.item_types[int(position)], f"[{position}]"
        case inspect.VarTupleType():
            return info.item_type, f"[{position}]"
        case inspect.DictType():
            return info.value_type, f"[{position}]"
        case _:
            pass
    return None, f"[{position}]"


_CONTAINERS = (inspect.StructType, inspect.TupleType, inspect.VarTupleType, inspect.DictType)
