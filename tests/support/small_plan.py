"""A plan of one microbatch on two actors, for tests of what is done with plans."""

from __future__ import annotations

from jaxpp_async.planning.plan import Plan
from jaxpp_async.planning.simulation import StepTimes

PLAN = Plan(
    step="train",
    arguments={},
    num_actors=2,
    spmd_mesh={},
    num_microbatches=1,
    marks=("model.py:3",),
    mark_names=(None,) * 1,
    cut=(0,),
    name="GPipe(2)",
    orders=("0F0 0B0", "1F0 1I0 1W0"),
    task_s={"fwd": (1.0, 2.0), "bwd": (3.0, 9.0), "bwd_input": (9.0, 0.5), "bwd_weight": (9.0, 0.25)},
    step_s=StepTimes(7.0, 7.5, 8.0),
    loop_s=6.5,
    bound=6.0,
    placement_bound=6.0,
    memory=(100, 80),
    kept_bytes=(30.0, 40.0),
    weight_kept_bytes=(10.0, 15.0),
    cap_bytes=120.0,
    candidates=(),
    advice=("transfers that take no time: 3.0% less",),
    assumed=(),
)
