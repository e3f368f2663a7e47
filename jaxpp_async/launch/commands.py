"""Make the command lines of this package's own programs, so that they import nothing from the working
directory.

Every interpreter gets `-P`: its import path is the installed packages and `PYTHONPATH`. The options `-E`,
`-I` and `-s` of this process are passed on.
"""

from __future__ import annotations

import contextlib
import os
import sys

from jaxpp_async.launch import run_module


def command_here(module: str, *arguments: str) -> list[str]:
    """Make the argument vector that runs a module of this copy of the package on this machine, with this
    process's interpreter.

    The caller makes the environment from `inherited_environment`.
    """
    return [sys.executable, *_options(), run_module.__file__, module, *arguments]


def command_there(python: str, module: str, *arguments: str) -> list[str]:
    """Make the argument vector that runs a module of the package that another interpreter, or another host,
    has.
    """
    ignoring = ["-E"] if sys.flags.ignore_environment else []
    return [python, *_options(), *ignoring, "-m", module, *arguments]


def inherited_environment() -> dict[str, str]:
    """Give this process's environment for another process on this machine, without the variables that this
    process was told to ignore (`-E`).

    Programs here get no `-E` themselves, since a mesh and its user pass settings in Python's variables as
    well.
    """
    ignored = "PYTHON" if sys.flags.ignore_environment else "\0"
    return {name: value for name, value in os.environ.items() if not name.startswith(ignored)}


def script_folder() -> bytes | None:
    """Find the folder from which this process's script imports its own modules; None if there is none.

    With a script it is the script's folder, with `python -m` that of the outermost package. Without a script
    (a notebook, `python -c`) it is the working directory, unless the interpreter was told to leave that out
    (`-P`, `-I`).
    """
    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if file is None:
        with contextlib.suppress(OSError):  # it is no more
            return None if sys.flags.safe_path else os.getcwdb()
        return None
    folder = os.path.dirname(os.path.realpath(os.fsencode(file)))
    for _ in range(spec.name.count(".") if spec is not None else 0):
        folder = os.path.dirname(folder)
    return folder


def _options() -> list[str]:
    return ["-P", *(["-s"] if sys.flags.no_user_site else [])]
