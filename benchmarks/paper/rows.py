"""Read the rows of the paper's table from `rows.json`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

JAXPP, FSDP, SPMD, NEMO = "JaxPP", "JAX FSDP", "JAX SPMD PP", "NeMo"

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Args:
        system: the system that was measured.
        model: the name of the model.
        gpus: the number of GPUs.
        global_batch: the number of sequences in a step.
        microbatches: the number of microbatches of each replica.
        pipeline: the number of pipeline stages that run side by side.
        tensor: the number of GPUs that share each layer.
        data: the number of replicas.
        fsdp: the number of GPUs over which FSDP splits the parameters.
        repeat: the number of stages of each actor in an interleaved pipeline; None without one.
        step_s: the seconds of a step.
        tflops: the model's TFLOPs a second and GPU that the table prints.
        model_flops: the model's FLOPs of a step, from which the paper computes `tflops`.
        note: text that says which figures are not the table's own.
    """

    system: str
    model: str
    gpus: int
    global_batch: int
    microbatches: int
    pipeline: int
    tensor: int
    data: int
    fsdp: int
    repeat: int | None
    step_s: float
    tflops: float
    model_flops: float
    note: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        """The system, the model and the number of GPUs, which no two rows share."""
        return self.system, self.model, self.gpus

    @property
    def microbatch(self) -> int:
        """The number of sequences in a microbatch of one replica."""
        return self.global_batch // (self.microbatches * self.data * self.fsdp)

    @property
    def nodes(self) -> int:
        return self.gpus // GPUS_PER_NODE


class _Table(msgspec.Struct):
    source: str
    notes: list[str]
    rows: list[Row]


def read_rows() -> tuple[Row, ...]:
    """Return the rows of the table, in its order."""
    text = Path(__file__).with_name("rows.json").read_bytes()
    return tuple(msgspec.json.decode(text, type=_Table).rows)
