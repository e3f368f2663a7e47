"""The command `checkpoint` (`jaxpp_async.commands.checkpoint`), on checkpoints of an inline mesh."""

from __future__ import annotations

import json
import shutil

import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import jaxpp_async as jpp
from jaxpp_async.checkpoint import manifest as m
from jaxpp_async.checkpoint.stored import load_manifest, read_arrays
from jaxpp_async.commands.app import app


@pytest.fixture(scope="module")
async def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    async with jpp.RemoteMesh(1, launcher="inline") as mesh:
        for number in (10, 20):
            tree = {"w": jnp.full((4, 3), number, jnp.bfloat16), "step": number, "b": jnp.zeros(5)}
            await mesh.save(folder / f"{number:08d}", tree)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def run(*arguments: object):
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)], env={"COLUMNS": "100"})


def test_checkpoints_are_listed_with_their_sizes(folder):
    done = run("ls", folder)
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["checkpoint", "00000010", "00000020"]
    found = json.loads(run("ls", folder, "--json").stdout)
    assert [row["leaves"] for row in found] == [3, 3]
    assert json.loads(run("ls", folder / "00000010", "--json").stdout)[0]["name"] == "."


def test_a_checkpoint_that_cannot_be_read_is_listed_as_such(folder):
    (folder / "00000010" / "manifest.json").write_text("{}")
    done = run("ls", folder)
    assert done.exit_code == 0 and "cannot be read" in done.stdout and "00000020" in done.stdout


def test_the_leaves_of_a_checkpoint_are_shown(folder):
    text = run("show", folder / "00000020").stdout
    assert "bfloat16[4, 3]" in text and "24 bytes" in text and "float32[5]" in text
    assert "3 leaves" in text
    found = json.loads(run("show", folder / "00000020", "--json").stdout)
    assert {row["path"]: row["bytes"] for row in found["arrays"]} == {"w": 24, "b": 20}
    assert found["values"] == {"step": "20"}


def test_a_leaf_in_pieces_is_shown_once_with_all_who_wrote_it(folder):
    path = folder / "00000020"
    one = load_manifest(str(path))
    w = one.arrays["w"]
    pieces = tuple(m.Piece(f, "w", (k, 0), (2, 3), "00") for k, f in ((0, w.file), (2, "other.safetensors")))
    files = {**one.files, "other.safetensors": m.File(8, "actor 1 on host far")}
    arrays = {**one.arrays, "w": m.Array(w.file, w.dtype, w.shape, "", None, pieces)}
    (path / "manifest.json").write_text(m.to_text(m.Manifest(files, arrays, one.values)))
    rows = json.loads(run("show", path, "--json").stdout)["arrays"]
    (by,) = [row["written_by"] for row in rows if row["path"] == "w"]
    assert by == f"{one.files[w.file].written_by}, actor 1 on host far"


def test_a_whole_checkpoint_is_verified(folder):
    done = run("verify", folder / "00000020")
    assert done.exit_code == 0 and done.stdout.startswith("2 arrays are whole")


def test_a_damaged_array_is_found_and_named(folder):
    manifest = load_manifest(str(folder / "00000020"))
    file = folder / "00000020" / manifest.arrays["w"].file
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    done = run("verify", folder / "00000020")
    assert done.exit_code == 1
    assert "corrupt" in done.stdout and "1 of 2 arrays are damaged" in done.stdout


def test_what_is_no_checkpoint_is_told(tmp_path):
    for command in ("ls", "show", "verify"):
        done = run(command, tmp_path / "nothing")
        assert done.exit_code == 1 and "there is no checkpoint" in done.stderr.replace("\n", " ")


def test_arrays_are_read_without_a_mesh(folder):
    path = str(folder / "00000010")
    assert read_arrays(path, load_manifest(path), ["w"])["w"].tolist() == [[10.0] * 3] * 4


def test_a_notebook_shows_the_same_facts(folder):
    html = jpp.Checkpoints(jpp.RemoteMesh(1, launcher="inline"), folder)._repr_html_()
    assert "2 complete, the newest of step 20" in html
    assert html.index(">20<") < html.index(">10<") and html.count(" B<") == 2
