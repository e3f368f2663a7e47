"""Make dataclasses that are cheap to create, for types of which a compilation creates tens of thousands of
instances.

To a type checker `frozen` is `dataclass(frozen=True)`. At run time nothing prevents assignment, since that
would be slow: a frozen dataclass sets each field through `object.__setattr__`, which takes three quarters of
the time to create an instance, and one compilation creates a quarter of a million instances. All other
classes of this package use `dataclass(frozen=True)` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, dataclass_transform, overload

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(*, eq: bool = True, slots: bool = True) -> Callable[[type[_T]], type[_T]]:
    """Return a decorator that turns a class into a dataclass whose fields must not be assigned again; nothing
    checks this at run time.

    Args:
        eq: whether instances with equal fields are equal and have the same hash; if False, an instance equals
            only itself.
        slots: whether the class gets `__slots__`, so that instances have no attributes besides the fields.
    """
    return dataclass(slots=slots, eq=eq, unsafe_hash=eq)


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
