"""ray_tasks: the tiny training step and an empty call as Ray actor tasks.

`ray_tasks.py tiny|rpc` is a contender (`contender.py`). tiny: two actors and the 32 calls of a 1F1B step (8
microbatches, 2 stages, forward and backward); the last backward of each stage updates its weights. Results
travel as object references. The actors compute 8x8 matrices with numpy: quicker for them than a jitted call
of JAX.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator

import numpy as np
import ray  # pyright: ignore[reportMissingImports]
from contender import Channel, timed
from first_values import first_values
from shapes import NUM_STAGES, TINY, Shape
from warm_up import checked_losses


class Empty:
    """An actor of which nothing is asked."""

    def call(self) -> None:
        """An empty call."""


class Stage:
    """What both stages share: a weight, its gradient's sum, and inputs kept from forward to backward."""

    def __init__(self, rank: int, shape: Shape):
        values = first_values(shape)
        (self.weight,) = values.stages[rank]
        self.shape, self.batch = shape, (values.x, values.target)[rank]
        self.grad = np.zeros_like(self.weight)
        self.kept: dict[int, tuple[np.ndarray, ...]] = {}

    def _learn(self, x: np.ndarray, dy: np.ndarray, microbatch: int) -> None:
        """Add one microbatch's gradient of x @ weight; the last one's updates the weight."""
        self.grad += x.T @ dy
        if microbatch == self.shape.num_microbatches - 1:
            self.weight = self.weight - self.shape.learning_rate / self.shape.num_microbatches * self.grad
            self.grad = np.zeros_like(self.weight)


class First(Stage):
    """Stage 0: tanh(x @ a)."""

    def forward(self, microbatch: int) -> np.ndarray:
        """To the next stage."""
        x = self.batch[microbatch]
        h = np.tanh(x @ self.weight)
        self.kept[microbatch] = x, h
        return h

    def backward(self, microbatch: int, dh: np.ndarray) -> None:
        """From the next stage's gradient."""
        x, h = self.kept.pop(microbatch)
        self._learn(x, dh * (1 - h * h), microbatch)


class Last(Stage):
    """Stage 1: h @ b, and the loss."""

    def forward(self, microbatch: int, h: np.ndarray) -> float:
        """The microbatch's loss."""
        error = h @ self.weight - self.batch[microbatch]
        self.kept[microbatch] = h, error
        return float(np.mean(error * error))

    def backward(self, microbatch: int) -> np.ndarray:
        """To the stage before."""
        h, error = self.kept.pop(microbatch)
        dy = error * np.float32(2 / error.size)
        dh = dy @ self.weight.T
        self._learn(h, dy, microbatch)
        return dh


def tiny(channel: Channel) -> None:
    """Serve the training step."""
    first, last = (ray.remote(kind).remote(rank, TINY) for rank, kind in enumerate((First, Last)))

    def step() -> float:
        # Every call is submitted at once, in 1F1B's order for each actor; Ray waits for their arguments.
        hidden, losses, done = [first.forward.remote(0)], [], []
        for i in range(TINY.num_microbatches):
            if i + 1 < TINY.num_microbatches:
                hidden.append(first.forward.remote(i + 1))
            losses.append(last.forward.remote(i, hidden[i]))
            done.append(first.backward.remote(i, last.backward.remote(i)))
        return float(np.mean(ray.get(losses + done)[: len(losses)]))

    loss = checked_losses(lambda num_steps: [step() for _ in range(num_steps)], TINY)
    channel.serve(lambda num_steps: timed(step, num_steps), ray=ray.__version__, loss=loss)


def rpc(channel: Channel) -> None:
    """Serve the empty call of two actors, awaited together."""
    actors = [ray.remote(Empty).remote() for _ in range(NUM_STAGES)]

    def call() -> None:
        ray.get([actor.call.remote() for actor in actors])

    for _ in range(200):
        call()
    channel.serve(lambda num_steps: timed(call, num_steps), ray=ray.__version__)


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    """Ray on this machine, and nothing of it afterwards."""
    # Ray's calls carry a token, as they do by default; a token of our own keeps it out of the user's home.
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=NUM_STAGES,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("tiny", "rpc"))
    args = parser.parse_args()
    channel = Channel()
    with cluster():
        tiny(channel) if args.what == "tiny" else rpc(channel)


if __name__ == "__main__":
    main()
