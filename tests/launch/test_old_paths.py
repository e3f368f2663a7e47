"""The modules that were under `jaxpp_async.actors.launch` are still importable there, with a warning."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from jaxpp_async import launch

OLD = "jaxpp_async.actors.launch"


@pytest.fixture
def not_imported(monkeypatch):
    """Forget the old path, so that an import runs the shim; restores `sys.modules` afterwards."""
    for name in [name for name in sys.modules if name == OLD or name.startswith(f"{OLD}.")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        (".base", ".launcher"),
        (".hostfile", ".hosts"),
        (".hosts", ".hosts"),
        (".inline", ".inline"),
        (".local", ".local"),
        (".ray", ".ray"),
        (".remote", ".remote"),
        (".slurm", ".slurm"),
        (".ssh", ".ssh"),
    ],
)
def test_a_module_is_the_same_object_under_its_old_path(not_imported, old, new):
    assert importlib.import_module(OLD + old) is importlib.import_module("jaxpp_async.launch" + new)


def test_the_old_path_warns_and_names_the_new_one(not_imported):
    with pytest.warns(DeprecationWarning, match=r": import jaxpp_async\.launch,") as warned:
        importlib.import_module(f"{OLD}.base")
    assert len(warned) == 1


def test_what_the_documentation_imported_from_the_old_path_is_what_the_new_path_has():
    script = """
import warnings
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    from jaxpp_async.actors.launch.hostfile import parse_hosts
    from jaxpp_async.actors.launch.remote import CommandReach, RemoteLauncher
    from jaxpp_async.actors.launch.ray import RayLauncher
    from jaxpp_async.actors.launch.base import ActorHandle, Launcher, LaunchSpec
    from jaxpp_async.actors.launch import LocalLauncher
    import jaxpp_async.actors.launch.base as base
    import jaxpp_async.actors.launch.local
assert [w.filename for w in warned if w.category is DeprecationWarning] == [__file__]
from jaxpp_async import launch
from jaxpp_async.launch import hosts, remote
assert (base.Launcher, LaunchSpec) == (launch.Launcher, launch.LaunchSpec)
assert LocalLauncher is launch.LocalLauncher
assert jaxpp_async.actors.launch.local.LocalLauncher is LocalLauncher
assert issubclass(RayLauncher, remote.RemoteLauncher) and RemoteLauncher is remote.RemoteLauncher
reach = CommandReach(lambda placement, agent: ["true"])
launcher = RemoteLauncher(reach, parse_hosts(["pod-0 slots=2", "pod-1 slots=2"]), control_address="10.0.0.1")
assert parse_hosts is hosts.parse_hosts and isinstance(launcher, remote.RemoteLauncher)
"""
    subprocess.run([sys.executable, "-c", script.replace("__file__", "'<string>'")], check=True, timeout=120)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("jaxpp_async.schedules", "Timeline", "ScheduleTiming"),
        ("jaxpp_async.timeline", "Bill", "StepBreakdown"),
        ("jaxpp_async.timeline", "Event", "TimelineEvent"),
        ("jaxpp_async.timeline", "Shares", "TimeShares"),
        ("jaxpp_async.timeline", "Transfer", "TimelineTransfer"),
    ],
)
def test_an_old_name_is_the_new_one_and_warns(module, old, new):
    home = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{old} is now called {new}"):
        assert getattr(home, old) is getattr(home, new)


def test_every_public_name_of_launch_is_there():
    assert [name for name in launch.__all__ if getattr(launch, name, None) is None] == []
    assert set(launch.__all__) <= set(dir(launch))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = launch.nothing
