"""Draw random training steps for as long as asked, from a fresh seed: `make fuzz ARGS="--examples 20000"`.

Prints each program that fails, shrunk, as text that runs by itself, and the seed that found it.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "support")]

import conftest  # noqa: F401, E402  (settings of JAX, before it starts)
import hypothesis  # noqa: E402
from checking import run_source  # noqa: E402
from hypothesis import HealthCheck, Verbosity, given, settings  # noqa: E402
from programs import programs  # noqa: E402


def main() -> None:
    """Run the fuzzer until something fails."""
    parser = argparse.ArgumentParser(description=__doc__, prog="make fuzz")
    parser.add_argument("--examples", type=int, default=5000, help="how many programs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="default: a fresh one")
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.examples} programs", flush=True)
    count = 0

    @hypothesis.seed(options.seed)
    @settings(
        max_examples=options.examples,
        deadline=None,
        database=None,
        report_multiple_bugs=True,
        print_blob=False,
        verbosity=Verbosity.normal,
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs())
    def search(program):
        nonlocal count
        count += 1
        if count % 500 == 0:
            print(f"{count} programs", flush=True)
        run_source(program.source)

    search()
    print(f"{count} programs: every result is plain JAX's")


if __name__ == "__main__":
    main()
