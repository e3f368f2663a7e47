"""torch_pipeline: the training steps of `shapes.py` under torch.distributed.pipelining: Schedule1F1B over
gloo.

`torch_pipeline.py tiny|big` is a contender (`contender.py`). It is rank 0, serves the line and starts rank 1,
which follows it. A step ends when the loss of rank 1 has arrived at rank 0: rank 1 sends it after its own
update.

Each rank has a core and a thread of its own, as our actors do. With `--default-threads` both have what torch
takes by
itself: as many threads as there are cores, wherever the system puts them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
from contender import Channel, timed
from first_values import Array, Values, first_values
from shapes import NUM_STAGES, SHAPES, Shape
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # pyright: ignore[reportMissingImports]
from warm_up import checked_losses

IDLE = timedelta(hours=1)
"""Rank 1 waits in a collective only within a step; generous, for a machine on which others compute."""


class TinyStage(nn.Module):
    """A stage of `shapes.TINY`: one matrix, the first one with a tanh behind it."""

    def __init__(self, weights: tuple[Array, ...], is_first: bool):
        super().__init__()
        self.linear = linear(weights[0])
        self.is_first = is_first

    def forward(self, x):
        y = self.linear(x)
        return torch.tanh(y) if self.is_first else y


class Block(nn.Module):
    """x + gelu(x @ w1) @ w2."""

    def __init__(self, w1: Array, w2: Array):
        super().__init__()
        self.layers = nn.Sequential(linear(w1), nn.GELU(approximate="tanh"), linear(w2))

    def forward(self, x):
        return x + self.layers(x)


def linear(weight: Array) -> nn.Linear:
    """What multiplies by `weight` [in, out]. Torch keeps it as [out, in]."""
    made = nn.Linear(*weight.shape, bias=False)
    with torch.no_grad():
        made.weight.copy_(torch.from_numpy(weight).T)
    return made


def stage_module(shape: Shape, values: Values, rank: int) -> nn.Module:
    """The module of one stage, with the first values."""
    weights = values.stages[rank]
    if not shape.num_blocks:
        return TinyStage(weights, is_first=rank == 0)
    return nn.Sequential(*(Block(w1, w2) for w1, w2 in zip(weights[::2], weights[1::2], strict=True)))


def make_step(shape: Shape, rank: int) -> Callable[[], float]:
    """This rank's part of a step: the schedule, the update, then the loss from rank 1 to rank 0."""
    values = first_values(shape)
    module = stage_module(shape, values, rank)
    stage = PipelineStage(module, rank, NUM_STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, shape.num_microbatches, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=shape.learning_rate, fused=True)
    x, target = (torch.from_numpy(v).flatten(0, 1) for v in (values.x, values.target))

    def first() -> float:
        optimizer.zero_grad()
        schedule.step(x)
        optimizer.step()
        loss = torch.empty(())
        dist.recv(loss, src=1)
        return loss.item()

    def last() -> float:
        optimizer.zero_grad()
        losses: list = []
        # The predictions are nobody's business: without this torch concatenates them.
        schedule.step(target=target, losses=losses, return_outputs=False)
        optimizer.step()
        loss = torch.stack(losses).mean()
        dist.send(loss, dst=0)
        return loss.item()

    return first if rank == 0 else last


def join(store: str, rank: int, core: int | None) -> None:
    """Meet the other rank, on one core and with one thread.

    Args:
        core: which; None: torch's own threads, on every core.
    """
    if core is not None:
        os.sched_setaffinity(0, {core})
        torch.set_num_threads(1)
    # The ranks share a host: without a name of its own gloo looks for the interface of the host's name.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_STAGES, timeout=IDLE
    )


def follow(shape: Shape) -> None:
    """Rank 1: as many steps as each line of stdin says, until it ends."""
    step = make_step(shape, 1)
    for line in iter(sys.stdin.readline, ""):
        for _ in range(int(line)):
            step()


@contextlib.contextmanager
def follower(shape: Shape, store: str, core: int | None) -> Iterator[Callable[[int], None]]:
    """Rank 1's process. Gives what tells it how many steps to run; it has ended afterwards."""
    where = ["--default-threads"] if core is None else ["--core", str(core)]
    command = [sys.executable, __file__, shape.name, "--follow", store, *where]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    lines = process.stdin
    assert lines is not None

    def tell(num_steps: int) -> None:
        lines.write(f"{num_steps}\n")
        lines.flush()

    try:
        yield tell
        lines.close()
        process.wait(10)
    finally:
        process.kill()
        process.wait()


def lead(shape: Shape, *, default_threads: bool) -> None:
    """Rank 0: the contender."""
    channel = Channel()
    cores = sorted(os.sched_getaffinity(0))
    own, other = (None, None) if default_threads else (cores[0], cores[-1])
    with tempfile.TemporaryDirectory() as folder, follower(shape, f"{folder}/store", other) as tell:
        join(f"{folder}/store", 0, own)
        step = make_step(shape, 0)

        def measure(num_steps: int) -> list[float]:
            tell(num_steps)
            return timed(step, num_steps)

        def losses(num_steps: int) -> list[float]:
            tell(num_steps)
            return [step() for _ in range(num_steps)]

        facts = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        channel.serve(measure, loss=checked_losses(losses, shape), **facts)
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(SHAPES))
    parser.add_argument("--follow", metavar="STORE", help="be rank 1 of the one that keeps its store there")
    parser.add_argument("--core", type=int, default=0, help="of rank 1")
    parser.add_argument("--default-threads", action="store_true", help="torch's own threads, on every core")
    args = parser.parse_args()
    shape = SHAPES[args.model]
    if args.follow is None:
        lead(shape, default_threads=args.default_threads)
        return
    join(args.follow, 1, None if args.default_threads else args.core)
    follow(shape)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
