"""Options of `plan` and `simulate` become a step's call, machines and costs."""

from __future__ import annotations

from types import ModuleType

import pytest

from jaxpp_async.commands.output import UseError
from jaxpp_async.commands.step_options import CallOptions, MachineOptions, efficiencies, numbers, pairs
from jaxpp_async.planning.cost_model import CostModel, TaskFormula


def where(**options) -> MachineOptions:
    names = MachineOptions._fields
    return MachineOptions(*({"device": "h100-sxm", **options}.get(name) for name in names))


def test_lists_of_numbers_and_of_pairs():
    assert numbers("--actors", "4, 8", least=1) == (4, 8) and numbers("--actors", None) is None
    assert pairs("--spmd", "data=2, model = 4") == {"data": "2", "model": "4"} and pairs("--spmd", None) == {}


@pytest.mark.parametrize("text", ["", "four", "4,", "-1", "0", "1.5"])
def test_other_numbers_are_refused(text):
    with pytest.raises(UseError, match=r"--actors .*: write whole numbers of at least 1, such as 4 or 4,8"):
        numbers("--actors", text, least=1)


@pytest.mark.parametrize("text", ["model", "model=", "=8", "a=1,,b=2"])
def test_other_pairs_are_refused(text):
    with pytest.raises(UseError, match=r"--spmd .*: write NAME=VALUE"):
        pairs("--spmd", text)


def test_a_call_has_positions_and_the_modules_shardings():
    module = ModuleType("module")
    module.__dict__.update(value="specs", function=lambda: "made")
    assert CallOptions.of(module, 3, donate="0,2", static=None, in_shardings="value") == ((0, 2), (), "specs")
    assert CallOptions.of(module, 3, donate=None, static="1", in_shardings="function") == ((), (1,), "made")
    with pytest.raises(UseError, match=r"has no shardings 'valeu'; did you mean value\?"):
        CallOptions.of(module, 3, donate=None, static=None, in_shardings="valeu")


def test_machines_are_all_numbers_of_actors_with_all_shapes():
    made = where(spmd=["model=8", "data=2,model=4"], memory="70GB", axis_rules="heads=model").machines([2, 4])
    shapes = [(m.actors, dict(m.spmd_mesh)) for m in made]
    eight, both = {"model": 8}, {"data": 2, "model": 4}
    assert shapes == [(2, eight), (2, both), (4, eight), (4, both)]
    assert made[0].memory == 70 * 10**9 and dict(made[0].axis_rules) == {"heads": "model"}
    assert made[0].links.get("between hosts") is None
    (other,) = where(network="ethernet-100g").machines([2])
    assert other.links["between hosts"].name == "ethernet-100g" and dict(other.spmd_mesh) == {}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"spmd": ["model=many"]}, "--spmd 'model=many': write the number of devices of each axis"),
        ({"spmd": ["model=0"]}, "--spmd 'model=0'"),
        ({"device": "h1000"}, "did you mean"),
        ({"network": "ethernet-1"}, "did you mean"),
        ({"device": "h1000"}, "did you mean 'h200'[?]$"),
        ({"memory": "999999"}, "--memory 999999 is 999999 bytes; did you mean 999999GB?"),
        ({"memory": "lots"}, "memory is 'lots'; write bytes, or text such as '70GB'"),
        ({"axis_rules": "heads=modle", "spmd": ["model=2"]}, "modle"),
    ],
)
def test_machines_that_cannot_be(options, says):
    with pytest.raises(UseError, match=says):
        where(**options).machines([2])


def test_costs_are_those_of_the_file_or_the_devices(tmp_path):
    costs = CostModel(formula=TaskFormula(flops_per_s=1e9))
    costs.save(tmp_path / "costs.json")
    assert where(costs=tmp_path / "costs.json", device="cpu").load_costs() == costs
    assert where().load_costs() is None
    (tmp_path / "costs.json").write_text("{}")
    with pytest.raises(UseError, match=r"--costs: .*costs\.json"):
        where(costs=tmp_path / "costs.json").load_costs()


def test_a_device_without_figures_needs_a_file_of_costs():
    with pytest.raises(UseError) as error:
        where(device="cpu").load_costs()
    assert "--device cpu: no rates of it are published" in str(error.value)
    assert "h100-sxm" in str(error.value) and "CostModel.from_timelines(timelines[2:]).save" in str(
        error.value
    )
    assert "--costs costs.json" in str(error.value)


def test_published_figures_with_an_efficiency():
    assert efficiencies(None) == {} and efficiencies("matmul=0.6, links=0.8") == {"matmul": 0.6, "links": 0.8}
    assert efficiencies("0.5") == {"matmul": 0.5, "memory": 0.5, "links": 0.5}
    options = where(efficiency="matmul=0.5", dispatch_us=20, spmd=["model=2"])
    machines = options.machines([2, 4])
    expected = CostModel.for_machine(machines[0], matmul=0.5, dispatch_s=20e-6)
    assert options.known_costs(machines) == expected
    assert where().known_costs(machines) is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"efficiency": "fast"}, "--efficiency 'fast': write a share such as 0.6"),
        ({"efficiency": "flops=0.5"}, "shares of matmul, memory, links"),
        ({"efficiency": "1.5"}, "--efficiency: matmul=1.5 is no share"),
        ({"dispatch_us": 5.0, "spmd": ["model=2", "model=4"]}, "go with one --spmd"),
        ({"efficiency": "0.5", "costs": "costs.json"}, "leave out --costs"),
    ],
)
def test_an_efficiency_that_cannot_be(options, says):
    with pytest.raises(UseError, match=says):
        where(**options).known_costs(where(**options).machines([2]))
