"""failed_reply: an exception in, the `Failed` reply that tells the controller of it out. No I/O."""

from __future__ import annotations

import traceback

from jaxpp_async.actors.messages import Failed
from jaxpp_async.printable import printable


def failed(
    request: int | None, error: BaseException, *, step: int | None = None, instruction: str | None = None
) -> Failed:
    """An exception as a reply: names and text only, nothing that has to be unpickled."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    text = "".join(traceback.format_exception(error))
    return Failed(request, printable(name), printable(str(error)), printable(text), step, instruction)
