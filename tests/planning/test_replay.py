"""Direct tests of the replay of programs in virtual time, by examples that are worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpp_async.planning import replay
from jaxpp_async.planning.replay import Replay, ReplayDelays
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import Aval, Delete, Input, Output, Recv, Run, Send
from jaxpp_async.timeline.events import read_stamps
from jaxpp_async.transport import memory

LARGE, SMALL = Aval((1 << 20,), "float32"), Aval((4,), "float32")


def program(actor: int, *instructions, aval: Aval = LARGE) -> ActorProgram:
    return ActorProgram(actor, instructions, (aval,) * 8)


def run(label: str, inputs=(), outputs=(), donated=()) -> Run:
    return Run(label, 0, tuple(inputs), tuple(outputs), tuple(donated))


def delays(replay: Replay, draws: int = 1, **given) -> ReplayDelays:
    """Delays of 0, except those given: a number for all, or one per actor, late input, run or transfer."""
    sizes = {"begin_s": len(replay.actors), "arguments_s": len(replay.late_inputs)}
    sizes |= dict.fromkeys(("dispatch_s", "run_s", "wake_s"), len(replay.run_labels))
    sizes |= dict.fromkeys(("post_s", "occupied_s", "latency_s"), len(replay.sends))
    return ReplayDelays(
        **{
            name: np.repeat(np.resize(np.array(given.get(name, 0.0), float), (size, 1)), draws, axis=1)
            for name, size in sizes.items()
        }
    )


def spans(replay: Replay, **given) -> list[tuple[float, float]]:
    """The begin and end of each instruction; None for one that has none."""
    times = replay.run(delays(replay, **given))
    pairs = zip(times.begin_s[:, 0].tolist(), times.end_s[:, 0].tolist(), strict=True)
    return [None if begin != begin else (begin, end) for begin, end in pairs]


def test_an_actor_runs_its_tasks_one_after_the_other():
    replay = Replay(
        [program(0, Input(0, 0), run("a", [0], [1]), run("b", [1], [2]), Delete(1), Output(2, 0))]
    )
    found = spans(replay, begin_s=1, dispatch_s=0.5, wake_s=9, run_s=[10, 20])
    assert found == [(1, 1), (1.5, 11.5), (12, 32), None, None]


def test_only_what_reads_a_late_argument_waits_for_it():
    instructions = [
        Input(0, 7),
        Input(1, 8),
        Input(2, 9),
        run("a", [0], [3]),
        run("b", [1], [4]),
        Send(2, 1, 0),
    ]
    replay = Replay([program(0, *instructions), program(1, Recv(0, 0, 0))], late_arguments=[8, 9])
    assert replay.late_inputs == (8, 9)
    found = spans(replay, begin_s=[1, 0], arguments_s=[20, 50], dispatch_s=0.5, wake_s=2, run_s=[10, 1])
    assert found == [(1, 1), (1, 21), (1, 51), (1.5, 11.5), (23, 24), (51, 51), (0, 51)]


def test_a_run_waits_for_what_it_receives_and_then_to_be_woken():
    replay = Replay(
        [
            program(0, run("a", [], [0]), Send(0, 1, 0)),
            program(1, Recv(0, 0, 0), run("b", [0], [1]), run("c", [1], [2])),
        ]
    )
    found = spans(
        replay, run_s=[10, 1, 1], post_s=0.5, occupied_s=2, latency_s=3, wake_s=[9, 0.25, 9], dispatch_s=0.0
    )
    assert found == [(0, 10), (10.5, 15.5), (0, 15.5), (15.75, 16.75), (16.75, 17.75)]


def test_data_that_came_before_the_last_run_ended_costs_only_its_dispatch():
    replay = Replay(
        [
            program(0, run("a", [], [0]), Send(0, 1, 0)),
            program(1, Recv(0, 0, 0), run("b", [], [1]), run("c", [0], [2])),
        ]
    )
    assert spans(replay, run_s=[1, 10, 1], dispatch_s=0.5, wake_s=4)[-1] == (11, 12)


def test_a_run_that_reads_no_received_data_does_not_wait_for_it():
    replay = Replay(
        [
            program(0, run("a", [], [0]), Send(0, 1, 0)),
            program(1, Recv(0, 0, 0), run("b", [], [1]), run("c", [0], [2])),
        ]
    )
    assert spans(replay, run_s=[10, 1, 1])[3:] == [(0, 1), (10, 11)]


def test_transfers_follow_each_other_on_a_link_but_not_on_two():
    one = Replay(
        [
            program(0, run("a", [], [0, 1]), Send(0, 1, 0), Send(1, 1, 1)),
            program(1, Recv(0, 0, 0), Recv(1, 0, 1), run("b", [0, 1], [2])),
        ]
    )
    assert spans(one, occupied_s=5, latency_s=1)[1:5] == [(0, 6), (0, 11), (0, 6), (0, 11)]
    two = Replay(
        [
            program(0, run("a", [], [0, 1]), Send(0, 1, 0), Send(1, 2, 1)),
            program(1, Recv(0, 0, 0)),
            program(2, Recv(0, 0, 1)),
        ]
    )
    assert spans(two, occupied_s=5, latency_s=1)[3:] == [(0, 6), (0, 6)]


def test_sends_after_one_run_start_one_after_the_other():
    replay = Replay(
        [
            program(0, run("a", [], [0, 1]), Send(0, 1, 0), Send(1, 2, 1)),
            program(1, Recv(0, 0, 0)),
            program(2, Recv(0, 0, 1)),
        ]
    )
    assert [begin for begin, _ in spans(replay, post_s=2)[1:3]] == [2, 4]


def test_a_transfer_begins_when_its_receive_is_posted():
    replay = Replay(
        [program(0, run("a", [], [0]), Send(0, 1, 0)), program(1, run("b", [], [1]), Recv(0, 0, 0))]
    )
    assert spans(replay, run_s=[1, 10], occupied_s=2) == [(0, 1), (1, 12), (0, 10), (10, 12)]


@pytest.mark.parametrize(("aval", "begins"), [(LARGE, 5), (SMALL, 1)])
def test_a_run_that_consumes_a_buffer_waits_for_sends_that_still_read_it(aval, begins):
    sends = program(0, run("a", [], [0]), Send(0, 1, 0), run("b", [0], [1], [0]), aval=aval)
    replay = Replay([sends, program(1, Recv(0, 0, 0), aval=aval)])
    assert spans(replay, run_s=1, occupied_s=4)[2] == (begins, begins + 1)


def test_what_is_received_can_be_passed_on():
    replay = Replay(
        [
            program(0, run("a", [], [0]), Send(0, 1, 0)),
            program(1, Recv(0, 0, 0), Send(0, 2, 1), run("b", [], [1])),
            program(2, Recv(0, 1, 1), run("c", [0], [1])),
        ]
    )
    found = spans(replay, run_s=[10, 1, 1], latency_s=3)
    assert found[3:] == [(13, 16), (0, 1), (0, 16), (16, 17)]


def test_a_slot_that_is_used_again_holds_another_buffer():
    replay = Replay(
        [
            program(0, run("a", [], [0]), Send(0, 1, 0), run("late", [], [1]), Send(1, 1, 1)),
            program(1, Recv(0, 0, 0), run("b", [0], [1]), Delete(0), Recv(0, 0, 1), run("c", [0], [2])),
        ]
    )
    assert spans(replay, run_s=[1, 20, 1, 1])[-1] == (21, 22)
    kept = Replay(
        [
            program(0, run("a", [], [0]), Send(0, 1, 0)),
            program(1, Recv(0, 0, 0), Output(0, 0), run("b", [], [0]), run("c", [0], [1])),
        ]
    )
    assert spans(kept, run_s=[20, 1, 1])[-1] == (1, 2)


def test_delays_of_what_does_not_happen_do_not_make_the_step_longer():
    replay = Replay([program(0, run("a", [], [0]))])  # waits for no data, so nothing wakes it
    assert replay.run(delays(replay, run_s=1, wake_s=50)).last_s.tolist() == [1]


def test_draws_at_once_are_the_draws_one_by_one_and_stamps_are_theirs():
    replay = Replay(
        [
            program(0, run("a", [], [0]), Send(0, 1, 0)),
            program(1, Recv(0, 0, 0), run("b", [0], [1]), Delete(0)),
        ]
    )
    both = delays(replay, draws=2, run_s=[1, 2])
    both.run_s[:, 1] *= 10
    times = replay.run(both)
    assert times.last_s.tolist() == [3, 30]
    assert read_stamps(times.stamps(0, 1)) == [(0, 10), (10, 10)]
    received, ran, deleted = read_stamps(times.stamps(1, 1))
    assert (received, ran) == ((0, 10), (10, 30)) and deleted[0] != deleted[0]


def test_programs_that_cannot_be_replayed_are_refused():
    with pytest.raises(ValueError, match="actor 1 receives tag 7, which no actor sends"):
        Replay([program(0), program(1, Recv(0, 0, 7))])
    with pytest.raises(ValueError, match="wait for each other in a circle"):
        Replay(
            [
                program(0, Recv(0, 1, 0), run("a", [0], [1]), Send(1, 1, 1)),
                program(1, Recv(0, 0, 1), run("b", [0], [1]), Send(1, 0, 0)),
            ]
        )


def test_a_step_without_instructions_takes_no_time():
    assert Replay([program(0)]).run(delays(Replay([program(0)]))).last_s.tolist() == [0]


def test_messages_are_copied_up_to_the_size_that_the_transport_copies():
    assert replay.EAGER_BYTES == memory.EAGER_BYTES
