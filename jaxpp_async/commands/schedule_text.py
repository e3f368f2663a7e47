"""Read a schedule from text such as `Std1F1B(4, stages="balanced")`, without running any code."""

from __future__ import annotations

import ast
import inspect
from typing import Any

from jaxpp_async.commands.output import UseError, did_you_mean


def parse_schedule(text: str) -> Any:
    """Return the schedule of the package that a text describes.

    Args:
        text: the call that makes the schedule: a name, and arguments that are literals.

    Raises:
        UseError: the text is no such call, the package has no such schedule, or the arguments are wrong.
    """
    import jaxpp_async
    from jaxpp_async import schedules

    public = [name for name in schedules.__all__ if name in jaxpp_async.__all__]
    known = [name for name in public if hasattr(getattr(schedules, name), "tasks")]
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        call = None
    if isinstance(call, ast.Name) and call.id in known:
        raise UseError(f"schedule {text!r} lacks its number of stages; write {call.id}(4), for 4 stages")
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise UseError(f"{text!r} is no schedule; write one such as 'Std1F1B(4, stages=\"balanced\")'")
    name = call.func.id
    if name not in known:
        close = did_you_mean(name, known) or f"; there are {', '.join(known)}"
        raise UseError(f"there is no schedule {name!r}{close}")
    kind = getattr(schedules, name)
    try:
        args = [ast.literal_eval(arg) for arg in call.args]
        kwargs = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except ValueError:
        raise UseError(
            f"schedule {text!r}: its arguments have to be numbers, texts or lists of them"
        ) from None
    try:
        inspect.signature(kind).bind(*args, **kwargs)  # names the argument, where the call names a base class
        return kind(*args, **kwargs)
    except (TypeError, ValueError) as error:  # a ScheduleError is a ValueError
        raise UseError(f"schedule {text!r}: {error}") from None
