"""Several meshes save into one folder: each save is whole, or its error says what another one did.

The same with every order of file operations is in storage/test_concurrent_savers.py.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import jaxpp_async as jpp
from jaxpp_async.errors import CheckpointError
from jaxpp_async.storage import checkpoint_folder, tensor_files


async def test_two_meshes_save_into_one_folder(remote_mesh, tmp_path):
    # two, not one shared
    meshes = [await remote_mesh(1, launcher="inline", max_restarts=n) for n in range(2)]
    makers = [mesh.distributed(lambda x: {"a": x, "b": x + 1}) for mesh in meshes]
    like = {"a": np.zeros(99, "f4"), "b": np.zeros(99, "f4"), "by": 0}
    told: list[int] = []
    for number in range(12):
        trees = [await meshes[n].run(makers[n], np.full(99, n, np.float32)) for n in range(2)]
        saves = [meshes[n].save(tmp_path / "one", {**trees[n], "by": n}) for n in range(2)]
        outcomes = await asyncio.gather(*saves, return_exceptions=True)
        for outcome in outcomes:
            assert not isinstance(outcome, BaseException) or "another save has put" in str(outcome)
        winners = [n for n, outcome in enumerate(outcomes) if not isinstance(outcome, BaseException)]
        told.append(len(winners))
        found = await meshes[number % 2].restore(tmp_path / "one", like)
        assert found["by"] in winners and found["a"][0] == found["by"] and found["b"][0] == found["by"] + 1
    assert sum(told) >= len(told)
    named = json.loads((tmp_path / "one" / "manifest.json").read_text())["files"]
    assert {path.name for path in (tmp_path / "one").iterdir()} == {"manifest.json", *named}


async def test_a_file_that_is_gone_before_the_commit_is_told(remote_mesh, tmp_path, monkeypatch):
    mesh = await remote_mesh(1, launcher="inline")
    array = await mesh.run(mesh.distributed(lambda x: x + 1), np.zeros(3, np.float32))
    await mesh.save(tmp_path / "one", {"x": array})
    before = {path: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    original = tensor_files.write

    def breaking(breaks: Callable[[str], None]) -> Any:
        def write(path: str, *args: Any) -> Any:
            written = original(path, *args)
            breaks(path)
            return written

        return write

    for breaks, said in (
        (lambda path: os.truncate(path, 10), "has 10 bytes, but had"),
        (os.unlink, "somebody has"),
    ):
        monkeypatch.setattr(tensor_files, "write", breaking(breaks))
        with pytest.raises(CheckpointError, match=said):
            await mesh.save(tmp_path / "one", {"x": array})
        assert {path: path.read_bytes() for path in (tmp_path / "one").iterdir()} == before


async def test_what_the_disk_did_not_make_durable_is_told_and_kept(remote_mesh, tmp_path, monkeypatch):
    """The manifest may be in place all the same: then its files must stay."""
    mesh = await remote_mesh(1, launcher="inline")
    await mesh.save(tmp_path / "one", {"x": np.zeros(3)})

    def fails(folder: str) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoint_folder, "sync_folder", fails)
    with pytest.raises(CheckpointError, match="Input/output error"):
        await mesh.save(tmp_path / "one", {"x": np.ones(3)})
    np.testing.assert_array_equal((await mesh.restore(tmp_path / "one", {"x": np.zeros(3)}))["x"], np.ones(3))


async def test_series_of_two_runs_leave_each_other_alone(remote_mesh, tmp_path):
    mesh = await remote_mesh(1, launcher="inline")
    under_way = tmp_path / "00000007" / f"{7:016x}-actor-0-0.safetensors"
    under_way.parent.mkdir()
    under_way.write_bytes(b"another run's")
    async with jpp.Checkpoints(mesh, tmp_path, keep=2) as newer:
        for number in (90, 91, 92):
            await newer.save(number, {"x": number}, wait=True)
    async with jpp.Checkpoints(mesh, tmp_path, keep=1) as older:  # went back, and goes on from there
        await older.save(50, {"x": 50}, wait=True)
        assert older.step_numbers() == [50, 91, 92]
        await older.save(51, {"x": 51}, wait=True)
        assert older.step_numbers() == [51, 91, 92]
    assert under_way.exists()
