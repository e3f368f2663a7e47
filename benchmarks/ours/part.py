"""part: runs a benchmark module's `run()` in a process of its own: `part.py transport`. Prints its figures as
one line of JSON."""

from __future__ import annotations

import importlib
import sys

from contender import Channel

if __name__ == "__main__":
    channel = Channel()
    channel.ready(**importlib.import_module(sys.argv[1]).run())
