"""Attack the control protocol for as long as asked, from a fresh seed:
`make fuzz-protocol ARGS="--frames 1000000"`.

Ends with the number of the first trial that broke something; `--seed S --only N` runs it again by itself.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import resource
import sys
import time

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1] / "support")]

from campaign import Campaign, Tally  # noqa: E402

_MIB = 1 << 20
_CHUNK = 10_000


def main() -> None:
    """Run the fuzzer to its end, or until something breaks."""
    parser = argparse.ArgumentParser(description=__doc__, prog="make fuzz-protocol")
    parser.add_argument(
        "--frames", type=int, default=100_000, help="how many mutated frames (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="default: a fresh one")
    parser.add_argument("--only", type=int, help="run this trial alone, with its traceback")
    options = parser.parse_args()
    campaign = Campaign(options.seed)
    if options.only is not None:
        print(f"seed {options.seed}, trial {options.only}: {campaign.trial(options.only)}")
        return
    print(f"seed {options.seed}, {options.frames} frames", flush=True)
    campaign.run(0, min(_CHUNK, options.frames))  # what the first trials load and cache is no leak
    began, before, total = time.monotonic(), _peak_bytes(), Tally()
    for start in range(0, options.frames, _CHUNK):
        tally = campaign.run(start, min(start + _CHUNK, options.frames))
        total.trials += tally.trials
        total.ends += tally.ends
        grown = (_peak_bytes() - before) / _MIB
        print(f"{total.trials} frames, {time.monotonic() - began:.0f} s, memory +{grown:.1f} MiB", flush=True)
        if grown > 16:
            raise SystemExit(f"seed {options.seed}: memory grew by {grown:.1f} MiB")
    for end, count in sorted(total.ends.items()):
        print(f"{count:9} {end}")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
