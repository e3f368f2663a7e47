"""Check the numbers that a user logs for a step, and keep a history of each name that stays bounded.

Nothing here waits; `session.metrics` resolves arrays and gives the numbers to loggers.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.core
import numpy as np

from jaxpp_async.base.printable import shown_value
from jaxpp_async.jax_bridge.tracebacks import deliberate
from jaxpp_async.session.remote_array import RemoteArray, is_remote
from jaxpp_async.view.history import History

LoggedValue: TypeAlias = float | RemoteArray | jax.Array
"""A number, or an array of one whose value is not here yet."""

MOST_NAMES = 1_000
"""The number of names whose history is kept."""

_LONGEST_NAME = 200
_MOST_STEP = 2**63 - 1


def check_step(step: Any) -> int:
    """Return the number of the step that a user logs for, as an int.

    Raises:
        TypeError: the step is no whole number.
        ValueError: the step is negative or too large.
    """
    try:
        number = operator.index(step)
    except TypeError:
        advice = "`await` it first" if is_remote(step) else "give a whole number"
        raise deliberate(TypeError(f"mesh.log: step is {shown_value(step)}; {advice}")) from None
    if not 0 <= number <= _MOST_STEP:
        raise deliberate(ValueError(f"mesh.log: step is {number}; give a whole number of at least 0"))
    return number


def check_values(values: Any) -> dict[str, LoggedValue]:
    """Return the values that a user logs, by name. Numbers become floats; an array whose value would have to
    be waited for stays the array.

    Args:
        values: a mapping of names to numbers: Python's, numpy's, or arrays without dimensions of numpy, JAX
            or the mesh.

    Raises:
        TypeError: `values` is no mapping, a name is no text, or a value is no number.
        ValueError: a name is empty, too long or has invisible characters, or an array has dimensions.
    """
    if not isinstance(values, Mapping):
        raise deliberate(
            TypeError(
                f"mesh.log: values is {shown_value(values)}; give a mapping such as {{'loss': loss}} after "
                "the step"
            )
        )
    checked: dict[str, LoggedValue] = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise deliberate(TypeError(f"mesh.log: the name {shown_value(name)} is no text"))
        if not name or len(name) > _LONGEST_NAME or not name.isprintable():
            limits = f"1 to {_LONGEST_NAME} printable characters"
            raise deliberate(ValueError(f"mesh.log: the name {shown_value(name)} has not {limits}"))
        checked[name] = _checked_value(name, value)
    return checked


def _checked_value(name: str, value: Any) -> LoggedValue:
    if isinstance(value, RemoteArray | np.ndarray | np.generic | jax.Array):
        _check_array(name, value)
        if isinstance(value, RemoteArray):
            return value
        if isinstance(value, jax.Array) and not value.is_ready():  # pyright: ignore[reportAttributeAccessIssue]
            return value
    elif not isinstance(value, Real):
        raise deliberate(
            TypeError(f"mesh.log: {name!r} is {shown_value(value)}; give one number, or an array of one")
        )
    try:
        return float(value)
    except OverflowError:
        raise deliberate(ValueError(f"mesh.log: {name!r} is too large for a float")) from None


def _check_array(name: str, value: Any) -> None:
    """Check that an array is one real number, which can be read."""
    if isinstance(value, jax.core.Tracer):
        raise deliberate(
            TypeError(
                f"mesh.log: {name!r} is {shown_value(value)}, which is being traced; let the step return it, "
                "and log it where the step is called"
            )
        )
    if value.shape:
        held = f"{value.dtype}{list(value.shape)}"
        mean = f"(await {name}).mean()" if isinstance(value, RemoteArray) else f"{name}.mean()"
        raise deliberate(
            ValueError(f"mesh.log: {name!r} is {held}; give one number, such as {mean} if that is meant")
        )
    kind = value.dtype
    is_number = jax.numpy.issubdtype(kind, np.number) and not jax.numpy.issubdtype(kind, np.timedelta64)
    if not (is_number or kind == np.bool_) or np.iscomplexobj(np.empty(0, kind)):
        raise deliberate(TypeError(f"mesh.log: {name!r} has the dtype {kind}; give a real number"))
    if isinstance(value, jax.Array) and value.is_deleted():
        raise deliberate(ValueError(f"mesh.log: {name!r} is a jax.Array that was deleted or donated"))


class Logged(NamedTuple):
    """The latest value of a name, and the step for which it was logged."""

    step: int
    value: float


class MetricHistory:
    """The histories of all names that a user logs, whose size has a bound however long the run is."""

    def __init__(self) -> None:
        self._histories: dict[str, History] = {}
        self.num_dropped = 0
        """The number of values whose names came when there were `MOST_NAMES` names already."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order in which they were first logged."""
        return tuple(self._histories)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of one step."""
        for name, value in values.items():
            history = self._histories.get(name)
            if history is None:
                if len(self._histories) >= MOST_NAMES:
                    self.num_dropped += 1
                    continue
                history = self._histories[name] = History()
            history.add(step, value)

    def latest(self) -> dict[str, Logged]:
        """Return the latest value of each name."""
        return {name: Logged(*h.last) for name, h in self._histories.items() if h.last is not None}

    def history(self, name: str) -> History:
        """Return a copy of the history of one name; empty for a name that was not logged."""
        history = self._histories.get(name)
        return history.copy() if history is not None else History()
