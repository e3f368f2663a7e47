"""launch: starts and stops actors: here (`local`), on other hosts (`ssh`, `slurm`, `ray`, or any command that runs a
program elsewhere), or inside this process (`inline`). `base` says what a launcher is.
"""

from jaxpp_async.actors.launch.base import DEFAULT_ACTOR, ActorHandle, Launcher, LaunchSpec
from jaxpp_async.actors.launch.local import LocalLauncher
from jaxpp_async.actors.processes.actor_request import share_out

__all__ = (
    "DEFAULT_ACTOR",
    "ActorHandle",
    "LaunchSpec",
    "Launcher",
    "LocalLauncher",
    "share_out",
)
