"""Run the command line `jaxpp-async`, also `python -m jaxpp_async`.

Little is imported here before Ctrl-C is one line, and an output that cannot be written as well.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def app(prog_name: str | None = None) -> None:
    """Run the command that the arguments of this process name, and end the process with its exit status.

    Args:
        prog_name: the name of the program in its help; None for that of the script.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if is_ours := is_ours and before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    try:
        from jaxpp_async.commands.app import app as commands
        from jaxpp_async.commands.output import FAILED, print_error
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, before)
    try:
        try:
            commands(prog_name=prog_name)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        _end()
    except OSError as error:
        if error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        print_error("jaxpp-async", f"the output cannot be written: {error.strerror or error}")
        sys.exit(FAILED)


def _end(*_: object) -> None:
    """End the process at once: modules that are imported in part cannot be left in order."""
    os.write(2, b"jaxpp-async: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    app(prog_name="python -m jaxpp_async")
