"""Profiles of actors: markers of steps and tasks, files for the user alone, and what is lost is told."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import signal
import stat
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from docs_code import doc_code
from waiting import until

import jaxpp_async as jpp
from jaxpp_async.actors.profiling import step_markers
from jaxpp_async.errors import MeshError
from jaxpp_async.protocol import messages as m


def loss_fn(params, x):
    return jnp.sum(jpp.pipeline_yield(x @ params[0]) @ params[1])


def train_step(params, batch):
    def grads_of(x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        return grads, loss

    grads, losses = jpp.accumulate_grads(grads_of, jpp.Std1F1B(2))(batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), losses


def problem():
    return [jnp.ones((8, 8)), jnp.ones((8, 8))], jnp.ones((2, 4, 8))


def marks(folder: Path) -> list[tuple[str, dict[str, int]]]:
    """The markers of steps and of microbatches' tasks in the profiles below a folder, with their numbers."""
    found = []
    for path in folder.rglob("*.trace.json.gz"):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        marked = [
            e for e in events if "actor" in e.get("args", {}) and ("mb" in e["name"] or e["name"] == "step")
        ]
        found += [(e["name"], {name: int(number) for name, number in e["args"].items()}) for e in marked]
    return found


async def run_steps(mesh, numbers: int):
    params, batch = problem()
    step = mesh.distributed(train_step, donate_argnums=0)
    for _ in range(numbers):
        params, _ = await mesh.run(step, params, batch)
    return step, params, batch


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}


def told(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


EXPECTED = {
    0: ["step", "fwd(stage 0, mb 0)", "fwd(stage 0, mb 1)", "bwd(stage 0, mb 0)", "bwd(stage 0, mb 1)"],
    1: ["step", "fwd_bwd(stage 1, mb 0)", "fwd_bwd(stage 1, mb 1)"],
}


def check_marks(folder: Path, numbers: range, actors=(0, 1)) -> None:
    expected = [(name, actor, n) for actor in actors for n in numbers for name in EXPECTED[actor]]
    found = [(name, s["actor"], s["step_num" if name == "step" else "step"]) for name, s in marks(folder)]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("launcher", ["inline", "local"])
async def test_each_actor_marks_its_steps_and_tasks(remote_mesh, tmp_path, launcher):
    mesh = await remote_mesh(2, launcher=launcher)
    step, params, batch = await run_steps(mesh, 20)  # tasks that are quick by now would run elsewhere
    begin = mesh.last_step_timeline().step + 1
    async with mesh.profile(tmp_path / "new" / "profile") as folder:
        future = None
        for _ in range(3):
            future = await mesh.submit(step, params, batch)
            params = future.outputs[0]
    assert future is not None and future.done()
    await mesh.run(step, params, batch)
    assert folder == tmp_path / "new" / "profile" and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert modes(folder) == {0o600}
    check_marks(folder, range(begin, begin + 3))
    if launcher == "inline":
        assert [path.name for path in folder.iterdir()] == ["inline"]
    else:
        for actor in (0, 1):
            check_marks(folder / f"actor-{actor}", range(begin, begin + 3), (actor,))
            assert len(list((folder / f"actor-{actor}").rglob("*.trace.json.gz"))) == 1
    assert step_markers(m.step_id(0), 0) is None


async def test_the_lines_that_the_documentation_shows(remote_mesh, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mesh = await remote_mesh(2, launcher="inline")
    step, params, batch = await run_steps(mesh, 1)
    await doc_code("timeline.md")["profile_three"](mesh, step, params, batch)
    assert len([name for name, _ in marks(tmp_path / "profile") if name == "step"]) == 2 * 3


async def test_files_of_other_hosts_come_in_parts_and_leave_nothing_there(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxpp_async.controller.actor_group.ActorGroup.is_on_this_machine", False)
    monkeypatch.setattr(m, "PROFILE_PART_BYTES", 1000)
    there = tmp_path / "there"
    there.mkdir()
    async with jpp.RemoteMesh(2, env={"TMPDIR": str(there)}) as mesh:
        step, params, batch = await run_steps(mesh, 1)
        async with mesh.profile(tmp_path / "profile") as folder:
            await mesh.run(step, params, batch)
            assert len(list(there.glob("jaxpp-profile-*"))) == 2
        check_marks(folder, range(1, 2))
        assert modes(folder) == {0o600} and list(there.glob("jaxpp-profile-*")) == []
        monkeypatch.setattr("jaxpp_async.controller.profiling.MOST_BYTES", 100)
        with pytest.raises(MeshError, match=r"no profile was written: its files have .* more than 100"):
            async with mesh.profile(tmp_path / "large"):
                pass
        assert list(there.glob("jaxpp-profile-*")) == []
        async with mesh.profile(tmp_path / "ended"):
            await mesh.aclose()
    assert list(there.glob("jaxpp-profile-*")) == []


async def test_a_restart_loses_the_profile_of_the_dead_alone(tmp_path, caplog):
    async with jpp.RemoteMesh(2, max_restarts=1) as mesh:
        step, params, batch = await run_steps(mesh, 1)
        async with mesh.profile(tmp_path / "profile") as folder:
            params, _ = await mesh.run(step, params, batch)
            os.kill(mesh.actors[1].pid, signal.SIGKILL)
            params, losses = await mesh.run(step, params, batch)
            await losses
        assert [path.name for path in folder.iterdir() if marks(path)] == ["actor-0"]
        (warning,) = [text for text in told(caplog) if "mesh.profile" in text]
        assert "of actor 1" in warning and "it was replaced while it was being profiled" in warning
        async with mesh.profile(tmp_path / "again") as folder:  # the successor too
            await mesh.run(step, params, batch)
        assert {path.name for path in folder.iterdir() if marks(path)} == {"actor-0", "actor-1"}


async def test_a_failure_is_raised_and_those_that_live_write_their_profiles(tmp_path, caplog):
    with pytest.raises(jpp.errors.ActorDiedError):
        async with jpp.RemoteMesh(2) as mesh:
            step, params, batch = await run_steps(mesh, 1)
            async with mesh.profile(tmp_path / "profile"):
                params, _ = await mesh.run(step, params, batch)
                os.kill(mesh.actors[1].pid, signal.SIGKILL)
                await until(lambda: mesh.is_closed)
                await mesh.run(step, params, batch)
    check_marks(tmp_path / "profile" / "actor-0", range(1, 2), (0,))
    assert any("profiles of actors that still run are written when they end" in text for text in told(caplog))


async def test_an_error_in_the_block_is_raised_and_the_profile_is_written(remote_mesh, tmp_path):
    mesh = await remote_mesh(2, launcher="inline")
    for number, error in enumerate((KeyError("of the user"), asyncio.CancelledError())):
        with pytest.raises(type(error)):
            async with mesh.profile(tmp_path / str(number)) as folder:
                await run_steps(mesh, 1)
                raise error
        assert {name for name, _ in marks(folder)} >= {"step"}


async def test_where_and_when_no_profile_can_be_recorded(remote_mesh, tmp_path):
    mesh = await remote_mesh(2, launcher="inline")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(
        MeshError, match=r"mesh.profile: the folder .*full has files; name a new or empty one"
    ):
        async with mesh.profile(tmp_path / "full"):
            pass
    with pytest.raises(MeshError, match=r"mesh.profile: .*full/file cannot be used: File exists"):
        async with mesh.profile(tmp_path / "full" / "file"):
            pass
    async with mesh.profile(tmp_path / "one"):
        with pytest.raises(MeshError, match=r"a profile into .*one is being recorded; leave its block first"):
            async with mesh.profile(tmp_path / "two"):
                pass
        await run_steps(mesh, 1)
    assert marks(tmp_path / "one")
    with (
        jax.profiler.trace(str(tmp_path / "own")),
        pytest.raises(MeshError, match=r"mesh.profile: actor 0.*: JAX's profiler does not start: .*Only one"),
    ):
        async with mesh.profile(tmp_path / "three"):
            pass
    with pytest.raises(MeshError, match="this mesh has not started"):
        async with jpp.RemoteMesh(1, launcher="inline").profile(tmp_path / "four"):
            pass


async def test_each_process_of_an_actor_has_a_profile(tmp_path):
    async with jpp.RemoteMesh(1, processes_per_actor=2, spmd_mesh={"data": 2}) as mesh:
        step = mesh.distributed(lambda x: x + 1)
        x = await mesh.run(step, jnp.ones(4))
        async with mesh.profile(tmp_path / "profile") as folder:
            await mesh.run(step, x)
    steps = [len(list((folder / "actor-0" / f"process-{rank}").rglob("*.xplane.pb"))) for rank in range(2)]
    assert steps == [1, 1] and [name for name, _ in marks(folder)] == ["step", "step"]
