"""The README's examples run as printed, and the first is as short as the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with both examples in it."""
    examples = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    train, test = examples
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


def test_a_users_test_runs_as_printed(folder: Path):
    assert "1 passed" in run(folder, "-m", "pytest", "-q")
