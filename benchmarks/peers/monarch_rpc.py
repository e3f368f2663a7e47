"""monarch_rpc: an empty endpoint call to two Monarch actors, each in a process of its own.

`monarch_rpc.py` is a contender (`contender.py`). The actors are one mesh, which one call asks together.
"""

from __future__ import annotations

import importlib.metadata

from contender import Channel, timed
from monarch.actor import Actor, endpoint, shutdown_context, this_host  # pyright: ignore[reportMissingImports]
from shapes import NUM_STAGES


class Empty(Actor):
    """An actor of which nothing is asked."""

    @endpoint
    async def call(self) -> None:
        """An empty call."""


def main() -> None:
    channel = Channel()
    processes = this_host().spawn_procs(per_host={"processes": NUM_STAGES})
    actors = processes.spawn("empty", Empty)

    def call() -> None:
        actors.call.call().get()

    for _ in range(200):
        call()
    channel.serve(
        lambda num_steps: timed(call, num_steps), monarch=importlib.metadata.version("torchmonarch")
    )
    processes.stop().get()
    shutdown_context().get()


if __name__ == "__main__":
    main()
