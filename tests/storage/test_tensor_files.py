"""Direct tests of safetensors files: arrays are written and read back, and files that lie are refused."""

from __future__ import annotations

import json
import os
import pathlib
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
from dtype_examples import AS_BYTES, NATIVE, example
from safetensors import deserialize, safe_open

from jaxpp_async.errors import CheckpointError
from jaxpp_async.storage import tensor_files
from jaxpp_async.storage.tensor_files import WantedArray

MIB = 1 << 20


def never() -> bool:
    return False


def same(actual: Any, expected: Any) -> None:
    """Compare arrays bit for bit, with dtypes and shapes."""
    assert (actual.dtype, actual.shape, actual.tobytes()) == (
        expected.dtype,
        expected.shape,
        expected.tobytes(),
    )


# ---------------------------------------------------------------- written and read back


@pytest.mark.parametrize("shape", [(3, 2), (), (0, 4)], ids=str)
def test_every_dtype_is_what_the_safetensors_library_reads(tmp_path, shape):
    arrays = {dtype: example(dtype, shape) for dtype in NATIVE + AS_BYTES}
    path = str(tmp_path / "file")
    size, digests = tensor_files.write(path, arrays, {"format": "x"}, never)
    assert os.listdir(tmp_path) == ["file"] and os.path.getsize(path) == size
    library = dict(deserialize(pathlib.Path(path).read_bytes()))
    assert set(library) == set(arrays)
    with safe_open(path, framework="numpy") as file:
        described = file.metadata()
        same(file.get_tensor("bfloat16"), arrays["bfloat16"])
    for dtype, array in arrays.items():
        stored = library[dtype]
        assert list(stored["shape"]) == [*shape, *[array.itemsize] * (dtype in AS_BYTES)]
        assert described.get(f"dtype:{dtype}") == (dtype if dtype in AS_BYTES else None)
        same(np.frombuffer(stored["data"], array.dtype).reshape(shape), array)
    wanted = [WantedArray(name, a.dtype.name, a.shape, digests[name]) for name, a in arrays.items()]
    for found, array in zip(tensor_files.read(path, wanted), arrays.values(), strict=True):
        same(found, array)


def test_what_the_library_writes_is_read(tmp_path):
    from safetensors.numpy import save_file

    array = example("float32")
    save_file({"a": array}, tmp_path / "file")
    digest = tensor_files.write(str(tmp_path / "ours"), {"a": array}, {}, never)[1]["a"]
    wanted = [WantedArray("a", "float32", (3, 2), digest)]
    (found,) = tensor_files.read(str(tmp_path / "file"), wanted)
    same(found, array)


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    array = np.zeros(3 << 20, np.float32)
    asked = iter([False, False, True])
    with pytest.raises(InterruptedError):
        tensor_files.write(str(tmp_path / "file"), {"a": array}, {}, lambda: next(asked))
    assert not os.listdir(tmp_path)


def test_a_failed_write_leaves_the_file_that_was_there(tmp_path):
    path = str(tmp_path / "file")
    tensor_files.write(path, {"a": np.ones(3)}, {}, never)
    before = (tmp_path / "file").read_bytes()
    with pytest.raises(InterruptedError):
        tensor_files.write(path, {"a": np.zeros(3)}, {}, lambda: True)
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == before


@pytest.mark.parametrize(
    ("needed", "rows"),
    [
        ((), [0, 1, 2, 3]),
        ([(slice(1, 3), slice(None))], [0, 1, 2, 3]),
        ([(slice(2, 3), slice(None))], [2, 3]),
        ([(slice(0, 2), slice(None))], [0, 1]),
        ([(slice(0, 1), slice(0, 1)), (slice(3, 4), slice(2, 3))], [0, 1, 2, 3]),
    ],
)
def test_of_an_array_in_pieces_only_those_that_are_needed_are_read(tmp_path, needed, rows):
    whole = np.arange(1, 13, dtype=np.int32).reshape(4, 3)
    pieces = []
    for start in (0, 2):
        path, part = str(tmp_path / str(start)), whole[start : start + 2]
        _, digests = tensor_files.write(path, {"p": part}, {}, never)
        pieces.append((path, (start, 0), WantedArray("p", "int32", (2, 3), digests["p"])))
    found = tensor_files.read_pieces((4, 3), "int32", pieces, needed)
    expected = np.zeros_like(whole)
    expected[rows] = whole[rows]
    same(found, expected)


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (1, 3), (2, 4), (3, 4), (0, 1)])
def test_of_an_array_in_pieces_a_part_is_read(tmp_path, start, stop):
    whole = np.arange(1, 13, dtype=np.int32).reshape(4, 3)
    pieces = []
    for begin in (0, 2):
        path, part = str(tmp_path / str(begin)), whole[begin : begin + 2]
        _, digests = tensor_files.write(path, {"p": part}, {}, never)
        pieces.append((path, (begin - start, 0), WantedArray("p", "int32", (2, 3), digests["p"])))
    same(tensor_files.read_pieces((stop - start, 3), "int32", pieces), whole[start:stop])


def test_a_piece_of_which_several_arrays_are_parts_is_read_once(tmp_path, monkeypatch):
    path, whole = str(tmp_path / "whole"), np.arange(4, dtype=np.int32)
    _, digests = tensor_files.write(path, {"w": whole, "v": whole}, {}, never)
    pieces = [WantedArray(name, "int32", (4,), digests[name]) for name in ("w", "w", "v")]
    reads, read = [], tensor_files.read
    monkeypatch.setattr(tensor_files, "read", lambda *args: (reads.append(args), read(*args))[1])
    read_one = tensor_files.read_shared([(path, piece) for piece in pieces])
    parts = [
        tensor_files.read_pieces((2,), "int32", [(path, (-start,), piece)], read_one=read_one)
        for start, piece in zip((0, 2, 1), pieces, strict=True)
    ]
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [1, 2]]
    assert len(reads) == 2


def test_a_piece_that_is_not_needed_may_be_missing(tmp_path):
    gone = (str(tmp_path / "gone"), (0,), WantedArray("p", "int32", (2,), "00"))
    found = tensor_files.read_pieces((4,), "int32", [gone], [(slice(2, 4),)])
    same(found, np.zeros(4, np.int32))
    with pytest.raises(CheckpointError, match="gone: the file is missing"):
        tensor_files.read_pieces((4,), "int32", [gone], [(slice(1, 2),)])


def test_a_small_file_is_read_whole_unless_it_is_longer_than_allowed(tmp_path):
    (tmp_path / "file").write_bytes(bytes(MIB))
    path = str(tmp_path / "file")
    assert tensor_files.read_whole(path, MIB) == bytes(MIB)
    with pytest.raises(CheckpointError, match=f"file: has {MIB} bytes, which is more than 0 MiB"):
        tensor_files.read_whole(path, MIB - 1)


# ---------------------------------------------------------------- files from anywhere


def test_pipes_devices_and_folders_are_no_files(tmp_path):
    for number, make in enumerate((os.mkfifo, lambda path: os.symlink("/dev/zero", path), os.mkdir)):
        path = str(tmp_path / f"file {number}")
        make(path)
        with pytest.raises(CheckpointError, match="is no regular file"):
            tensor_files.read(path, [WantedArray("w", "float32", (4,), "00")])


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def file_with(path: pathlib.Path, header: Any, data: bytes = bytes(16)) -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return str(path)


def entry(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"w":' * 50_000,
        b"{}",
        b"[]",
        b"5",
        b"\xff\xfe",
        b"1" * 5000,
        {"w": 5},
        {"w": {}},
        entry(dtype=None),
        entry(dtype="O"),
        entry(shape=[5]),
        entry(shape=[-4]),
        entry(shape=[[4]]),
        entry(shape="4"),
        entry(data_offsets=[0, 17]),
        entry(data_offsets=[16, 0]),
        entry(data_offsets=[-16, 0]),
        entry(data_offsets=[-(2**70), 16 - 2**70]),
        entry(data_offsets=[2**63, 2**63 + 16]),
        entry(data_offsets=[2**70, 2**70 + 16]),
        entry(data_offsets=[1, 17]),
        entry(data_offsets=[0]),
        entry(data_offsets=[0.0, 16.0]),
        entry(data_offsets="ab"),
        entry(data_offsets=[10**4299, 10**4299 + 16]),
        entry(shape=deep(900)),
        entry(shape=["\ud800"]),
        entry(dtype=deep(900)),
        entry(dtype="\ud800" * 1000),
        entry(shape=[10**4000]),
    ],
    ids=lambda header: repr(header)[:60],
)
def test_a_header_that_is_wrong_is_refused_with_the_file_in_a_short_message(tmp_path, header):
    path = file_with(tmp_path / "file", header)
    with pytest.raises(CheckpointError, match="file: ") as error:
        tensor_files.read(path, [WantedArray("w", "float32", (4,), "00")])
    assert str(error.value).encode() and len(str(error.value)) < 1000


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 1000])
def test_a_header_longer_than_the_file_is_refused(tmp_path, length):
    (tmp_path / "file").write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=f"its header would be {length} bytes long"):
        tensor_files.read(str(tmp_path / "file"), [])


def test_a_promise_of_a_terabyte_takes_no_memory(tmp_path):
    sizes = [1 << 38]
    path = file_with(tmp_path / "file", entry(shape=sizes, data_offsets=[0, 4 << 38]))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="was cut off"):
            tensor_files.read(path, [WantedArray("w", "float32", (1 << 38,), "00")])
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def test_a_file_with_changed_bits_is_refused_or_still_has_the_array(tmp_path):
    array = np.arange(4, dtype=np.float32)
    rng, path = random.Random(0), tmp_path / "file"
    _, digests = tensor_files.write(str(path), {"w": array}, {}, lambda: False)
    wanted, good = [WantedArray("w", "float32", (4,), digests["w"])], path.read_bytes()
    for _ in range(1000):
        data = bytearray(good)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        for _ in range(rng.randint(1, 3)):
            if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            (got,) = tensor_files.read(str(path), wanted)
        except CheckpointError:
            continue
        np.testing.assert_array_equal(got, array)
