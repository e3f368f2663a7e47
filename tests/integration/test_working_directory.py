"""What lies in the working directory is not imported: not by actors, and not by any other program of the
package."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jaxpp_async.errors import MeshError
from jaxpp_async.launch.run_module import command_here, command_there
from jaxpp_async.transport.ucx.context import check_config_file

MODULES = ("secrets", "json", "random", "socket", "numpy", "jax", "uvloop", "msgspec", "ucxx", "jaxpp_async")

SCRIPT = """
import asyncio
import jaxpp_async as jpp

async def main():
    # The cache has to be of this run: another one's executables were compiled without the hook.
    async with jpp.RemoteMesh(1, setup="hook:install", compilation_cache=None) as mesh:
        step = mesh.distributed(lambda x: x + 1)
        print(await (await mesh.run(step, 1.0)))

if __name__ == "__main__":
    asyncio.run(main())
"""

HOOK = """
import sys
import neighbour

def install():
    print("installed from", sys.path[-1], flush=True)
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder whose modules leave a file behind when they are imported."""
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / name)!r} + '.ran', 'w')\nraise SystemExit(7)\n"
        )
    return tmp_path


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"JAX_PLATFORMS": "cpu"} | variables


def ran(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.ran"))


def test_actors_do_not_import_from_it_and_their_hook_comes_from_the_scripts_folder(folder):
    (folder / "train.py").write_text(SCRIPT)
    (folder / "hook.py").write_text(HOOK)
    (folder / "neighbour.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-P", "train.py"], cwd=folder, env=environment(),
        capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (done.stdout, ran(folder)) == ("2.0\n", []), done.stderr
    assert f"installed from {folder}" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        command_here("jaxpp_async.actors"),
        command_here("jaxpp_async.doctor.probe_programs", "ucx"),
        command_here("jaxpp_async.doctor.host"),
        command_there(sys.executable, "jaxpp_async.actors"),
        command_there(sys.executable, "jaxpp_async.launch.host_agent"),
    ],
    ids=lambda command: " ".join(map(os.path.basename, command[-2:])),
)
def test_no_program_imports_from_it(folder, command):
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        input="",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran(folder) == [] and done.returncode in (0, 80, 81), done.stderr


WHO_ASKS = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
from jaxpp_async.launch import run_module
subprocess.run(run_module.command_here("probe", "word"), env=run_module.inherited_environment(), check=True)
print(run_module.command_there("py", "m")[1:-2])
"""


@pytest.mark.parametrize(
    ("options", "path", "there"),
    [((), "said", ["-P"]), (("-E",), "ignored", ["-P", "-E"]), (("-s",), "said", ["-P", "-s"])],
)
def test_programs_here_run_the_package_of_whoever_starts_them(tmp_path, options, path, there):
    """And leave alone what that was told to."""
    clone, said = tmp_path / "clone", tmp_path / "said"
    clone.mkdir()
    said.mkdir()
    (clone / "jaxpp_async").symlink_to(Path(__file__).parents[2] / "jaxpp_async")
    probe = (
        "import sys, os, jaxpp_async; print(jaxpp_async.__file__, sys.argv[1:], os.environ.get('PYTHONPATH'))"
    )
    (said / "probe.py").write_text(probe)
    command = [sys.executable, "-P", *options, "-c", WHO_ASKS, str(clone)]
    done = subprocess.run(
        command,
        env=environment(PYTHONPATH=str(said)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if path == "ignored":
        assert "No module named 'probe'" in done.stderr or "No module named probe" in done.stderr, done.stderr
    else:
        assert done.stdout == f"{clone}/jaxpp_async/__init__.py ['word'] {said}\n{there}\n", done.stderr


FOLDERS = """
from jaxpp_async.launch.run_module import script_folder
print(script_folder())
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["scripts/train.py"], "scripts"),
        (["-P", "scripts/train.py"], "scripts"),
        (["-m", "scripts.train"], "."),
        (["-c", textwrap.dedent(FOLDERS)], "."),
        (["-P", "-c", textwrap.dedent(FOLDERS)], None),
    ],
    ids=str,
)
def test_the_scripts_folder(tmp_path, arguments, expected):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(FOLDERS)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    folder = None if expected is None else os.fsencode((tmp_path / expected).resolve())
    assert done.stdout == f"{folder}\n", done.stderr


def test_ucx_settings_in_it_are_refused(tmp_path, monkeypatch):
    """They may name a folder of libraries for UCX to load."""
    monkeypatch.chdir(tmp_path)
    check_config_file()
    (tmp_path / "ucx.conf").write_text("UCX_MODULE_DIR=/tmp/modules\n")
    with pytest.raises(
        MeshError, match=rf"working directory {tmp_path} has a file ucx.conf.* set UCX_CONFIG_DIR"
    ):
        check_config_file()
    done = subprocess.run(
        command_here("jaxpp_async.doctor.probe_programs", "ucx"),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "has a file ucx.conf" in done.stdout, done.stdout + done.stderr
    monkeypatch.setenv("UCX_CONFIG_DIR", ".")
    check_config_file()
