"""Put UCX transports through random rounds of transfers and aborts, from a fresh seed: `make fuzz-transport`.

Three transports in one process: offers, messages of one copy, wrong sizes, cancelled receives, and aborts and
closings in the middle. If something is wrong, the command prints the seed and the round and exits with
status 1. The same seed performs the same rounds again, `--only N` performs one of them again and again; only
their timing differs each time.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import logging
import pathlib
import random
import sys
import time
import traceback
from collections import Counter

HERE = pathlib.Path(__file__).parent
# Before what is imported from there: this is a program, and pytest is not there to find it.
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "support")]

from performing import all_held, perform  # noqa: E402
from resources import SETTLE_S, differences, open_files, shared_memory  # noqa: E402
from trio import Broken  # noqa: E402

_HUNG_S = 120.0
_TELL_EVERY_S = 10.0


class Narrator:
    """Prints what goes on now and then, and sees to it that a process that hangs says where, and ends."""

    def __init__(self) -> None:
        self._began_s = self._told_s = time.monotonic()
        self.number = 0  # of the round that goes on

    def tell(self, number: int, tally: Counter[str]) -> None:
        """Before each round."""
        self.number, now_s = number, time.monotonic()
        faulthandler.dump_traceback_later(_HUNG_S, exit=True)
        if now_s - self._told_s > _TELL_EVERY_S:
            self._told_s = now_s
            print(
                f"{tally['rounds']} rounds, {tally['received']} messages, {now_s - self._began_s:.0f} s",
                flush=True,
            )


def main() -> None:
    """Run the fuzzer until the time is over, or until something breaks."""
    parser = argparse.ArgumentParser(description=__doc__, prog="make fuzz-transport")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="default: a fresh one")
    parser.add_argument("--only", type=int, help="this round alone, again and again")
    options = parser.parse_args()
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO)
    # Said first: a process that ends by a signal says no more.
    print(f'seed {options.seed}; to repeat it: make fuzz-transport ARGS="--seed {options.seed}"', flush=True)
    narrator = Narrator()
    try:
        tally = _fuzz(options, narrator)
    except BaseException as error:  # whatever it is: a run that ends early has failed, Ctrl-C too
        traceback.print_exc()
        print(
            f"FAILED: {type(error).__name__}: {error}\nto repeat its round alone, again and again: "
            f'make fuzz-transport ARGS="--seed {options.seed} --only {narrator.number}"'
        )
        sys.exit(1)
    for name, count in sorted(tally.items()):
        print(f"{count:9} {name}")


def _fuzz(options: argparse.Namespace, narrator: Narrator) -> Counter[str]:
    perform(options.seed, range(1), narrator.tell)  # whatever a process takes once and keeps
    before, files, end_s = all_held(), shared_memory(), time.monotonic() + 60 * options.minutes
    numbers = itertools.count() if options.only is None else itertools.repeat(options.only)
    tally = perform(
        options.seed, itertools.takewhile(lambda _: time.monotonic() < end_s, numbers), narrator.tell
    )
    settled_s = time.monotonic() + SETTLE_S
    while left := differences(before, all_held()):
        if time.monotonic() > settled_s:
            raise Broken(f"left behind, as (before, after): {left}; files: {open_files()}")
        time.sleep(0.05)
    if left := shared_memory() - files:
        raise Broken(f"left in /dev/shm: {left}")
    return tally


if __name__ == "__main__":
    main()
