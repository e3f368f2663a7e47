"""Direct tests of the numbered checkpoints of one run, on a mesh that only makes folders."""

from __future__ import annotations

import asyncio
import os

import pytest

from jaxpp_async.checkpoint.retention import Checkpoints
from jaxpp_async.checkpoint.save import Saving
from jaxpp_async.errors import ActorDiedError, CheckpointError, MeshError


class Mesh:
    """Saves by making a manifest; the test says which saves fail."""

    def __init__(self):
        self.saver, self.fails, self.removed, self.restored, self.error = self, set(), [], [], None

    async def save(self, path, tree, *, wait, on_progress, after_commit):
        saving, number = Saving(path, 0), int(os.path.basename(path))
        if number in self.fails:
            saving.set_outcome(self.error or CheckpointError(f"{number} failed"))
        else:
            whole(path)
            await after_commit()
            saving.set_outcome()
        return saving

    async def remove(self, path):
        self.removed.append(int(os.path.basename(path)))
        os.remove(os.path.join(path, "manifest.json"))

    async def restore(self, path, like):
        self.restored.append(int(os.path.basename(path)))
        if self.restored[-1] in self.fails:
            raise CheckpointError("broken")
        return like


def whole(path) -> None:
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, "manifest.json"), "w"):
        pass


@pytest.fixture
def mesh() -> Mesh:
    return Mesh()


def test_at_least_one_checkpoint_has_to_stay(mesh, tmp_path):
    with pytest.raises(MeshError, match=r"^keep is 0; at least one checkpoint has to stay$"):
        Checkpoints(mesh, tmp_path, keep=0)


def test_only_whole_checkpoints_with_a_number_count(mesh, tmp_path):
    checkpoints = Checkpoints(mesh, tmp_path / "run")
    assert (checkpoints.latest(), checkpoints.step_numbers()) == (None, [])
    for name in ("00000012", "00000003", "123456789"):
        whole(tmp_path / "run" / name)
    for name in ("00000099", "notes", "7"):
        (tmp_path / "run" / name).mkdir()
    assert checkpoints.step_numbers() == [3, 12, 123456789]
    assert checkpoints.latest() == 123456789
    assert checkpoints.path(12) == str(tmp_path / "run" / "00000012")


async def test_the_newest_few_up_to_the_one_just_saved_stay(mesh, tmp_path):
    for number in (1, 2, 3, 90):  # 90 is of another run, or of before this one went back
        whole(tmp_path / f"{number:08d}")
    async with Checkpoints(mesh, tmp_path, keep=2) as checkpoints:
        await checkpoints.save(4, {})
    assert mesh.removed == [1, 2]
    assert checkpoints.step_numbers() == [3, 4, 90]


async def test_a_save_that_failed_is_raised_once_and_removes_nothing(mesh, tmp_path):
    mesh.fails = {2}
    checkpoints = Checkpoints(mesh, tmp_path, keep=1)
    await checkpoints.save(1, {})
    await checkpoints.save(2, {})
    with pytest.raises(CheckpointError, match=r"^2 failed$"):
        await checkpoints.save(3, {})
    await checkpoints.save(3, {})
    assert checkpoints.step_numbers() == [3]
    assert mesh.removed == [1]


async def test_a_failure_that_somebody_has_seen_is_not_raised_again(mesh, tmp_path):
    mesh.fails = {1}
    checkpoints = Checkpoints(mesh, tmp_path)
    saving = await checkpoints.save(1, {})
    with pytest.raises(CheckpointError):
        await saving
    await checkpoints.wait()


async def test_what_ends_the_context_is_raised_rather_than_a_failed_save(mesh, tmp_path, caplog):
    mesh.fails = {1}
    with pytest.raises(ZeroDivisionError):
        async with Checkpoints(mesh, tmp_path) as checkpoints:
            await checkpoints.save(1, {})
            raise ZeroDivisionError
    assert [record.getMessage() for record in caplog.records] == ["1 failed"]
    with pytest.raises(CheckpointError, match=r"^1 failed$"):
        async with Checkpoints(mesh, tmp_path) as checkpoints:
            await checkpoints.save(1, {})


async def test_a_mesh_that_ended_in_a_save_is_told_as_any_other_error_of_one(mesh, tmp_path, caplog):
    mesh.fails, mesh.error = {1, 2, 3}, ActorDiedError("killed")
    checkpoints = Checkpoints(mesh, tmp_path)
    saving = await checkpoints.save(1, {})
    with pytest.raises(ActorDiedError):
        await saving
    await checkpoints.wait()
    with pytest.raises(ActorDiedError):
        async with checkpoints:
            await checkpoints.save(2, {})
    with pytest.raises(ActorDiedError) as caught:
        async with checkpoints:
            await checkpoints.save(3, {})
            raise mesh.error
    assert caught.value is mesh.error and caplog.records == []


async def test_the_newest_is_restored_unless_another_is_asked_for(mesh, tmp_path):
    for number in (1, 2):
        whole(tmp_path / f"{number:08d}")
    checkpoints = Checkpoints(mesh, tmp_path)
    assert await checkpoints.restore("like") == "like"
    await checkpoints.restore("like", step_number=1)
    assert mesh.restored == [2, 1]


async def test_where_there_is_none_that_is_said_with_the_folder(mesh, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        await Checkpoints(mesh, tmp_path / "none").restore("like")
    none = "there is no checkpoint in it with a step number for its name (00000000)"
    assert str(caught.value) == f"{tmp_path / 'none'}: {none}"
    whole(tmp_path / "none")
    with pytest.raises(CheckpointError) as caught:
        await Checkpoints(mesh, tmp_path / "none").restore("like")
    assert str(caught.value).endswith("; this folder is itself a checkpoint: mesh.restore(path, like)")


async def test_of_a_broken_one_the_others_are_named(mesh, tmp_path):
    for number in (1, 2, 3):
        whole(tmp_path / f"{number:08d}")
    mesh.fails = {3}
    with pytest.raises(CheckpointError, match=r"^broken") as caught:
        await Checkpoints(mesh, tmp_path).restore("like")
    assert caught.value.__notes__ == [f"{tmp_path} also has [1, 2]: restore(like, step_number=2)"]


async def test_files_that_no_manifest_names_go_when_it_is_asked_for(mesh, tmp_path):
    left = tmp_path / "00000001" / "0123456789abcdef-actor-0-0.safetensors"
    left.parent.mkdir()
    left.write_bytes(b"")
    (left.parent / "notes.txt").write_text("mine")
    removed = await asyncio.wait_for(Checkpoints(mesh, tmp_path).remove_leftovers(), 60.0)
    assert removed == [str(left)]
    assert [path.name for path in left.parent.iterdir()] == ["notes.txt"]


async def test_a_notebook_shows_the_checkpoints_and_the_save_under_way(mesh, tmp_path):
    checkpoints = Checkpoints(mesh, tmp_path / "a<b")
    assert repr(checkpoints).endswith("a<b: 0 complete; keeps 3>")
    await checkpoints.save(7, {})
    under_way = checkpoints._current = Saving(checkpoints.path(8), 2_000_000)
    under_way.written_bytes = 500_000
    html = checkpoints._repr_html_()
    assert "a&lt;b: 1 complete, the newest of step 7; keeps 3" in html
    assert html.index("00000008") < html.index(">7<")
    assert "500 kB of 2 MB" in html and "cannot be read" in html  # the manifest of this mesh is empty
    under_way.set_outcome()
    assert "00000008" not in checkpoints._repr_html_()


async def test_a_notebook_shows_how_far_a_save_is(tmp_path):
    saving = Saving(str(tmp_path), 2_000)
    assert "0 B of 2 kB" in saving._repr_html_() and "being written" in saving._repr_html_()
    saving.set_outcome(CheckpointError("the disk is <full>"))
    assert "failed: the disk is &lt;full&gt;" in saving._repr_html_()
