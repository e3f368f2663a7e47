"""tracebacks: what a user sees of a traceback. In: an error that leaves a public function. Out: the same error, without
the frames that say nothing to a user.

Those are this package's, and those of JAX and Python's library that it called: an error of `errors`, or one of Python's
types that is marked as `deliberate`, says all there is to say in its message; the user's own, raised while a step is
traced, has its cause in the user's frames. Where neither is so, a bug of this package for one, the frames behind the
user's last one stay. JAX's own switch shows everything: `JAX_TRACEBACK_FILTERING=off`. Never touches a message
or a cause, nor an error that the caller was handling already, and never fails itself.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Final, TypeVar

from jaxpp_async import jax_config, jax_origins
from jaxpp_async.errors import JaxppAsyncError
from jaxpp_async.pages import page

_E = TypeVar("_E", bound=BaseException)

_DELIBERATE: Final = "_jaxpp_async_deliberate"


def deliberate(error: _E) -> _E:
    """`raise deliberate(TypeError(...))`: a mistake of the user's, of which the message says all."""
    error.__dict__[_DELIBERATE] = True
    return error


@contextlib.contextmanager
def framework_hints() -> Iterator[None]:
    """Around the tracing of a user's function: what a framework says of it gets a note with what to write here."""
    try:
        yield
    except Exception as error:  # flax is not imported for its types, and gives this two of them
        hinted = any("copy=True" in note for note in getattr(error, "__notes__", ()))  # in a loop, which is in a step
        if "different trace level" in str(error) and not hinted:
            error.add_note(
                "A step, and the function that accumulate_grads runs, are traced by themselves: neither may change or "
                "differentiate an nnx object that was made outside. Write `graphdef, state = nnx.split(model)` there, "
                f"and `model = nnx.merge(graphdef, state, copy=True)` in the function: {page('models.md')}"
            )
        raise


class HiddenFrames:
    """`with HiddenFrames():` around what a public function does: every error that leaves it is shortened, and all those
    that are printed with it. Costs next to nothing where there is none.
    """

    __slots__ = ("_handled",)

    def __enter__(self) -> None:
        # Python chains it to each error that is raised in here, and its traceback belongs to the caller.
        self._handled = sys.exception()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # Python goes on with the error's traceback as it is now, and adds nothing for the `with` itself.
        if error is None or not (isinstance(error, Exception) or _is_cancelled(error)) or not jax_config.hides_frames():
            return
        # Whatever fails here would stand in the error's place, and a user's exception may do anything when it is
        # looked at (properties, `__getattribute__`): a long traceback is the lesser evil.
        with contextlib.suppress(Exception):
            for each in _chain(error, self._handled):
                says_all = _says_all(each)
                # Past the exception's own `__setattr__`, which refuses where it is a frozen dataclass.
                BaseException.with_traceback(each, shown(each.__traceback__, says_all=says_all))


def shown(traceback: TracebackType | None, *, says_all: bool) -> TracebackType | None:
    """The part of a traceback that a user sees.

    Args:
        says_all: the error's message says everything: of this package's frames none is needed.
    """
    entries = list(_entries(traceback))
    hidden, last_of_user = _hidden([entry.tb_frame for entry in entries])
    rest: TracebackType | None = None
    for k in range(len(entries) - 1, -1, -1):
        if not hidden[k] or (k > last_of_user and not says_all):
            entry = entries[k]
            rest = TracebackType(rest, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rest


def _hidden(frames: list[FrameType]) -> tuple[list[bool], int]:
    """For each frame whether it may be left out, and the index of the user's last one (-1: there is none)."""
    hidden: list[bool] = []
    last_of_user = -1
    for k, frame in enumerate(frames):
        name = jax_origins.path_of(frame.f_code)
        ours, helps = jax_origins.is_ours(name), jax_origins.is_of_jax(name) or jax_origins.is_of_library(name)
        hidden.append(ours or (helps and bool(hidden) and hidden[-1]))
        if not ours and not helps:
            last_of_user = k
    return hidden, last_of_user


def _says_all(error: BaseException) -> bool:
    """Whether nobody needs this package's frames to understand an error."""
    if isinstance(error, JaxppAsyncError) or _is_cancelled(error):
        return True
    return _DELIBERATE in object.__getattribute__(error, "__dict__")  # past a `__getattribute__` of the user's


def _is_cancelled(error: BaseException) -> bool:
    """Whether it is asyncio's `CancelledError`: by its name, for the marks come here too, and do without asyncio."""
    return type(error).__name__ == "CancelledError"


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _chain(error: BaseException, handled: BaseException | None) -> Iterator[BaseException]:
    """An error and all those that are printed with it, up to the one that was being handled before."""
    seen = {id(handled)} - {id(error)}  # it may be raised once more while it is handled
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, None if each.__suppress_context__ else each.__context__]
