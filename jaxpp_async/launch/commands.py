"""commands: how the package's own programs are started, so that nothing is imported from the working directory.

Every interpreter gets `-P`: its import path is the installed packages and what `PYTHONPATH` says. The options `-E`,
`-I` and `-s` of this process hold for the others too.
"""

from __future__ import annotations

import contextlib
import os
import sys

from jaxpp_async.launch import run_module


def command_here(module: str, *arguments: str) -> list[str]:
    """The argument vector that runs a module of this very package on this machine, with this process's interpreter.

    Its environment is to be made from `inherited_environment`.
    """
    return [sys.executable, *_options(), run_module.__file__, module, *arguments]


def command_there(python: str, module: str, *arguments: str) -> list[str]:
    """The argument vector that runs a module of the package that another interpreter, or another host, has."""
    deaf = ["-E"] if sys.flags.ignore_environment else []
    return [python, *_options(), *deaf, "-m", module, *arguments]


def inherited_environment() -> dict[str, str]:
    """This process's environment for another one on this machine, without what this process was told to ignore (`-E`).

    Programs here get no `-E` themselves, since a mesh and its user say something by Python's variables as well.
    """
    ignored = "PYTHON" if sys.flags.ignore_environment else "\0"
    return {name: value for name, value in os.environ.items() if not name.startswith(ignored)}


def script_folder() -> bytes | None:
    """The folder from which this process's script imports its own modules; None if there is none.

    It is the folder of the script, or of the outermost package with `python -m`. Without a script (a notebook,
    `python -c`) it is the working directory, unless the interpreter was told to leave that alone (`-P`, `-I`).
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
