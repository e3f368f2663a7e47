"""Direct tests of when replicas of actors' arrays are made, when they are whole, and who gets them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxpp_async.controller.request_history import RequestHistory
from jaxpp_async.controller.state_replicas import (
    MAX_REMEMBERED_BYTES,
    AwaitAnswers,
    CopyState,
    DropOthers,
    MovePart,
    Stage,
    StateCopy,
    StateReplicas,
    choose_holders,
)
from jaxpp_async.program.instructions import CONTROLLER, Aval
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.actor_info import Topology
from tests.controller.test_request_history import Remembered

ARRAY = m.ReplicaArray(5, Aval((2,), "float32"), (8,))


class Replicas(StateReplicas):
    """The replicas of actors on hosts of their own, made every third step."""

    def __init__(self, num_actors: int = 3, per_actor: int = 1) -> None:
        self.history = RequestHistory()
        super().__init__(Topology(num_actors, per_actor), self.history, 3)
        self.hosts = [f"n{process}" for process in range(num_actors * per_actor)]

    def carry_out(self, commands: list[Any]) -> list[Any]:
        """Carry out the commands that are waited for, and return those that follow."""
        followed = []
        for command in commands:
            if self.waits_for(command):
                is_copy = isinstance(command, CopyState)
                copy = StateCopy((ARRAY,), self.hosts[command.process]) if is_copy else None
                followed += self.carried_out(command, copy)
        return followed

    def make(self) -> None:
        commands = self.begin()
        while commands:
            commands = self.carry_out(commands)


def moves(commands: list[Any]) -> list[tuple[int, int, int]]:
    """Of the parts that are moved: whose, from where, to where."""
    return [(c.owner, c.source, c.to) for c in commands if isinstance(c, MovePart)]


def test_a_replica_is_due_with_the_first_step_and_then_after_so_many():
    replicas, due = Replicas(), []
    for step in range(7):
        replicas.count_step()
        if replicas.is_due:
            due.append(step)
            replicas.make()
    assert due == [0, 3, 6]


def test_much_that_is_remembered_makes_a_replica_due():
    replicas = Replicas()
    replicas.make()
    assert not replicas.is_due
    replicas.history.add(Remembered(m.Store((), ()), size_bytes=MAX_REMEMBERED_BYTES + 1))
    assert replicas.is_due


def test_the_stages_of_a_replica():
    replicas = Replicas()
    replicas.history.add(Remembered(m.Store((), (1,)), is_answered=True))
    commands = replicas.begin()
    assert commands == [CopyState(process, 0) for process in range(3)]
    replicas.history.add(after := Remembered(m.Store((), (2,)), is_answered=True))
    for command in commands[:2]:
        assert replicas.carry_out([command]) == [] and replicas.stage is Stage.COPYING
    commands = replicas.carry_out(commands[2:])
    assert replicas.stage is Stage.STORING and moves(commands) == [(0, 0, 1), (1, 1, 2), (2, 2, 0)]
    assert {command.total_bytes for command in commands} == {24}
    (answers,) = replicas.carry_out(commands)
    assert replicas.stage is Stage.SETTLING and isinstance(answers, AwaitAnswers)
    assert replicas.whole is None and len(replicas.history) == 2
    assert replicas.carry_out([answers]) == [DropOthers(0)]
    assert replicas.whole is not None and replicas.whole.generation == 0 and replicas.stage is Stage.IDLE
    assert replicas.history.needed() == [after]


def test_only_one_replica_is_made_at_a_time_and_none_in_a_save():
    replicas = Replicas()
    assert replicas.begin() and replicas.begin() == []
    replicas.cancel()
    replicas.history.add(save := Remembered(m.BeginSnapshot(b"/folder", ()), is_answered=True))
    assert replicas.begin() == []
    replicas.history.add(replace(save, message=m.Sweep(b"/folder")))
    assert replicas.begin() == [CopyState(process, 1) for process in range(3)]


def test_a_replica_that_is_given_up_leaves_the_one_before_it():
    replicas = Replicas()
    replicas.make()
    before = replicas.whole
    commands = replicas.carry_out(replicas.begin())
    replicas.cancel()
    assert replicas.whole is before and not any(map(replicas.waits_for, commands))


def test_a_successor_gets_its_own_part_and_the_one_that_the_lost_actor_held():
    replicas = Replicas()
    replicas.make()
    commands = replicas.restore({1})
    assert commands[0] == DropOthers(0) and moves(commands) == [(1, 2, 1)]
    assert moves(replicas.hand_over({1})) == [(0, 0, 1)]


def test_no_two_parts_travel_between_the_same_processes_at_once():
    for num_actors, lost in ((2, {0}), (2, {1}), (4, {0, 2}), (5, {1, 3})):
        replicas = Replicas(num_actors)
        replicas.make()
        for commands in (replicas.restore(lost), replicas.hand_over(lost)):
            pairs = [(source, to) for _, source, to in moves(commands)]
            assert pairs and len(set(pairs)) == len(pairs)


def test_parts_are_looked_for_where_they_were_put_also_if_a_successor_is_on_another_host():
    replicas = Replicas(num_actors=4)
    replicas.hosts = ["a", "a", "b", "b"]  # so copies go to the actor after the next
    replicas.make()
    replicas.hosts = ["a", "b", "a", "b"]
    assert moves(replicas.restore({1})) == [(1, 3, 1)]
    assert moves(replicas.hand_over({1})) == [(3, 3, 1)]


def test_the_only_actor_has_its_copy_at_the_controller():
    replicas = Replicas(num_actors=1, per_actor=2)
    replicas.make()
    assert moves(replicas.restore({0})) == [(0, CONTROLLER, 0), (1, CONTROLLER, 1)]
    assert replicas.lost_together({0}) is None


def test_without_a_replica_nothing_is_moved_and_nothing_is_lost():
    replicas = Replicas()
    assert (
        replicas.restore({1}) == replicas.hand_over({1}) == [] and replicas.lost_together({0, 1, 2}) is None
    )


@pytest.mark.parametrize(("lost", "together"), [({1}, None), ({1, 2}, (1, 2)), ({0, 2}, (2, 0))])
def test_an_actor_and_the_holder_of_its_copy_lost_together(lost, together):
    replicas = Replicas()
    replicas.make()
    found = replicas.lost_together(lost)
    assert (found and (found.owner, found.holder)) == together
    assert found is None or found.host == f"n{found.owner}"


@pytest.mark.parametrize(
    ("hosts", "holders"),
    [
        (["a", "a"], {0: 1, 1: 0}),
        (["a", "b"], {0: 1, 1: 0}),
        (["a", "a", "b", "b"], {0: 2, 1: 3, 2: 0, 3: 1}),
        (["a", "a", "a", "b"], {0: 1, 1: 2, 2: 3, 3: 0}),
        (["a", "a", "b", "b", "c", "c"], {0: 2, 1: 3, 2: 4, 3: 5, 4: 0, 5: 1}),
        (["ab", "ba", "ab"], {0: 1, 1: 2, 2: 0}),  # two processes an actor, each on a host of its own
    ],
)
def test_second_copies_are_kept_on_other_hosts_where_that_is_possible(hosts, holders):
    assert choose_holders([list(of_actor) for of_actor in hosts]) == holders
