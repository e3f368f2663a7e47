"""What compilations of one step under several schedules share."""

from __future__ import annotations

from uneven_model import arguments, uneven_step

import jaxpp_async as jpp
from jaxpp_async.compiler import pass_cache, sharding_propagation
from jaxpp_async.compiler.ir import Types, ValueType
from jaxpp_async.planning.machine import StepCompiler
from jaxpp_async.program.instructions import Aval


def test_a_value_has_the_sharding_of_the_one_that_it_stands_for():
    types = Types()
    first, second = (types.new(ValueType(Aval((4,), "float32"))) for _ in range(2))
    known = pass_cache.KnownSpecs(len(types))
    copy = types.new(types[first], like=first)
    copy_of_copy, other = types.new(types[first], like=copy), types.new(types[first])
    known.add(types, {copy: ("data",), other: ()})
    assert known.find(types, [first, copy_of_copy]) == {first: ("data",), copy_of_copy: ("data",)}
    assert known.find(types, [second]) is None and known.find(types, [other]) is None


def test_shardings_are_inferred_once_and_programs_are_the_same(monkeypatch):
    inferred = []
    original = sharding_propagation.private_api.propagated_specs
    monkeypatch.setattr(
        sharding_propagation.private_api,
        "propagated_specs",
        lambda *args: inferred.append(args) or original(*args),
    )
    machine, fn, args = jpp.Machine(2, {"data": 2}), uneven_step(), arguments()
    compiler = StepCompiler(fn, "test")
    finest = jpp.ZeroBubbleH1(5, stages=[0, 1, 2, 3])
    compiler.compile(jpp.Machine(5, {"data": 2}), arguments(num_microbatches=2), finest)
    every = [
        jpp.Interleaved1F1B(4, stages=[0, 1, 2]),
        jpp.ZeroBubbleH1(2, stages=[1]),
    ]
    steps = [compiler.compile(machine, args, schedule) for schedule in every]
    assert len(inferred) == 1  # under the finest cut and with other microbatches
    for step, schedule in zip(steps, every, strict=False):
        alone = jpp.compile_for(machine, fn, args, schedule=schedule)
        assert step.compiled.programs == alone.compiled.programs
        assert [work.key for work in step.works] == [work.key for work in alone.works]
