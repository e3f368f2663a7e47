"""compiler.dead: a traced step in; out: the same without what nothing needs. Plain data, no jax."""

from __future__ import annotations

from dataclasses import replace

from jaxpp_async.compiler.ir import Flat, Loop, Op, used_ids
from jaxpp_async.compiler.primitives import MARKER


def eliminate_dead(flat: Flat) -> Flat:
    """Drop operations, loop results and loop inputs that nothing needs. Markers stay: they count stages."""
    needed = {r for r in flat.outputs if isinstance(r, int)}
    kept: list[Op | Loop] = []
    for op in reversed(flat.ops):
        if needed.isdisjoint(op.outputs) and not (isinstance(op, Op) and op.name == MARKER):
            continue
        kept.append(_prune_loop(op, needed) if isinstance(op, Loop) else op)
        needed.update(kept[-1].reads)
    return Flat(flat.inputs, tuple(reversed(kept)), flat.outputs)


def _prune_loop(loop: Loop, needed: set[int]) -> Loop:
    keep = [i for i, o in enumerate(loop.outputs) if o in needed]
    body = eliminate_dead(Flat(loop.body.inputs, loop.body.ops, tuple(loop.body.outputs[i] for i in keep)))
    used = used_ids(body.ops, body.outputs)
    invariants, batch, index = loop.body_inputs()
    kept_invariants = [i for i, v in enumerate(invariants) if v in used]
    kept_batch = [i for i, v in enumerate(batch) if v in used]
    inputs = [invariants[i] for i in kept_invariants] + [batch[i] for i in kept_batch] + [index]
    return replace(
        loop,
        body=Flat(tuple(inputs), body.ops, body.outputs),
        invariants=tuple(loop.invariants[i] for i in kept_invariants),
        batch=tuple(loop.batch[i] for i in kept_batch),
        outputs=tuple(loop.outputs[i] for i in keep),
        reductions=tuple(loop.reductions[i] for i in keep),
    )
