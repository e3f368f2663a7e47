"""The README's example runs as printed, and is as short as the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_example_runs_as_printed_and_learns(tmp_path: Path):
    examples = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(examples) == 1 and len(examples[0].splitlines()) <= 40
    script = tmp_path / "train.py"
    script.write_text(examples[0], encoding="utf-8")
    run = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", run.stdout)]
    assert len(losses) == 6 and losses[-1] < losses[0] / 10
