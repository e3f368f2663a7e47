"""The data of examples/train_gpt.py: what is read, how it is split, cut into batches and counted."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from gpt import data

SHAPE = (2, 3, 8)  # num_microbatches, microbatch_size, seq_len


def text_of(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8)


def test_standard_library_is_there_and_split_by_file():
    corpus = data.load_corpus(None)
    assert len(corpus.train) > 5 * len(corpus.validation) > 500_000
    assert corpus.validation[:2000].tobytes() not in corpus.train.tobytes()
    assert "Python's standard library" in corpus.source


def test_many_files_are_held_out_whole_and_order_of_reading_does_not_matter():
    files = {f"{index}.txt": bytes([index]) * 10 for index in range(40)}
    corpus = data.split_corpus(files, "")
    assert set(corpus.train).isdisjoint(corpus.validation)
    assert (len(corpus.train), len(corpus.validation)) == (360, 40)
    backwards = data.split_corpus(dict(reversed(files.items())), "")
    assert np.array_equal(corpus.train, backwards.train)


def test_one_file_is_split_at_its_end(tmp_path: Path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)))
    path.write_bytes(bytes(range(1, 101)))
    corpus = data.load_corpus(path)
    assert corpus.train.tolist() == list(range(1, 91)) and corpus.validation.tolist() == list(range(91, 101))


def test_folder_is_read_without_hidden_binary_and_empty_files(tmp_path: Path):
    for name, content in {
        "b.txt": b"bb",
        "a/a.md": b"a" * 18,
        ".git/x": b"x",
        "z.bin": b"\0z",
        "e": b"",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    corpus = data.load_corpus(tmp_path)
    assert sorted([*corpus.train, *corpus.validation]) == sorted(b"bb" + b"a" * 18)
    assert corpus.source == f"{tmp_path} (2 files)"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or folder"),
        (b"", "no text in it"),
        (b"\0\1", "no text in it"),
    ],
)
def test_unusable_data_says_so(tmp_path: Path, content: bytes | None, message: str):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(data.DataError, match=message):
        data.load_corpus(path)


def test_too_little_text_says_how_much_is_needed():
    with pytest.raises(data.DataError, match="8 bytes of training text, but --seq-len 8 needs at least 9"):
        data.train_batches(text_of(8), SHAPE, seed=0)
    with pytest.raises(data.DataError, match="48 bytes of validation text, but one batch needs 49"):
        data.validation_batches(text_of(48), SHAPE, max_batches=1)
    assert next(data.train_batches(text_of(9), SHAPE, seed=0))["tokens"].shape == SHAPE
    assert len(data.validation_batches(text_of(49), SHAPE, max_batches=9)) == 1


def test_labels_are_the_bytes_after_the_tokens():
    text = np.arange(256, dtype=np.uint8)
    for batch in islice(data.train_batches(text, SHAPE, seed=1), 5):
        assert batch["tokens"].shape == batch["labels"].shape == SHAPE
        assert batch["tokens"].dtype == np.int32
        assert np.array_equal(batch["labels"], batch["tokens"] + 1)


def test_seed_decides_the_batches():
    def tokens(seed: int) -> list[np.ndarray]:
        return [batch["tokens"] for batch in islice(data.train_batches(text_of(1000), SHAPE, seed), 3)]

    assert np.array_equal(tokens(0), tokens(0))
    assert not np.array_equal(tokens(0), tokens(1))


@pytest.mark.parametrize(
    ("size", "max_batches", "expected"), [(49, 4, 1), (96, 4, 1), (97, 4, 2), (10_000, 4, 4)]
)
def test_validation_predicts_no_byte_twice(size: int, max_batches: int, expected: int):
    places = np.arange(size, dtype=np.int64)  # Positions instead of bytes: `_windows` only indexes.
    batches = data.validation_batches(places, SHAPE, max_batches)
    labels = np.concatenate([batch["labels"].ravel() for batch in batches])
    assert len(batches) == expected and len(set(labels)) == len(labels) == expected * math.prod(SHAPE)


def test_counting_losses_of_a_text_known_by_hand():
    # "ab" * 100: every pair is known, so the bigram knows all but the smoothing; the unigram knows one bit a
    # byte.
    text = np.frombuffer(b"ab" * 100, np.uint8)
    batches = data.validation_batches(text, SHAPE, max_batches=1)
    assert data.unigram_loss(text, batches) == pytest.approx(-math.log(101 / 456))
    pair_ab, pair_ba = math.log(101 / 356), math.log(100 / 355)
    assert data.bigram_loss(text, batches) == pytest.approx(-(pair_ab + pair_ba) / 2)
