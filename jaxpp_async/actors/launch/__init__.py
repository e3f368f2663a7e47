"""Keep the old import path `jaxpp_async.actors.launch` working for one release, with a deprecation warning.

The package and its modules are replaced by the module objects of `jaxpp_async.launch`, so that a class
imported by either path is the same class.
"""

import importlib
import sys
import warnings

_NEW_NAMES = {
    "base": "launcher",
    "hostfile": "hosts",
    "hosts": "hosts",
    "inline": "inline",
    "local": "local",
    "ray": "ray",
    "remote": "remote",
    "slurm": "slurm",
    "ssh": "ssh",
}
"""The names of the modules under the old path, each with its name in `jaxpp_async.launch`."""

warnings.warn(
    "jaxpp_async.actors.launch is deprecated: import jaxpp_async.launch, with .launcher for .base and "
    ".hosts for .hostfile",
    DeprecationWarning,
    stacklevel=2,
)
_launch = importlib.import_module("jaxpp_async.launch")
for _old, _new in _NEW_NAMES.items():
    _module = importlib.import_module(f"jaxpp_async.launch.{_new}")
    sys.modules[f"{__name__}.{_old}"] = _module
    setattr(_launch, _old, _module)  # for `import jaxpp_async.actors.launch.base as base`
sys.modules[__name__] = _launch
