"""The command `demo` (`jaxpp_async.commands.demo`), from a wheel, in an empty folder, away from the clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from flit_core import buildapi
from paths import ROOT


def test_the_demo_of_a_wheel_trains_and_shows_a_step(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(ROOT)
    wheel = zipfile.ZipFile(tmp_path / buildapi.build_wheel(str(tmp_path)))
    wheel.extractall(tmp_path / "installed")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    package = Path(run("-c", "import jaxpp_async; print(jaxpp_async.__file__)").strip())
    assert package.is_relative_to(tmp_path / "installed")
    shown = run("-m", "jaxpp_async", "demo", "--steps", "4", "--html", "step.html")
    assert shown.startswith("4 steps on 2 actors (actor 0 is pid ")
    assert re.search(r"step [123] of 'train_step'", shown) and "\nactor 1  " in shown
    assert Path("step.html").read_text().startswith("<!doctype html>")
    assert os.listdir() == ["step.html"]
    lines = shown.splitlines()
    assert lines[-2].endswith(f"kB: {Path('step.html').absolute().as_uri()}")
    assert lines[-1].startswith("next: a step of your own")
