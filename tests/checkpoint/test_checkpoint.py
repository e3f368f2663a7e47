"""Checkpoints: what is written, read back, refused and left behind; and that training goes on from one bit
for bit."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import gc
import inspect
import itertools
import json
import logging
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import checkpoint_faults
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dtype_examples import AS_BYTES, NATIVE, example
from jax.sharding import PartitionSpec as P
from models import gpt, grads_step, mlp
from resources import inspect_actors
from train_gpt import Pipeline

import jaxpp_async as jpp
from gpt import data, report
from gpt.options import parse_options
from jaxpp_async.actors import checkpoint_requests
from jaxpp_async.checkpoint import manifest as m
from jaxpp_async.checkpoint import trees
from jaxpp_async.checkpoint.restore import load_manifest
from jaxpp_async.errors import ActorDiedError, ArrayError, CheckpointError, MeshError
from jaxpp_async.storage import checkpoint_folder, tensor_files
from jaxpp_async.testing import assert_close

pytestmark = pytest.mark.filterwarnings("error")

MODEL = mlp(2)


def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    params, grads, losses = grads_step(MODEL, jpp.Std1F1B(2))(state["params"], batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    return {"params": params, "momentum": momentum, "count": state["count"] + 1}, losses


def new_state() -> Any:
    params = MODEL.init(0)
    return {"params": params, "momentum": jax.tree.map(np.zeros_like, params), "count": np.int32(0)}


def batch(number: int) -> Any:
    return MODEL.batch(number, 4)


def equal(actual: Any, expected: Any) -> None:
    """Bit for bit, also in structure."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert [bits(leaf) for leaf in jax.tree.leaves(actual)] == [
        bits(leaf) for leaf in jax.tree.leaves(expected)
    ]


def bits(x: Any) -> Any:
    """What a leaf is, in plain values."""
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return str(jax.random.key_impl(x)), bits(jax.random.key_data(x))
    if isinstance(x, np.ndarray | np.generic | jax.Array):
        array = np.asarray(x)
        array = array.astype(array.dtype.newbyteorder("<"))
        return array.dtype.name, array.shape, array.tobytes()
    return x


@pytest.fixture
async def mesh(remote_mesh) -> jpp.RemoteMesh:
    return await remote_mesh(2, launcher="inline")


# ---------------------------------------------------------------- files


def cut(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def zeros(path: pathlib.Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def header(path: pathlib.Path) -> None:
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def renamed(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"float32", b"float64").replace(b'"F32"', b'"I32"'))


BROKEN = [
    (cut, "was cut off"),
    (flip, "is corrupt: its SHA-256"),
    (zeros, "cannot be read|has no array"),
    (header, "is no safetensors file"),
    (renamed, "by the manifest"),
    (pathlib.Path.unlink, "is missing"),
    (lambda path: path.write_bytes(b""), "was cut off"),
]


# ---------------------------------------------------------------- manifest and paths


def manifest() -> m.Manifest:
    values: Any = {
        "step": 3,
        "big": 1 << 100,
        "nan": float("nan"),
        "x": 0.1,
        "c": 1 - 2j,
        "s": "\N{SNOWMAN}",
        "b": True,
    }
    arrays = {"w/0": m.Array("f", "float32", (2, 3), "00"), "key": m.Array("f", "uint32", (2,), "01", "fry")}
    return m.Manifest({"f": m.File(32, "actor 0")}, arrays, values)


def test_a_manifest_round_trips():
    again = m.parse(m.to_text(manifest()))
    assert repr(again) == repr(manifest())  # NaN equals nothing
    assert {p: type(v) for p, v in again.values.items()} == {p: type(v) for p, v in manifest().values.items()}


@pytest.mark.parametrize(
    ("shape", "cells", "is_whole"),
    [
        ((4,), [((0,), (2,)), ((2,), (2,))], True),
        ((4,), [((0,), (2,)), ((0,), (2,))], False),
        ((4,), [((0,), (2,)), ((1,), (2,))], False),
        ((2, 2), [((i, j), (1, 1)) for i in (0, 1) for j in (0, 1)], True),
        # a part of one piece beside one of two; one beside two that overlap, with one element missing
        ((2, 2), [((0, 0), (1, 2)), ((1, 0), (1, 1)), ((1, 1), (1, 1))], True),
        ((2, 2), [((0, 0), (2, 1)), ((0, 1), (1, 1)), ((1, 1), (1, 1))], True),
        ((2, 3), [((0, 0), (1, 2)), ((1, 0), (1, 2)), ((1, 1), (1, 2))], False),
        ((2, 2), [((0, 0), (1, 2)), ((0, 0), (2, 1))], False),
        ((2, 2), [((0, 0), (1, 1)), ((1, 1), (1, 1)), ((0, 0), (1, 2))], False),
        ((0, 3), [((0, 0), (0, 3)), ((0, 0), (0, 3))], True),
        ((), [((), ()), ((), ())], False),
        ((), [((), ())], True),
    ],
)
def test_pieces_are_all_of_an_array(shape, cells, is_whole):
    pieces = tuple(m.Piece("f", f"w[{k}]", *cell, "00") for k, cell in enumerate(cells))
    text = m.to_text(
        m.Manifest({"f": m.File(8, "actor 0")}, {"w": m.Array("f", "float32", shape, "", None, pieces)}, {})
    )
    if is_whole:
        assert m.parse(text).arrays["w"].pieces == pieces
    else:
        with pytest.raises(CheckpointError, match=r"are no array|overlap, or are no grid"):
            m.parse(text)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"value": 3', '"value": 4', "its checksum is not"),
        ('"version": 1', '"version": 2', "version 2; this package reads version 1"),
        (m.FORMAT, "other", "is not the manifest"),
        ("}", "", "is no JSON, or was cut off"),
    ],
)
def test_a_manifest_that_was_changed(old, new, said):
    with pytest.raises(CheckpointError, match=said):
        m.parse(m.to_text(manifest()).replace(old, new))


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        ({"a": [1, {"b": 2}], "c": (3,)}, ["a/0", "a/1/b", "c/0"]),
        ({"a/b": 1, "a": {"b": 2}, "~": 3}, ["a/b", "a~1b", "~0"]),
        (5, ["."]),
        ({}, []),
        ([None, 1], ["1"]),
    ],
)
def test_paths(tree, paths):
    assert list(trees.named_leaves(tree)) == paths


def test_writers_share_the_bytes():
    sizes = {"embed": 100, "a": 60, "b": 10, "both": 40}
    holders = {"embed": (0, 1), "a": (0,), "b": (1,), "both": (0, 1)}
    assert m.assign_writers(sizes, holders) == {0: ["a", "both"], 1: ["embed", "b"]}
    assert m.split_into_files(["embed", "a", "b"], sizes, 70) == [["embed"], ["a", "b"]]
    assert m.split_into_files([], sizes, 70) == []


# ---------------------------------------------------------------- saving and restoring


async def test_a_save_sees_the_step_before_it_and_not_the_one_behind(mesh, tmp_path):
    step = mesh.distributed(train_step, donate_argnums=0)
    state, _ = await mesh.run(step, new_state(), batch(0))
    expected = await mesh.fetch(state)
    first = await mesh.submit(step, state, batch(1))  # donates `state` while nothing has been written
    saving = await mesh.save(tmp_path / "a", {"state": first.outputs[0]}, wait=False)
    second = await mesh.submit(step, first.outputs[0], batch(2))
    await saving
    assert saving.done() and saving.written_bytes == saving.size_bytes > 0
    plain, _ = jax.jit(train_step)(expected, batch(1))
    await second
    saved = (await mesh.restore(tmp_path / "a", {"state": (step, 0)}))["state"]
    assert_close(await mesh.fetch(saved), plain)
    state, _ = await mesh.run(step, saved, batch(2))
    equal(await mesh.fetch(state), await mesh.fetch(second.outputs[0]))


def zoo() -> dict[str, Any]:
    """A leaf of every kind that steps know; those of 64 bits are for the host alone."""
    narrow = [d for d in NATIVE + AS_BYTES if "64" not in d and "128" not in d] + ["complex64"]
    return {
        "arrays": {d: example(d) for d in narrow},
        "scalar": np.float32(3.5),
        "keys": {
            "new": jax.random.split(jax.random.key(0), 3),
            "old": jax.random.PRNGKey(1),
            "rbg": jax.random.key(2, impl="rbg"),
        },
    }


def host() -> dict[str, Any]:
    rng = np.random.default_rng(3).bit_generator.state
    plain = {"int": -7, "float": 0.1, "complex": 1 + 2j, "str": "text", "bool": True, "inf": float("-inf")}
    big = np.arange(6, dtype=">f8").reshape(3, 2).T
    return {"wide": example("int64"), "double": big, "jax": jnp.arange(3), "rng": rng, "plain": plain}


async def saved_zoo(mesh: jpp.RemoteMesh, path: pathlib.Path) -> dict[str, Any]:
    step = mesh.distributed(lambda tree: jax.tree.map(lambda x: x, tree))
    on_actors = await mesh.run(step, zoo())
    tree = {"actors": on_actors, "waiting": await mesh.put(zoo()), "host": host()}
    await mesh.save(path, tree)
    return {"actors": zoo(), "waiting": zoo(), "host": host()}


async def test_leaves_of_every_kind_come_back_as_like_says(mesh, tmp_path):
    expected = await saved_zoo(mesh, tmp_path)
    assert not list(tmp_path.glob("*.partial"))
    equal(await mesh.restore(tmp_path, expected), expected)
    shapes = jax.tree.map(lambda x: x if isinstance(x, str) else jax.typeof(x), zoo())
    shapes = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype), shapes)
    restored = await mesh.restore(tmp_path, {"actors": shapes, "waiting": shapes, "host": host()})
    assert {x.actors for x in jax.tree.leaves(restored["actors"])} == {()}
    equal(await mesh.fetch(restored["waiting"]), zoo())
    again = await mesh.restore(tmp_path, {**restored, "actors": restored["waiting"]})
    equal(await mesh.fetch(again["actors"]), zoo())


async def test_plain_jax_reads_it_without_this_package(mesh, tmp_path):
    expected = await saved_zoo(mesh, tmp_path / "checkpoint")
    docs = (pathlib.Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    reader = next(
        b for b in re.findall(r"^```python\n(.*?)^```", docs, re.DOTALL | re.MULTILINE) if "def load" in b
    )
    main = f"""
import sys
sys.modules["jaxpp_async"] = None  # an import of it fails
import numpy as np
from reader import jax, load
{inspect.getsource(bits)}
print(repr({{path: bits(leaf) for path, leaf in load(sys.argv[1]).items()}}))
"""
    (tmp_path / "reader.py").write_text(reader)
    (tmp_path / "main.py").write_text(main.replace("(x: Any) -> Any", "(x)"))
    command = [sys.executable, str(tmp_path / "main.py"), str(tmp_path / "checkpoint")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = eval(done.stdout, {"inf": float("inf")})
    assert found == {path: bits(leaf) for path, leaf in trees.named_leaves(expected).items()}


async def test_an_array_on_two_actors_is_written_once(mesh, tmp_path):
    model = gpt(2, layers=2, tied=True)
    step = mesh.distributed(grads_step(model, jpp.Std1F1B(2)))
    params, _, _ = await mesh.run(step, model.init(0), model.batch(0, 2))
    both = [path for path, array in trees.named_leaves(params).items() if len(array.actors) == 2]
    assert both
    await mesh.save(tmp_path, {"again": params, "params": params})
    arrays = load_manifest(str(tmp_path)).arrays
    assert len(arrays) == 2 * len(jax.tree.leaves(params))
    size = sum(array.nbytes for array in jax.tree.leaves(params))
    headers = sum(8 + int.from_bytes(f.read_bytes()[:8], "little") for f in tmp_path.glob("*.safetensors"))
    assert sum(f.stat().st_size for f in tmp_path.glob("*.safetensors")) == 2 * size + headers
    restored = await mesh.restore(tmp_path, {"again": (step, 0), "params": params})
    equal(await mesh.fetch(restored["again"]), await mesh.fetch(params))
    assert [a.actors for a in jax.tree.leaves(restored["again"])] == [
        a.actors for a in jax.tree.leaves(params)
    ]


@pytest.fixture
def reads(monkeypatch) -> dict[int, list[str]]:
    """What each actor reads."""
    found: dict[int, list[str]] = {}
    original = checkpoint_requests._read_and_place

    def read(message: Any, layouts: Any) -> Any:
        found.setdefault(id(layouts), []).extend(part.name for part in message.parts)
        return original(message, layouts)

    monkeypatch.setattr(checkpoint_requests, "_read_and_place", read)
    return found


async def test_another_number_of_actors_schedule_and_sharding(reads, mesh, remote_mesh, tmp_path):
    step = mesh.distributed(train_step, donate_argnums=0)
    state, _ = await mesh.run(step, new_state(), batch(0))
    await mesh.save(tmp_path, state)
    expected = await mesh.fetch(state)
    again = await mesh.restore(tmp_path, (step, 0))
    homes = [path for path, a in trees.named_leaves(again).items() for _ in a.actors]
    # nobody reads what it does not hold
    assert len(reads) == 2 and sorted(itertools.chain(*reads.values())) == sorted(homes)
    assert not set.intersection(*({*names} for names in reads.values())) - {
        p for p in homes if homes.count(p) == 2
    }
    _, losses = await mesh.run(step, again, batch(1))

    other = await remote_mesh(1, launcher="inline", spmd_mesh={"data": 2, "model": 2})
    specs = jax.tree.map(lambda x: P("model") if x.ndim else P(), expected)
    there = other.distributed(train_step, in_shardings=(specs, None)).with_schedule(jpp.GPipe(2))
    await there.compile(expected, batch(1))
    moved = await other.restore(tmp_path, (there, 0))
    assert moved["params"]["head"].spec[0] == "model"
    equal(await other.fetch(moved), expected)
    _, other_losses = await other.run(there, moved, batch(1))
    assert_close(await other_losses, await losses)

    await other.save(tmp_path, moved)  # in place of the other, and with other writers
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    equal(await mesh.fetch(await mesh.restore(tmp_path, (step, 0))), expected)


def struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


SAVED = {"w": np.zeros((2, 3), np.float32), "n": 5, "key": jax.random.key(0), "s": "text"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"w": struct((3, 2), "float32")},
            r"'w' is float32\[2, 3\] in the checkpoint, but float32\[3, 2\] in `like`",
        ),
        ({"w": struct((2, 3), "bfloat16")}, r"'w' is float32\[2, 3\] .* but bfloat16\[2, 3\] in `like`"),
        ({"w": 1.0}, r"'w' is float32\[2, 3\] .* but a Python float"),
        ({"n": 5.0}, "'n' is a Python int in the checkpoint, but a Python float"),
        ({"n": struct((), "float32")}, r"'n' is a Python int .* but float32\[\]"),
        ({"s": struct((), "int32")}, r"'s' is a Python str .* but int32\[\]"),
        (
            {"key": jax.random.key(0, impl="rbg")},
            r"'key' is uint32\[2\] \(data of threefry2x32 keys\) .* \(data of rbg keys\)",
        ),
        (
            {"key": jax.random.PRNGKey(0)},
            r"'key' is uint32\[2\] \(data of threefry2x32 keys\) .* but uint32\[2\] in",
        ),
        (
            {"new": 1},
            "`like` has a Python int at 'new', where the checkpoint has nothing; leave out of `like`",
        ),
        (
            {"w": {"v": 1}},
            r"`like` has a Python int at 'w/v', .* nothing; only the checkpoint has 'w'; leave out",
        ),
        (
            {"w": None},
            r"the checkpoint has float32\[2, 3\] at 'w', where `like` has nothing; add it .* and drop",
        ),
        ({"w": object()}, r"`like\['w'\]` is a object; give"),
        ({"w": [1, {2}]}, r"`like\['w'\]\[1\]` is a set; give"),
    ],
)
async def test_a_like_that_does_not_match(mesh, tmp_path, change, said):
    await mesh.save(tmp_path, SAVED)
    with pytest.raises(CheckpointError, match=said):
        await mesh.restore(tmp_path, {**SAVED, **change})
    restored = await mesh.restore(tmp_path, {**SAVED, "n": struct((), "int32")})
    assert await restored["n"] == 5


async def test_a_like_without_keys(mesh, tmp_path):
    step = mesh.distributed(lambda a, b, c: (b, a))
    await step.compile(np.zeros(2, np.float32), np.zeros(3, np.float32), None)
    await mesh.save(tmp_path, np.zeros(2, np.float32))
    cases = {
        r"^`like` itself is a step; write `\(step, 0\)`, a tuple": step,
        r"^`like\[0\]` is a step; write `\(step, 0\)`, a tuple": [step, 0],
        r"^`like` itself is a object; give \(step, argnum\)": object(),
        r"^`like` has \(step, 2\): .* no argument 2 with arrays in it; arguments 0, 1 have$": (step, 2),
        r"no argument 5 with arrays in it; arguments 0, 1 have$": (step, 5),
        r"the root is float32\[2\] in the checkpoint, but float32\[3\] in `like`": (step, 1),
        r"`like` has a Python int at 'x', .* nothing; only the checkpoint has the root": {"x": 1},
    }
    for said, like in cases.items():
        with pytest.raises(CheckpointError, match=said):
            await mesh.restore(tmp_path, like)
    equal(await mesh.fetch(await mesh.restore(tmp_path, (step, 0))), np.zeros(2, np.float32))


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (object(), "x is a object, which a checkpoint cannot hold"),
        (b"bytes", "x is a bytes"),
        (np.array(["a"]), "x is a numpy array of dtype <U1"),
        (np.array([None]), "x is a numpy array of dtype object"),
        (np.zeros(2, [("a", "f4")]), "x is a numpy array of dtype"),
        (np.zeros(2, "M8[s]"), "x is a numpy array of dtype"),
    ],
)
async def test_leaves_that_cannot_be_saved(mesh, tmp_path, leaf, said):
    with pytest.raises(CheckpointError, match=re.escape(said)):
        await mesh.save(tmp_path / "a", {"x": leaf, "y": 1})
    assert not os.listdir(tmp_path)


async def test_arrays_that_are_gone_or_elsewhere(mesh, remote_mesh, tmp_path):
    step = mesh.distributed(lambda x: x + 1)
    array = await mesh.run(step, np.zeros(3, np.float32))
    other = await remote_mesh(1, launcher="inline", spmd_mesh={"data": 2, "model": 2})
    with pytest.raises(ArrayError, match="x is a RemoteArray of another mesh"):
        await other.save(tmp_path / "a", {"x": array})
    await array.delete()
    with pytest.raises(ArrayError, match="x cannot be used: it was deleted"):
        await mesh.save(tmp_path / "a", {"x": array})
    assert not os.listdir(tmp_path)


# ---------------------------------------------------------------- paths

ODD = [
    b"with space",
    b"new\nline",
    b"not-utf8-\xff\xfe",
    "\N{SNOWMAN}".encode(),
    b"-rf %s {x} \\",
    b"\x1b[31m",
]


@pytest.mark.parametrize("name", ODD, ids=ascii)
async def test_any_name_that_a_file_system_allows(mesh, tmp_path, name, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    path = os.path.join(os.fsencode(tmp_path), name)
    array = await mesh.run(mesh.distributed(lambda x: x + 1), np.zeros(3, np.float32))
    tree = {"on an actor": array, "here": np.arange(3)}
    for given in (path, pathlib.Path(os.fsdecode(path))):
        saving = await mesh.save(given, tree)
        assert saving.path == os.fsdecode(path) and repr(saving).encode()
        equal(await mesh.fetch(await mesh.restore(given, tree)), await mesh.fetch(tree))
    assert os.listdir(os.fsencode(tmp_path)) == [name]
    file = next(name for name in os.listdir(saving.path) if name.endswith("-actor-0-0.safetensors"))
    flip(pathlib.Path(saving.path, file))
    with pytest.raises(CheckpointError, match="is corrupt") as error:
        await mesh.restore(path, tree)
    assert str(error.value).encode() and "\n" not in str(error.value).partition("is corrupt")[0]
    async with jpp.Checkpoints(mesh, path, keep=1) as checkpoints:
        for number in (1, 2):
            await checkpoints.save(number, tree)
    equal(await mesh.fetch(await checkpoints.restore(tree)), await mesh.fetch(tree))
    assert caplog.text.encode() and "UnicodeEncodeError" not in capfd.readouterr().err


async def test_a_save_that_could_not_begin_says_only_that(mesh, tmp_path, caplog):
    """It has written nothing that could be left over."""
    (tmp_path / "file").touch()
    for name in ("file", "file/in it", "x" * 300):
        with pytest.raises(CheckpointError, match="could not be saved: "):
            await mesh.save(tmp_path / name, [await mesh.put(np.ones(3, np.float32))])
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["with\0nul", b"with\0nul", "half \ud800"], ids=ascii)
async def test_names_that_no_file_can_have(mesh, tmp_path, name):
    path = os.path.join(tmp_path if isinstance(name, str) else os.fsencode(tmp_path), name)
    with pytest.raises(CheckpointError, match="no folder can have this name") as error:
        await mesh.save(path, {"x": 1})
    assert str(error.value).encode()
    with pytest.raises(CheckpointError, match="no folder can have this name"):
        await mesh.restore(path, {"x": 1})
    with pytest.raises(CheckpointError, match="no folder can have this name"):
        jpp.Checkpoints(mesh, path)
    with pytest.raises(CheckpointError, match="File name too long"):
        await mesh.save(tmp_path / ("x" * 300), {"x": 1})
    assert not os.listdir(tmp_path)


# ---------------------------------------------------------------- restoring without a compiled step


@pytest.mark.parametrize("name", ["file/x", "x" * 300, "file"])
async def test_a_save_that_could_not_begin_has_nothing_to_remove(mesh, tmp_path, name, caplog):
    (tmp_path / "file").write_text("in the way")
    array = await mesh.run(mesh.distributed(lambda x: x + 1), np.zeros(3, np.float32))
    with pytest.raises(CheckpointError, match=r"Not a directory|File name too long|File exists"):
        await mesh.save(tmp_path / name, {"on an actor": array, "here": np.arange(3)})
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize("path", ["", b""])
async def test_an_empty_path_is_no_folder(mesh, tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    said = r"^the path of a checkpoint is empty; name a folder \('.' is the working directory\)$"
    with pytest.raises(CheckpointError, match=said):
        await mesh.save(path, {"x": 1})
    with pytest.raises(CheckpointError, match=said):
        await mesh.restore(path, {"x": 1})
    with pytest.raises(CheckpointError, match=said):
        jpp.Checkpoints(mesh, path)
    assert not os.listdir(tmp_path)
    await mesh.save(".", {"x": 1})
    assert await mesh.restore(tmp_path, {"x": 0}) == {"x": 1}


async def test_an_abstract_state_stands_in_for_a_compiled_step(mesh, remote_mesh, tmp_path):
    step = mesh.distributed(train_step)
    state, _ = await mesh.run(step, new_state(), batch(0))
    await mesh.save(tmp_path, {"state": state, "key": jax.random.key(3), "step": 7})
    expected = await mesh.run(step, state, batch(1))
    fresh = await remote_mesh(2, launcher="inline", max_restarts=1)
    uncompiled = fresh.distributed(train_step)
    with pytest.raises(
        CheckpointError, match=r"step 'train_step' has not been compiled.*jax.eval_shape.*step.compile"
    ):
        await fresh.restore(tmp_path, {"state": (uncompiled, 0), "key": jax.random.key(0), "step": 0})
    like = {"state": jax.eval_shape(new_state), "key": jax.eval_shape(lambda: jax.random.key(0)), "step": 0}
    restored = await fresh.restore(tmp_path, like)
    assert restored["step"] == 7 and {x.actors for x in jax.tree.leaves(restored["state"])} == {()}
    actual = await fresh.run(uncompiled, restored["state"], batch(1))
    equal(await fresh.fetch(actual), await mesh.fetch(expected))
    assert await fresh.fetch(restored["key"]) == jax.random.key(3)
    await uncompiled.compile(like["state"], batch(0))  # no values: the shapes tell where each leaf goes
    again = await fresh.restore(tmp_path, {**like, "state": (uncompiled, 0)})
    assert all(x.actors for x in jax.tree.leaves(again["state"]))
    equal(await fresh.fetch(await fresh.run(uncompiled, again["state"], batch(1))), await fresh.fetch(actual))


async def test_a_path_without_a_checkpoint_says_what_is_there(mesh, tmp_path):
    series = tmp_path / "run"
    async with jpp.Checkpoints(mesh, series, keep=9) as checkpoints:
        for number in (2, 4):
            await checkpoints.save(number, {"x": number})
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").touch()
    await mesh.save(tmp_path / "named" / "a", {"x": 1})
    broken = series / "00000006"
    broken.mkdir()
    (broken / "0123456789abcdef-actor-0-0.safetensors.partial").touch()
    for path, said in {
        series: r"is a folder of checkpoints, 00000004, 00000002; give one of them \(.*/00000004\), "
        r"or .*Checkpoints\(",
        series / "00000009": "there is no such folder; in .*run there are 00000004, 00000002$",
        broken: r"manifest\.json is missing: a save was broken off here, .*; "
        r"in .*run there are 00000004, 00000002$",
        series / "00000002" / "manifest.json": "it is a file; give the folder that it is in: .*/00000002$",
        tmp_path / "named": r"is a folder of checkpoints, a; give one of them \(.*/named/a\)$",
        tmp_path / "notes" / "a.txt": "it is a file$",
        tmp_path / "notes": "in it are a.txt; nor is there one in it or beside it$",
        tmp_path / "empty": "it is empty; nor is there one in it or beside it$",
        tmp_path / "no" / "where": "there is no such folder; nor is there one in it or beside it$",
    }.items():
        with pytest.raises(CheckpointError, match=said):
            await mesh.restore(path, {"x": 0})


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"half \ud800": 1}, "'half \\\\ud800': this key of the tree is no text"),
        ({"x": "half \ud800"}, "x is a str with surrogates in it.*np.frombuffer"),
        ({"x": 10**4200}, "x is a whole number of more than 4000 digits"),
    ],
)
async def test_text_and_numbers_that_no_manifest_can_hold(mesh, tmp_path, tree, said):
    with pytest.raises(CheckpointError, match=said):
        await mesh.save(tmp_path / "a", tree)
    assert not os.listdir(tmp_path)


# ---------------------------------------------------------------- failures


async def saved_twice(mesh: jpp.RemoteMesh, folder: pathlib.Path) -> tuple[Any, Any]:
    """A step on both actors, its state, and checkpoints of it in `old` and `new`."""
    step = mesh.distributed(train_step)
    state, _ = await mesh.run(step, new_state(), batch(0))
    await mesh.save(folder / "old", state)
    await mesh.save(folder / "new", state)
    return step, state


async def test_broken_checkpoints_name_file_and_cause(mesh, tmp_path):
    step, state = await saved_twice(mesh, tmp_path)
    for breaks, said in BROKEN:
        await mesh.save(tmp_path / "new", state)
        path = sorted((tmp_path / "new").glob("*-actor-1-0.safetensors"))[0]
        breaks(path)
        async with asyncio.timeout(5):
            with pytest.raises(CheckpointError, match=said) as caught:
                await mesh.restore(tmp_path / "new", (step, 0))
        assert str(path) in str(caught.value)
    for content, said in [
        ("{", "manifest.json: is no JSON"),
        ('{"format": 1}', "manifest.json: is not the manifest"),
    ]:
        (tmp_path / "new" / "manifest.json").write_text(content)
        with pytest.raises(CheckpointError, match=said):
            await mesh.restore(tmp_path / "new", (step, 0))
    (tmp_path / "new" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"new: .* manifest\.json is missing: .*; in .* there are old$"):
        await mesh.restore(tmp_path / "new", (step, 0))
    equal(await mesh.fetch(await mesh.restore(tmp_path / "old", (step, 0))), await mesh.fetch(state))


async def held(mesh: jpp.RemoteMesh) -> dict[str, Any]:
    gc.collect()  # what earlier tests left
    numbers = await inspect_actors(mesh._running())
    return {
        f"{actor} {name}": n
        for actor, ns in numbers.items()
        for name, n in ns.items()
        if name == "store_arrays"
    }


async def test_a_failed_restore_leaves_no_arrays(mesh, tmp_path):
    step, _ = await saved_twice(mesh, tmp_path)
    before = await held(mesh)
    flip(sorted((tmp_path / "new").glob("*-actor-1-0.safetensors"))[0])
    with contextlib.suppress(CheckpointError):
        await mesh.restore(tmp_path / "new", (step, 0))
    assert await held(mesh) == before


def full_disk(*args: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["_write_array", "commit", "make"])
async def test_a_full_disk(mesh, tmp_path, monkeypatch, where):
    _, state = await saved_twice(mesh, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(tensor_files if where == "_write_array" else checkpoint_folder, where, full_disk)
    for folder in ("new", "a/b/c"):
        async with asyncio.timeout(5):
            with pytest.raises(CheckpointError, match=f"{tmp_path}/{folder}.*No space left on device"):
                await mesh.save(tmp_path / folder, {"state": state, "host": np.zeros(3)})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]
    monkeypatch.undo()
    await mesh.save(tmp_path / "new", state)


class Gate:
    """Holds threads that write until it is opened."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop, self.reached, self.open = loop, asyncio.Event(), threading.Event()

    def __call__(self, original: Any) -> Any:
        def write(file: Any, array: Any, is_stopped: Any) -> Any:
            self._loop.call_soon_threadsafe(self.reached.set)
            while not self.open.wait(0.01):
                if is_stopped():
                    raise InterruptedError
            return original(file, array, is_stopped)

        return write


@pytest.fixture
async def gate(monkeypatch) -> AsyncIterator[Gate]:
    gate = Gate(asyncio.get_running_loop())
    monkeypatch.setattr(tensor_files, "_write_array", gate(tensor_files._write_array))
    yield gate
    gate.open.set()


@pytest.mark.parametrize("how", ["task", "handle", "at once"])
async def test_a_cancelled_save_leaves_nothing(mesh, tmp_path, gate, how):
    step = mesh.distributed(train_step)
    state, _ = await mesh.run(step, new_state(), batch(0))
    tree = {"state": state, "host": np.zeros(3)}
    async with asyncio.timeout(10):
        if how == "task":
            saving = asyncio.ensure_future(mesh.save(tmp_path / "a" / "b", tree))
            await gate.reached.wait()
            saving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await saving
        else:
            saving = await mesh.save(tmp_path / "a" / "b", tree, wait=False)
            if how == "handle":
                await gate.reached.wait()
            await saving.cancel()
            with pytest.raises(CheckpointError, match="b: the save was cancelled"):
                await saving
        assert not os.listdir(tmp_path)
        gate.open.set()
        await mesh.save(tmp_path / "a" / "b", tree)
        equal(await mesh.fetch(await mesh.restore(tmp_path / "a" / "b", tree)), await mesh.fetch(tree))


def held_back(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> tuple[asyncio.Event, threading.Event]:
    """Holds threads that come to a function.

    Returns:
        Set when the first has come; to be set to let them go on.
    """
    loop, original = asyncio.get_running_loop(), getattr(module, name)
    reached, go_on = asyncio.Event(), threading.Event()

    def wait(*args: Any) -> Any:
        loop.call_soon_threadsafe(reached.set)
        assert go_on.wait(10)
        return original(*args)

    monkeypatch.setattr(module, name, wait)
    return reached, go_on


@pytest.mark.parametrize("series", [False, True])
async def test_what_is_replaced_while_it_is_restored_is_restored_as_it_is_then(
    mesh, tmp_path, monkeypatch, series
):
    """A save removes the files of the checkpoint before it: whoever reads that begins anew."""
    step = mesh.distributed(train_step)
    old, _ = await mesh.run(step, new_state(), batch(0))
    new, _ = await mesh.run(step, old, batch(1))
    checkpoints = jpp.Checkpoints(mesh, tmp_path, keep=1)
    async with asyncio.timeout(20):
        await checkpoints.save(1, old, wait=True)
        reached, go_on = held_back(monkeypatch, tensor_files, "read")
        like = (step, 0)
        restoring: Any = checkpoints.restore(like) if series else mesh.restore(checkpoints.path(1), like)
        found = asyncio.ensure_future(restoring)
        await reached.wait()
        await checkpoints.save(2 if series else 1, new, wait=True)
        go_on.set()
        equal(await mesh.fetch(await found), await mesh.fetch(new))


async def test_a_save_that_is_cancelled_twice_while_it_commits_is_whole_or_absent(
    mesh, tmp_path, monkeypatch
):
    state, _ = await mesh.run(mesh.distributed(train_step), new_state(), batch(0))
    reached, go_on = held_back(monkeypatch, checkpoint_folder, "commit")
    (tmp_path / "a").mkdir()
    async with asyncio.timeout(20):
        saving = await mesh.save(tmp_path / "a", state, wait=False)
        await reached.wait()
        cancels = []
        for _ in range(2):
            cancels.append(asyncio.ensure_future(saving.cancel()))
            await asyncio.sleep(0.2)  # to clean up, if it would
        go_on.set()
        await asyncio.gather(*cancels)
        equal(await mesh.fetch(await mesh.restore(tmp_path / "a", state)), await mesh.fetch(state))
        await saving  # it was too late to stop it


async def test_a_save_begins_when_the_sweep_of_a_cancelled_one_is_over(mesh, tmp_path, monkeypatch):
    """A late sweep would take the folder away in which the new save begins."""
    step = mesh.distributed(train_step)
    old, _ = await mesh.run(step, new_state(), batch(0))
    new, _ = await mesh.run(step, old, batch(1))
    reached, go_on = held_back(monkeypatch, checkpoint_requests, "_sweep")
    async with asyncio.timeout(20):
        first = await mesh.save(tmp_path / "a", old, wait=False)
        await reached.wait()
        await first.cancel()
        second = asyncio.ensure_future(mesh.save(tmp_path / "a", new))
        await asyncio.sleep(0.5)  # to commit, if it would
        go_on.set()
        await second
        equal(await mesh.fetch(await mesh.restore(tmp_path / "a", new)), await mesh.fetch(new))
        await first  # it was whole already


async def test_training_goes_on_and_the_next_save_waits(mesh, tmp_path, gate):
    step = mesh.distributed(train_step, donate_argnums=0)
    state, _ = await mesh.run(step, new_state(), batch(0))
    expected = await mesh.fetch(state)
    told: list[float] = []
    first = await mesh.save(
        tmp_path / "1", state, wait=False, on_progress=lambda s: told.append(s.written_bytes)
    )
    await gate.reached.wait()
    for number in range(1, 4):  # donates what is being saved, and the one after
        state, _ = await mesh.run(step, state, batch(number))
    second = asyncio.ensure_future(mesh.save(tmp_path / "2", state))
    waiting = asyncio.shield(first)  # type: ignore[arg-type]
    waiting.cancel()
    assert not first.done() and not second.done() and not (tmp_path / "2").exists()
    gate.open.set()
    await second
    assert first.done() and told and told[-1] == first.size_bytes and told == sorted(told)
    equal(await mesh.fetch(await mesh.restore(tmp_path / "1", (step, 0))), expected)
    equal(await mesh.fetch(await mesh.restore(tmp_path / "2", (step, 0))), await mesh.fetch(state))


async def test_a_mesh_that_closes_ends_its_save(tmp_path, gate, caplog):
    async with jpp.RemoteMesh(1, launcher="inline") as mesh:
        array = await mesh.run(mesh.distributed(lambda x: x + 1), np.zeros(3, np.float32))
        saving = await mesh.save(tmp_path / "a", array, wait=False)
        await gate.reached.wait()
    assert "the mesh closed before this save was whole" in caplog.text
    with pytest.raises(CheckpointError, match="was cancelled"):
        await saving
    assert not os.listdir(tmp_path)


async def test_progress_that_fails_costs_no_checkpoint(mesh, tmp_path, caplog):
    await mesh.save(tmp_path, {"x": np.zeros(3)}, on_progress=lambda saving: 1 // 0)
    assert "ZeroDivisionError" in caplog.text
    equal(await mesh.restore(tmp_path, {"x": np.ones(3)}), {"x": np.zeros(3)})


# ---------------------------------------------------------------- a run's checkpoints


async def test_the_newest_few_stay_and_what_crashes_left_goes_when_it_is_asked_for(mesh, tmp_path):
    crashed = tmp_path / "00000009" / "0123456789abcdef-actor-0-0.safetensors.partial"
    crashed.parent.mkdir()
    crashed.write_bytes(b"crashed")
    (tmp_path / "notes").write_text("mine")
    async with jpp.Checkpoints(mesh, tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() is None
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            await checkpoints.restore({"x": 0})
        for number in (2, 4, 6, 8):
            saving = await checkpoints.save(number, {"x": number, "w": np.full(3, number)})
        await saving
        assert checkpoints.step_numbers() == [6, 8]
        other = tmp_path / "00000008" / crashed.name
        other.write_bytes(b"crashed, and saved again")
        assert await checkpoints.remove_leftovers() == [str(other), str(crashed)]
    assert sorted(os.listdir(tmp_path)) == ["00000006", "00000008", "notes"]
    like = {"x": 0, "w": np.zeros(3, int)}
    assert (await checkpoints.restore(like))["x"] == 8
    flip(next((tmp_path / "00000008").glob("*.safetensors")))
    with pytest.raises(CheckpointError, match="is corrupt") as caught:
        await checkpoints.restore(like)
    assert "restore(like, step_number=6)" in caught.value.__notes__[0]
    assert (await checkpoints.restore(like, step_number=6))["x"] == 6
    with pytest.raises(MeshError, match="keep is 0"):
        jpp.Checkpoints(mesh, tmp_path, keep=0)


async def test_leftovers_beside_a_single_checkpoint_go_when_it_is_asked_for(mesh, tmp_path):
    await mesh.save(tmp_path, {"x": np.ones(3)})
    whole = set(os.listdir(tmp_path))
    (crashed := tmp_path / "0123456789abcdef-actor-0-0.safetensors.partial").write_bytes(b"crashed")
    await mesh.save(tmp_path / "other", {"x": 1})
    assert crashed.exists()
    assert await jpp.Checkpoints(mesh, tmp_path).remove_leftovers() == [str(crashed)]
    assert set(os.listdir(tmp_path)) == whole | {"other"}


async def test_a_background_save_that_fails_is_raised_once_and_nothing_is_pruned(mesh, tmp_path, monkeypatch):
    async with jpp.Checkpoints(mesh, tmp_path, keep=1) as checkpoints:
        await checkpoints.save(1, {"x": np.zeros(3)}, wait=True)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_folder, "commit", full_disk)
            await checkpoints.save(2, {"x": np.zeros(3)})
            with pytest.raises(CheckpointError, match=r"00000002.*No space left"):
                await checkpoints.save(3, {"x": np.zeros(3)})
            seen = await checkpoints.save(4, {"x": np.zeros(3)})
            with pytest.raises(CheckpointError, match="00000004") as caught:
                await seen
            assert not [entry for entry in caught.traceback if "/jaxpp_async/" in str(entry.path)]
        assert os.listdir(tmp_path) == ["00000001"]
        await checkpoints.save(5, {"x": np.zeros(3)})
    assert os.listdir(tmp_path) == ["00000005"]


# ---------------------------------------------------------------- going on


async def train(
    mesh: jpp.RemoteMesh, step: Any, run: Any, last: int, checkpoints: Any = None
) -> tuple[Any, list[bytes]]:
    """Steps up to number `last`, saved after each; the run and each step's losses."""
    losses = []
    for number in range(run["step"] + 1, last + 1):
        rng = np.random.default_rng()
        rng.bit_generator.state = run["rng"]
        state, loss = await mesh.run(step, run["state"], batch(int(rng.integers(1000))))
        run = {"state": state, "step": number, "rng": rng.bit_generator.state}
        losses.append((await loss).tobytes())
        if checkpoints is not None:
            await checkpoints.save(number, run)
    return run, losses


async def test_after_a_full_disk_and_a_death_another_mesh_goes_on_bit_for_bit(remote_mesh, tmp_path, caplog):
    def start() -> Any:
        return {"state": new_state(), "step": 0, "rng": np.random.default_rng(0).bit_generator.state}

    mesh = await jpp.RemoteMesh(2, setup="checkpoint_faults:install", env=checkpoint_faults.ENV).__aenter__()
    try:
        step = mesh.distributed(train_step, donate_argnums=0)
        async with jpp.Checkpoints(mesh, tmp_path, keep=2) as checkpoints:
            run, losses = await train(mesh, step, start(), 3, checkpoints)
            bias = run["state"]["params"]["blocks"][1]["b"]
            async with asyncio.timeout(5):
                with pytest.raises(CheckpointError, match=r"00000004.*actor 1.*File too large"):
                    await checkpoints.save(4, {"full": bias, "w": run["state"]["params"]["head"]}, wait=True)
            assert sorted(os.listdir(tmp_path)) == ["00000002", "00000003"]
            async with asyncio.timeout(5):
                await checkpoints.save(4, {**run, "die": bias})
                with pytest.raises(ActorDiedError, match=r"^actor 1 .*killed by SIGKILL") as caught:
                    await checkpoints.wait()
            assert any(
                note.startswith(f"{tmp_path}/00000004 could not be s") for note in caught.value.__notes__
            )
            package = [entry for entry in caught.traceback if "/jaxpp_async/" in str(entry.path)]
            assert [entry.name for entry in package] == []
            assert "may be left" not in caplog.text
    finally:
        await mesh.aclose()
    assert sorted(os.listdir(tmp_path)) == ["00000002", "00000003"]

    mesh = await remote_mesh(2, launcher="local")
    step = mesh.distributed(train_step, donate_argnums=0)
    await step.compile(new_state(), batch(0))
    run = await jpp.Checkpoints(mesh, tmp_path).restore({**start(), "state": (step, 0)})
    _, more = await train(mesh, step, run, 6)
    _, undisturbed = await train(mesh, step, start(), 6)
    assert losses + more == undisturbed


@pytest.fixture
def tiny(tmp_path) -> Iterator[tuple[Any, Any]]:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 80)
    words = (
        "--launcher inline --steps 4 --save-every 2 --layers 2 --dim 8 --heads 2 --seq-len 8 "
        f"--microbatches 2 --batch-size 4 --data {text} --checkpoint-dir {tmp_path / 'run'} "
        f"--trace {tmp_path / 'trace.json'}"
    )
    options = parse_options(words.split())
    yield options, dataclasses.replace(options, resume=True)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--save-every 2", "--save-every 2 needs --checkpoint-dir"),
        ("--resume", "--resume needs the --checkpoint-dir"),
        ("--resume --checkpoint-dir {empty} --verify 1", "leave it out with --resume"),
        ("--checkpoint-dir {used}", "has checkpoints; add --resume"),
    ],
)
def test_options_of_train_gpt_that_do_not_go_together(line, said, tmp_path, capsys):
    (tmp_path / "used" / "00000004").mkdir(parents=True)
    (tmp_path / "used" / "00000004" / "manifest.json").touch()
    with pytest.raises(SystemExit):
        parse_options(line.format(empty=tmp_path / "empty", used=tmp_path / "used").split())
    assert said in capsys.readouterr().err


async def test_train_gpt_resumes_bit_for_bit(tiny, tmp_path, capsys):
    runs = []
    for options in tiny:
        corpus = data.load_corpus(options.data)
        batches = data.train_batches(corpus.train, options.batch_shape, options.seed)
        runs.append(Pipeline(options, report.Reporter()))
        await runs[-1].run(batches, data.validation_batches(corpus.validation, options.batch_shape, 1))
        shutil.rmtree(tmp_path / "run" / "00000004")  # as if it had been stopped after step 3
    whole, resumed = runs
    assert resumed.first_step == 2 and len(whole.losses) == 4
    assert resumed.losses == whole.losses[2:] and resumed.validation_loss == whole.validation_loss
    equal(resumed.params, whole.params)
    said = capsys.readouterr().out
    assert "going on after step 2" in said
    # the last three; two of them were resumed
    assert "trace of 3 steps: " in said and "trace of 2 steps: " in said
    traced = [
        e["name"] for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"
    ]
    assert "fwd(stage 0, mb 1)" in traced
    shutil.rmtree(tmp_path / "run")
    await _train_gpt_is_interrupted_and_resumes(tiny[1], whole)


class StoppedBatches(data.TrainBatches):
    """Who takes the third of these is cancelled, as by Ctrl-C, while its step is under way."""

    num_taken = 0

    def __next__(self) -> Any:
        self.num_taken += 1
        if self.num_taken == 3 and (task := asyncio.current_task()) is not None:
            asyncio.get_running_loop().call_soon(task.cancel)
        return super().__next__()


async def _train_gpt_is_interrupted_and_resumes(options: Any, whole: Pipeline) -> None:
    corpus = data.load_corpus(options.data)
    validation = data.validation_batches(corpus.validation, options.batch_shape, 1)
    stopped, resumed = Pipeline(options, report.Reporter()), Pipeline(options, report.Reporter())
    with pytest.raises(asyncio.CancelledError):
        batches = StoppedBatches(corpus.train, options.batch_shape, options.seed)
        await asyncio.create_task(stopped.run(batches, validation))
    await resumed.run(data.train_batches(corpus.train, options.batch_shape, options.seed), validation)
    assert resumed.first_step == 3 and resumed.losses == whole.losses[3:]
    equal(resumed.params, whole.params)
