"""What lowering plans is what the executor measures: peak bytes, whatever finishes first."""

import random

import pytest
from graph_builder import gpipe, pipeline_graph, std_1f1b

from jaxpp_async.actors.execution_plan import BindInput, Execute, PostRecv, StartSend, make_plan
from jaxpp_async.actors.executor import Executor
from jaxpp_async.compiler.lowering import lower
from jaxpp_async.program.buffer_table import peak_plan


class Step:
    """Drives one executor an actor; events come in an order drawn from `seed`."""

    def __init__(self, programs, seed: int):
        self.pick = random.Random(seed)
        self.executors = [Executor(make_plan(p)) for p in programs]
        self.runs: list[list[Execute]] = [[] for _ in programs]
        self.events: list[tuple[int, str, int]] = []
        self.posted: dict[int, tuple[int, int]] = {}
        self.started: dict[int, tuple[int, int]] = {}

    def take(self, actor: int, commands) -> None:
        for c in commands:
            match c:
                case BindInput():
                    self.events.append((actor, "arrived", c.buffer))
                case PostRecv():
                    self.posted[c.tag] = (actor, c.buffer)
                case StartSend():
                    self.started[c.tag] = (actor, c.buffer)
                case Execute():
                    self.runs[actor].append(c)
        for tag in self.posted.keys() & self.started.keys():
            (receiver, into), (sender, buffer) = self.posted.pop(tag), self.started.pop(tag)
            self.events += [(receiver, "arrived", into), (sender, "sent", buffer)]

    def finish_run(self, actor: int) -> None:
        run, executor = self.runs[actor].pop(0), self.executors[actor]
        self.take(actor, executor.ran(run.instruction))

    def finish_transfer(self, index: int) -> None:
        actor, what, buffer = self.events.pop(index)
        executor = self.executors[actor]
        self.take(actor, executor.sent(buffer) if what == "sent" else executor.arrived(buffer))

    def measure(self) -> list[int]:
        for actor, executor in enumerate(self.executors):
            self.take(actor, executor.start())
        while not all(e.finished for e in self.executors):
            ready = [(self.finish_transfer, k) for k in range(len(self.events))]
            ready += [(self.finish_run, a) for a, queue in enumerate(self.runs) if queue]
            finish, index = self.pick.choice(ready)
            finish(index)
        return [e.peak_bytes for e in self.executors]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("order", [std_1f1b, gpipe])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_planned_and_measured_peak_are_one_number(order, num_stages, seed):
    programs = lower(pipeline_graph(num_stages, 8, order))
    assert Step(programs, seed).measure() == [peak_plan(p).peak_bytes for p in programs]
