"""Read files as byte arrays and cut them into batches, the same ones in every run, with numpy alone."""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAX_TEXT_BYTES = 16 * 1024 * 1024
MIN_FILES_TO_SPLIT_BY_FILE = 20
VALIDATION_SHARE = 10
"""One part in so many is held out for validation."""

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
"""Folders of the standard library that are not its own, or are tables and tests more than source."""

Batch = dict[str, np.ndarray]
"""`tokens` and `labels`, int32, both (num_microbatches, microbatch_size, seq_len)."""


class DataError(ValueError):
    """The text cannot be used: missing, unreadable or too small. The message says what to do."""


@dataclass(frozen=True)
class Corpus:
    """Bytes (uint8) to train on and to validate with, and one line on where they came from."""

    train: np.ndarray
    validation: np.ndarray
    source: str


# ---------------------------------------------------------------- reading


def load_corpus(path: Path | None) -> Corpus:
    """Text from `path` (a file or a folder), or from the running Python's own standard library.

    Raises:
        DataError: nothing there, or nothing that reads as text.
    """
    if path is None:
        folder = Path(sysconfig.get_path("stdlib"))
        names = (name for name in _sorted_files(folder) if name.suffix == ".py")
        files = read_texts(folder, (name for name in names if not SKIPPED_FOLDERS & set(name.parts)))
        if not files:
            raise DataError(
                f"no standard library sources in {folder}; give text of your own with --data PATH"
            )
        return split_corpus(files, f"{len(files)} source files of Python's standard library")
    if path.is_file():
        files = read_texts(path.parent, [Path(path.name)])
    elif path.is_dir():
        files = read_texts(path, _sorted_files(path))
    else:
        raise DataError(f"--data {path}: no such file or folder")
    if not files:
        raise DataError(
            f"--data {path}: no text in it (empty files and files with NUL bytes are passed over)"
        )
    return split_corpus(files, f"{path} ({len(files)} file{'s' if len(files) > 1 else ''})")


def _sorted_files(folder: Path) -> list[Path]:
    """Visible regular files below `folder`, as sorted paths relative to it."""
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if not any(part.startswith(".") for part in name.parts))


def read_texts(folder: Path, names: Iterable[Path]) -> dict[str, bytes]:
    """Relative name to content of each file that holds text.

    Raises:
        DataError: a file cannot be read.
    """
    texts: dict[str, bytes] = {}
    for name in names:
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {folder / name}: {error.strerror}") from error
        if content and b"\0" not in content:
            texts[name.as_posix()] = content
    return texts


def split_corpus(files: dict[str, bytes], source: str) -> Corpus:
    """Hold out whole files where there are many, else the end of the text. Depends on names and contents
    alone."""
    # By checksum of the name: near alphabetical neighbours resemble each other, and every machine orders
    # alike.
    order = sorted(files, key=lambda name: (zlib.crc32(name.encode()), name))
    if len(files) >= MIN_FILES_TO_SPLIT_BY_FILE:
        num_held_out = len(files) // VALIDATION_SHARE
        validation = b"".join(files[name] for name in order[:num_held_out])
        train = b"".join(files[name] for name in order[num_held_out:])
    else:
        text = b"".join(files[name] for name in order)
        train, validation = (
            text[: -(len(text) // VALIDATION_SHARE) or None],
            text[-(len(text) // VALIDATION_SHARE) :],
        )
    return Corpus(_as_array(train), _as_array(validation), source)


def _as_array(text: bytes) -> np.ndarray:
    return np.frombuffer(text[:MAX_TEXT_BYTES], dtype=np.uint8)


# ---------------------------------------------------------------- batches


class TrainBatches(Iterator[Batch]):
    """Endless batches of windows at random places in `text`.

    Args:
        text: uint8 bytes.
        shape: (num_microbatches, microbatch_size, seq_len).
        seed: the same seed gives the same batches.

    Attributes:
        position: which batch comes next: a tree of numbers and strings. Once it is set, what follows is what
            followed when it was read: a run that is to go on saves it.

    Raises:
        DataError: `text` is shorter than one window.
    """

    def __init__(self, text: np.ndarray, shape: tuple[int, int, int], seed: int):
        self._text, self._shape, self._num_starts = text, shape, len(text) - shape[-1]
        if self._num_starts < 1:
            raise DataError(
                f"{len(text)} bytes of training text, "
                f"but --seq-len {shape[-1]} needs at least {shape[-1] + 1}"
            )
        self._rng = np.random.default_rng(seed)

    def __next__(self) -> Batch:
        starts = self._rng.integers(0, self._num_starts, size=self._shape[0] * self._shape[1])
        return _windows(self._text, starts, self._shape)

    @property
    def position(self) -> Any:
        return self._rng.bit_generator.state

    @position.setter
    def position(self, position: Any) -> None:
        self._rng.bit_generator.state = position


def train_batches(text: np.ndarray, shape: tuple[int, int, int], seed: int) -> TrainBatches:
    """See `TrainBatches`."""
    return TrainBatches(text, shape, seed)


def validation_batches(text: np.ndarray, shape: tuple[int, int, int], max_batches: int) -> list[Batch]:
    """Up to `max_batches` batches of windows spread evenly over `text`, no byte predicted twice.

    Raises:
        DataError: `text` does not fill one batch.
    """
    num_microbatches, microbatch_size, seq_len = shape
    batch_size = num_microbatches * microbatch_size
    num_windows = (len(text) - 1) // seq_len
    num_batches = min(max_batches, num_windows // batch_size)
    if num_batches == 0:
        raise DataError(
            f"{len(text)} bytes of validation text, but one batch needs {batch_size * seq_len + 1}: "
            "give more text with --data, or lower --batch-size or --seq-len"
        )
    starts = np.arange(num_batches * batch_size) * num_windows // (num_batches * batch_size) * seq_len
    return [_windows(text, part, shape) for part in np.split(starts, num_batches)]


def _windows(text: np.ndarray, starts: np.ndarray, shape: tuple[int, int, int]) -> Batch:
    windows = text[starts[:, None] + np.arange(shape[-1] + 1)].astype(np.int32)
    return {"tokens": windows[:, :-1].reshape(shape), "labels": windows[:, 1:].reshape(shape)}


# ---------------------------------------------------------------- what counting alone achieves


def unigram_loss(train: np.ndarray, batches: Iterable[Batch]) -> float:
    """Cross-entropy, in nats a byte, of the labels by the byte frequencies of `train`, add-one smoothed."""
    counts = np.bincount(train, minlength=256) + 1.0
    log_probs = np.log(counts / counts.sum())
    return -float(np.mean([log_probs[batch["labels"]].mean() for batch in batches]))


def bigram_loss(train: np.ndarray, batches: Iterable[Batch]) -> float:
    """The same, each byte given the one before it."""
    pairs = train[:-1].astype(np.int64) * 256 + train[1:]
    counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256) + 1.0
    log_probs = np.log(counts / counts.sum(axis=1, keepdims=True))
    return -float(np.mean([log_probs[batch["tokens"], batch["labels"]].mean() for batch in batches]))
