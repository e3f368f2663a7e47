"""Run modules of this package in child processes that import nothing from the working directory.

The functions make command lines. Every interpreter gets the option `-P`, with which it imports only from
installed packages and `PYTHONPATH`. The options `-E`, `-I` and `-s` of this process are passed on.

This file is also the script that such a command line runs: `python -P .../run_module.py MODULE ARGUMENTS...`.
A child process on this machine has to run the same copy of the package as its parent, whether that copy was
installed, is in a clone, or is on an import path that only the parent has. The script loads the package from
the folder that contains this file, so that the import path does not have to name it. This happens before the
package can be imported, so this file imports nothing but Python's own modules.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from importlib.util import module_from_spec, spec_from_file_location


def command_here(module: str, *arguments: str) -> list[str]:
    """Return the argument vector that runs a module of this copy of the package on this machine, with this
    process's interpreter.

    The caller makes the environment of the new process from `inherited_environment`.

    Args:
        module: the dotted name of the module.
        arguments: the command-line arguments for the module.
    """
    return [sys.executable, *_options(), __file__, module, *arguments]


def command_there(python: str, module: str, *arguments: str) -> list[str]:
    """Return the argument vector that runs a module of this package with another interpreter, on this host or
    another one.

    The interpreter imports the copy of the package that is installed for that interpreter.

    Args:
        python: the path of the interpreter.
        module: the dotted name of the module.
        arguments: the command-line arguments for the module.
    """
    ignoring = ["-E"] if sys.flags.ignore_environment else []
    return [python, *_options(), *ignoring, "-m", module, *arguments]


def inherited_environment() -> dict[str, str]:
    """Return the environment variables that a child process on this machine inherits from this process. If
    this process was started with `-E`, which makes Python ignore the variables `PYTHON*`, those variables are
    left out.

    The child process does not get the option `-E`, because a mesh and its user also pass settings to the
    child in variables `PYTHON*`.
    """
    ignored = "PYTHON" if sys.flags.ignore_environment else "\0"
    return {name: value for name, value in os.environ.items() if not name.startswith(ignored)}


def script_folder() -> bytes | None:
    """Return the folder from which this process's script imports its own modules, or None if there is none.

    For a script, this is the folder that contains it; for `python -m`, the folder that contains the outermost
    package. Without a script (a notebook, `python -c`), it is the working directory, unless the interpreter
    was told to leave that out of the import path (`-P`, `-I`).
    """
    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if file is None:
        with contextlib.suppress(OSError):  # the folder was deleted
            return None if sys.flags.safe_path else os.getcwdb()
        return None
    folder = os.path.dirname(os.path.realpath(os.fsencode(file)))
    for _ in range(spec.name.count(".") if spec is not None else 0):
        folder = os.path.dirname(folder)
    return folder


def _options() -> list[str]:
    return ["-P", *(["-s"] if sys.flags.no_user_site else [])]


def main() -> None:
    """Load the package from this file's folder, then run the module named by the first command-line argument
    as `python -m` does.
    """
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = spec_from_file_location(os.path.basename(folder), os.path.join(folder, "__init__.py"))
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = package = module_from_spec(spec)
    spec.loader.exec_module(package)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
