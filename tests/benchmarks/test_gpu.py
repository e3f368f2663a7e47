"""`make bench-gpu` where there is no GPU: its programs run small, and what it makes of what they say is a
table.

python benchmarks/gpu.py --platform cpu --small      # all of it, in a minute
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp_async as jpp
from gpt.model import ModelConfig, init_params, loss_fn
from jaxpp_async.doctor.facts import Gpu

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "ours")]

import device_peer  # noqa: E402
import device_step  # noqa: E402
import gpu  # noqa: E402
import gpu_table  # noqa: E402
import nccl_peer  # noqa: E402
from gpu_table import ERRORS_HANDLED, ERRORS_NOT_HANDLED  # noqa: E402


def test_every_test_that_wants_a_gpu_is_run_by_make_and_by_the_benchmark():
    every = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_on_gpu*.py"))
    (in_make,) = re.findall(r"(?m)^GPU_TESTS := (.*)$", (ROOT / "Makefile").read_text())
    assert in_make.split() == every == list(gpu.GPU_TESTS)


def test_where_a_gpu_is_wanted_an_nccl_that_is_missing_fails_and_does_not_skip(tmp_path):
    (tmp_path / "nccl.py").write_text("raise ImportError('not here')")
    bench = gpu.Bench("cpu", True, print)
    env = {"JAXPP_TEST_GPU": "cuda", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(tmp_path)}
    ran = bench.run(gpu.Program((*gpu.PYTEST, "tests/gpu/test_on_gpu_nccl.py"), 60.0, env))
    assert gpu.results(ran) == {
        "counts": {},
        "why_skipped": [],
        "failed": "1 failed: test_on_gpu_nccl.py",
    }


# ---------------------------------------------------------------- its programs


def test_two_processes_send_each_other_memory():
    command = [sys.executable, "benchmarks/ours/device_peer.py", "cpu", "--small", "--sizes", "4096,1048576"]
    done = subprocess.run(
        [*command, "--pings", "5"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=100
    )
    found = json.loads(done.stdout)
    assert set(found["gb_s"]) == set(found["copy_gb_s"]) == {"4096", "1048576"} and found["half_rtt_us"] > 0
    assert found["abort"]["ms"] > 0 and found["routes"]


def test_two_processes_send_each_other_memory_over_a_stand_in_for_nccl(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXPP_TEST_NCCL_VIOLATIONS", str(tmp_path / "broken"))
    bench = gpu.Bench("cpu", True, print)
    found = gpu.nccl(bench)
    assert set(found["gb_s"]) == {"65536", "1048576"} and found["nccl"] == "stand-in"
    assert not (tmp_path / "broken").exists(), "no rule of NCCL was broken"
    rows = dict((what, figure) for what, figure, _ in gpu_table.rows({"nccl": found}))
    assert list(rows) == ["NCCL between two GPUs: 64 KiB", "NCCL between two GPUs: 1 MiB"]
    assert gpu_table.failures({"nccl": found}) == []


def test_nccl_between_two_gpus_is_skipped_and_said_so_where_there_is_one():
    found = gpu.nccl(gpu.Bench("cuda", False, print, "GPU-8f11"))
    assert gpu_table.rows({"nccl": found}) == [("NCCL between two GPUs", "-", found["skipped"])]
    assert "one GPU" in found["skipped"] and gpu_table.failures({"nccl": found}) == []


def tiny_work(options):
    """Instead of `device_step.work`, which takes long to compile."""

    def loss(params, x):
        return jnp.mean(jnp.square(jpp.pipeline_yield(jnp.tanh(x @ params["a"])) @ params["b"]))

    def step(params, batch):
        def grads(x):
            value, grad = jax.value_and_grad(loss)(params, x)
            return grad, value

        grad, losses = jpp.accumulate_grads(grads, jpp.Std1F1B(2))(batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grad), jnp.mean(losses)

    def init(key):
        return {name: jax.random.normal(jax.random.fold_in(key, k), (4, 4)) for k, name in enumerate("ab")}

    return step, init, np.ones((options.microbatches, 2, 4), np.float32)


async def test_actors_and_jit_take_the_same_step(monkeypatch):
    sizes = gpu.step_sizes(True, 0) | {"microbatches": 2, "steps": 2}
    arguments = [str(part) for name, value in sizes.items() for part in (f"--{name}", value)]
    train_step, init, batch = device_step.work(device_step.read_options(["jit", "cpu", *arguments]))
    state = jax.eval_shape(init, jax.random.key(0))
    assert jax.eval_shape(train_step, state, batch)[1].shape == () and "bfloat16" in str(
        jax.tree.leaves(state)
    )
    monkeypatch.setattr(device_step, "work", tiny_work)
    found = {
        "sizes": sizes,
        "jit": device_step.plain(device_step.read_options(["jit", "cpu", *arguments])),
        "ours": await device_step.ours(
            device_step.read_options(["ours", "cpu", *arguments]), launcher="inline"
        ),
    }
    assert found["ours"]["losses"] == pytest.approx(found["jit"]["losses"], rel=1e-5)
    assert found["ours"]["gaps"]["tasks"] >= 2 * (1 + 2) and found["ours"]["staged"] == []
    shown = [what for what, _, _ in gpu_table.rows({"step": found})]
    steps, gaps = ["step, jit", "step, ours", "step, ours to jit"], ["between tasks of an actor"]
    assert shown == [*steps, *gaps, "where a step's time goes"]
    assert json.loads(json.dumps(found)) == found, "it is printed as JSON"


@pytest.mark.parametrize(
    "gib, layers, size", [(141, 16, 12), (80, 16, 6), (40, 12, 6), (24, 8, 5), (16, 8, 3), (0, 8, 3)]
)
def test_the_step_fills_the_memory_of_the_actor_that_needs_most(gib, layers, size):
    sizes = gpu.step_sizes(False, gib << 30)
    assert (sizes["layers"], sizes["microbatch-size"]) == (layers, size)
    fixed, sequence = gpu.step_bytes(sizes)
    memory = 0.9 * 0.45 * ((gib << 30) or gpu.UNKNOWN_BYTES)
    assert fixed + size * sequence <= memory < fixed + (size + 1) * sequence


@pytest.mark.parametrize("dim, head_dim", [(2048, 128), (1024, 64)])
def test_what_a_layer_takes_is_a_little_more_than_what_autodiff_keeps(dim, head_dim):
    def kept(layers, size):
        config = ModelConfig(num_layers=layers, dim=dim, num_heads=dim // head_dim, seq_len=1024)
        shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), shapes)
        tokens = jax.ShapeDtypeStruct((size, 1024), jnp.int32)
        batch = {"tokens": tokens, "labels": tokens}
        backward = jax.eval_shape(lambda p, b: jax.vjp(lambda p: loss_fn(p, b, config), p)[1], params, batch)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backward))

    layer = (kept(2, 2) - kept(2, 1)) - (kept(1, 2) - kept(1, 1))
    assert 1.0 < gpu.ACTIVATION_BYTES[dim] / layer < 1.15


def test_a_program_that_hangs_is_ended_with_all_it_started_and_says_how_far_it_came():
    bench = gpu.Bench("cpu", True, print)
    hangs = "import subprocess; print('begun', flush=True); subprocess.run(['sleep', '100'])"
    ran = bench.run(gpu.Program(("-c", hangs), 1.0))
    assert (ran.code, ran.out, ran.failed) == (None, "begun\n", "took longer than 1 s")
    assert bench.figures(gpu.Program(("-c", "print('{\"a\": 1}')"), 60.0)) == {"a": 1}
    failed = bench.figures(gpu.Program(("-c", "raise SystemExit('no GPU')"), 60.0))
    assert failed == {"failed": "ended with code 1: no GPU"}


TWO = [Gpu(index, f"H{index}00", uuid, index + 1, 0) for index, uuid in enumerate(("GPU-8f11", "GPU-8a22"))]


@pytest.mark.parametrize(
    "named, there, first, known",
    [
        (("0", "1"), TWO, "GPU-8f11", TWO[0]),
        (("1",), TWO, "GPU-8a22", TWO[1]),
        (("gpu-8A", "GPU-8f"), TWO, "GPU-8a22", TWO[1]),
        (("MIG-a",), TWO, "MIG-a", None),
        (("2", "3"), (), "2", None),  # nobody can be asked
        ((), TWO, "", None),
    ],
)
def test_everything_is_on_one_gpu_of_those_that_may_be_used(named, there, first, known):
    assert gpu.the_one(named, there) == (first, known)


def test_all_programs_get_the_one_gpu_that_the_figures_are_said_to_be_of(monkeypatch, programs, tmp_path):
    monkeypatch.setattr(gpu, "host_gpus", lambda environ: ("1", "0"))
    monkeypatch.setattr(gpu.gather, "find_gpus", lambda: (None, TWO, ""))
    assert gpu.main([]) == 0
    assert {bench.gpu for bench in programs.benches} == {"GPU-8a22"}
    (between,) = [p.command for p in programs.asked if "nccl_peer" in p.command[0]]
    assert nccl_peer.read_options(between[1:]).other == "GPU-8f11", (
        "what takes two gets the next one beside it"
    )
    assert json.loads((tmp_path / "gpu.json").read_text())["about"]["device"] == "H100"


def test_a_program_sees_the_one_gpu_alone(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    says = gpu.Program(("-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"), 60.0)
    shown = [gpu.Bench("cuda", True, print, name).run(says).out.strip() for name in ("GPU-8f11", "")]
    assert shown == ["GPU-8f11", "0,1"]


# ---------------------------------------------------------------- the whole run, with programs that say what
# is wanted

PEER = {
    "routes": ["cuda_copy", "cuda_ipc"],
    "half_rtt_us": 12.0,
    "gb_s": {"65536": 4.0, "1048576": 40.0, "268435456": 900.0},
    "copy_gb_s": {"65536": 100.0, "1048576": 800.0, "268435456": 1500.0},
    "abort": {"ms": 2.0, "ended": ["TransferError"] * 4},
    "device": "NVIDIA H100",
}
NOT_TRIED = PEER | {"abort": {"not_tried": "nothing ends it"}}
STEP = {"ms": [10.0], "losses": [1.0], "compile_s": 3.0}


class Programs:
    """Stands in for `Bench.run`: notes what is asked, and answers."""

    def __init__(self, monkeypatch, tmp_path):
        self.asked, self.benches, self.wrong = [], [], {}
        monkeypatch.setattr(gpu.Bench, "run", lambda bench, program: self.run(program, bench))
        monkeypatch.setattr(gpu.harness, "RESULTS", tmp_path)

    def run(self, program, bench):
        self.asked.append(program)
        self.benches.append(bench)
        what = program.command[2 if program.command[0] == "-m" else 0]
        said = {
            "tests": "tests/test_a.py::test_b PASSED [100%]\n",
            "device_peer": json.dumps(self._peer(program)),
        }
        said["nccl_peer"] = json.dumps({"gb_s": {"1048576": 30.0}, "nccl": "2.32.3"})
        said["device_step"] = json.dumps(STEP)
        name = "tests" if program.command[0] == "-m" else Path(what).stem
        return self.wrong.get(name) or gpu.Ran(0, said[name], "", program.limit_s)

    def _peer(self, program):
        return NOT_TRIED if "JAXPP_UCX_ERROR_HANDLING" in (program.env or {}) else PEER


@pytest.fixture
def programs(monkeypatch, tmp_path):
    return Programs(monkeypatch, tmp_path)


@pytest.mark.parametrize("small", [(), ("--small",)])
def test_all_of_it_runs_tests_first_within_ten_minutes(programs, capsys, small):
    assert gpu.main(["--markdown", *small]) == 0
    commands = [program.command for program in programs.asked]
    assert [command[:1] for command in commands[:2]] == [("-m",)] * 2, (
        "figures of what is wrong are worth nothing"
    )
    assert sum(program.limit_s for program in programs.asked) <= gpu.BUDGET_S < 600
    options = []
    for script, *arguments in commands[2:]:
        read = device_peer.read_options if "peer" in script else device_step.read_options
        options.append(read(arguments))
    assert [getattr(o, "contender", "peer") for o in options] == ["peer"] * 3 + ["jit", "ours"]
    printed = capsys.readouterr().out
    for row in (
        "| UCX's error handling | keep on |",
        "| test_on_gpu.py | 1 passed |",
        "| step, ours to jit | 1.00x |",
    ):
        assert row in printed
    assert ("jax 0." in printed and "cpu" not in printed.partition("|")[0].partition(",")[0]) or small


@pytest.mark.parametrize(
    "name, ran, text",
    [
        ("tests", gpu.Ran(1, "FAILED tests/gpu/test_on_gpu.py::test_a - boom\n", "", 9.0),
         "1 failed: test_on_gpu"),
        ("tests", gpu.Ran(None, "tests/t.py::a PASSED\ntests/t.py::b ", "", 9.0),
         "longer than 9 s, in t.py::b"),
        ("tests", gpu.Ran(4, "", "ERROR: not found", 9.0),
         "tests, tests/gpu/test_on_gpu.py: ended with code 4: ERROR"),
        ("device_peer", gpu.Ran(-11, "", "", 9.0), "transfers, tcp, staged: ended with code -11: no output"),
        ("device_peer", gpu.Ran(0, json.dumps(PEER | {"abort": {"failed": "TimeoutError"}}), "", 9.0),
         "abort: Ti"),
        ("device_step", gpu.Ran(0, "nothing", "", 9.0), "step, ours: printed no figures"),
    ],
)  # fmt: skip
def test_what_fails_costs_only_itself_and_is_said_at_the_end(programs, capsys, name, ran, text):
    programs.wrong = {name: ran}
    assert gpu.main([]) == 1
    assert len(programs.asked) == 7
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failed: ")]
    assert any(text in line for line in failed), failed


@pytest.mark.parametrize(
    "on, off, verdict, why",
    [
        (PEER, NOT_TRIED, "keep on",
         "1.00x the bandwidth without (1 MiB), 1.00x the half round trip; an abort"),
        (PEER | {"gb_s": PEER["gb_s"] | {"268435456": 450.0}}, NOT_TRIED, "look again",
         "0.50x the bandwidth"),
        # small ones are of latency
        (PEER | {"gb_s": PEER["gb_s"] | {"65536": 0.4}}, NOT_TRIED, "keep on", "1.00x"),
        (PEER | {"routes": ["cuda_copy", "posix"]}, NOT_TRIED, "switch off", "no cuda_ipc"),
        (PEER | {"abort": {"failed": "TimeoutError"}}, NOT_TRIED, "look again",
         "end transfers: TimeoutError"),
        ({"failed": "hung"}, NOT_TRIED, "not decided", "both"),
    ],
)  # fmt: skip
def test_whether_ucx_is_to_handle_errors_is_chosen_with_the_figures(on, off, verdict, why):
    _, said, beside = gpu_table.choice({ERRORS_HANDLED: on, ERRORS_NOT_HANDLED: off})
    assert said == verdict and why in beside


def test_results_of_tests_are_counted_up_to_where_they_were_ended():
    out = """
tests/gpu/test_on_gpu.py::TestX::test_a[64 KiB] PASSED [ 10%]
tests/gpu/test_on_gpu.py::TestX::test_b SKIPPED (NCCL needs a GPU) [ 20%]
tests/gpu/test_on_gpu.py::TestX::test_c FAILED [ 30%]
SKIPPED [2] tests/gpu/test_on_gpu.py:83: NCCL needs a GPU
SKIPPED [1] tests/support/one_gpu.py:24: NCCL does not: take it
FAILED tests/gpu/test_on_gpu.py::TestX::test_c - AssertionError
"""
    found = gpu.results(gpu.Ran(1, out, "", 9.0))
    assert found == {
        "counts": {"passed": 1, "skipped": 1, "failed": 1},
        "why_skipped": ["NCCL does not: take it", "NCCL needs a GPU"],
        "failed": "1 failed: test_on_gpu.py::TestX::test_c",
    }
    assert gpu.results(gpu.Ran(5, "collected 0 items", "", 9.0)) == {"counts": {}, "why_skipped": []}


FAILING = """
import pytest

def test_a(): pass

def test_b(): assert 1 == 2

def test_c(): pytest.skip("no luck")

@pytest.fixture
def broken(): raise OSError("no device")

def test_d(broken): pass
"""


def test_what_pytest_itself_says_of_failures_is_understood(tmp_path):
    file = tmp_path / "test_on_gpu_x.py"
    file.write_text(FAILING)
    as_here = ("-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}")
    ran = gpu.Bench("cpu", True, print).run(gpu.Program((*gpu.PYTEST, *as_here, str(file)), 60.0))
    assert gpu.results(ran) == {
        "counts": {"passed": 1, "failed": 1, "skipped": 1, "error": 1},
        "why_skipped": ["no luck"],
        "failed": "2 failed: test_on_gpu_x.py::test_b, test_on_gpu_x.py::test_d",
    }
