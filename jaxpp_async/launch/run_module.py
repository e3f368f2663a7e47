"""Run a module of the package that this file belongs to: `python -P .../run_module.py MODULE ARGUMENTS...`.

A child process on this machine has to run the same copy of the package as its parent, whether that copy was
installed, is in a clone, or is on an import path that only the parent has. This script loads the package from
the folder that contains this file, so that the import path does not have to name it. The script is a separate
module because it runs before the package can be imported.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.util import module_from_spec, spec_from_file_location


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
