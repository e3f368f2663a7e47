"""Post tagged messages through UCX's C functions, on raw handles of ucxx's workers and endpoints.

ucxx's own requests are not used because they discard the size of the received message, which UCX reports.
Without the size, a message that is too short would look like a success and leave old data in the rest of the
buffer. (The C functions are also faster, by about 1 us per message.)

Only functions and structures of UCX's public header `ucp/api/ucp.h` are used, whose layout has been fixed
since UCX 1.10.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

STATUS_OK = 0
STATUS_TRUNCATED = -9
STATUS_CANCELED = -16
STATUS_LAST = -100

_FIELD_CALLBACK, _FIELD_USER_DATA, _FIELD_FLAGS, _NO_IMMEDIATE = 1 << 1, 1 << 2, 1 << 4, 1 << 16
_CLOSE_FORCE = 1
_FULL_MASK = (1 << 64) - 1


class _RecvInfo(ctypes.Structure):
    _fields_ = (("sender_tag", ctypes.c_uint64), ("length", ctypes.c_size_t))


class _Param(ctypes.Structure):
    """UCX's structure `ucp_request_param_t`: the options of one call."""

    _fields_ = (
        ("op_attr_mask", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("request", ctypes.c_void_p),
        ("callback", ctypes.c_void_p),
        ("datatype", ctypes.c_uint64),
        ("user_data", ctypes.c_void_p),
        ("reply_buffer", ctypes.c_void_p),
        ("memory_type", ctypes.c_int),
        ("recv_info", ctypes.c_void_p),
        ("memh", ctypes.c_void_p),
    )


class _Route(ctypes.Structure):
    """UCX's structure `ucp_transport_entry_t`: one transport and device that an endpoint uses."""

    _fields_ = (("transport_name", ctypes.c_char_p), ("device_name", ctypes.c_char_p))


class _EndpointInfo(ctypes.Structure):
    """UCX's structure `ucp_ep_attr_t`: the properties of an endpoint that a query returns."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_sockaddr", ctypes.c_uint64 * 16),  # 128 aligned bytes, like `struct sockaddr_storage`
        ("remote_sockaddr", ctypes.c_uint64 * 16),
        ("routes", ctypes.POINTER(_Route)),
        ("num_routes", ctypes.c_uint),
        ("route_size", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
    )


_FIELD_ROUTES, _MAX_ROUTES = 1 << 3, 32

# ucs_status_t is a packed enum: one signed byte.
_SendCallback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int8, ctypes.c_void_p)
_RecvCallback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int8, ctypes.c_void_p, ctypes.c_void_p)


def is_error(result: int) -> bool:
    """Return whether the result of posting is an error status, which is a small negative number, rather than
    0 or a request's handle."""
    return STATUS_LAST <= result < 0


class TagPort:
    """A wrapper of one UCX worker that posts tagged messages and records which operations have ended.

    `send` and `recv` return UCX's result: 0 if the operation has completed successfully, an error status (see
    `is_error`), or the handle of a request. A handle can be passed to `cancel`, and must be passed to `free`
    when the operation has ended.

    Args:
        worker: the worker's raw handle, which must stay valid as long as this object is used.

    Attributes:
        completed: a list with one tuple `(identity, status, length)` for every operation that has ended since
            the owner last emptied the list. UCX adds to the list while the worker makes progress. `length` is
            the number of bytes received, 0 for sends.
        free: a function that releases the request with the given handle.
    """

    def __init__(self, worker: int):
        self._worker = worker
        self._ucp, self._ucs = _loaded("libucp.so.0"), _loaded("libucs.so.0")
        _declare(self._ucp, self._ucs)
        self._tag_send, self._tag_recv = self._ucp.ucp_tag_send_nbx, self._ucp.ucp_tag_recv_nbx
        self.free: Callable[[int], None] = self._ucp.ucp_request_free
        self.completed: list[tuple[int, int, int]] = []
        # A reference is kept for as long as UCX may call them.
        self._callbacks = _completion_callbacks(self.completed)
        send_callback, recv_callback = (ctypes.cast(c, ctypes.c_void_p).value for c in self._callbacks)
        # UCX reads a parameter block only during the call, so one of each kind serves all calls.
        self._send_param = _Param(op_attr_mask=_FIELD_CALLBACK | _FIELD_USER_DATA, callback=send_callback)
        # Receives never complete in the call: UCX tells only the callback how long a truncated message was.
        self._recv_param = _Param(
            op_attr_mask=_FIELD_CALLBACK | _FIELD_USER_DATA | _NO_IMMEDIATE, callback=recv_callback
        )
        self._send_param_at = ctypes.addressof(self._send_param)
        self._recv_param_at = ctypes.addressof(self._recv_param)

    def send(self, endpoint: int, address: int, size_bytes: int, tag: int, identity: int) -> int:
        """Post a send, and return UCX's result (see `TagPort`).

        Args:
            endpoint: the endpoint's raw handle.
            address: the address of the first byte to send.
            size_bytes: the number of bytes.
            tag: the message's tag.
            identity: a number from 1 that identifies the send in `completed`, where it appears unless it
                completed within this call.
        """
        self._send_param.user_data = identity
        return self._tag_send(endpoint, address, size_bytes, tag, self._send_param_at)

    def recv(self, address: int, size_bytes: int, tag: int, identity: int) -> int:
        """Post a receive of a message with exactly this tag, and return UCX's result (see `TagPort`).

        Args:
            address: the address to receive at.
            size_bytes: the number of bytes that may be written there.
            tag: the message's tag.
            identity: a number from 1 that identifies the receive in `completed`.
        """
        self._recv_param.user_data = identity
        return self._tag_recv(self._worker, address, size_bytes, tag, _FULL_MASK, self._recv_param_at)

    def discard_unexpected(self, tag: int, mask: int, identity: int) -> int | None:
        """Receive and discard one message that arrived before a receive for it was posted, and whose tag
        equals `tag` in the bits of `mask`.

        Args:
            tag: the tag to look for.
            mask: the bits of the tag that are compared.
            identity: a number from 1 that identifies the operation in `completed`.

        Returns:
            UCX's result (see `TagPort`); None if there is no such message.
        """
        message = self._ucp.ucp_tag_probe_nb(self._worker, tag, mask, 1, ctypes.byref(_RecvInfo()))
        if not message:
            return None
        self._recv_param.user_data = identity
        # Received into zero bytes: UCX then drops an eager message, and releases the sender of a large one.
        return self._ucp.ucp_tag_msg_recv_nbx(self._worker, None, 0, message, self._recv_param_at)

    def cancel(self, request: int) -> None:
        """Ask UCX to cancel a receive. A receive that has no message yet is cancelled and then appears in
        `completed`; any other receive continues."""
        self._ucp.ucp_request_cancel(self._worker, request)

    def close_endpoint(self, endpoint: int) -> None:
        """Force-close an endpoint that has failed, because ucxx does not close such an endpoint itself. This
        does not wait until the endpoint is closed."""
        param = _Param(op_attr_mask=_FIELD_FLAGS, flags=_CLOSE_FORCE)
        result = self._ucp.ucp_ep_close_nbx(endpoint, ctypes.byref(param))
        if result and not is_error(result):
            self.free(result)

    def routes(self, endpoint: int) -> tuple[str, ...]:
        """Return the sorted names of the UCX transports that an endpoint uses; empty if UCX does not report
        them."""
        entries = (_Route * _MAX_ROUTES)()
        info = _EndpointInfo(
            field_mask=_FIELD_ROUTES,
            routes=ctypes.cast(entries, ctypes.POINTER(_Route)),
            num_routes=_MAX_ROUTES,
            route_size=ctypes.sizeof(_Route),
        )
        if self._ucp.ucp_ep_query(endpoint, ctypes.byref(info)) != STATUS_OK:
            return ()
        return tuple(sorted({entry.transport_name.decode() for entry in entries[: info.num_routes]}))

    def status_text(self, status: int) -> str:
        """Return UCX's own description of a status."""
        return self._ucs.ucs_status_string(status).decode()


def _completion_callbacks(completed: list[tuple[int, int, int]]):
    """Return the callbacks that UCX calls when a send, and when a receive, has ended.

    The callbacks only add to a list, because they run inside UCX, where no operation may be posted.

    Args:
        completed: the list. Each entry is the operation's identity, its status, and for a receive the number
            of bytes that came (for a send 0).
    """
    length_at = ctypes.c_size_t.from_address
    offset = _RecvInfo.length.offset

    @_SendCallback
    def sent(_request, status, identity):
        completed.append((identity, status, 0))

    @_RecvCallback
    def received(_request, status, info, identity):
        completed.append((identity, status, length_at(info + offset).value))

    return sent, received


def _loaded(name: str) -> ctypes.CDLL:
    """Open a shared library that ucxx has loaded already. If ucxx has not loaded it, fail instead of loading
    another copy."""
    return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)


def _declare(ucp: ctypes.CDLL, ucs: ctypes.CDLL) -> None:
    pointer, size, tag, result = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_ssize_t
    for function, returns, arguments in (
        (ucp.ucp_tag_send_nbx, result, (pointer, pointer, size, tag, pointer)),
        (ucp.ucp_tag_recv_nbx, result, (pointer, pointer, size, tag, tag, pointer)),
        (ucp.ucp_tag_probe_nb, pointer, (pointer, tag, tag, ctypes.c_int, pointer)),
        (ucp.ucp_tag_msg_recv_nbx, result, (pointer, pointer, size, pointer, pointer)),
        (ucp.ucp_request_cancel, None, (pointer, pointer)),
        (ucp.ucp_request_free, None, (pointer,)),
        (ucp.ucp_ep_close_nbx, result, (pointer, pointer)),
        (ucp.ucp_ep_query, ctypes.c_int8, (pointer, pointer)),
        (ucs.ucs_status_string, ctypes.c_char_p, (ctypes.c_int8,)),
    ):
        function.restype, function.argtypes = returns, arguments
