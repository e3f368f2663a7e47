"""Check one program: what its plan computes is what plain JAX computes."""

from __future__ import annotations

import linecache
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from eager import Once
from interpret import run_plan
from planning import plan_step

from jaxpp_async.compiler.pipeline import CompilePlan
from jaxpp_async.testing import assert_close


def run_source(source: str, check: Callable | None = None) -> None:
    """Run a program's text, with lines in tracebacks.

    Args:
        check: called in place of `check` below.
    """
    name = f"<program {hash(source):x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names: dict[str, Any] = {"__name__": "program"}
    if check is not None:
        source = source.replace("from checking import check", "")
        names["check"] = check
    exec(compile(source, name, "exec"), names)


def check(
    step: Callable, *args: Any, actors: int, donate: tuple[int, ...], rtol: float, atol: float
) -> CompilePlan:
    """Plan a step, run the plan, and compare.

    Raises:
        AssertionError: a result is wrong, or a pass left something that it must not.
    """
    once = Once(step, *args)
    done = plan_step(once, *args, actors=actors, donate=donate)
    assert_close(run_plan(done, *args), once.run(*args), rtol=rtol, atol=atol)
    check_homes(done)
    return done


def check_homes(done: CompilePlan) -> None:
    """A state stays where it is from step to step.

    Raises:
        AssertionError: a result that continues an argument is not where the step takes the argument.
    """
    graph = done.placed.graph
    ends: dict[int, set[int]] = defaultdict(set)
    for o in graph.outputs:
        ends[o.result] |= {*o.actors}
    starts = {i.arg: {*i.actors} for i in graph.inputs}
    for result, arg in done.continues.items():
        if starts[arg] and starts[arg] != ends[result]:  # what is only replaced lies anywhere
            name = done.traced.arg_names[arg]
            raise AssertionError(
                f"{name} is on actors {starts[arg]} before and {ends[result]} after the step"
            )
