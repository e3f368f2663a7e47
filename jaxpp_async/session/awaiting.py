"""Wrap coroutines so that a user who forgets `await` gets an error that says to add it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Generator
from types import CoroutineType
from typing import Any, NoReturn, ParamSpec, TypeVar

from jaxpp_async.jax_bridge.tracebacks import HiddenFrames, deliberate

_P = ParamSpec("_P")
_T = TypeVar("_T")


class UnawaitedCoroutine:
    """A coroutine in a wrapper that raises a helpful error if a user forgets `await`.

    The wrapper raises this error if a user's code indexes or unpacks the wrapper, or reads an attribute that
    a coroutine does not have.

    An `UnawaitedCoroutine` works wherever a coroutine does: `await`, `asyncio.create_task`, `gather`,
    `wait_for`, `TaskGroup`, `asyncio.run`, `inspect.iscoroutine`. The class is a wrapper because Python's own
    coroutine type cannot be subclassed. The wrapper's methods are those of the wrapped coroutine, so a task
    that runs the wrapper has no extra cost.
    """

    __slots__ = ("__weakref__", "_coroutine", "close", "send", "throw")

    def __init__(self, coroutine: Coroutine[Any, Any, Any]):
        self._coroutine = coroutine
        self.send, self.throw, self.close = coroutine.send, coroutine.throw, coroutine.close

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]  # nobody sets it
        """Python's own coroutine type, so that `isinstance` and `inspect.iscoroutine` accept this object."""
        return CoroutineType

    def __await__(self) -> Generator[Any, None, Any]:
        return self._coroutine.__await__()

    def __repr__(self) -> str:
        return repr(self._coroutine)

    def __getitem__(self, key: object) -> NoReturn:
        """Raise an error that tells the user to await the coroutine before indexing or unpacking its result.

        Unpacking calls this method too, since there is no `__iter__`.
        """
        with HiddenFrames():
            raise deliberate(TypeError(f"{self._advice()} (`a, b = await ...`)"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cr_") or name in ("__name__", "__qualname__"):
            # for asyncio's and inspect's reports
            return getattr(self._coroutine, name)
        if name.startswith("_"):
            raise AttributeError(f"a coroutine has no attribute {name!r}", name=name, obj=self)
        raise AttributeError(f"{self._advice()} to use its result's {name!r}", name=name, obj=self)

    def _advice(self) -> str:
        return (
            f"{self._coroutine.__qualname__}(...) is a coroutine, which has no result yet: write `await` "
            "before it"
        )


def says_to_await(
    method: Callable[_P, CoroutineType[Any, Any, _T]],
) -> Callable[_P, CoroutineType[Any, Any, _T]]:
    """Decorate an async method so that a user who forgets to await it gets an error that says so.

    The decorated method returns an `UnawaitedCoroutine`, which raises that error.
    """

    @functools.wraps(method)
    def call(*args: _P.args, **options: _P.kwargs) -> CoroutineType[Any, Any, _T]:
        with HiddenFrames():
            try:
                coroutine = method(*args, **options)
            except TypeError as error:
                # the method cannot be called with these arguments; nothing of it has run
                raise deliberate(error) from None
            return UnawaitedCoroutine(coroutine)  # pyright: ignore[reportReturnType]  # as `__class__` says

    mark = getattr(inspect, "markcoroutinefunction", None)  # Python 3.12
    return mark(call) if mark is not None else call
