"""Direct tests of what the user gets of a step that was sent: its future and its prints."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from sent_steps import STATS, answer, sent_step

from jaxpp_async.base.printable import first_line
from jaxpp_async.compiler.ir import Print, PrintOperand, ValueType
from jaxpp_async.errors import MeshError, StepAbortedError
from jaxpp_async.program.instructions import Aval
from jaxpp_async.protocol.messages import step_id
from jaxpp_async.session.remote_array import RemoteArray
from jaxpp_async.session.step_future import Printer, StepFuture

STEP = step_id(7)

# ---------------------------------------------------------------- futures


@pytest.mark.parametrize(
    ("error", "line"),
    [(ValueError("a\nb"), "a"), (ValueError(), "ValueError"), (KeyError("k"), "'k'")],
    ids=repr,
)
def test_an_error_is_told_by_its_first_line_or_by_its_type(error, line):
    assert first_line(error) == line


async def test_a_step_tells_what_it_is_at_and_its_statistics_once_it_has_finished():
    step = sent_step(STEP)
    future = StepFuture("outputs", step, arrays=None)
    assert (repr(future), future.done()) == ("<StepFuture: step 7 ('train'), under way>", False)
    with pytest.raises(MeshError, match=r"^a step has stats once it has finished; await it first$"):
        _ = future.stats
    answer(step)
    assert (repr(future), future.done()) == ("<StepFuture: step 7 ('train'), finished>", True)
    assert future.stats == [STATS]
    assert await future == "outputs"


async def test_a_failed_step_says_why_and_has_no_statistics():
    step = sent_step(STEP)
    future = StepFuture(None, step, arrays=None)
    step.fail(StepAbortedError("link lost"))
    assert repr(future) == "<StepFuture: step 7 ('train'), failed: link lost>"
    with pytest.raises(MeshError, match=r"^step 7 \('train'\) failed, so it has no stats: link lost$"):
        _ = future.stats
    with pytest.raises(StepAbortedError, match="link lost"):
        await future


async def test_a_step_that_prints_is_over_when_it_has_printed():
    step, printed = sent_step(STEP), asyncio.get_running_loop().create_future()
    future = StepFuture(None, step, None, printing=printed)
    answer(step)
    assert (future.done(), repr(future)) == (False, "<StepFuture: step 7 ('train'), finished, printing>")
    printed.set_result(None)
    assert future.done()


# ---------------------------------------------------------------- prints


class Values:
    """Fetches arrays: each is its id."""

    def __init__(self):
        self.asked = []

    async def fetch(self, arrays):
        self.asked.append([array.array_id for array in arrays])
        return [np.int32(array.array_id) for array in arrays]

    def release(self, array) -> None: ...


def shown(values: Values, array_id: int) -> RemoteArray:
    return RemoteArray(values, array_id, ValueType(Aval((), "int32")), (0,))


def step_that_prints(said: list) -> SimpleNamespace:
    one = Print(lambda operands: said.append(int(operands[0])), (PrintOperand(3),), "a.py:1")
    return SimpleNamespace(hidden_results=(3,), prints=(one,))


async def test_steps_print_in_the_order_in_which_they_started_whichever_ends_first():
    said, values = [], Values()
    printer, steps = Printer(values), [sent_step(step_id(k)) for k in range(2)]
    tasks = []
    for k, step in enumerate(steps):
        tasks.append(printer.start(step_that_prints(said), [shown(values, 10 + k)], step))
    answer(steps[1])
    for _ in range(5):
        await asyncio.sleep(0)
    assert (said, values.asked) == ([], [[11]])
    answer(steps[0])
    await asyncio.gather(*tasks)
    assert said == [10, 11]


async def test_a_step_that_failed_prints_nothing_and_holds_up_nobody():
    said, values = [], Values()
    printer, failed, well = Printer(values), sent_step(step_id(0)), sent_step(step_id(1))
    first = printer.start(step_that_prints(said), [shown(values, 10)], failed)
    second = printer.start(step_that_prints(said), [shown(values, 11)], well)
    failed.fail(StepAbortedError("gone"))
    answer(well)
    await asyncio.gather(first, second)
    assert (said, values.asked) == ([11], [[11]])
