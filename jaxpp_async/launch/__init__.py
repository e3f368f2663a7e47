"""Launchers start and stop actors: on this machine, on other hosts, or inside this process. Modules in
reading order:

launcher              defines `Launcher`, `ActorHandle` and `LaunchSpec`, the interface of every launcher
choose                makes the launcher that the options of a mesh ask for, from a table of launchers
options               holds these options, and describes each kind of launcher
local                 starts actors as processes of this machine
inline                runs actors inside this process
remote                starts actors on other hosts, through any command that runs a program on a host
ssh, slurm, ray       start actors on other hosts by ssh, by srun, and through a Ray cluster
hosts                 describes hosts, reads hostfiles, and places processes on hosts
spawn                 prepares and starts the process of one actor on its host
process_supervisor    starts and watches child processes on a separate thread
host_agent            is the program on another host that starts and ends the actors there
host_agent_client     talks to a host agent, or to another program on a host
host_agent_protocol   defines the messages between a launcher and a host agent
login_errors          explains why a program on a host could not be started
run_module            runs programs of this package so that they import nothing from the working directory
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = (
    "CONTROLLER",
    "DEFAULT_ACTOR",
    "ActorHandle",
    "ActorRequest",
    "Death",
    "LaunchSpec",
    "Launcher",
    "LocalLauncher",
    "make_process_transport",
    "share_out",
)

if TYPE_CHECKING:
    from jaxpp_async.launch.launcher import DEFAULT_ACTOR as DEFAULT_ACTOR
    from jaxpp_async.launch.launcher import ActorHandle as ActorHandle
    from jaxpp_async.launch.launcher import Launcher as Launcher
    from jaxpp_async.launch.launcher import LaunchSpec as LaunchSpec
    from jaxpp_async.launch.local import LocalLauncher as LocalLauncher
    from jaxpp_async.launch.process_supervisor import Death as Death
    from jaxpp_async.launch.spawn import ActorRequest as ActorRequest
    from jaxpp_async.launch.spawn import share_out as share_out
    from jaxpp_async.program.instructions import CONTROLLER as CONTROLLER
    from jaxpp_async.transport.registry import make_process_transport as make_process_transport

_HOMES = {
    "ActorHandle": "launch.launcher",
    "ActorRequest": "launch.spawn",
    "CONTROLLER": "program.instructions",
    "DEFAULT_ACTOR": "launch.launcher",
    "Death": "launch.process_supervisor",
    "LaunchSpec": "launch.launcher",
    "Launcher": "launch.launcher",
    "LocalLauncher": "launch.local",
    "make_process_transport": "transport.registry",
    "share_out": "launch.spawn",
}
"""The module of each public name. A module is imported with the first use of its name, so that a host agent,
which is a module of this package, starts without numpy and asyncio."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"jaxpp_async.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
