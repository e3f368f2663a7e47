"""Events of a mesh: each reader sees each event, late, slow and cancelled readers too, and none of them holds
the mesh up."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
from datetime import UTC, datetime
from typing import Any

import models
import pytest
from fake_actor import start_fakes
from paths import SUPPORT

import jaxpp_async as jpp
from jaxpp_async.base.events import Event, EventLog, Events
from jaxpp_async.controller.error_messages import ActorInfo
from jaxpp_async.controller.mesh_events import MeshEvents
from jaxpp_async.controller.options import ActorConfig
from jaxpp_async.errors import ActorDiedError, LaunchError, RemoteError
from jaxpp_async.launch import LocalLauncher
from jaxpp_async.launch.hosts import Settings


async def kinds(events: Events) -> list[str]:
    return [event.kind async for event in events]


def told(*kinds_: str, kept: int = 1000) -> EventLog:
    log = EventLog(kept)
    for kind in kinds_:
        log.emit(kind, f"it {kind}")  # type: ignore[arg-type]
    return log


async def test_every_reader_sees_every_event_from_its_subscription_on():
    log = EventLog()
    early = asyncio.create_task(kinds(log.subscribe()))
    await asyncio.sleep(0)
    log.emit("started", "actor 0 started", actor=0, host="n1")
    late, without_history = log.subscribe(), log.subscribe(history=False)
    log.emit("died", "actor 0 died", actor=0, step=7)
    log.emit("closed", "the mesh is closed")
    log.emit("started", "nobody hears this")
    assert await early == await kinds(late) == ["started", "died", "closed"]
    assert await kinds(without_history) == ["died", "closed"]
    assert await kinds(log.subscribe()) == ["started", "died", "closed"]
    assert await kinds(log.subscribe(history=False)) == await kinds(late) == []


async def test_what_an_event_says():
    log = told()
    log.emit("died", "actor 2 was killed\nand much more", actor=2, step=7, pid=11, host="n1")
    event = await anext(log.subscribe())
    assert (event.kind, event.actor, event.step, event.text) == ("died", 2, 7, "actor 2 was killed")
    assert abs((datetime.now(UTC) - event.at).total_seconds()) < 5 and event.details["pid"] == 11
    assert str(event).endswith("died: actor 2 was killed")
    assert json.loads(json.dumps(event.as_dict()))["details"] == {"pid": 11, "host": "n1"}


async def test_a_reader_that_does_not_read_is_told_what_it_lost():
    log = told(*["compiled"] * 5, kept=3)
    events = log.subscribe()
    first = await anext(events)
    assert (first.kind, first.details["count"]) == ("lost", 2)
    assert (await anext(events)).kind == "compiled"
    for _ in range(10):
        log.emit("checkpointed", "again")
    lost = await anext(events)
    assert (lost.kind, lost.details["count"]) == ("lost", 9)  # two compiled, seven checkpointed
    log.emit("closed", "the end")
    assert await kinds(events) == ["lost", "checkpointed", "checkpointed", "closed"]


async def test_a_cancelled_reader_loses_nothing_and_leaves_nothing(caplog):
    log = EventLog()
    events = log.subscribe()
    before = len(asyncio.all_tasks())
    for kind in ("started", "compiled"):
        # The event and the cancellation reach the reader at once, in either order.
        for cancel_first in (False, True):
            reading = asyncio.create_task(anext_of(events))
            await asyncio.sleep(0)
            if cancel_first:
                reading.cancel()
            log.emit(kind, "now")
            reading.cancel()
            await asyncio.wait([reading])
            if reading.cancelled():
                assert (await anext(events)).kind == kind
    assert not log._waiting and len(asyncio.all_tasks()) == before
    abandoned = asyncio.create_task(anext_of(events))
    await asyncio.sleep(0)
    abandoned.cancel()
    await asyncio.wait([abandoned])
    del abandoned, events
    gc.collect()
    assert not [r for r in caplog.records if r.name == "asyncio"]


async def anext_of(events: Events) -> Event:
    return await anext(events)


async def test_readers_that_share_an_iterator_share_its_events():
    log = EventLog()
    events = log.subscribe()
    readers = [asyncio.create_task(kinds(events)) for _ in range(2)]
    await asyncio.sleep(0)
    log.emit("started", "one")
    log.emit("closed", "two")
    assert sorted([kind for reader in readers for kind in await reader]) == ["closed", "started"]


def test_what_is_told():
    log = EventLog()
    mesh_events, info = MeshEvents(log), ActorInfo(1, "n1", 47, ("cpu:0",), "ready")
    mesh_events.started(info)
    mesh_events.suspect(info, 3.2, None, 10.0)
    mesh_events.recovered(info, 4.0)
    mesh_events.failed(RemoteError("the user's own", actor=1))  # nobody died
    mesh_events.failed(ActorDiedError("actor 1 was killed", actor=1, host="n1", pid=47, step=7))
    mesh_events.restarted([info], 3, 1.5)
    mesh_events.restarted([], 0, 1.5)
    mesh_events.closed(ActorDiedError("actor 1 was killed"))
    mesh_events.closed(None)
    assert [(event.kind, event.actor, event.step, event.details.get("pid")) for event in log._kept] == [
        ("started", 1, None, 47),
        ("suspect", 1, None, 47),
        ("recovered", 1, None, 47),
        ("died", 1, 7, 47),
        ("restarted", 1, None, 47),
        ("restarted", None, None, None),
        ("closed", None, None, None),
    ]
    assert log._kept[-1].text == "the mesh is closed: actor 1 was killed"


async def test_events_are_logged_with_actor_and_step(caplog):
    with caplog.at_level(logging.DEBUG, "jaxpp_async"):
        log = told("started")
        log.emit("died", "actor 1 died", actor=1, step=4, host="n1")
    records = [(r.levelname, r.actor, r.step, r.host, r.getMessage()) for r in caplog.records]  # type: ignore[attr-defined]
    assert records == [
        ("DEBUG", None, None, None, "started: it started"),
        ("ERROR", 1, 4, "n1", "died: actor 1 died"),
    ]


# ---------------------------------------------------------------- of real meshes


async def test_the_life_of_a_mesh(tmp_path):
    model = models.mlp(2)
    mesh = jpp.RemoteMesh(2, launcher="inline")
    reading = asyncio.create_task(everything(mesh.events()))  # before it has started
    async with mesh:
        step = mesh.distributed(models.grads_step(model, jpp.Std1F1B(2)), name="train")
        state, _, _ = await mesh.run(step, model.init(0), model.batch(0, 2))
        await mesh.save(tmp_path / "a", state)
    async with asyncio.timeout(5):
        events = await reading
    assert [(event.kind, event.actor) for event in events] == [
        ("started", 0),
        ("started", 1),
        ("compiled", None),
        ("checkpointed", None),
        ("closed", None),
    ]
    started, _, compiled, saved, closed = (event.details for event in events)
    assert started["pid"] == os.getpid() and started["devices"] == ("cpu:0",)
    assert compiled["name"] == "train" and compiled["seconds"] > 0 and compiled["num_tasks"] > 0
    assert saved["path"] == str(tmp_path / "a") and saved["size_bytes"] > 0 and closed["error"] is None


async def test_a_mesh_that_does_not_start_is_closed():
    mesh = jpp.RemoteMesh(1, launcher=LocalLauncher(settings=Settings(python="/no/such/python")))
    with pytest.raises(LaunchError):
        await mesh.__aenter__()
    assert mesh.is_closed
    async with asyncio.timeout(5):
        [closed] = await everything(mesh.events())
    assert (closed.kind, closed.details["error"]) == ("closed", "LaunchError")
    assert "No such file" in closed.text


async def test_a_mesh_whose_start_is_cancelled_is_closed():
    mesh = jpp.RemoteMesh(1, launcher="inline")
    entering = asyncio.ensure_future(mesh.__aenter__())
    await asyncio.sleep(0)
    assert not mesh.is_closed
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert mesh.is_closed


async def test_a_death_is_told():
    launcher = LocalLauncher(actor="fake_actor:FakeActor")
    log = EventLog()
    config = ActorConfig(env={"PYTHONPATH": str(SUPPORT)})
    controller = await start_fakes(1, launcher, config, events=log)
    os.kill(controller.actors[0].pid, signal.SIGKILL)
    events = log.subscribe()
    async with asyncio.timeout(5):
        started, died = await anext(events), await anext(events)
        await controller.aclose()
        [closed] = await everything(events)
    assert (started.kind, died.kind, died.actor, died.details["error"]) == (
        "started",
        "died",
        0,
        "ActorDiedError",
    )
    assert died.details["pid"] == started.details["pid"] == controller.actors[0].pid
    assert closed.details["error"] == "ActorDiedError" and "SIGKILL" in closed.text


async def test_an_actor_that_is_given_up_dies_once():
    """Its process is killed then, and that is no death of its own."""
    launcher, log = LocalLauncher(actor="fake_actor:FakeActor"), EventLog()
    config = ActorConfig(env={"PYTHONPATH": str(SUPPORT)})
    options: Any = {"events": log, "max_restarts": 2}
    controller = await start_fakes(1, launcher, config, suspect_s=0.8, dead_s=1.6, **options)
    try:
        os.kill(controller.actors[0].pid, signal.SIGSTOP)
        events = log.subscribe()
        async with asyncio.timeout(20):
            seen = [await anext(events)]
            while seen[-1].kind != "restarted":
                seen.append(await anext(events))
    finally:
        await controller.aclose()
    assert [event.kind for event in seen] == ["started", "suspect", "died", "started", "restarted"]
    assert seen[2].details["error"] == "ActorUnresponsiveError"


async def everything(events: Events) -> list[Event]:
    return [event async for event in events]
