"""Direct tests of cost models: measured and assumed times, links, files."""

from __future__ import annotations

import json

import pytest
from measured_step import STEP, WORKS, event, timeline

from jaxpp_async import CostModel
from jaxpp_async.errors import CostError, JaxppAsyncError, MeshError, MissingCost
from jaxpp_async.planning.cost_model import TaskFormula
from jaxpp_async.planning.devices import Link
from jaxpp_async.planning.machine import Machine
from jaxpp_async.planning.samples import LinkCost, Samples
from jaxpp_async.program.work import Collective, TaskWork
from jaxpp_async.timeline import ActorTimeline

OTHER = TaskWork("other", 40.0, 4.0)
LINK = LinkCost(Samples((1.0,)), 10.0)


def test_a_measured_task_has_its_own_samples():
    costs = CostModel.from_timelines([STEP])
    assert costs.is_measured(WORKS[0]) and costs.task_s(WORKS[0]) == 1.25
    assert [costs.samples(WORKS[0]).quantile(u) for u in (0.0, 0.49, 0.5, 0.99)] == [0.5, 0.5, 2, 2]


def test_another_task_has_the_time_of_the_formula_spread_as_measured_ones_are():
    costs = CostModel.from_timelines([STEP])
    assert not costs.is_measured(OTHER)
    # 10 FLOPs take 1.25 s and 20 take 2.8125 s, so nothing is left for an overhead
    assert costs.formula is not None and costs.formula.overhead_s == pytest.approx(0, abs=1e-6)
    assert costs.task_s(OTHER) == pytest.approx(40 / 7.5, rel=0.05)
    ratios = sorted([0.4, 1.6, 3.75 / 2.8125, 1.875 / 2.8125])
    assert costs.spread.seconds == pytest.approx(ratios)
    assert costs.samples(OTHER).quantile(0.0) == pytest.approx(0.4 * costs.task_s(OTHER))
    assert "fitted to 2 measured kinds of task" in costs.assumed[0]


def test_short_tasks_do_not_decide_what_is_added_to_long_ones():
    works = tuple(TaskWork(f"{flops}", flops, 0.0) for flops in (0.0, 10.0, 20.0))
    took = (0.001, 1.5, 2.5)  # a long task takes half a second more than its FLOPs do
    runs = [event(0, k, "run", 10.0 * k, 10.0 * k + took[k], executable=k) for k in range(3)]
    costs = CostModel.from_timelines([timeline(ActorTimeline(0, tuple(runs)), works=works)])
    assert costs.task_s(TaskWork("other", 5.0, 0.0)) == pytest.approx(1.0)
    assert costs.task_s(works[0]) == pytest.approx(0.001)  # it was measured
    assert costs.spread.seconds == (1, 1)


def test_long_tasks_that_lie_on_no_line_get_no_more_added_than_short_ones_take():
    works = tuple(TaskWork(f"{flops}", flops, 0.0) for flops in (0.0, 10.0, 20.0, 30.0))
    took = (0.01, 1.5, 2.6, 3.0)  # a line would add 0.8 s
    runs = [event(0, k, "run", 10.0 * k, 10.0 * k + took[k], executable=k) for k in range(4)]
    costs = CostModel.from_timelines([timeline(ActorTimeline(0, tuple(runs)), works=works)])
    assert costs.formula is not None and costs.formula.overhead_s == pytest.approx(0.01)
    assert costs.task_s(TaskWork("other", 10.0, 0.0)) == pytest.approx(1.158, rel=1e-3)


def test_measured_delays_are_distributions():
    costs = CostModel.from_timelines([STEP])
    assert costs.dispatch.seconds == (0.125, 0.5) and costs.wake.seconds == (0.25, 0.5)
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
        return costs.task_s(TaskWork("", 0, 0, (Collective(kind, (("x", devices),), 40.0),)))

    assert seconds("all-gather", 4) == 3 * (1 + 1)  # three steps of a ring, of 10 bytes each
    assert seconds("all-reduce", 4) == 2 * 3 * (1 + 1)
    assert seconds("all-to-all", 4) == 3 * (1 + 1)
    assert seconds("collective-permute", 4) == 1 + 4
    assert seconds("all-reduce", 1) == 0


@pytest.mark.parametrize("axes", [(("slow", 2), ("fast", 4)), (("fast", 4), ("slow", 2))])
def test_an_exchange_along_several_axes_sends_least_over_the_slowest(axes):
    fast, slow = LinkCost(Samples((0.0,)), 100.0), LinkCost(Samples((0.5,)), 10.0)
    costs = CostModel(links={"devices": fast}, axes={"slow": slow})

    def seconds(kind: str) -> float:
        return costs.exchange_s(Collective(kind, axes, 800.0))

    # The fast ring gathers 800 bytes from 4 devices; each of its parts, 200 bytes, comes from 2 slow devices.
    assert seconds("all-gather") == seconds("reduce-scatter") == 3 * 2 + (0.5 + 100 / 10)
    assert seconds("all-reduce") == 2 * seconds("all-gather")
    assert seconds("all-to-all") == 3 * 2 + (0.5 + 400 / 10)
    assert seconds("collective-permute") == 0.5 + 80


def test_what_has_no_cost_is_named():
    with pytest.raises(MissingCost, match="no cost for a task of 40 FLOPs and 4 bytes: it was"):
        CostModel().task_s(OTHER)
    work = TaskWork("", 0, 0, (Collective("all-gather", (("x", 4),), 40.0),))
    where = r"an exchange \(all-gather\) between 4 devices of an actor along its mesh axis 'x'"
    with pytest.raises(MissingCost, match=where):
        CostModel(formula=TaskFormula()).task_s(work)
    unknown = Collective("broadcast", (("x", 4),), 40.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        MissingCost, match=r"an exchange of the kind 'broadcast' .*: the kinds are all-reduce"
    ):
        CostModel(links={"devices": LINK}).exchange_s(unknown)
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
    assert len(costs.assumed) == 6


def test_the_devices_of_an_actor_send_at_the_same_time():
    costs = CostModel.from_device("h100-sxm", devices_per_actor=8)
    assert costs.links["between hosts"].bytes_per_s == 8 * 50e9
    assert costs.links["devices"].bytes_per_s == 450e9
    assert costs.link_between(0, 1)[0] == "between hosts"
    wide = CostModel.from_device("h100-sxm", devices_per_actor=16)  # more than one host has
    assert wide.links["devices"].bytes_per_s == 50e9


@pytest.mark.parametrize(
    ("spmd_mesh", "rates"),
    [
        ({"data": 2, "model": 8}, {"data": 50e9, "model": 450e9}),
        ({"model": 8, "data": 2}, {"data": 450e9, "model": 50e9}),  # neighbours are along "data"
        ({"data": 2, "model": 4}, {"data": 450e9, "model": 450e9}),  # one host
        ({"data": 4, "model": 4}, {"data": 50e9, "model": 450e9}),
        ({"data": 2, "one": 1, "model": 8}, {"data": 50e9, "one": 450e9, "model": 450e9}),
    ],
)
def test_an_axis_has_the_link_that_its_devices_have(spmd_mesh, rates):
    costs = CostModel.for_machine(Machine(4, spmd_mesh, "h100-sxm"))
    assert {axis: link.bytes_per_s for axis, link in costs.axes.items()} == rates


def test_a_gather_on_two_hosts_of_eight():
    costs = CostModel.for_machine(Machine(2, {"data": 2, "model": 8}, "h100-sxm"))
    model, data = ((axis, n) for axis, n in (("model", 8), ("data", 2)))
    inside = 7 * (3.4e-6 + 1e9 / 8 / 450e9)
    assert costs.exchange_s(Collective("all-gather", (model,), 1e9)) == pytest.approx(inside)
    assert costs.exchange_s(Collective("all-gather", (data,), 1e9)) == pytest.approx(14e-6 + 0.5e9 / 50e9)
    both = inside + 14e-6 + 0.5e9 / 8 / 50e9
    assert costs.exchange_s(Collective("all-gather", (data, model), 1e9)) == pytest.approx(both)


def test_a_machine_s_own_links_are_priced():
    wire = Link("wire", 10e9, 1e-6)
    links = {"devices": "pcie5", "same host": wire, "between hosts": "ethernet-100g"}
    machine = Machine(4, {"data": 2, "model": 2}, "h100-sxm", links)
    costs = CostModel.for_machine(machine, links={"same host": 0.5})
    assert costs.links["devices"].bytes_per_s == costs.axes["data"].bytes_per_s == 64e9
    assert costs.links["same host"] == LinkCost(Samples((1e-6,)), 4 * 0.5 * 10e9)
    assert costs.links["between hosts"].bytes_per_s == 4 * 12.5e9
    assert costs.actors_per_host == 2
    assert not any("infiniband" in text for text in costs.assumed)
    assert any(
        "infiniband-ndr: the machine names none" in x
        for x in CostModel.for_machine(Machine(1, {}, "b200")).assumed
    )
    assert any("8 TB/s are published" in text for text in CostModel.from_device("b200").assumed)
    with pytest.raises(CostError, match="links has 'wire'; its keys are 'devices', 'same host'"):
        CostModel.for_machine(machine, links={"wire": 0.5})
    with pytest.raises(CostError, match=r"links\['same host'\]=2 is no share"):
        CostModel.for_machine(machine, links={"same host": 2})


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
        ("", "no file of kind 'jaxpp_async costs', or it is damaged"),
        ("[1, 2]", "no file of kind 'jaxpp_async costs', or it is damaged"),
        ('{"kind": "other", "version": 1}', "no file of kind 'jaxpp_async costs', but of 'other'"),
        ('{"kind": "jaxpp_async costs", "version": 7}', "has version 7, .* of version 2; make it anew"),
        ('{"kind": "jaxpp_async costs", "version": 2}', "missing required field `value`"),
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
    saved["value"]["queue"]["seconds"] = [-1.0]
    path.write_text(json.dumps(saved))
    with pytest.raises(CostError, match="finite and not negative"):
        CostModel.load(path)


def test_a_model_is_printed_in_a_line():
    few = CostModel(
        tasks={"a": Samples((1.0,) * 500), "b": Samples((2.0,))},
        formula=TaskFormula(flops_per_s=1e9),
        links={"same host": LinkCost(Samples((1e-5,)), 2e9)},
        dispatch=Samples((3e-6,)),
    )
    assert str(few) == (
        "<CostModel: 2 measured tasks with 501 samples, others at 1e+09 FLOPs/s, same host 10 us and 2e+09 "
        "bytes/s; dispatch 3 us; .assumed (0)>"
    )
    assert repr(CostModel()) == "<CostModel: no measured task; dispatch 0 us; .assumed (0)>"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: CostModel.from_device("h100-sxm", dtype="float16"),
            "dtype is 'float16', of which",
        ),
        (lambda: CostModel.from_device("h100-sxm", matmul="1"), "matmul='1' is no share of a published rate"),
        (lambda: CostModel(tasks={"a": 3}), r"tasks\['a'\] of a cost model is 3; write a Samples"),
        (lambda: CostModel(actors_per_host=-1), "actors_per_host of a cost model is -1; write"),
        (lambda: LinkCost(Samples((0.0,)), 1e-320), r"bytes_per_s of a link is .*; write a rate between"),
        (lambda: TaskFormula(1e308), "must be finite and not negative, and at most"),
        (
            lambda: Samples.of([float("nan")]),
            "a measured time must be a finite number of seconds",
        ),
        (lambda: CostModel.from_timelines([1]), "1 is no timeline of a step"),
        (lambda: CostModel.from_timelines(1), "timelines is 1; write a list of timelines"),
    ],
)
def test_costs_that_nothing_can_be_computed_with(make, message):
    with pytest.raises(CostError, match=message):
        make()
