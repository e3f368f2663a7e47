"""Loggers for `RemoteMesh(loggers=[...])`: what `mesh.log` gets goes to TensorBoard, W&B or a file.

A logger is any object with `log(step, values)`. Whoever makes one closes it, after the mesh has closed:

    with TensorBoardLogger("runs/first") as logger:
        async with jpp.RemoteMesh(2, loggers=[logger]) as mesh:
            ...
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any


class TensorBoardLogger(AbstractContextManager["TensorBoardLogger"]):
    """A logger that writes event files; needs the package tensorboardX.

    Args:
        folder: the folder of the files, for `tensorboard --logdir`.
    """

    def __init__(self, folder: str | Path):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def __exit__(self, *_: object) -> None:
        self._writer.close()


class WandbLogger(AbstractContextManager["WandbLogger"]):
    """A logger that sends values to Weights & Biases; needs the package wandb.

    Args:
        options: the options of `wandb.init`, such as `project` and `config`.
    """

    def __init__(self, **options: Any):
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(**options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def __exit__(self, error: object, *_: object) -> None:
        self._run.finish(exit_code=0 if error is None else 1)


class JsonLinesLogger:
    """A logger that appends a line of JSON a step to a file.

    JSON has no NaN and no infinity: such a value is written as null. A value named "step" is written as
    "step_value".

    Args:
        path: the file.
    """

    def __init__(self, path: str | Path):
        self._path = Path(path)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        line: dict[str, float | None] = {"step": step}
        for name, value in values.items():
            line["step_value" if name == "step" else name] = value if math.isfinite(value) else None
        with self._path.open("a", encoding="utf-8") as file:
            print(json.dumps(line), file=file)
