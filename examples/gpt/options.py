"""options: the command line in, checked `Options` out. Never imports jax, so a mistyped option is answered at
once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

TWO_STAGES = ("Interleaved1F1B", "LoopedBFS", "ZeroBubbleV", "DualPipeV", "VHalf", "VMin")
"""Schedules that want two stages on each actor."""
SCHEDULES = ("GPipe", "Std1F1B", "Eager1F1B", "ZeroBubbleH1", "ZeroBubbleH2", *TWO_STAGES)


TRACED_STEPS = 3
"""How many steps `--trace` writes: a few in a row show how one begins before the last has ended."""


class OptionError(ValueError):
    """Options that do not go together. The message names the option and says what to change."""


@dataclass(frozen=True)
class Options:
    """Everything a run depends on; one field an option, named alike."""

    actors: int = 2
    stages: int = 0  # 0: one an actor, two under TWO_STAGES.
    schedule: str = "Std1F1B"
    microbatches: int = 8
    batch_size: int = 16
    steps: int = 300
    dp: int = 1
    tp: int = 1
    layers: int = 4
    dim: int = 128
    heads: int = 4
    seq_len: int = 128
    tie_embedding: bool = False
    launcher: str = "local"
    seed: int = 0
    data: Path | None = None
    verify: int = 0
    dump_passes: Path | None = None
    checkpoint_dir: Path | None = None
    save_every: int = 0  # 0: at the end only.
    resume: bool = False
    max_restarts: int = 0
    page: bool = False
    trace: Path | None = None
    trace_step: int = 0  # 0: the last TRACED_STEPS.
    tensorboard: Path | None = None

    @property
    def num_stages(self) -> int:
        """Stages asked for, or as many as suit the schedule."""
        return self.stages or self.actors * (2 if self.schedule in TWO_STAGES else 1)

    @property
    def batch_shape(self) -> tuple[int, int, int]:
        """(num_microbatches, microbatch_size, seq_len)."""
        return self.microbatches, self.batch_size // self.microbatches, self.seq_len

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    def is_traced(self, step_number: int) -> bool:
        """Whether a step, counted from 1 as in the lines of progress, is in the file that `--trace` names."""
        if self.trace is None:
            return False
        return step_number == self.trace_step if self.trace_step else step_number > self.steps - TRACED_STEPS


_HELP = {
    "actors": "actors, each a process of its own unless --launcher inline",
    "stages": "pipeline stages, at least one an actor "
    f"(default: one an actor; two for {', '.join(TWO_STAGES)})",
    "schedule": f"order of tasks: {', '.join(SCHEDULES)}",
    "microbatches": "microbatches a step",
    "batch_size": "sequences a step, over all microbatches",
    "steps": "optimizer steps",
    "dp": "data parallel devices inside each actor",
    "tp": "tensor parallel devices inside each actor",
    "layers": "transformer blocks",
    "dim": "width of the model",
    "heads": "attention heads",
    "seq_len": "bytes of context",
    "launcher": "local: one process an actor; inline: all in this process",
    "seed": "of parameters, batches and the sample",
    "data": "text file or folder (default: the sources of Python's standard library)",
    "verify": "also run the first VERIFY steps with plain jax.jit and compare",
    "dump_passes": "write the text of every compiler pass and each actor's program into this folder",
    "checkpoint_dir": "save the run here, at its end and with --save-every; "
    "the newest three checkpoints stay",
    "save_every": "also save after every SAVE_EVERY steps, while training goes on",
    "max_restarts": "replace actors that died and go on with the same numbers, so many times in ten minutes",
    "trace": f"write what every actor did in the last {TRACED_STEPS} steps, as a trace for ui.perfetto.dev",
    "tensorboard": "write loss and tokens/s of each step into this folder, for tensorboard --logdir",
    "trace_step": f"the one step to trace instead of the last {TRACED_STEPS}, counted from 1 as in the lines "
    "of progress",
}
_FOLDERS = ("dump_passes", "checkpoint_dir", "tensorboard")
_FILES = ("data", "trace")
_AT_LEAST_ZERO = ("seed", "verify", "max_restarts")


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Read and check a command line; a mistake ends the process with status 2 and one line that says what to
    change."""
    parser = _parser()
    options = Options(**vars(parser.parse_args(argv)))
    try:
        check(options)
    except OptionError as error:
        parser.error(str(error))
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_gpt.py",
        description="Train a small GPT on bytes of real text, its stages in different processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    defaults = Options()
    for name, text in _HELP.items():
        flag, default = "--" + name.replace("_", "-"), getattr(defaults, name)
        if name == "schedule":
            parser.add_argument(flag, type=_schedule_name, default=default, metavar="NAME", help=text)
        elif name == "launcher":
            parser.add_argument(flag, choices=("local", "inline"), default=default, help=text)
        elif name in (*_FILES, *_FOLDERS):
            metavar = "DIR" if name in _FOLDERS else "FILE" if name == "trace" else "PATH"
            parser.add_argument(flag, type=Path, default=argparse.SUPPRESS, metavar=metavar, help=text)
        else:
            least = 0 if name in _AT_LEAST_ZERO else 1
            shown = argparse.SUPPRESS if name in ("stages", "verify", "save_every", "trace_step") else default
            parser.add_argument(flag, type=_whole_number(least), default=shown, metavar="N", help=text)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in --checkpoint-dir, if there is one",
    )
    parser.add_argument(
        "--page", action="store_true", help="show the run on a page in your browser while it goes on"
    )
    parser.add_argument(
        "--tie-embedding", action="store_true", help="use the embedding as output projection too"
    )
    return parser


def _schedule_name(text: str) -> str:
    for name in SCHEDULES:
        if name.lower() == text.lower():
            return name
    raise argparse.ArgumentTypeError(f"no schedule {text!r}; there are {', '.join(SCHEDULES)}")


def _whole_number(least: int):
    def parse(text: str) -> int:
        value = int(text) if text.strip().lstrip("-").isdecimal() else None
        if value is None or value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return parse


def check(options: Options) -> None:
    """What must hold between options, before anything is launched.

    Raises:
        OptionError: the first thing that does not hold.
    """
    o = options
    rules = [
        (
            o.num_stages >= o.actors,
            f"--stages {o.num_stages} leaves some of {o.actors} --actors without a stage",
        ),
        (o.layers >= o.num_stages, f"--layers {o.layers} cannot fill {o.num_stages} stages; raise --layers"),
        (
            o.batch_size % (o.microbatches * o.dp) == 0,
            f"--batch-size {o.batch_size} is not a multiple of "
            f"--microbatches x --dp = {o.microbatches * o.dp}",
        ),
        (o.dim % o.heads == 0, f"--dim {o.dim} is not a multiple of --heads {o.heads}"),
        (
            o.dim // o.heads % 2 == 0,
            f"--dim / --heads = {o.dim // o.heads} is odd; rotary positions need pairs",
        ),
        (o.heads % o.tp == 0, f"--heads {o.heads} is not a multiple of --tp {o.tp}"),
        (o.verify <= o.steps, f"--verify {o.verify} is more than --steps {o.steps}"),
        (
            o.dump_passes is None or not o.dump_passes.exists() or o.dump_passes.is_dir(),
            f"--dump-passes {o.dump_passes} is a file; name a folder",
        ),
        (
            o.trace is None or (o.trace.parent.is_dir() and not o.trace.is_dir()),
            f"--trace {o.trace} cannot be written; name a file in a folder that there is",
        ),
        (
            o.tensorboard is None or not o.tensorboard.exists() or o.tensorboard.is_dir(),
            f"--tensorboard {o.tensorboard} is a file; name a folder",
        ),
        (
            o.tensorboard is None or find_spec("tensorboardX") is not None,
            f"--tensorboard {o.tensorboard} needs the package tensorboardX: pip install tensorboardX",
        ),
        (o.trace is not None or not o.trace_step, f"--trace-step {o.trace_step} needs --trace FILE"),
        (o.trace_step <= o.steps, f"--trace-step {o.trace_step} is more than --steps {o.steps}"),
        (
            o.checkpoint_dir is not None or not o.save_every,
            f"--save-every {o.save_every} needs --checkpoint-dir DIR",
        ),
        (
            o.checkpoint_dir is not None or not o.resume,
            "--resume needs the --checkpoint-dir DIR of the run to go on with",
        ),
        (
            not (o.resume and o.verify),
            f"--verify {o.verify} compares from the first step on; leave it out with --resume",
        ),
        (
            o.resume or o.checkpoint_dir is None or not any(o.checkpoint_dir.glob("[0-9]*/manifest.json")),
            f"--checkpoint-dir {o.checkpoint_dir} has checkpoints; "
            "add --resume to go on from them, or name another",
        ),
    ]
    for holds, message in rules:
        if not holds:
            raise OptionError(message)
