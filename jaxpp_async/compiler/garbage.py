"""compiler.garbage: holds up Python's search for reference cycles while a step is compiled.

A compilation makes millions of objects that live until it ends. Searching them for cycles finds none and takes a third
of the compiler's time, more in a process that holds much else.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Within it no cycle is collected, in any thread; nested uses count as the outermost one."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
