"""Direct tests of a step on devices that compute after a call has returned."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from jaxpp_async.actors.device_step_run import DeviceStepRun

COMMAND = SimpleNamespace(instruction=3, buffer=7)


class Step(DeviceStepRun):
    """A step of nothing but what its device reports; the test reads what became of it."""

    def __init__(self):  # a step that waits for its device needs nothing of the actor
        self.failed, self.times, self._on_thread = [], [], 2

    def fail(self, error, instruction=None):
        self.failed.append((str(error), instruction))
        self.ended = True

    def _note(self, instruction, *, waiting=False, computing=False): ...

    def _ran(self, command, start_s, end_s):
        self.times.append((start_s, end_s))
        return []

    def _carry_out(self, commands): ...


def test_a_task_that_was_called_early_begins_when_the_one_before_it_has_ended():
    step = Step()
    step._ran_on_device(COMMAND, 10.0, 14.0, None)
    step._ran_on_device(COMMAND, 11.0, 17.0, None)  # called while the first one still computed
    assert step.times == [(10, 14), (14, 17)]


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("what", ["a task", "a copy"])
def test_a_failure_of_the_device_fails_the_step_that_is_under_way(what, has_ended):
    step, done = Step(), []
    step.ended = has_ended
    error = RuntimeError("out of memory")
    if what == "a task":
        step._ran_on_device(COMMAND, 1.0, 2.0, error)
    else:
        step._unless_failed(COMMAND, partial(done.append, 1))(2.0, error)
    assert step.failed == ([] if has_ended else [("out of memory", 3)])
    assert step.times == done == []


@pytest.mark.parametrize(("has_ended", "calls"), [(False, 1), (True, 0)])
def test_work_goes_on_behind_the_device_unless_the_step_has_ended(has_ended, calls):
    step, done = Step(), []
    step.ended = has_ended
    step._unless_failed(COMMAND, partial(done.append, 1))(2.0, None)
    assert len(done) == calls and step.failed == []
