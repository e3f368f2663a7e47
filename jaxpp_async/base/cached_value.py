"""Define a property that is computed once, at its first read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

_T = TypeVar("_T")


class cached_value(Generic[_T]):
    """A property that is computed when it is first read and then stored in the instance, for classes without
    `__slots__`.

    This replaces `functools.cached_property`. Up to Python 3.11 that class takes a lock at the first read,
    and the lock costs more time than the computations that this package caches. If two threads read the
    property at the same time, both compute it.
    """

    def __init__(self, compute: Callable[[Any], _T]) -> None:
        self._compute, self._name, self.__doc__ = compute, compute.__name__, compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> cached_value[_T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> _T: ...
    def __get__(self, instance: object | None, owner: type) -> _T | cached_value[_T]:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value
