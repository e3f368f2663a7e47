"""Say what `step.init` compiles: a function that makes an argument of a step where the step uses it.

`init_request` makes a step of the user's function, whose results have the places, parts and shardings in
which another step takes its argument. The function has to make leaves of the shapes and dtypes of this
argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxpp_async.base.printable import listed
from jaxpp_async.compiler.ir import Traced
from jaxpp_async.compiler.pipeline import StepRequest
from jaxpp_async.errors import ArrayError
from jaxpp_async.jax_bridge import private_api
from jaxpp_async.session.argument_binding import Slot
from jaxpp_async.session.leaf_division import DividedPlace
from jaxpp_async.session.step import DistributedStep
from jaxpp_async.session.step_request import StepOptions


def init_request(
    step: DistributedStep, argnum: int, fn: Callable, args: Sequence[Any]
) -> tuple[DistributedStep, StepRequest]:
    """Return a step that runs `fn(*args)`, and the request to compile it so that `step` takes what it makes.

    Args:
        step: the step that takes the results as its argument `argnum`, and that has been compiled.
        argnum: the position of the argument.
        fn: the user's function.
        args: the arguments of `fn`.

    Raises:
        MeshError: `step` has not been compiled.
        ArrayError: `step` has no such argument with arrays in it. When the request is compiled, also if `fn`
            makes other leaves than the argument has.
    """
    argument = step.argument(argnum, "step.init")
    wanted, of = jax.tree.leaves(argument), f"argument {argnum} of step {step.__name__!r}"
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(argument)]
    what = f"step.init: {getattr(fn, '__name__', 'init')} does not make {of}"
    divided = {k: place for k, s in enumerate(wanted) if (place := DividedPlace.of(s)) is not None}
    maker = DistributedStep(step.runner, fn, StepOptions(None, None, (), ()))
    request = replace(
        maker.request(args),
        result_homes={k: frozenset(s.home) for k, s in enumerate(wanted) if s.home}
        | {k: tuple(map(frozenset, place.actors)) for k, place in divided.items()},
        result_parts={k: place.parts for k, place in divided.items()},
        out_specs=lambda traced: _checked_out_specs(traced, wanted, paths, what),
    )
    return maker, request


def _checked_out_specs(traced: Traced, wanted: Sequence[Slot], paths: Sequence[str], what: str) -> list:
    """Check that the function of `step.init` makes the leaves that a step needs, and return their shardings.

    Args:
        traced: the traced function.
        wanted: for each leaf of the step's argument, the slot with its name, type and actors.
        paths: the path of each of these leaves in the argument, as text.
        what: the beginning of the error message.

    Raises:
        ArrayError: the function makes more or fewer leaves than `wanted` has, or a leaf has another shape or
            dtype. The message compares leaves of the same path.
    """
    made = [_out_type(traced, ref) for ref in traced.flat.outputs[: len(traced.out_names)]]
    types = [f"{s.type.aval.dtype}{list(s.type.aval.shape)}" for s in wanted]
    if made != types:
        made_at = dict(zip((name.removeprefix("result") for name in traced.out_names), made, strict=True))
        asked = [(slot.name, path, kind) for slot, path, kind in zip(wanted, paths, types, strict=True)]
        differ = [
            f"result{path} is {made_at[path]}, but {name} is {kind}"
            for name, path, kind in asked
            if made_at.get(path, kind) != kind
        ]
        extra = [f"result{path} ({kind})" for path, kind in made_at.items() if path not in paths]
        missing = [f"{name} ({kind})" for name, path, kind in asked if path not in made_at]
        said = [f"it has no {listed(missing, 3)}"] * bool(missing)
        said += [f"the argument has no {listed(extra, 3)}"] * bool(extra)
        raise ArrayError(f"{what}: {'; '.join(said or differ[:1] or ['its leaves have another order'])}")
    return [s.type.aval.spec for s in wanted]


def _out_type(traced: Traced, ref: Any) -> str:
    if isinstance(ref, int):
        aval = traced.types[ref].aval
        return f"{aval.dtype}{list(aval.shape)}"
    return f"{private_api.canonical_dtype(np.asarray(ref.value).dtype)}{list(np.shape(ref.value))}"
