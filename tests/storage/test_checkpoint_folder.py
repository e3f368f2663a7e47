"""Direct tests of a checkpoint's folder: names, the manifest that is put in place, and what is removed."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib

import pytest

from jaxpp_async.errors import CheckpointError
from jaxpp_async.storage import checkpoint_folder as folders

ID, OTHER = "0" * 16, "1" * 16


def save(folder: pathlib.Path, save_id: str = ID, replaces: bytes | None = None) -> tuple[bytes, str]:
    """Save one file; return the manifest, and the file's name."""
    name = folders.file_name(save_id, 0, 0)
    (folder / name).write_bytes(b"1234")
    manifest = json.dumps({"files": {name: {}}}).encode()
    folders.commit(str(folder), save_id, manifest, replaces, {name: 4})
    return manifest, name


# ---------------------------------------------------------------- names


def test_files_of_saves_are_known_by_their_names():
    ours = ["0123456789abcdef-actor-3-10.safetensors", "0123456789abcdef-controller-0.safetensors.partial"]
    ours.append("manifest.json.0123456789abcdef.partial")
    others = ["manifest.json", "model.safetensors", "0123456789abcdef-actor-3.safetensors", "notes.txt"]
    assert folders.written_by_saves([*ours, *others]) == ours
    text = json.dumps({"files": {name: {} for name in [*ours, *others, "../" + ours[0]]}}).encode()
    assert folders.files_of(text) == (ours[0],)
    assert folders.files_of(b"{") == folders.files_of(None) == ()


def test_a_file_is_named_after_its_save_its_writer_and_its_number():
    assert folders.file_name(ID, 3, 10) == f"{ID}-actor-3-10.safetensors"
    assert folders.file_name(ID, None, 0) == f"{ID}-controller-0.safetensors"
    ids = {folders.new_save_id() for _ in range(100)}
    assert len(ids) == 100
    assert folders.written_by_saves([folders.file_name(i, 0, 0) for i in ids]) != []


@pytest.mark.parametrize(
    ("name", "says"),
    [("", "is empty; name a folder"), (b"", "is empty"), ("a\0b", "a NUL byte"), ("\ud800", "be encoded")],
    ids=ascii,
)
def test_a_name_that_no_folder_can_have_is_refused(name, says):
    with pytest.raises(CheckpointError, match=says):
        folders.absolute(name)


@pytest.mark.parametrize("name", ["a", b"a", pathlib.Path("a"), "./b/../a"], ids=ascii)
def test_a_path_is_made_absolute_for_processes_elsewhere(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert folders.absolute(name) == str(tmp_path / "a")


# ---------------------------------------------------------------- making a folder


def test_missing_folders_are_made_and_listed_from_the_outermost_on(tmp_path):
    made = [str(tmp_path / "a"), str(tmp_path / "a" / "b")]
    assert folders.make(made[1]) == made
    assert os.path.isdir(made[1])
    assert folders.make(made[1]) == []


def test_a_folder_that_cannot_be_made_leaves_none_above_it(tmp_path):
    with pytest.raises(OSError, match="File name too long"):
        folders.make(str(tmp_path / "a" / "b" / ("x" * 300)))
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- the manifest


def test_a_commit_puts_its_manifest_in_place_of_the_one_it_found(tmp_path):
    assert folders.read_manifest(str(tmp_path)) is None
    first, old = save(tmp_path)
    assert folders.read_manifest(str(tmp_path)) == first
    second, new = save(tmp_path, OTHER, replaces=first)
    assert folders.read_manifest(str(tmp_path)) == second
    assert sorted(os.listdir(tmp_path)) == sorted(
        ["manifest.json", old, new]
    )  # neither lock nor partial file


@pytest.mark.parametrize("replaces", [None, b"another"])
def test_a_commit_leaves_the_manifest_that_another_save_has_put_there(tmp_path, replaces):
    first, old = save(tmp_path)
    with pytest.raises(CheckpointError, match="another save has put a checkpoint there, or removed"):
        save(tmp_path, OTHER, replaces=replaces)
    assert folders.read_manifest(str(tmp_path)) == first
    assert set(os.listdir(tmp_path)) == {"manifest.json", old, folders.file_name(OTHER, 0, 0)}


def test_a_commit_refuses_files_that_have_changed_and_takes_those_of_other_hosts(tmp_path):
    name = folders.file_name(ID, 0, 0)
    (tmp_path / name).write_bytes(b"123")
    with pytest.raises(CheckpointError, match=f"{name}: has 3 bytes, but had 4 when it was written"):
        folders.commit(str(tmp_path), ID, b"{}", None, {name: 4})
    assert os.listdir(tmp_path) == [name]
    folders.commit(str(tmp_path), ID, b"{}", None, {name: 3, folders.file_name(ID, 1, 0): 4})
    assert folders.read_manifest(str(tmp_path)) == b"{}"


def test_files_that_are_gone_or_have_another_length_are_found(tmp_path):
    (tmp_path / "a").write_bytes(b"1234")
    folders.check_files(str(tmp_path), {"a": 4})
    with pytest.raises(CheckpointError, match="a: has 4 bytes, but had 5 when it was written"):
        folders.check_files(str(tmp_path), {"a": 5})
    with pytest.raises(CheckpointError, match="b: No such file or directory: it was written, and somebody"):
        folders.check_files(str(tmp_path), {"a": 4, "b": 1})


def test_a_lock_that_another_process_keeps_ends_the_commit_with_advice(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "LOCK_WAIT_S", 0.0)
    monkeypatch.setattr(folders, "LOCK_LOOK_S", 0.0)
    with open(tmp_path / folders.LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another save has held this lock for 0 s; a process that"):
            save(tmp_path)
    assert folders.read_manifest(str(tmp_path)) is None
    save(tmp_path)  # the lock has ended with its file


# ---------------------------------------------------------------- removing


def test_only_files_with_names_of_saves_are_removed_whole_or_partial(tmp_path):
    ours, partial = folders.file_name(ID, 0, 0), folders.file_name(ID, 1, 0) + folders.PARTIAL
    for name in (ours, partial, "notes"):
        (tmp_path / name).touch()
    (tmp_path.parent / "outside").touch()
    names = [ours, folders.file_name(ID, 1, 0), folders.file_name(ID, 2, 0), "notes", "../outside"]
    folders.remove_files(str(tmp_path), names)
    assert os.listdir(tmp_path) == ["notes"]
    assert (tmp_path.parent / "outside").exists()


def test_a_checkpoint_is_removed_with_its_folder_unless_more_is_there(tmp_path):
    folder = tmp_path / "a"
    for kept in ([], ["notes"]):
        folder.mkdir()
        _, name = save(folder)
        for other in kept:
            (folder / other).touch()
        assert folders.remove(str(folder)) == (name,)
        assert (os.listdir(folder) if folder.exists() else []) == kept
    assert folders.remove(str(tmp_path / "none")) == ()


def test_leftovers_are_the_files_of_saves_that_the_manifest_does_not_name(tmp_path):
    _, name = save(tmp_path)
    left = [folders.file_name(OTHER, 0, 0), f"manifest.json.{OTHER}.partial"]
    for other in [*left, "notes"]:
        (tmp_path / other).touch()
    assert folders.remove_leftovers(str(tmp_path)) == left
    assert set(os.listdir(tmp_path)) == {"manifest.json", name, "notes"}
