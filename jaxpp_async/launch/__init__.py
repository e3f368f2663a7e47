"""launch: starts and stops actors: here, on other hosts, or inside this process.

base                      what a launcher is; a launcher of one's own is one too
choosing                  options in, a launcher out
local, inline, remote     here; in this process; on other hosts, by ...
ssh, slurm, ray           ... logins, a Slurm allocation, a Ray cluster, or any command that runs a program elsewhere
hosts, hostfile           which process runs where, and how it is set up there; that as a file
addresses                 by which address other hosts reach this one
host_program, keeper_link our ends of a program on a host, and of the keeper of actors there
display, explain          how the launch goes; what a host's or ssh's words mean, and what to do
"""

from jaxpp_async.launch.launcher import DEFAULT_ACTOR, ActorHandle, Launcher, LaunchSpec
from jaxpp_async.launch.local import LocalLauncher
from jaxpp_async.launch.spawn import share_out

__all__ = (
    "DEFAULT_ACTOR",
    "ActorHandle",
    "LaunchSpec",
    "Launcher",
    "LocalLauncher",
    "share_out",
)
