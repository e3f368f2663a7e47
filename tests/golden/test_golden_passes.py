"""What every pass makes of three small steps under each schedule, as text in `passes/`; `make golden`
rewrites it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import steps

FOLDER = Path(__file__).parent / "passes"


def path_of(step: str, schedule: str) -> Path:
    return FOLDER / f"{step}_{schedule}.txt"


@pytest.mark.parametrize(("step", "schedule"), steps.ALL_NAMES)
def test_passes(step, schedule, request):
    text = steps.text_of(step, schedule)
    if request.config.getoption("--golden", default=False):
        FOLDER.mkdir(exist_ok=True)
        path_of(step, schedule).write_text(text)
    assert text == path_of(step, schedule).read_text()


def test_the_same_in_another_process_with_another_hash_seed():
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(
        [sys.executable, steps.__file__],
        env={**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    files = {names: hashlib.sha256(path_of(*names).read_bytes()).hexdigest() for names in steps.ALL_NAMES}
    assert done.stdout.splitlines() == [
        f"{step} {schedule} {digest}" for (step, schedule), digest in files.items()
    ]


def test_texts_name_no_file_and_no_address():
    for path in FOLDER.iterdir():
        text = path.read_text()
        assert "0x" not in text and str(Path(__file__).parents[2]) not in text, path.name
