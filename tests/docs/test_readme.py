"""The README's examples run as printed, and the first is as short as the README says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from textwrap import indent

import pytest
from flit_core import buildapi

CLONE = Path(__file__).parents[2]
README = CLONE / "README.md"


def code_blocks(page: Path, language: str = "python") -> list[str]:
    """The blocks of code of a page, in the language that their fences name."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with the example of the README, and the test of docs/howto/testing.md."""
    (train,), (test,) = code_blocks(README), code_blocks(CLONE / "docs" / "howto" / "testing.md")
    assert len(train.splitlines()) <= 40
    (tmp_path / "train.py").write_text(train, encoding="utf-8")
    (tmp_path / "test_train.py").write_text(test, encoding="utf-8")
    return tmp_path


def run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_example_runs_as_printed_and_learns(folder: Path):
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", run(folder, "train.py"))]
    assert len(losses) == 6 and losses[-1] < losses[0] / 10


def test_the_lines_behind_the_loop_show_which_stage_is_slow(folder: Path):
    (lines,) = code_blocks(README, "py")
    text = (folder / "train.py").read_text(encoding="utf-8")
    loop, main = text.split("\n\n\nif __name__")
    (folder / "train.py").write_text(
        f"{loop}\n{indent(lines, 8 * ' ')}\n\nif __name__{main}", encoding="utf-8"
    )
    shown = run(folder, "train.py")
    assert "stage 1" in shown and "imbalance" in shown
    assert "<html" in (folder / "step.html").read_text(encoding="utf-8")


def test_the_readme_is_short_enough_for_a_newcomer():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 130


def test_a_users_test_runs_as_printed(folder: Path):
    assert "1 passed" in run(folder, "-m", "pytest", "-q")


def test_what_is_installed_after_a_pull_has_nothing_that_the_pull_removed(tmp_path: Path, monkeypatch):
    """pip builds in the clone, so nothing of a build may stay there for the next."""
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CLONE / name, clone)
    shutil.copytree(
        CLONE / "jaxpp_async", clone / "jaxpp_async", ignore=shutil.ignore_patterns("__pycache__")
    )
    assert (
        tomllib.loads((clone / "pyproject.toml").read_text())["build-system"]["build-backend"]
        == buildapi.__name__
    )
    (clone / "jaxpp_async" / "gone.py").touch()
    monkeypatch.chdir(clone)
    before = sorted(clone.rglob("*"))
    assert "jaxpp_async/gone.py" in packed(tmp_path, "first")
    assert sorted(clone.rglob("*")) == before
    (clone / "jaxpp_async" / "gone.py").unlink()
    after = packed(tmp_path, "second")
    assert "jaxpp_async/gone.py" not in after and "jaxpp_async/controller/controller.py" in after


def packed(tmp_path: Path, name: str) -> list[str]:
    folder = tmp_path / name
    folder.mkdir()
    with zipfile.ZipFile(folder / buildapi.build_wheel(str(folder))) as wheel:
        return wheel.namelist()
