"""compile: how long the compiler takes from a step function to every actor's instruction stream, pass by
pass.

Runs no step and starts no actor. `python benchmarks/compile.py --help`; results in `results/compile.json`.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import harness
import jax
import transformer

import jaxpp_async as jpp
from jaxpp_async.compiler.pipeline import StepRequest, compile_step, gc_paused, plan
from jaxpp_async.session import mesh_options
from jaxpp_async.session.step import DistributedStep
from jaxpp_async.session.step_request import StepOptions

NUM_ACTORS = 8
STAGES = (12, 24, 48, 96)
MICROBATCHES = (16, 64, 128)
TARGET = (48, 64)
"""Stages and microbatches of the case whose time is a promise: 3 s."""


def request(num_stages: int, num_microbatches: int, spmd_mesh: dict[str, int] | None = None) -> StepRequest:
    """What is compiled: `transformer.train_step` under Interleaved1F1B, its state donated."""
    shape = transformer.Shape(num_stages)
    step, state = transformer.train_step(shape, jpp.Interleaved1F1B(num_stages))
    axes = spmd_mesh or {}
    target = mesh_options.make_target(axes, ["auto"] * len(axes), {}, "cpu")
    runner: Any = SimpleNamespace(num_actors=NUM_ACTORS, target=target)
    options = StepOptions(in_shardings=None, out_shardings=None, donate_argnums=(0,), static_argnums=())
    distributed = DistributedStep(runner, step, options)
    return distributed.request((state, transformer.batch(shape, num_microbatches)))


def compile_once(args: argparse.Namespace) -> Callable[[Callable[[str], None]], Any]:
    """One compilation of `args`' case, up to the streams or (`--emit`) up to the executables."""
    axes = {"data": args.data} if args.data > 1 else None
    wanted, run = request(args.stages, args.microbatches, axes), compile_step if args.emit else plan
    return lambda passed: run(wanted, passed)


def case(args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one size, in this process: the first run, which has to fill JAX's own caches, and later
    ones."""
    (first,) = harness.measure(compile_once(args), 1)
    # A step function of its own for each run: JAX would know the first one's trace.
    runs = [harness.measure(compile_once(args), 1)[0] for _ in range(args.runs)]
    later = harness.medians(runs)
    return {
        "stages": args.stages,
        "microbatches": args.microbatches,
        "first_s": round(sum(first.values()), 3),
        "median_s": round(sum(later.values()), 3),
        "least_s": round(min(sum(r.values()) for r in runs), 3),
        "jax_s": round(jax_alone(args), 3),
        "passes_s": harness.rounded(later),
    }


def jax_alone(args: argparse.Namespace) -> float:
    """Time `jax.make_jaxpr` of the same step: the part of `trace` that no compiler of jaxprs can save."""

    def run(passed: Callable[[str], None]) -> None:
        with gc_paused():
            jax.make_jaxpr(wanted.fn)(*wanted.args)
        passed("jax")

    found = []
    for _ in range(args.runs):
        wanted = request(args.stages, args.microbatches)
        found += harness.measure(run, 1)
    return harness.medians(found)["jax"]


def profile(args: argparse.Namespace) -> None:
    """Where one size spends its time, by function."""
    compile_once(args)(lambda _: None)
    run = compile_once(args)
    profiler = cProfile.Profile()
    profiler.runcall(run, lambda _: None)
    pstats.Stats(profiler).sort_stats(args.sort).print_stats(45)


def all_cases(args: argparse.Namespace) -> None:
    """Every size, each in a process of its own, and how the time grows."""
    cases = []
    for stages in STAGES:
        for microbatches in MICROBATCHES:
            command = [
                sys.executable,
                __file__,
                "--runs",
                str(args.runs),
                "case",
                str(stages),
                str(microbatches),
            ]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            cases.append(json.loads(done.stdout))
            print(_line(cases[-1]), flush=True)
    growth = _growth(cases)
    print("growth, as the exponent of stages x microbatches:", growth)
    figures = {"cases": cases, "growth": growth} | ({"note": args.note} if args.note else {})
    print("written to", harness.write("compile", figures))


def _growth(cases: list[dict[str, Any]]) -> dict[str, float]:
    """Exponents for the whole and for each pass. Tracing, partitioning and placing see no microbatches, so
    the whole grows with less than the product; along one axis alone it must stay at most 1."""
    fixed_stages = [c for c in cases if c["stages"] == TARGET[0]]
    fixed_microbatches = [c for c in cases if c["microbatches"] == TARGET[1]]
    found = {
        "stages x microbatches": [(c["stages"] * c["microbatches"], c["median_s"]) for c in cases],
        f"stages at {TARGET[1]} microbatches": [(c["stages"], c["median_s"]) for c in fixed_microbatches],
        f"microbatches at {TARGET[0]} stages": [(c["microbatches"], c["median_s"]) for c in fixed_stages],
    }
    for name in cases[0]["passes_s"]:
        found[f"{name}, stages"] = [(c["stages"], c["passes_s"][name]) for c in fixed_microbatches]
    return {name: round(harness.exponent(*zip(*points, strict=True)), 2) for name, points in found.items()}


def _line(c: dict[str, Any]) -> str:
    parts = "  ".join(f"{name} {s * 1000:.0f}" for name, s in c["passes_s"].items())
    size = f"{c['stages']:3} stages {c['microbatches']:4} microbatches"
    median, least, jax_s = c["median_s"], c["least_s"], c["jax_s"]
    return f"{size}: {median:6.2f} s (least {least:.2f}), JAX alone {jax_s:.2f} s  (ms: {parts})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="runs a figure is the median of")
    parser.add_argument("--emit", action="store_true", help="up to the serialized executables")
    parser.add_argument(
        "--note", help="what a reader of the results should know, such as who else used the machine"
    )
    parser.add_argument("--data", type=int, default=1, help="devices of an actor, on one axis")
    parser.add_argument("--sort", default="tottime", help="order of a profile: tottime or cumtime")
    parser.add_argument("what", nargs="?", choices=("all", "case", "profile"), default="all")
    parser.add_argument("stages", nargs="?", type=int, default=TARGET[0])
    parser.add_argument("microbatches", nargs="?", type=int, default=TARGET[1])
    args = parser.parse_args()
    if args.what == "all":
        all_cases(args)
    elif args.what == "case":
        print(json.dumps(case(args)))
    else:
        profile(args)


if __name__ == "__main__":
    main()
