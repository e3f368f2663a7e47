"""Checkpoints from anywhere: what a manifest or a file says is refused by name, costs no memory and leads
nowhere."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
from typing import Any

import pytest

from jaxpp_async.checkpoint import manifest as m
from jaxpp_async.checkpoint.stored import load_manifest
from jaxpp_async.errors import CheckpointError
from jaxpp_async.storage import checkpoint_folder, tensor_files
from jaxpp_async.storage.tensor_files import WantedArray

MIB = 1 << 20


def content() -> dict[str, Any]:
    """A manifest's fields, as JSON has them."""
    arrays = {
        "w": m.Array("a.safetensors", "float32", (4,), "00"),
        "k": m.Array("a.safetensors", "uint32", (2,), "01"),
    }
    text = m.to_text(m.Manifest({"a.safetensors": m.File(96, "actor 0")}, arrays, {"step": 3, "x": 0.5}))
    return json.loads(text)


def signed(fields: dict[str, Any]) -> str:
    """Whoever writes a manifest writes its checksum too: it is there against damage."""
    fields.pop("sha256", None)
    return json.dumps({**fields, "sha256": m._checksum(fields)})


def test_the_checksum_is_no_obstacle_to_a_forger():
    assert m.parse(signed(content())).values == {"step": 3, "x": 0.5}


NAMES = [
    "/etc/passwd",
    "../secret.safetensors",
    "..",
    ".",
    "",
    "a/b.safetensors",
    "a\\b",
    "-rf",
    ".hidden",
    "a\0b",
    "a\nb",
    "\ud800",
    "\N{SNOWMAN}",
    "a" * 300,
    "C:x",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_no_file_name_leads_out_of_the_folder(name):
    fields = content()
    fields["files"] = {name: fields["files"]["a.safetensors"]}
    for array in fields["arrays"].values():
        array["file"] = name
    with pytest.raises(CheckpointError, match="is no name of a file in this folder"):
        m.parse(signed(fields))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("file", "b.safetensors"),
        ("file", 5),
        ("file", ["a.safetensors"]),
        ("shape", [-1]),
        ("shape", [1.5]),
        ("shape", [True]),
        ("shape", ["4"]),
        ("shape", "44"),
        ("shape", None),
        ("shape", {"4": 1}),
        ("dtype", "object"),
        ("dtype", "O"),
        ("dtype", "float32,O"),
        ("dtype", "f4"),
        ("dtype", "str"),
        ("dtype", "S8"),
        ("dtype", "V8"),
        ("dtype", "void64"),
        ("dtype", "datetime64[s]"),
        ("dtype", "finfo"),
        ("dtype", "__name__"),
        ("dtype", "__builtins__"),
        ("dtype", ">f4"),
        ("dtype", 5),
        ("dtype", None),
        ("dtype", ["float32"]),
        ("sha256", 5),
        ("key_impl", 5),
        ("more", 1),
    ],
)
def test_fields_of_arrays_are_checked(field, value):
    fields = content()
    fields["arrays"]["w"][field] = value
    with pytest.raises(CheckpointError, match="has a field that cannot be read"):
        m.parse(signed(fields))


@pytest.mark.parametrize("value", [-1, "96", 1.0, None, True])
def test_sizes_are_checked(value):
    fields = content()
    fields["files"]["a.safetensors"]["size_bytes"] = value
    with pytest.raises(CheckpointError, match=r"'a\.safetensors': Expected `int`.* at `\$\.size_bytes`|>= 0"):
        m.parse(signed(fields))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"format":' + "[" * 900 + "]" * 900 + "}",
        "1" * 5000,
        "NaN",
        '"',
        "[1]",
        "",
    ],
    ids=lambda text: text[:8],
)
def test_texts_that_are_none(text):
    with pytest.raises(CheckpointError):
        m.parse(text)


def test_a_thousand_mutated_manifests():
    rng = random.Random(0)
    hostile = [
        None,
        -1,
        2**70,
        1e308,
        "",
        "..",
        [],
        {},
        [[[]]],
        True,
        {"type": []},
        {"type": "complex", "value": "x"},
    ]
    for _ in range(1000):
        fields: Any = content()
        here = fields
        for _ in range(rng.randint(1, 3)):
            key = rng.choice(list(here))
            if not isinstance(here[key], dict) or not here[key] or rng.random() < 0.2:
                break
            here = here[key]
        key = rng.choice(list(here))
        if rng.random() < 0.3:
            del here[key]
        else:
            here[key] = rng.choice(hostile)
        try:
            parsed = m.parse(signed(fields))
        except CheckpointError:
            continue
        assert m.parse(m.to_text(parsed)) == parsed  # what it takes is a manifest


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


HOSTILE = {
    "a checksum that cannot be sent": ("arrays", "w", "sha256", "\ud800"),
    "a checksum of a piece that cannot be sent": ("arrays", "p", "pieces", 0, "sha256", "\ud800"),
    "a name of a piece that cannot be sent": ("arrays", "p", "pieces", 0, "name", "\ud800"),
    "a writer that cannot be printed": ("files", "a.safetensors", "written_by", "\ud800"),
    "a kind of keys that cannot be printed": ("arrays", "w", "key_impl", "\ud800"),
    "a dtype that is a program": ("arrays", "w", "dtype", "(" * 200 + "f4"),
    "a dtype that is half a list": ("arrays", "w", "dtype", "4(,)f4"),
    "an axis beyond 64 bits": ("arrays", "w", "shape", [0, 2**70]),
    "a product beyond 64 bits": ("arrays", "w", "shape", [2**62, 4]),
    "axes without end": ("arrays", "w", "shape", [1] * 100),
    "axes of many digits": ("arrays", "w", "shape", [10**4000] * 60),
    "a size beyond 64 bits": ("files", "a.safetensors", "size_bytes", 10**4000),
    "a deep shape": ("arrays", "w", "shape", deep(900)),
    "a deep value": ("values", "x", "value", deep(900)),
    "a deep kind": ("values", "x", "type", deep(900)),
    "a deep writer": ("files", "a.safetensors", "written_by", deep(900)),
    "a deep version": ("version", deep(900)),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_fields_are_refused_by_name(what):
    fields = content()
    fields["arrays"]["p"] = json.loads(json.dumps(fields["arrays"]["w"])) | {
        "pieces": [{"file": "a.safetensors", "name": "p[0]", "start": [0], "shape": [4], "sha256": "00"}]
    }
    m.parse(signed(json.loads(json.dumps(fields))))
    *path, last, value = HOSTILE[what]
    here: Any = fields
    for key in path:
        here = here[key]
    here[last] = value
    with pytest.raises(CheckpointError) as error:
        m.parse(signed(fields))
    assert str(error.value).encode() and len(str(error.value)) < 1000


def test_depth_is_refused_wherever_the_stack_ends():
    """Reading, checking and printing a nested value each end at another depth."""
    text = signed(content())
    for levels in (*range(100, 1200, 50), 3000, 10_000, 50_000, 200_000):
        for where in ('"more": ', '"version": 1, "sha256": '):
            with pytest.raises(CheckpointError):
                m.parse(text[:-1] + f", {where}" + "[" * levels + "]" * levels + "}")


def test_a_key_that_stands_twice_is_refused():
    text = signed(content())
    with pytest.raises(CheckpointError, match="a key stands twice"):
        m.parse(text.replace('"step":', '"step": {"type": "int", "value": 4}, "step":'))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_json_is_refused(value):
    fields = content()
    fields["values"]["x"]["value"] = float(value)
    with pytest.raises(CheckpointError, match="is no JSON"):
        m.parse(signed(fields))


def test_a_few_thousand_texts_with_changed_bytes():
    """Signed again, so that what is changed is looked at, or not."""
    rng, good = random.Random(1), m.to_text(m.parse(signed(content())))
    pieces = [*'{}[]",:-', "1e999", "9" * 30, "null", "\\ud800", "\\u0000", "NaN", "9" * 5000]
    for _ in range(3000):
        text = good
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice([*pieces, text[at : at + 20]]) + text[at + rng.randint(0, 8) :]
        with contextlib.suppress(ValueError, AttributeError):  # else it goes as it is
            text = signed(json.loads(text))
        try:
            parsed = m.parse(text)
        except CheckpointError as error:
            assert str(error).encode()
            continue
        assert repr(m.parse(m.to_text(parsed))) == repr(parsed)


# ---------------------------------------------------------------- files


def write_manifest(folder: pathlib.Path) -> None:
    (folder / "manifest.json").write_text(signed(content()))


def test_pipes_and_devices_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(CheckpointError, match=r"manifest\.json: is no regular file"):
        load_manifest(str(tmp_path))
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"manifest\.json: is no regular file"):
        load_manifest(str(tmp_path))


def test_a_huge_manifest_is_not_read(tmp_path):
    with open(tmp_path / "manifest.json", "wb") as file:
        file.truncate(1 << 40)  # takes no space on the disk
    with pytest.raises(CheckpointError, match=f"has {1 << 40} bytes, which is more than 256 MiB"):
        load_manifest(str(tmp_path))


def test_what_a_link_leads_to_is_not_told(tmp_path):
    (tmp_path / "secret").write_text("hunter2 hunter2 hunter2")
    (tmp_path / "manifest.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError) as error:
        load_manifest(str(tmp_path))
    (tmp_path / "manifest.json").unlink()
    write_manifest(tmp_path)
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "secret")
    sizes = {name: file.size_bytes for name, file in load_manifest(str(tmp_path)).files.items()}
    with pytest.raises(CheckpointError) as size:
        checkpoint_folder.check_files(str(tmp_path), sizes)
    with pytest.raises(CheckpointError) as header:
        tensor_files.read(str(tmp_path / "a.safetensors"), [WantedArray("w", "float32", (4,), "00")])
    assert not any("hunter" in str(e.value) for e in (error, size, header))
