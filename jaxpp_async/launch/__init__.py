"""Launchers start and stop actors: on this machine, on other hosts, or inside this process. Modules in
reading order:

launcher              defines `Launcher`, `ActorHandle` and `LaunchSpec`, the interface of every launcher
choose                makes the launcher that the options of a mesh ask for, from a table of launchers
options               holds these options, and describes a kind of launcher
local                 starts actors as processes of this machine
inline                runs actors inside this process
remote                starts actors on other hosts, through any command that runs a program on a host
ssh, slurm, ray       start actors on other hosts by ssh, by srun, and through a Ray cluster
hosts                 describes hosts, reads hostfiles, and places processes on hosts
spawn                 prepares and starts the process of one actor on its host
process_supervisor    owns child processes on a thread of its own
host_agent            is the program that starts and ends the actors of another host
host_agent_client     talks to a host agent, or to another program on a host
host_agent_protocol   defines the messages between a launcher and a host agent
login_errors          explains why a program on a host could not be started
commands, run_module  run programs of this package so that they import nothing from the working directory
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
