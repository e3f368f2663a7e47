"""Train a small GPT on real text through a pipeline of actor processes.

    python examples/train_gpt.py --help

In: bytes of text (by default the sources of Python's standard library). Out: progress, a sample of the
    trained model,
where the time went, and the validation loss beside what byte and byte-pair frequencies alone achieve.

The model is in `gpt/model.py` and the step functions in `gpt/steps.py`; neither knows about processes.
`Pipeline`, below, is all it takes to run them on a mesh.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import uvloop
from jax.sharding import PartitionSpec

import jaxpp_async as jpp
from gpt import data, report, steps
from gpt.model import AXIS_RULES, ModelConfig, sample, state_specs
from gpt.options import Options, parse_options
from jaxpp_async.errors import CheckpointError
from jaxpp_async.timeline import Timeline, write_trace
from loggers import TensorBoardLogger

MAX_VALIDATION_BYTES = 64 * 1024
SAMPLE_PROMPT, SAMPLE_BYTES = b"def ", 300
NEXT = "next: --trace trace.json says where a step's time goes, --page shows the run while it goes on"


def main() -> int:
    options, reporter = parse_options(), report.Reporter()
    try:
        corpus = data.load_corpus(options.data)
        reporter.line(f"text: {corpus.source}, {len(corpus.train):,} bytes to train on")
        batches = data.train_batches(corpus.train, options.batch_shape, options.seed)
        max_batches = max(1, MAX_VALIDATION_BYTES // options.tokens_per_step)
        validation = data.validation_batches(corpus.validation, options.batch_shape, max_batches)
    except data.DataError as error:
        print(f"train_gpt.py: error: {error}", file=sys.stderr)
        return 2
    try:
        run(options, reporter, corpus, batches, validation)
    except CheckpointError as error:
        print("\n".join([f"train_gpt.py: error: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print("".join(["interrupted", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return 130
    return 0


def run(
    options: Options,
    reporter: report.Reporter,
    corpus: data.Corpus,
    batches: data.TrainBatches,
    validation: list[data.Batch],
) -> None:
    """Train on the mesh; then, with the actors gone and the cores free, compare, sample and sum up."""
    if options.launcher == "inline":
        # Inline actors share this process's devices.
        jax.config.update("jax_num_cpu_devices", options.dp * options.tp)
    pipeline = Pipeline(options, reporter)
    try:
        uvloop.run(pipeline.run(batches, validation))
    except KeyboardInterrupt as error:
        if (saved := pipeline.checkpoints) is not None and (newest := saved.latest()) is not None:
            error.add_note(f"; the newest checkpoint is {saved.path(newest)}, and --resume goes on from it")
        raise

    if options.verify:
        with reporter.spinner(f"{options.verify} steps with plain jax.jit"):
            difference = pipeline.verify(data.train_batches(corpus.train, options.batch_shape, options.seed))
        reporter.lines(report.verify_lines(*difference))
    text = sample(pipeline.params, pipeline.config, SAMPLE_PROMPT, SAMPLE_BYTES, seed=options.seed)
    reporter.lines(["", "a sample:", report.printable(text), ""])
    reporter.lines(report.actor_table(pipeline.actor_times, pipeline.train_s))
    reporter.line(f"{pipeline.tokens_per_s:,.0f} tokens/s on average")
    bigram, unigram = data.bigram_loss(corpus.train, validation), data.unigram_loss(corpus.train, validation)
    reporter.line(report.validation_line(pipeline.validation_loss, bigram, unigram))
    if not options.trace:
        reporter.line(NEXT)


class Pipeline:
    """One training run on a mesh, and what it brings to the host.

    Attributes:
        first_step: how many steps came before this run: 0, or those of the checkpoint that it went on from.
        losses: one a step of this run.
        params: at the end.
        verified_params: after `--verify` steps.
        actor_times: where each actor's time went during training.
        train_s: seconds of training, launch and compilation left out.
        timelines: of the steps that `--trace` wants.
        validation_loss: nats a byte.
    """

    def __init__(self, options: Options, reporter: report.Reporter):
        self.options, self.reporter = options, reporter
        self.config = ModelConfig(
            num_layers=options.layers,
            dim=options.dim,
            num_heads=options.heads,
            seq_len=options.seq_len,
            tie_embedding=options.tie_embedding,
        )
        optimizer = steps.make_optimizer(options.steps)
        # The last stage has the output projection and the loss, too: it gets fewer layers where that helps.
        schedule = getattr(jpp, options.schedule)(num_stages=options.num_stages, stages="balanced")
        self.init = steps.make_init(self.config, optimizer)
        self.train_step = steps.make_train_step(self.config, optimizer, schedule)
        self.eval_step = steps.make_eval_step(self.config, schedule)
        self.key = jax.random.key(options.seed)

        self.state_shapes = jax.eval_shape(self.init, self.key)

        self.checkpoints: jpp.Checkpoints | None = None
        self.first_step = 0
        self.losses: list[float] = []
        self.params: Any = None
        self.verified_params: Any = None
        self.actor_times = [report.ActorTime()] * options.actors
        self.train_s = 0.0
        self.timelines: list[Timeline] = []
        self.validation_loss = float("nan")

    async def run(self, batches: data.TrainBatches, validation: list[data.Batch]) -> None:
        """Launch, compile, train, evaluate."""
        o = self.options
        kind = "actor processes" if o.launcher == "local" else "inline actors"
        async with AsyncExitStack() as stack:
            loggers = [stack.enter_context(TensorBoardLogger(o.tensorboard))] if o.tensorboard else []
            with self.reporter.phase(f"launching {o.actors} {kind}"):
                mesh = jpp.RemoteMesh(
                    o.actors,
                    spmd_mesh={"data": o.dp, "model": o.tp},
                    axis_rules=AXIS_RULES,
                    launcher=o.launcher,
                    max_restarts=o.max_restarts,
                    page=o.page,
                    loggers=loggers,
                    progress=False,  # the reporter's lines say it
                )
                await stack.enter_async_context(mesh)
            if mesh.page_url is not None:
                self.reporter.line(f"the run's page: {mesh.page_url}")
            if o.checkpoint_dir:
                # Leaving it waits for the save under way: it has to be left before the mesh.
                self.checkpoints = await stack.enter_async_context(jpp.Checkpoints(mesh, o.checkpoint_dir))
            step = await self._compile(mesh, validation[0])
            state = await self._restore(step, batches) or await self._init(step)
            state = await self._train(mesh, step, state, batches)
            with self.reporter.phase("evaluating"):
                await self._evaluate(mesh, state["params"], validation)
        if o.trace:
            self._write_trace(o.trace)

    async def _compile(self, mesh: Any, batch: data.Batch) -> Any:
        """The training step; compiled, it knows where it keeps each part of the state."""
        step = mesh.distributed(
            self.train_step,
            in_shardings=(state_specs(self.state_shapes), PartitionSpec(None, "data")),
            donate_argnums=0,
        )
        with self.reporter.phase(f"compiling {self.options.num_stages} stages, {self.options.schedule}"):
            compiled = await step.compile(self.state_shapes, batch)
        if self.options.dump_passes:
            dump_passes(compiled, self.options.dump_passes)
            self.reporter.line(f"compiler passes are in {self.options.dump_passes}")
        num_parameters = sum(leaf.size for leaf in jax.tree.leaves(self.state_shapes["params"]))
        self.reporter.line(
            f"{num_parameters:,} parameters, {self.options.tokens_per_step:,} bytes of text a step"
        )
        return step

    async def _init(self, step: Any) -> steps.State:
        """A new state, each part made where the step keeps it."""
        with self.reporter.phase("making the parameters on the actors"):
            return await step.init(0, self.init, self.key)

    # -------------------------------------------------------- checkpoints
    #
    # What a run needs to go on as if nothing had happened: its state, how many steps it has done, and which
    # batch comes next. All of it is one tree, saved together.

    async def _save(self, step_number: int, state: steps.State, batches: data.TrainBatches) -> None:
        """Save the run as it is after `step_number` steps; files are written while training goes on."""
        assert self.checkpoints is not None
        run = {"state": state, "step": step_number, "batches": batches.position}
        await self.checkpoints.save(step_number, run, on_progress=self.reporter.saving)

    async def _restore(self, step: Any, batches: data.TrainBatches) -> steps.State | None:
        """Go on from the newest checkpoint, if asked to and if there is one: its state, with `batches` moved
        on."""
        if not self.options.resume or self.checkpoints is None or self.checkpoints.latest() is None:
            return None
        with self.reporter.phase("restoring"):
            # The state goes where the step keeps it; the rest comes back as what `batches.position` is made
            # of.
            run = await self.checkpoints.restore({"state": (step, 0), "step": 0, "batches": batches.position})
        self.first_step, batches.position = run["step"], run["batches"]
        self.reporter.line(f"going on after step {self.first_step}")
        return run["state"]

    # -------------------------------------------------------- training

    async def _train(
        self, mesh: Any, step: Any, state: steps.State, batches: data.TrainBatches
    ) -> steps.State:
        o = self.options
        with self.reporter.training(o.steps, o.tokens_per_step, self.first_step) as progress:
            if o.verify:
                state = await self._train_steps(mesh, step, state, batches, range(1, o.verify + 1), progress)
                self.verified_params = await mesh.fetch(state["params"])
            rest = range(self.first_step + o.verify + 1, o.steps + 1)
            state = await self._train_steps(mesh, step, state, batches, rest, progress)
        self.train_s = progress.seconds
        return state

    async def _train_steps(
        self,
        mesh: Any,
        step: Any,
        state: steps.State,
        batches: data.TrainBatches,
        numbers: range,
        progress: report.TrainingProgress,
    ) -> steps.State:
        """The steps of these numbers, counted from 1. The next is under way before the loss of this is looked
        at."""
        pending: tuple[Any, Any] | None = None
        number, position = numbers.start - 1, batches.position
        try:
            with progress.clock():
                for number in numbers:
                    position = batches.position
                    future = await mesh.submit(step, state, next(batches))
                    state, loss = future.outputs
                    if pending:
                        await self._finish(mesh, *pending, progress)
                    pending = future, loss
                    if self._is_due(number):
                        await self._save(number, state, batches)
                if pending:
                    await self._finish(mesh, *pending, progress)
        except asyncio.CancelledError:  # Ctrl-C. A step that was sent counts: `state` stands for its result.
            if self.checkpoints is not None:
                done = int(await steps.num_steps(state))
                if done < number:
                    batches.position = position  # The last batch has not been used.
                await self._save(done, state, batches)
            raise
        return state

    def _is_due(self, number: int) -> bool:
        """Whether the run is saved after this step."""
        every = self.options.save_every
        return self.checkpoints is not None and (
            number == self.options.steps or bool(every and number % every == 0)
        )

    async def _finish(self, mesh: Any, future: Any, loss: Any, progress: report.TrainingProgress) -> None:
        await future
        self.actor_times = [spent.add(one) for spent, one in zip(self.actor_times, future.stats, strict=True)]
        self.losses.append(float(await loss))
        if self.options.is_traced(self.first_step + len(self.losses)):
            self.timelines.append(future.timeline())
        progress.advance(self.losses[-1])
        mesh.log(progress.step, {"loss": self.losses[-1], "tokens/s": progress.rate})

    async def _evaluate(self, mesh: Any, params: Any, validation: list[data.Batch]) -> None:
        """The loss of each validation batch, where the parameters are; then the parameters, fetched."""
        step = mesh.distributed(
            self.eval_step, in_shardings=(state_specs(params), PartitionSpec(None, "data"))
        )
        losses = [await (await mesh.run(step, params, batch)) for batch in validation]
        self.validation_loss = float(np.mean(losses))
        self.params = await mesh.fetch(params)

    def _write_trace(self, path: Path) -> None:
        if not self.timelines:
            self.reporter.line(f"no trace: this run had none of the steps that --trace {path} wants")
            return
        write_trace(path, self.timelines)
        self.reporter.lines(["", *str(self.timelines[-1]).splitlines(), ""])
        self.reporter.line(
            f"trace of {len(self.timelines)} steps: {path}; show it: jaxpp-async page {path}, or drop it on "
            "https://ui.perfetto.dev. The mesh numbers steps from 0, and making the state is one of them."
        )

    @property
    def tokens_per_s(self) -> float:
        """Of this run's training."""
        return len(self.losses) * self.options.tokens_per_step / max(self.train_s, 1e-9)

    def verify(self, batches: Iterator[data.Batch]) -> tuple[float, float]:
        """Largest relative differences of losses and parameters from the same steps under plain `jax.jit`."""
        num_steps = self.options.verify
        state = jax.jit(self.init)(self.key)
        state, losses = steps.run_plain(self.train_step, state, islice(batches, num_steps))
        return (
            steps.largest_relative_difference(self.losses[:num_steps], losses),  # A leaf a step.
            steps.largest_relative_difference(self.verified_params, state["params"]),
        )


def dump_passes(compiled: Any, folder: Path) -> None:
    """Write the text of each pass, numbered in order, and the programs that the actors run."""
    folder.mkdir(parents=True, exist_ok=True)
    texts: Sequence[tuple[str, str]] = [*compiled.passes.items(), ("programs", compiled.as_text())]
    for index, (name, text) in enumerate(texts):
        (folder / f"{index:02d}_{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
