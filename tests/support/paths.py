"""Folders of this checkout that tests read or put on the path of processes that they start."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
"""Where the modules lie that tests share: fakes, models, faults. Actors import some of them."""
