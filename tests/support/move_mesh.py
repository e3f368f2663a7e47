"""A stand-in for a mesh whose moves end at once, for tests of what sends arrays between actors."""

from __future__ import annotations

from jaxpp_async.session.remote_array import RemoteArray


class MoveMesh:
    """Stands in for the controller and the arrays of a mesh of two actors; steps end at once.

    Attributes:
        fails: raised by the next step that is started.
        is_held: whether steps wait for `let_go`.
    """

    num_steps = 7

    def __init__(self):
        self.loaded, self.started, self.released, self.fails = [], [], [], None
        self._number, self.is_held, self._waiting = 90, False, []

    def new_array_id(self) -> int:
        self._number += 1
        return self._number

    async def load(self, program, on_compiled=None):
        self.loaded.append(sorted(program.parts))
        return len(self.loaded) - 1, {}

    def start_step(self, step, inputs, outputs):
        assert step.kind == "move"
        self.started.append((step.program_id, dict(inputs), dict(outputs)))
        if self.is_held:
            self._waiting.append(step)
        elif self.fails is None:
            step.finish()
        else:
            step.fail(self.fails)
        return step

    def new_array(self, value_type, actors):
        return RemoteArray(self, self.new_array_id(), value_type, actors)

    def release(self, array) -> None:
        self.released.append(array.array_id)

    def let_go(self, failures=None) -> None:
        """End the steps that wait; `failures` says by their numbers which fail, and how."""
        for number, step in enumerate(self._waiting):
            error = (failures or {}).get(number)
            step.finish() if error is None else step.fail(error)
