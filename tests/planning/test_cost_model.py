"""Direct tests of cost models: measured and assumed times, links, files."""

from __future__ import annotations

import json

import pytest
from measured_step import STEP, WORKS, event, timeline

from jaxpp_async import CostModel
from jaxpp_async.errors import CostError, JaxppAsyncError, MeshError, MissingCost
from jaxpp_async.planning.cost_model import TaskFormula
from jaxpp_async.planning.samples import LinkCost, Samples
from jaxpp_async.program.work import Collective, TaskWork
from jaxpp_async.timeline import ActorTimeline

OTHER = TaskWork("other", 40.0, 4.0)
LINK = LinkCost(Samples((1.0,)), 10.0)


def test_a_measured_task_has_its_own_samples():
    costs = CostModel.from_timelines([STEP])
    assert costs.is_measured(WORKS[0]) and costs.task_s(WORKS[0]) == 1.25
    assert [costs.sample(WORKS[0], u) for u in (0.0, 0.49, 0.5, 0.99)] == [0.5, 0.5, 2, 2]


def test_another_task_has_the_time_of_the_formula_spread_as_measured_ones_are():
    costs = CostModel.from_timelines([STEP])
    assert not costs.is_measured(OTHER)
    # 10 FLOPs take 1.25 s and 20 take 2.8125 s, so nothing is left for an overhead
    assert costs.formula is not None and costs.formula.overhead_s == pytest.approx(0, abs=1e-6)
    assert costs.task_s(OTHER) == pytest.approx(40 / 7.5, rel=0.05)
    ratios = sorted([0.4, 1.6, 3.75 / 2.8125, 1.875 / 2.8125])
    assert costs.spread.seconds == pytest.approx(ratios)
    assert costs.sample(OTHER, 0.0) == pytest.approx(0.4 * costs.task_s(OTHER))
    assert "fitted to 2 measured kinds of task" in costs.assumed[0]


def test_short_tasks_do_not_decide_what_is_added_to_long_ones():
    works = tuple(TaskWork(f"{flops}", flops, 0.0) for flops in (0.0, 10.0, 20.0))
    took = (0.001, 1.5, 2.5)  # a long task takes half a second more than its FLOPs do
    runs = [event(0, k, "run", 10.0 * k, 10.0 * k + took[k], executable=k) for k in range(3)]
    costs = CostModel.from_timelines([timeline(ActorTimeline(0, tuple(runs)), works=works)])
    assert costs.task_s(TaskWork("other", 5.0, 0.0)) == pytest.approx(1.0)
    assert costs.task_s(works[0]) == pytest.approx(0.001)  # it was measured
    assert costs.spread.seconds == (1, 1)


def test_measured_delays_are_distributions():
    costs = CostModel.from_timelines([STEP])
    assert costs.dispatch.seconds == (0.125, 0.5, 0.5) and costs.wake.seconds == (0.25,)
    assert costs.arguments == {4: Samples((0.5,))} and costs.reply.seconds == (8,)
    assert costs.links["same host"].latency.mean == 1.75
    assert any("no large transfer was measured" in text for text in costs.assumed)


def test_the_formula_takes_the_longer_of_computing_and_reading():
    formula = TaskFormula(0.5, flops_per_s=10.0, bytes_per_s=1.0)
    assert formula.task_s(TaskWork("", 40, 1)) == 4.5
    assert formula.task_s(TaskWork("", 40, 8)) == 8.5
    assert TaskFormula().task_s(OTHER) == 0
    for bad in ({"overhead_s": -1.0}, {"flops_per_s": 0.0}, {"bytes_per_s": float("inf")}):
        with pytest.raises(ValueError):
            TaskFormula(**bad)


def test_exchanges_between_devices_add_to_a_task():
    costs = CostModel(formula=TaskFormula(), links={"devices": LINK})

    def seconds(kind: str, devices: int) -> float:
        return costs.task_s(TaskWork("", 0, 0, (Collective(kind, devices, 40.0),)))

    assert seconds("all-gather", 4) == 1 + 3
    assert seconds("all-reduce", 4) == 2 * (1 + 3)
    assert seconds("all-reduce", 1) == 0


def test_what_has_no_cost_is_named():
    with pytest.raises(MissingCost, match=r"task with key 'other' \(40 FLOPs, 4 bytes\)"):
        CostModel().task_s(OTHER)
    work = TaskWork("", 0, 0, (Collective("all-gather", 4, 40.0),))
    with pytest.raises(MissingCost, match="an all-gather between 4 devices of an actor"):
        CostModel(formula=TaskFormula()).task_s(work)
    with pytest.raises(MissingCost, match=r"from actor 0 to actor 1 \(same host\)"):
        CostModel().link_between(0, 1)
    assert issubclass(MissingCost, CostError) and issubclass(CostError, JaxppAsyncError)


def test_actors_on_two_hosts_are_joined_by_another_link():
    costs = CostModel(links={"same host": LINK, "between hosts": LINK}, actors_per_host=2)
    assert costs.link_between(0, 1) == ("same host", "same host")
    assert costs.link_between(1, 2) == ("between hosts", "between hosts")
    within = CostModel(links={"memory": LINK})
    assert within.link_between(1, 2) == ("memory", "memory")
    unknown = CostModel(links={"same host": LINK}, actors_per_host=1)
    assert unknown.link_between(0, 1) == ("between hosts", "same host")


# ---------------------------------------------------------------- published figures


def test_a_device_has_the_rates_of_the_table_times_what_is_reached_of_them():
    costs = CostModel.from_device("h100-sxm", matmul=0.5, memory=0.8, links=0.9, overhead_s=1e-5)
    assert costs.task_s(TaskWork("", 989.5e12 / 2, 0)) == pytest.approx(1 + 1e-5)
    assert costs.task_s(TaskWork("", 0, 0.8 * 3350e9)) == pytest.approx(1 + 1e-5)
    assert costs.links["devices"].bytes_per_s == costs.links["same host"].bytes_per_s == 0.9 * 450e9
    assert costs.links["between hosts"].bytes_per_s == 0.9 * 50e9
    assert costs.link_between(7, 8)[0] == "between hosts" and costs.link_between(0, 7)[0] == "same host"
    assert "matrix products reach 50% of 9.9e+14 FLOPs/s (h100-sxm, bfloat16)" in costs.assumed
    assert len(costs.assumed) == 5


def test_the_devices_of_an_actor_send_at_the_same_time():
    costs = CostModel.from_device("h100-sxm", devices_per_actor=8)
    assert costs.links["between hosts"].bytes_per_s == 8 * 50e9
    assert costs.links["devices"].bytes_per_s == 450e9
    assert costs.link_between(0, 1)[0] == "between hosts"
    wide = CostModel.from_device("h100-sxm", devices_per_actor=16)  # more than one host has
    assert wide.links["devices"].bytes_per_s == 50e9


def test_what_no_vendor_publishes_is_said():
    assert any("ici-v5e has no latency" in text for text in CostModel.from_device("tpu-v5e").assumed)
    assert CostModel.from_device("h100-sxm", dtype="float32").formula == TaskFormula(0.0, 67e12, 3350e9)
    for device, dtype in (("cpu", "bfloat16"), ("tpu-v4", "float32")):
        with pytest.raises(CostError, match=f"of device '{device}' no rate of {dtype} or of memory"):
            CostModel.from_device(device, dtype=dtype)
    with pytest.raises(MeshError, match="did you mean 'h100-sxm'"):
        CostModel.from_device("h100-sxn")


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_of_a_rate_is_between_none_and_all(share):
    with pytest.raises(CostError, match=r"matmul=.* is no share of a published rate"):
        CostModel.from_device("h100-sxm", matmul=share)


# ---------------------------------------------------------------- files


def test_a_model_is_the_same_after_saving_and_loading(tmp_path):
    costs, path = CostModel.from_timelines([STEP]), tmp_path / "costs.json"
    path.write_text("older")
    costs.save(path)
    assert CostModel.load(path) == costs
    assert [p.name for p in tmp_path.iterdir()] == ["costs.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no cost model, or it is damaged"),
        ("[1, 2]", "no cost model, or it is damaged"),
        ('{"format": "other", "version": 1}', "holds no cost model, but 'other'"),
        ('{"format": "jaxpp_async costs", "version": 7}', "of version 7, and this package reads version 1"),
        ('{"format": "jaxpp_async costs", "version": 1}', "missing required field `costs`"),
    ],
)
def test_a_file_that_is_no_model_says_what_to_do(tmp_path, text, words):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(CostError, match=words) as caught:
        CostModel.load(path)
    assert "CostModel.from_timelines" in str(caught.value) and "costs.json" in str(caught.value)


def test_a_file_with_wrong_numbers_is_damaged(tmp_path):
    path = tmp_path / "costs.json"
    CostModel.from_timelines([STEP]).save(path)
    saved = json.loads(path.read_text())
    saved["costs"]["queue"]["seconds"] = [-1.0]
    path.write_text(json.dumps(saved))
    with pytest.raises(CostError, match="finite and not negative"):
        CostModel.load(path)
