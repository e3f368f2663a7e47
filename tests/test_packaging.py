"""What is shipped, and which interpreter `make setup` takes."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from flit_core import buildapi

ROOT = Path(__file__).parents[1]


def test_the_wheel_has_types_and_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    wheel = zipfile.ZipFile(tmp_path / buildapi.build_wheel(str(tmp_path)))
    names = set(wheel.namelist())
    assert {"jaxpp_async/py.typed", "jaxpp_async/__init__.py"} <= names
    assert {"jaxpp_async/view/drawing.js", "jaxpp_async/view/drawing.css"} <= names
    assert {"jaxpp_async/page/page.js", "jaxpp_async/page/page.css"} <= names
    (entry_points,) = (name for name in names if name.endswith("/entry_points.txt"))
    assert "jaxpp-async=jaxpp_async.__main__:app" in wheel.read(entry_points).decode().splitlines()


WORKS, FAILS = "echo $0", "exit 127"  # as a command of pyenv's fails whose version is not switched on


@pytest.mark.parametrize(
    ("commands", "wanted", "found"),
    [
        ({"bin/python3.12": WORKS, "bin/python3.11": WORKS}, "newest", "bin/python3.12"),
        ({"bin/python3.12": WORKS, "bin/python3.11": WORKS}, "oldest", "bin/python3.11"),
        ({"bin/python3.13": FAILS, "bin/python3.12": WORKS}, "newest", "bin/python3.12"),
        (
            {"bin/python3.13": FAILS, "bin/python3.12": WORKS, "pyenv/versions/3.13.0/bin/python": WORKS},
            "newest",
            "pyenv/versions/3.13.0/bin/python",
        ),
        ({"bin/python3.10": WORKS, "bin/python3.13": FAILS}, "newest", None),
    ],
)
def test_the_interpreter_is_the_newest_one_that_runs(commands, wanted, found, tmp_path):
    for name, text in {"bin/python3": FAILS, **commands}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for tool in ("sed", "sort"):
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    env = {"PATH": str(tmp_path / "bin"), "PYENV_ROOT": str(tmp_path / "pyenv")}
    done = subprocess.run(
        [".ci/find-python", wanted], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout == (f"{tmp_path / found}\n" if found else "")
    assert done.returncode == (0 if found else 1)
