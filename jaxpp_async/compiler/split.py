"""compiler.split: one backward task in, its input-gradient and weight-gradient parts out. No jax, no schedule.

The input part makes what other stages wait for and nothing else; the rest, the weight gradients, can run later. Nothing
that costs something is computed in both, and the fewest bytes are kept between them. An operation that does both at
once is opened first: a checkpoint is replaced by what it computes again and differentiates, a scan over layers becomes
two scans.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024, arXiv:2401.10241, section 2.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from jaxpp_async.compiler.cut import LightOps, cut
from jaxpp_async.compiler.ir import Types
from jaxpp_async.compiler.partition import StagedLoop, StageTask
from jaxpp_async.compiler.residuals import made_again


def split_backward(
    staged: StagedLoop, task: StageTask, wanted: Collection[int], types: Types
) -> tuple[StageTask | None, StageTask | None]:
    """The two parts of a backward task. Where one has nothing to do it is None, and the other is the whole task.

    Args:
        staged: the loop.
        task: of kind `"bwd"`.
        wanted: ids of the values that other stages need.
        types: of the loop's values; new values enter it.
    """
    stage = task.key[1]
    if not wanted:
        return None, replace(task, key=("bwd_weight", stage))
    first, second = cut(task.ops, wanted)
    early = {o for op in first for o in op.outputs}
    adds_first = tuple(a for a in task.adds if _value(staged, a) in early)
    adds_second = tuple(a for a in task.adds if _value(staged, a) not in early)
    if not second and not adds_second:
        return replace(task, key=("bwd_input", stage)), None
    later = StageTask(("bwd_weight", stage), tuple(second), adds_second)
    repeated = LightOps.among(first, staged.loop.body.inputs).needed(staged.reads(later))
    later = replace(later, ops=(*repeated.values(), *second))
    again = made_again(first, staged.takes(later), staged.loop.body.inputs, types)
    return (
        StageTask(("bwd_input", stage), tuple(first), adds_first),
        replace(later, ops=again.read_by(later.ops)),
    )


def _value(staged: StagedLoop, add: tuple[int, int]) -> object:
    return staged.outputs[add[0]][add[1]].value
