"""The executor: events in, commands out. No jax, no loop."""

from __future__ import annotations

import random
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpp_async.actors.execution_plan import (
    BindInput,
    Drop,
    Execute,
    Finish,
    KeepOutput,
    PostRecv,
    StartSend,
    make_plan,
)
from jaxpp_async.actors.executor import Executor
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import Aval, Delete, Input, Output, Recv, Run, Send

A = Aval((4,), "float32")  # 16 bytes
BIG = Aval((25,), "float32")  # 100 bytes


def program(*instructions, avals=None, uncounted=()):
    slots = {
        slot
        for i in instructions
        for slot in ((*i.inputs, *i.outputs) if isinstance(i, Run) else (i.buffer,))
    }
    return ActorProgram(0, tuple(instructions), tuple(avals or [A] * (max(slots) + 1)), frozenset(uncounted))


def run(inputs, outputs, donated=(), label="f"):
    return Run(label, 0, tuple(inputs), tuple(outputs), tuple(donated))


def short(commands):
    """Commands as a reader would write them."""
    names = {BindInput: "bind", PostRecv: "recv", StartSend: "send", Drop: "drop", KeepOutput: "keep"}
    words = []
    for c in commands:
        if isinstance(c, Execute):
            words.append(f"run{c.instruction}")
        elif isinstance(c, Finish):
            words.append("finish")
        else:
            words.append(f"{names[type(c)]}{c.buffer}")
    return " ".join(words)


PIPELINE = program(
    Input(0, 0),
    Recv(1, 1, 0),
    Recv(2, 1, 1),
    run([0, 1], [3]),
    Send(3, 1, 0),
    Delete(1),
    Delete(3),
    run([0, 2], [4]),
    Delete(2),
    Output(4, 0),
    uncounted=[0],
)

SCENARIOS = [
    # (name, program, events, (commands after each event), peak bytes)
    (
        "receives are posted and passed; a send never waits; a sent buffer is dropped when its send is done",
        PIPELINE,
        ["start", "in0", "in1", "ran3", "in2", "ran7", "sent3"],
        ["bind0 recv1 recv2", "", "run3", "send3 drop1", "run7", "drop2 keep4", "drop3 finish"],
        48,
    ),
    (
        "the next run is issued while one executes, and what lies between waits for the first",
        PIPELINE,
        ["start", "in2", "in0", "in1", "ran3", "sent3", "ran7"],
        ["bind0 recv1 recv2", "", "", "run3 run7", "send3 drop1", "drop3", "drop2 keep4 finish"],
        48,
    ),
    (
        "a run may be issued ahead on what the running one makes",
        program(Input(0, 0), run([0], [1]), run([1], [2]), Delete(1), run([2], [3]), Output(3, 0)),
        ["start", "in0", "ran1", "ran2", "ran4"],
        ["bind0", "run1 run2", "run4", "drop1", "keep3 finish"],
        16 * 3,
    ),
    (
        "donated inputs leave as outputs come",
        program(Input(0, 0, True), run([0], [1], [0]), Output(1, 0), avals=[BIG, BIG]),
        ["start", "in0", "ran1"],
        ["bind0", "run1", "keep1 finish"],
        100,
    ),
    (
        "a buffer under send is not donated",
        program(Input(0, 0), run([0], [1]), Send(1, 1, 0), run([1], [2], [0]), Output(2, 0)),
        ["start", "in0", "ran1", "sent1", "ran3"],
        ["bind0", "run1", "send1", "run3", "keep2 finish"],
        32,
    ),
    (
        "a received buffer can be passed on before it came",
        program(Recv(0, 1, 0), Send(0, 2, 0), Delete(0)),
        ["start", "in0", "sent0"],
        ["recv0", "send0", "drop0 finish"],
        16,
    ),
    (
        "a received buffer can be a result; the step waits for it",
        program(Recv(0, 1, 0), Output(0, 0)),
        ["start", "in0"],
        ["recv0", "keep0 finish"],
        16,
    ),
    (
        "a slot used again is another buffer",
        program(Recv(0, 1, 0), run([0], [1]), Delete(0), Recv(0, 1, 1), run([0], [2]), Output(2, 0)),
        ["start", "in0", "ran1", "in2", "ran4"],
        ["recv0", "run1", "drop0 recv2", "run4", "keep3 finish"],
        48,
    ),
    ("nothing to do", ActorProgram(0, (), ()), ["start"], ["finish"], 0),
]


@pytest.mark.parametrize(
    ("name", "program", "events", "expected", "peak"), SCENARIOS, ids=[s[0] for s in SCENARIOS]
)
def test_scenarios(name, program, events, expected, peak):
    plan = make_plan(program)
    executor = Executor(plan)
    for event, commands in zip(events, expected, strict=True):
        word = event.rstrip("0123456789")
        number = int(event.removeprefix(word) or -1)
        if word == "start":
            found = executor.start()
        elif word == "in":
            found = executor.arrived(number)
        elif word == "ran":
            found = executor.ran(number)
        else:
            found = executor.sent(number)
        assert short(found) == commands, event
    assert executor.finished
    assert executor.peak_bytes == peak


def test_inputs_that_are_bound_are_not_asked_for():
    plan = make_plan(program(Input(0, 0), Input(1, 1), run([0], [2]), run([1], [3]), Delete(2), Delete(3)))
    executor = Executor(plan)
    assert short(executor.start(available=[0])) == "bind1 run2"
    assert executor.table_bytes == 32
    assert short(executor.arrived(1)) == "run3"


def test_a_run_that_is_alone_holds_the_next_one_back():
    plan = make_plan(program(run([], [0]), Send(0, 1, 0), run([], [1]), run([], [2])))
    executor = Executor(plan, alone={0})
    assert [short(executor.start()), short(executor.ran(0))] == ["run0", "send0 run2 run3"]


def test_deleted_buffers_under_send_are_pending_and_not_in_the_table():
    executor = Executor(make_plan(program(Input(0, 0), run([0], [1]), Send(1, 1, 0), Delete(1), Delete(0))))
    executor.start()
    executor.arrived(0)
    executor.ran(1)
    assert (executor.table_bytes, executor.pending_bytes) == (0, 16)
    assert executor.position() == "end of program, 1 transfers open"
    executor.sent(1)
    assert (executor.table_bytes, executor.pending_bytes) == (0, 0)


def test_position_names_the_instruction_and_what_it_waits_for():
    executor = Executor(
        make_plan(program(Recv(0, 1, 0), run([0], [1], label="fwd(stage 1, mb 0)"), Output(1, 0)))
    )
    executor.start()
    assert executor.starved
    assert executor.position().startswith("#1 run ") and "fwd(stage 1, mb 0)" in executor.position()
    assert executor.position().endswith("waiting for 1 buffers")


@pytest.mark.parametrize(
    ("instructions", "message"),
    [
        ([Delete(0)], "slot 0 holds no buffer"),
        ([Input(0, 0), Recv(0, 1, 0)], "slot 0 is defined while it holds a buffer"),
        ([Input(0, 0), run([0], [1], [0]), Delete(0)], "slot 0 holds no buffer"),
        ([Input(0, 0), Output(0, 0), Delete(0)], "slot 0 has left the program as a result"),
    ],
)
def test_malformed_programs_are_refused(instructions, message):
    with pytest.raises(ValueError, match=message):
        make_plan(program(*instructions))


def test_receives_that_are_kept_or_donated_are_private():
    plan = make_plan(
        program(
            Recv(0, 1, 0),
            Recv(1, 1, 1),
            Recv(2, 1, 2),
            run([0, 1], [3], [0]),
            Output(2, 0),
            Delete(1),
        )
    )
    assert [c.private for c in plan.commands if isinstance(c, PostRecv)] == [True, False, True]
    assert plan.max_receives == {A: 3}


# ---------------------------------------------------------------- any program, any order of completion


def random_program(rng: random.Random) -> ActorProgram:
    """A valid program: every buffer is used after its definition, deleted at most once, never donated while
    kept."""
    instructions, free_slots, held = [], [], []
    fresh, tags, results = count(), count(), count()

    def slot():
        return free_slots.pop() if free_slots and rng.random() < 0.5 else next(fresh)

    for arg in range(rng.randint(1, 3)):
        held.append(slot())
        instructions.append(Input(held[-1], arg, True))
    for _ in range(rng.randint(1, 25)):
        kind = rng.choice(["run", "run", "recv", "send", "delete", "output"])
        if kind == "recv":
            held.append(slot())
            instructions.append(Recv(held[-1], 1, next(tags)))
        elif not held:
            continue
        elif kind == "run":
            inputs = rng.sample(held, rng.randint(1, min(3, len(held))))
            donated = [p for p in range(len(inputs)) if rng.random() < 0.3]
            outputs = [next(fresh) for _ in range(rng.randint(1, 2))]
            instructions.append(run(inputs, outputs, donated))
            for p in donated:
                held.remove(inputs[p])
                free_slots.append(inputs[p])
            held += outputs
        elif kind == "send":
            instructions.append(Send(rng.choice(held), 1, next(tags)))
        else:
            buffer = held.pop(rng.randrange(len(held)))
            instructions.append(Delete(buffer) if kind == "delete" else Output(buffer, next(results)))
            if kind == "delete":
                free_slots.append(buffer)
    return program(*instructions)


class Checker:
    """Carries commands out in any order, and minds what must never happen."""

    def __init__(self, executor, plan, rng):
        self.executor, self.plan, self.rng = executor, plan, rng
        self.arriving, self.sending, self.running = [], [], []
        self.here, self.gone, self.most_running = set(), set(), 0
        self.finished = False

    def obey(self, commands):
        for c in commands:
            assert not self.finished
            match c:
                case BindInput() | PostRecv():
                    self.arriving.append(c.buffer)
                case Execute():
                    made = {key for r in self.running for key in r.outputs}
                    consumed = {c.inputs[p] for p in c.donated}
                    assert set(c.inputs) <= self.here | made, "issued before its inputs are there"
                    assert not set(c.inputs) & self.gone, "reads a freed buffer"
                    assert not consumed & set(self.sending), "consumes a buffer under send"
                    self.running.append(c)
                    self.most_running = max(self.most_running, len(self.running))
                case StartSend():
                    assert c.buffer in self.here and c.buffer not in self.gone
                    self.sending.append(c.buffer)
                case Drop():
                    assert c.buffer in self.here and c.buffer not in self.gone
                    assert c.buffer not in self.sending, "freed under send"
                    assert not any(c.buffer in r.inputs for r in self.running), "freed under a run"
                    self.gone.add(c.buffer)
                case KeepOutput():
                    assert c.buffer in self.here and c.buffer not in self.gone
                case Finish():
                    assert not self.arriving and not self.sending and not self.running
                    self.finished = True

    def drive(self):
        self.obey(self.executor.start())
        while self.arriving or self.sending or self.running:
            kind = self.rng.choice([k for k in ("arriving", "sending", "running") if getattr(self, k)])
            if kind == "running":  # one compute thread: in order
                done = self.running.pop(0)
                self.gone |= {done.inputs[p] for p in done.donated}
                self.here |= set(done.outputs)
                self.obey(self.executor.ran(done.instruction))
                continue
            waiting = getattr(self, kind)
            key = waiting.pop(self.rng.randrange(len(waiting)))
            if kind == "arriving":
                self.here.add(key)
                self.obey(self.executor.arrived(key))
            else:
                self.obey(self.executor.sent(key))
        assert self.finished, self.executor.position()


@given(seed=st.integers(0, 2**32), ahead=st.booleans())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_program_finishes_in_any_order_of_completion(seed, ahead):
    rng = random.Random(seed)
    plan = make_plan(random_program(rng))
    peaks = set()
    for _ in range(3):
        checker = Checker(Executor(plan, alone=() if ahead else range(len(plan.commands))), plan, rng)
        checker.drive()
        assert checker.most_running <= (2 if ahead else 1)
        assert checker.executor.pending_bytes == 0
        peaks.add(checker.executor.peak_bytes)
    assert len(peaks) == 1, "peak bytes depend on timing"


def test_peak_bytes_are_those_that_the_compiler_plans():
    from jaxpp_async.program.buffer_table import peak_plan

    for seed in range(200):
        rng = random.Random(seed)
        text = random_program(rng)
        executor = Executor(make_plan(text))
        Checker(executor, executor.plan, rng).drive()
        assert executor.peak_bytes == peak_plan(text).peak_bytes, seed
