"""warm_up: what every contender does before it is measured: some steps, whose losses must go down. In: what
runs steps;
out: the loss of the first one, which is the same for all contenders. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shapes import Shape

STEPS = {"tiny": 30, "big": 3}


def checked_losses(run: Callable[[int], Sequence[float]], shape: Shape) -> float:
    """Warm up, and see that the model is trained.

    Args:
        run: runs so many steps and returns their losses, each taken before the step's update.

    Returns:
        The loss of the first step.

    Raises:
        SystemExit: the losses do not go down, so that what would be measured is no training.
    """
    losses = run(STEPS[shape.name])
    if not losses[-1] < losses[0]:
        raise SystemExit(
            f"the loss of {shape.name} went from {losses[0]} to {losses[-1]} in {len(losses)} steps"
        )
    return losses[0]
