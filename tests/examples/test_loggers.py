"""Loggers of examples/loggers.py: what they write can be read by others."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from paths import ROOT

from gpt.options import OptionError, check, parse_options
from loggers import JsonLinesLogger, TensorBoardLogger, WandbLogger


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    """The (step, name, value) of each scalar in the event files of a folder."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            at += 12 + size + 4
    return found


def test_tensorboard_reads_each_value(tmp_path):
    pytest.importorskip("tensorboardX")
    with TensorBoardLogger(tmp_path / "run") as logger:
        logger.log(0, {"loss": 2.5, "train/rate": 0.5})
        logger.log(7, {"loss": 1.5})
    assert scalars(tmp_path / "run") == [(0, "loss", 2.5), (0, "train/rate", 0.5), (7, "loss", 1.5)]


@pytest.mark.parametrize("fails", [False, True])
def test_wandb_gets_each_step_and_how_the_run_ended(monkeypatch, fails):
    told = []

    class FakeRun:
        def log(self, values, step):
            told.append((step, values))

        def finish(self, exit_code):
            told.append(exit_code)

    def init(**options):
        told.append(options)
        return FakeRun()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    try:
        with WandbLogger(project="gpt") as logger:
            logger.log(3, {"loss": 2.5})
            if fails:
                raise KeyError("of the training")
    except KeyError:
        assert fails
    assert told == [{"project": "gpt"}, (3, {"loss": 2.5}), int(fails)]


def test_lines_of_json(tmp_path):
    logger = JsonLinesLogger(tmp_path / "log.jsonl")
    logger.log(0, {"loss": 2.5})
    logger.log(1, {"loss": 1.5})
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 0, "loss": 2.5}, {"step": 1, "loss": 1.5}]


def test_lines_are_json_whatever_is_logged(tmp_path):
    logger = JsonLinesLogger(tmp_path / "log.jsonl")
    logger.log(7, {"loss": float("nan"), "norm": float("inf"), "step": 1.0})
    line = (tmp_path / "log.jsonl").read_text()
    assert line == '{"step": 7, "loss": null, "norm": null, "step_value": 1.0}\n'


def test_a_training_run_writes_its_losses(tmp_path):
    pytest.importorskip("tensorboardX")
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog; " * 200)
    sizes = "--layers 2 --dim 16 --heads 2 --seq-len 16 --batch-size 4 --microbatches 2 --steps 3"
    options = [*sizes.split(), "--launcher", "inline", "--data", "text", "--tensorboard", "run"]
    script = str(ROOT / "examples" / "train_gpt.py")
    done = subprocess.run(
        [sys.executable, script, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [(step, value) for step, name, value in scalars(tmp_path / "run") if name == "loss"]
    assert [step for step, _ in losses] == [1, 2, 3]
    assert f"step 3/3  loss {losses[-1][1]:.3f}" in done.stdout


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    options = replace(parse_options([]), tensorboard=tmp_path)
    monkeypatch.setattr("gpt.options.find_spec", lambda name: None)
    with pytest.raises(OptionError, match="needs the package tensorboardX: pip install tensorboardX"):
        check(options)
