"""Direct tests of carrying out the commands of a restart. No processes, no JAX."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until

from jaxpp_async.controller import recovery as r
from jaxpp_async.controller import recovery_driver
from jaxpp_async.controller import state_replicas as s
from jaxpp_async.controller.options import ControllerOptions
from jaxpp_async.controller.recovery_driver import RecoveryDriver
from jaxpp_async.errors import (
    ActorDiedError,
    ActorUnresponsiveError,
    LaunchError,
    MeshError,
    RemoteError,
    TransferError,
)
from jaxpp_async.program.instructions import CONTROLLER, Aval
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.actor_info import ActorInfo, Topology

DIED = ActorDiedError("actor 1 was killed", actor=1, host="n1", pid=101, step=3)
ARRAY = m.ReplicaArray(5, Aval((2,), "float32"), (8,))


class Fakes:
    """Everything that a driver acts on. Each call is noted as text, and succeeds unless `fails` names it.
    Calls that `blocked` names do not end.
    """

    def __init__(self, num_actors: int) -> None:
        self.calls: list[str] = []
        self.sent: list[tuple[int, m.Request]] = []
        self.fails: dict[str, Exception] = {}
        self.blocked: set[str] = set()
        self.left_out: set[str] | None = None  # the blobs that a message to load leaves out
        self.is_open = True
        self.actors = range(num_actors)
        self.processes = Topology(num_actors)
        self.host_transfers = SimpleNamespace(transport=None)
        self.links = {
            a: SimpleNamespace(info=ActorInfo(a, f"n{a}", 100 + a, (), "ready"), known_blobs=set())
            for a in self.actors
        }
        self.linking = SimpleNamespace(
            cancel=lambda: self.note("cancel links"),
            aclose=lambda: self.wait("close links"),
            link_again=lambda: self.wait("link again"),
        )

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.fails:
            raise self.fails[call]

    async def wait(self, call: str, result: Any = None) -> Any:
        self.note(call)
        if call in self.blocked:
            try:
                await asyncio.Event().wait()
            finally:
                self.calls.append(f"{call}: cancelled")
        return result

    # the actors' processes

    def set_state(self, actor: int, state: str) -> None:
        self.note(f"actor {actor} is {state}")

    def check_devices(self) -> None:
        self.note("check devices")

    async def remove(self, actor: int) -> None:
        await self.wait(f"reap {actor}")

    async def start_actor(self, actor: int) -> list[Any]:
        return await self.wait(f"start {actor}", [self.links[actor]])

    async def abort(self, process: int, cause: str) -> None:
        await self.wait(f"abort {process}: {cause}")

    async def reset_transport(self, process: int) -> None:
        await self.wait(f"renew {process}")

    async def reset_host_transport(self) -> None:
        await self.wait("renew controller")

    async def connect(self) -> None:
        await self.wait("connect")

    # the monitor

    def watch(self, link: Any) -> None:
        self.note(f"watch {link.info.process}")

    def unwatch(self, process: int) -> None:
        self.note(f"unwatch {process}")

    # requests and programs

    def hold_back(self) -> None:
        self.note("hold back")

    def resume(self, requests: Any, epoch: int) -> int:
        self.note(f"resume {list(requests)} in epoch {epoch}")
        return 2

    async def wait_open(self) -> None:
        await self.wait("wait open")

    def send(self, process: int, message: m.Request, *, awaited: bool = True) -> Any:
        self.sent.append((process, message))
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if type(message).__name__ not in self.blocked:
            answer.set_result(m.ReplicaTaken((ARRAY,)))
        return answer

    async def call(self, process: int, message: Any, *, in_restart: bool) -> None:
        assert in_restart
        await self.wait(f"load {message} into {process}")

    async def call_each(self, requests: dict[int, m.Request], what: str) -> None:
        await self.wait(f"{what} {[*requests]} to {next(iter(requests.values())).generation}")  # type: ignore

    def programs_of(self, actor: int) -> tuple[int, ...]:
        return (7,)

    def load_message(self, program_id: int, actor: int, known: set[str]) -> str:
        self.left_out = set(known)
        known.add(f"blob of {program_id}")
        return f"program {program_id} of {actor}"


class Script:
    """In place of the state machine: gives the commands that a test wants, and keeps the events."""

    def __init__(self) -> None:
        self.epoch = 4
        self.commands: list[r.Command] = []
        self.events: list[r.Event] = []
        self.replicas = SimpleNamespace(stage=s.Stage.IDLE)
        self.history = SimpleNamespace(needs_files=True, blocks_replicas=False)

    def handle(self, event: r.Event, now: float) -> list[r.Command]:
        self.events.append(event)
        commands, self.commands = self.commands, []
        return commands


class Driver(RecoveryDriver):
    """A driver of fakes. What it tells the controller is in `suspected`, `restarted` and `ended`."""

    def __init__(self, machine: Any, num_actors: int = 3) -> None:
        self.fakes: Any = Fakes(num_actors)
        self.suspected: list[Any] = []
        self.restarted: list[Any] = []
        self.ended: list[Any] = []
        super().__init__(
            machine,
            self.fakes,
            self.fakes,
            self.fakes,
            self.fakes.linking,
            self.fakes,
            ControllerOptions(max_restarts=3, backup_every=10),
            suspect=self.suspected.append,
            on_restarted=lambda *restarted: self.restarted.append(restarted),
            end=lambda *ended: self.ended.append(ended),
        )
        self.machine = machine

    def give(self, *commands: r.Command) -> None:
        """Have the scripted machine give some commands."""
        self.machine.commands = list(commands)
        self.handle(r.StepSent())

    async def outcome(self) -> Any:
        """Wait for the one event that follows `give`."""
        await until(lambda: len(self.machine.events) == 2, every_s=0)
        return self.machine.events[1]


@contextlib.asynccontextmanager
async def scripted() -> AsyncIterator[Driver]:
    driver = Driver(Script())
    try:
        yield driver
    finally:
        await driver.aclose()


@contextlib.asynccontextmanager
async def running(num_actors: int = 3) -> AsyncIterator[Driver]:
    """A driver of the real machine, whose mesh has started."""
    machine = r.Recovery(Topology(num_actors), max_restarts=3, replica_every=10)
    driver = Driver(machine, num_actors)
    driver.handle(r.MeshStarted())
    try:
        yield driver
    finally:
        await driver.aclose()


# ---------------------------------------------------------------- outcomes


async def test_a_restart_from_its_first_command_to_its_last():
    async with running() as driver:
        driver.handle(r.FailureFound(DIED))
        await until(lambda: driver.restarted)
        assert [told[:2] for told in driver.restarted] == [
            ((1,), 2)
        ] and driver.recovery.state is r.State.RUNNING
    assert driver.fakes.calls[:-1] == [
        "hold back", "actor 0 is waiting", "actor 1 is restarting", "actor 2 is waiting",
        "unwatch 1", "cancel links", "close links", "reap 1", "start 1", "watch 1",
        "abort 0: actor 1 was killed", "renew 0", "abort 2: actor 1 was killed", "renew 2",
        "renew controller", "check devices", "connect", "load program 7 of 1 into 1", "link again",
        "roll back [0, 1, 2] to None", "actor 0 is ready", "actor 1 is ready", "actor 2 is ready",
    ]  # fmt: skip
    assert driver.fakes.calls[-1] == "resume [] in epoch 1"


async def test_a_successor_gets_all_blobs_also_those_that_a_waiting_request_is_going_to_bring():
    async with scripted() as driver:
        driver.fakes.links[1].known_blobs = {"of a program that is loaded meanwhile"}
        driver.give(r.LoadPrograms(1))
        await driver.outcome()
        assert driver.fakes.left_out == set()
        assert driver.fakes.links[1].known_blobs == {"of a program that is loaded meanwhile", "blob of 7"}


async def test_an_outcome_bears_the_epoch_in_which_its_command_was_given():
    async with scripted() as driver:
        driver.give(r.Reap(1))
        driver.machine.epoch = 5
        assert await driver.outcome() == r.CarriedOut(4, r.Reap(1))


async def test_all_commands_that_are_given_together_bear_the_epoch_in_which_they_were_given():
    """A failed replica makes the policy report a failure, which begins the next epoch at once."""
    async with scripted() as driver:

        def begin_another_epoch(error: Exception) -> None:
            driver.machine.epoch = 5

        driver._suspect = begin_another_epoch
        driver.give(r.GiveUpReplica(TransferError("slow")), r.Reap(1))
        assert await driver.outcome() == r.CarriedOut(4, r.Reap(1))


async def test_a_failed_command_is_reported_with_its_error():
    async with scripted() as driver:
        driver.fakes.fails["start 1"] = error = LaunchError("no such host")
        driver.give(r.StartSuccessor(1))
        assert await driver.outcome() == r.NotCarriedOut(4, r.StartSuccessor(1), error)


@pytest.mark.parametrize(
    "where",
    ["hold back", "cancel links", "close links", "reap 1", "renew controller", "resume [] in epoch 1"],
)
async def test_a_bug_ends_the_mesh_and_says_so(where, caplog):
    """Wherever it is: a restart that stands still would be worse."""
    async with running() as driver:
        driver.fakes.fails[where] = KeyError("a bug")
        driver.handle(r.FailureFound(DIED))
        await until(lambda: driver.ended)
        ((error, dead),) = driver.ended
        assert isinstance(error, ActorDiedError) and dead is None
        assert "the restart failed: KeyError('a bug')" in str(error)
    assert any("failed" in record.message and record.exc_info for record in caplog.records)


async def test_devices_that_do_not_fit_end_the_mesh_without_a_traceback_in_the_log(caplog):
    async with running() as driver:
        driver.fakes.fails["check devices"] = MeshError("actor 1 has other devices")
        driver.handle(r.FailureFound(DIED))
        await until(lambda: driver.ended)
        assert "lost actors could not be replaced: actor 1 has other devices" in str(driver.ended[0][0])
    assert not any(record.exc_info for record in caplog.records)


# ---------------------------------------------------------------- work that a further failure stops


async def test_work_is_cancelled_at_once_and_its_end_is_waited_for():
    async with scripted() as driver:
        driver.fakes.blocked |= {"reap 1", "close links"}
        driver.give(r.Reap(1))
        await until(lambda: driver.fakes.calls == ["reap 1"], every_s=0)
        driver.give(r.StopWork())
        assert driver.fakes.calls == ["reap 1", "cancel links"]
        await until(lambda: "reap 1: cancelled" in driver.fakes.calls, every_s=0)
        await until(lambda: "close links" in driver.fakes.calls, every_s=0)
        assert len(driver.machine.events) == 2  # the two gifts: a cancelled command has no outcome


async def test_a_second_failure_in_the_same_pass_of_the_loop_leaves_no_work_behind():
    """Nothing of the first attempt has begun then; a coroutine that never runs would be a warning."""
    async with running() as driver:
        driver.handle(r.FailureFound(DIED))
        driver.handle(r.FailureFound(ActorDiedError("actor 2 was killed", actor=2)))
        await until(lambda: driver.restarted)
        assert [told[:2] for told in driver.restarted] == [((1, 2), 2)] and not driver.ended
    assert [call for call in driver.fakes.calls if call.startswith("reap")] == ["reap 1", "reap 2"]


async def test_closing_cancels_what_is_under_way_and_begins_nothing_more():
    async with running() as driver:
        driver.fakes.blocked.add("reap 1")
        driver.handle(r.FailureFound(DIED))
        await until(lambda: "reap 1" in driver.fakes.calls)
    assert driver.fakes.calls[-1] == "reap 1: cancelled"
    driver.handle(r.FailureFound(DIED))
    assert driver.fakes.calls[-1] == "reap 1: cancelled" and driver.recovery.state is r.State.ENDED


# ---------------------------------------------------------------- deadlines


async def test_an_actor_that_does_not_drop_its_work_is_lost(monkeypatch):
    monkeypatch.setattr(recovery_driver, "ABORT_S", 0.01)
    async with scripted() as driver:
        driver.fakes.blocked.add("renew 2")
        driver.give(r.RenewTransport(2, "a death"))
        failed = await driver.outcome()
        assert isinstance(failed.error, ActorUnresponsiveError) and failed.error.actor == 2
        assert str(failed.error) == (
            "actor 2 (host n2, pid 102) did not drop its work within 0.01 s of a failure elsewhere: no answer"
        )


async def test_ends_that_are_not_connected_in_time_are_a_failed_transfer(monkeypatch):
    monkeypatch.setattr(recovery_driver, "CONNECT_S", 0.01)
    async with scripted() as driver:
        driver.fakes.blocked.add("connect")
        driver.give(r.ConnectAll())
        failed = await driver.outcome()
        assert isinstance(failed.error, TransferError)
        assert str(failed.error) == "the data plane could not be connected anew within 0.01 s"


async def test_actors_that_do_not_go_back_in_time_are_a_failure(monkeypatch):
    monkeypatch.setattr(recovery_driver, "ROLLBACK_S", 0.01)
    async with scripted() as driver:
        driver.fakes.blocked.add("roll back [0, 1, 2] to 6")
        driver.give(r.RollBack(6, 0))
        failed = await driver.outcome()
        assert isinstance(failed.error, ActorUnresponsiveError)
        assert str(failed.error) == "actors did not go back to the last replica of their arrays in time"


async def test_work_that_is_cancelled_by_nobody_who_should_is_a_failure():
    async with scripted() as driver:
        gone = asyncio.get_running_loop().create_future()
        gone.cancel()

        async def link_again() -> None:
            await gone

        driver._linking.link_again = link_again  # type: ignore[method-assign]
        driver.give(r.MakeLinks())
        failed = await driver.outcome()
        assert isinstance(failed, r.NotCarriedOut) and "its work was cancelled" in str(failed.error)


async def test_the_end_of_a_pause_is_an_outcome_like_others():
    async with scripted() as driver:
        driver.give(pause := r.WakeUp(0.0))
        assert (await driver.outcome()).command is pause


# ---------------------------------------------------------------- replicas


async def test_a_copy_of_the_state_is_asked_for_before_the_command_returns():
    """Requests that are made in the same pass of the event loop come behind it."""
    async with scripted() as driver:
        driver.give(s.CopyState(2, 6))
        assert driver.fakes.sent == [(2, m.TakeReplica(6))]
        assert await driver.outcome() == r.CarriedOut(4, s.CopyState(2, 6), s.StateCopy((ARRAY,), "n2"))


async def test_a_part_is_sent_and_received_by_the_processes_that_the_command_names():
    async with scripted() as driver:
        move = s.MovePart(6, 0, 0, 2, (ARRAY,), 8)
        driver.give(move)
        assert await driver.outcome() == r.CarriedOut(4, move)
        assert dict(driver.fakes.sent) == {
            0: m.SendReplica(4, 6, 0, 2),
            2: m.ReceiveReplica(4, 6, 0, 0, (ARRAY,)),
        }


@pytest.mark.parametrize(
    ("source", "to", "link"),
    [(0, 2, "between actors 0 and 2"), (0, CONTROLLER, "with the controller")],
)
async def test_a_part_that_does_not_arrive_names_the_link(source, to, link, monkeypatch):
    monkeypatch.setattr("jaxpp_async.layout.state_replicas.ReplicaStore.receive", lambda *_: asyncio.sleep(0))
    async with scripted() as driver:
        driver._patience_s = 0.01
        driver.fakes.blocked |= {"SendReplica", "ReceiveReplica"}
        driver.give(s.MovePart(6, 0, source, to, (ARRAY,), 8))
        failed = await driver.outcome()
        assert isinstance(failed.error, TransferError)
        assert str(failed.error) == (
            f"the replica of actor 0's arrays does not arrive: the link {link} is broken, or slower than "
            "50 MB/s (progress_timeout_s)"
        )


async def test_older_parts_are_dropped_everywhere_and_nobody_waits_for_it():
    async with scripted() as driver:
        driver.give(s.DropOthers(6))
        assert driver.fakes.sent == [(process, m.DropReplicas(6)) for process in range(3)]
        await asyncio.sleep(0)
        assert len(driver.machine.events) == 1


@pytest.mark.parametrize(
    ("error", "suspected", "level"),
    [
        (TransferError("slow"), True, None),
        (RemoteError("MemoryError", exception_type="builtins.MemoryError"), False, logging.WARNING),
        (LaunchError("the mesh has ended"), False, logging.DEBUG),
    ],
)
async def test_a_replica_that_could_not_be_made_is_judged_or_told(error, suspected, level, caplog):
    caplog.set_level(logging.DEBUG, "jaxpp_async")
    async with scripted() as driver:
        driver.give(r.GiveUpReplica(error))
        assert driver.suspected == [error] * suspected
    assert [record.levelno for record in caplog.records if record.name == "jaxpp_async"] == (
        [] if level is None else [level]
    )


async def test_who_makes_a_replica_waits_until_it_is_whole_or_given_up():
    async with scripted() as driver:
        driver.machine.replicas.stage = s.Stage.COPYING
        making = asyncio.ensure_future(driver.make_replica())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not making.done() and driver.machine.events == [r.ReplicaWanted()]
        driver.machine.replicas.stage = s.Stage.IDLE
        driver.handle(r.StepSent())
        await making


async def test_files_are_kept_with_a_warning_when_no_replica_gets_whole(caplog):
    async with scripted() as driver:
        await driver.secure()
        assert driver.machine.events == [r.ReplicaWanted()] * 10
    assert "keep the files, a restart would read them again" in caplog.text


async def test_files_may_go_as_soon_as_no_restart_would_read_them():
    async with scripted() as driver:

        def make_whole(event: r.Event, now: float) -> list[r.Command]:
            driver.machine.history.needs_files = False
            return []

        driver.machine.handle = make_whole
        await driver.secure()


async def test_securing_waits_for_the_end_of_a_save(monkeypatch, caplog):
    """A save is no failed attempt, however long it takes."""
    monkeypatch.setattr(recovery_driver, "_SAVE_POLL_S", 0.0)
    async with scripted() as driver:
        driver.machine.history.blocks_replicas = True
        securing = asyncio.ensure_future(driver.secure())
        for _ in range(50):
            await asyncio.sleep(0)
        assert not securing.done() and driver.machine.events == []
        driver.machine.history.needs_files = False
        await securing
    assert not caplog.records
