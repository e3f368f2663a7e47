"""Compute when each event of a step happens, from the events that it waits for and from its delay.

In such a graph (a timed event graph, or max-plus system) an event happens a given delay after the latest of
the events that it needs. A step breaks down into its causes, and a compiled step is simulated, by this one
computation with different delays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class EventGraph:
    """Events that wait for other events, in an order in which each comes after all that it needs.

    Args:
        needs: for each event, the numbers of the events that it waits for. Events are numbered from 0, and
            need not be sorted.

    Raises:
        ValueError: some events wait for each other in a cycle.
    """

    def __init__(self, needs: Sequence[Sequence[int]]):
        self._needs = needs
        missing = list(map(len, needs))
        followers: list[list[int]] = [[] for _ in needs]
        for event, needed in enumerate(needs):
            for need in needed:
                followers[need].append(event)
        order = [event for event, count in enumerate(missing) if not count]
        for event in order:  # grows while it is read
            for follower in followers[event]:
                missing[follower] -= 1
                if not missing[follower]:
                    order.append(follower)
        if len(order) < len(needs):
            raise ValueError("tasks wait for each other in a circle")
        self._steps = [(event, needs[event]) for event in order]

    def times(self, delays: Sequence[float]) -> list[float]:
        """Return when each event happens, in the unit of the delays.

        Args:
            delays: for each event, how long it happens after the latest event that it needs. An event that
                needs none happens at its delay.
        """
        times = [0.0] * len(delays)
        for event, needed in self._steps:
            if not needed:
                times[event] = delays[event]
                continue
            latest = times[needed[0]]
            for need in needed[1:]:
                if times[need] > latest:
                    latest = times[need]
            times[event] = latest + delays[event]
        return times

    def times_of_draws(self, delays: np.ndarray) -> np.ndarray:
        """Return when each event happens for several draws of the delays at once.

        Args:
            delays: the delays, of shape (events, draws).

        Returns:
            The times, of shape (events, draws).
        """
        if delays.shape[1] == 1:  # numbers of Python are quicker than arrays of one number
            return np.array(self.times(delays[:, 0].tolist()), dtype=float).reshape(delays.shape)
        times = np.array(delays, dtype=float)
        rows = list(times)  # views: what is added to a row is added to `times`
        maximum = np.maximum
        for event, needed in self._steps:
            if not needed:
                continue
            latest = rows[needed[0]]
            for need in needed[1:]:
                latest = maximum(latest, rows[need])
            row = rows[event]
            row += latest
        return times
