"""examples/llama: the pipeline computes what plain `jax.jit` computes, a few lines from the plain script.

`pytest tests/examples/test_llama.py -k lines -s` prints how many.
"""

from __future__ import annotations

import ast
import difflib
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from interpret import check_step
from paths import ROOT
from resources import nothing_left

import jaxpp_async as jpp
from jaxpp_async.testing import assert_close

pytest.importorskip("grain", reason="grain is not installed")

from llama import plain, train

PLAIN, PIPELINE = (ROOT / "examples" / "llama" / name for name in ("plain.py", "train.py"))
TEXT = ROOT / "DESIGN.md"
STEPS = ("--steps", "6", "--log-every", "1", "--eval-every", "3", "--save-every", "3")
METRICS = {"loss", "grad norm", "rate"}


@pytest.fixture(autouse=True)
def quick_compiles():
    """Compiling is what these tests cost, and LLVM's optimizations are half of it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


async def logged(script: Any, folder: Path, *options: str) -> dict[int, dict[str, float]]:
    """Run a script in float32, and return what it logs: step number to metrics."""
    found: dict[int, dict[str, float]] = defaultdict(dict)

    class Recorder:
        def log(self, step: int, values: Any) -> None:
            found[step].update({name: float(value) for name, value in values.items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(script.SIZES, "tiny", replace(script.SIZES["tiny"], dtype=jnp.float32))
        patch.setattr(script, "Printer", Recorder)
        done = script.main(
            script.parse([*STEPS, "--data", str(TEXT), "--checkpoints", str(folder), *options])
        )
        if script is train:
            await done
    return dict(found)


def checkpoint(folder: Path, name: str, to: Path) -> Path:
    """Copy one checkpoint of a run to a folder of its own."""
    shutil.copytree(folder / name, to / name)
    return to


@pytest.fixture(scope="module")
async def plain_run(tmp_path_factory):
    """The checkpoints of the plain script, and what it logs."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, await logged(plain, folder)


@pytest.fixture(scope="module")
async def pipeline_run(tmp_path_factory):
    """The same of the pipeline, on two actors."""
    folder = tmp_path_factory.mktemp("pipeline")
    return folder, await logged(train, folder, "--launcher", "inline")


def of_steps(run: tuple[Path, dict[int, Any]], *numbers: int) -> dict[int, Any]:
    return {number: run[1][number] for number in numbers}


# ---------------------------------------------------------------- numbers


def test_equals_the_plain_script(plain_run, pipeline_run):
    found = pipeline_run[1]
    assert set(found[1]) == METRICS and set(found[3]) == METRICS | {"held-out loss"}
    assert found[6]["loss"] < found[1]["loss"] - 1
    assert_close(found, plain_run[1], rtol=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        ("--actors", "4", "--launcher", "inline"),
        ("--actors", "2", "--schedule", "Interleaved1F1B", "--stages", "4", "--cut", "0", "1", "2"),
    ],
    ids=["four actors", "processes"],
)
async def test_goes_on_with_other_actors(pipeline_run, plain_run, tmp_path, capsys, caplog, options):
    """Layers, their moments and the place in the data come from a checkpoint of two inline actors."""
    folder = checkpoint(pipeline_run[0], "00000003", tmp_path)
    async with nothing_left(caplog):
        found = await logged(train, folder, *options)
    assert capsys.readouterr().out.endswith(f"going on after step 3 of {folder}\n")
    assert_close(found, of_steps(plain_run, *range(4, 7)), rtol=1e-3)


async def test_starts_under_plain_jit(plain_run, tmp_path):
    found = await logged(train, tmp_path, "--plain")
    expected = {k: {name: values[name] for name in METRICS} for k, values in plain_run[1].items()}
    assert_close(found, expected, rtol=1e-3)


async def test_the_plain_script_goes_on(plain_run, tmp_path):
    found = await logged(plain, checkpoint(plain_run[0], "3", tmp_path))
    assert_close(found, of_steps(plain_run, *range(4, 7)), rtol=1e-5)


def test_equals_plain_jit_in_bfloat16():
    """As the sizes have it: activations in bfloat16, parameters and their gradients in float32."""
    program = train.Program(train.SIZES["tiny"], train.parse([]))
    state = jax.jit(program.init)(jax.random.key(0))
    batch = next(train.make_batches(train.read(str(TEXT)), program.config, train.parse([])))
    types = {str(leaf.dtype) for leaf in jax.tree.leaves(state)}
    assert types == {"float32", "int32"}
    schedules = (jpp.ZeroBubbleV(4, stages="balanced"),)
    check_step(program.train_step, state, batch, schedules=schedules, donate=(0,), rtol=5e-3, atol=5e-3)


# ---------------------------------------------------------------- placement


def compiled(size: str, actors: int, *options: str, batch: tuple[int, int] = (8, 1)) -> Any:
    """The training step, compiled for a machine that is not there."""
    config = train.SIZES[size]
    program = train.Program(config, train.parse(["--actors", str(actors), *options]))
    state = jax.eval_shape(program.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((*batch, config.seq_len), jnp.int32)
    arguments = (state, {"tokens": tokens, "labels": tokens})
    return jpp.compile_for(jpp.Machine(actors), program.train_step, arguments, donate_argnums=0)


@pytest.mark.parametrize(
    ("size", "actors", "options"),
    [
        ("tiny", 2, ()),
        ("tiny", 4, ()),
        ("tiny", 2, ("--schedule", "ZeroBubbleV", "--stages", "4")),
        ("8b", 8, ()),
    ],
)
def test_each_actor_holds_its_share_of_the_layers(size, actors, options):
    """Parameters and both moments of all layers; of 8b the balanced stages are not equally long."""
    report = compiled(size, actors, *options).report()
    stacked = [line for line in report.inputs if "['layers']" in line.name]
    whole = sum(line.size_bytes for line in stacked)
    held = [sum(line.bytes_on(actor) for line in stacked) for actor in range(actors)]
    assert len(stacked) == 3 * 9
    assert sum(held) == whole
    if size == "tiny":
        assert max(held) <= 1.05 * whole / actors
    assert all(line.parts for line in report.outputs if "['layers']" in line.name)


def test_only_activations_and_scalars_travel():
    """In the loop the residual stream, in bfloat16; outside it the norm for clipping."""
    config = train.SIZES["tiny"]
    transfers = compiled("tiny", 4, batch=(8, 2)).report().transfers
    in_loop = {t.size_bytes for t in transfers if t.when == "in the loop"}
    assert in_loop == {2 * config.seq_len * config.dim * 2}
    assert max(t.size_bytes for t in transfers if t.when != "in the loop") <= 4


# ---------------------------------------------------------------- lines to port


def code(path: Path) -> list[tuple[str, bool]]:
    """The lines of a script that are code, and whether each belongs to the model."""
    text = path.read_text()
    tree = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    model: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        if isinstance(node, ast.ClassDef) and any(ast.unparse(b) == "nnx.Module" for b in node.bases):
            model |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return [
        (line, number in model)
        for number, line in enumerate(text.splitlines(), 1)
        if number not in docstrings and line.strip() and not line.lstrip().startswith("#")
    ]


def test_lines_to_port_the_script():
    """Lines of code that were added, changed or removed: a changed one counts once."""
    before, after = code(PLAIN), code(PIPELINE)
    matcher = difflib.SequenceMatcher(None, *([x for x, _ in y] for y in (before, after)), autojunk=False)
    model = script = 0
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        if kind != "equal":
            of_model = max(sum(m for _, m in before[i1:i2]), sum(m for _, m in after[j1:j2]))
            model += of_model
            script += max(i2 - i1, j2 - j1) - of_model
    print(f"lines to port: model {model}, script {script}; longer by {len(after) - len(before)} lines")
    page = (ROOT / "docs" / "howto" / "llama.md").read_text()
    assert f"changed, and {script} lines of the rest" in page
    assert model == 1
    assert script <= 40
    assert len(after) - len(before) <= 30
