"""Direct tests of how a program is loaded, with executables that are made by hand."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from jaxpp_async.actors import loaded_program
from jaxpp_async.actors.executables import Executable
from jaxpp_async.actors.execution_plan import make_plan
from jaxpp_async.actors.loaded_program import LoadedProgram, load_program
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import Aval, Input, Run
from jaxpp_async.protocol.actor_info import ProcessRank
from jaxpp_async.protocol.messages import Load, Loaded

F4 = Aval((4,), "float32")
RUNS = Run("f", 3, (0,), (1,)), Run("g", 3, (1,), (2,), donated=(0,))
PROGRAM = ActorProgram(0, (Input(0, 0), *RUNS), (F4,) * 3)


class Sharding:
    """On the one device that there is."""

    def is_equivalent_to(self, other, ndim: int) -> bool:
        return other is self


HERE = Sharding()


def layout(aval: Aval) -> SimpleNamespace:
    return SimpleNamespace(aval=aval, dtype=np.dtype(aval.dtype), sharding=HERE)


LAYOUTS = SimpleNamespace(of=layout)


def executable(shape=(4,), **more) -> Executable:
    signature = ((shape, np.dtype("float32"), HERE),)
    return Executable(lambda x: [x], 64, signature, signature, **more)


class Compiled:
    """Executables by key, as an actor has them; compiling takes a second."""

    def __init__(self, **by_donation: Executable):
        self.blobs, self.loaded = {}, []
        self._found = {("k", ()): by_donation["keeps"], ("k", (0,)): by_donation["donates"]}

    def add_blobs(self, blobs) -> None:
        self.blobs |= blobs

    async def load(self, keys, on_compiled=None) -> float:
        self.loaded += keys
        return 1.0

    def get(self, key) -> Executable:
        return self._found[key]


@pytest.fixture
def made(monkeypatch):
    """What a loaded program is made of."""
    monkeypatch.setattr(loaded_program, "LoadedProgram", lambda *parts: parts)
    return monkeypatch


async def load(compiled: Compiled, executables=None, modelled_s=None):
    message = Load(1, PROGRAM, executables or {3: "k"}, {"k": b"blob"}, {0: "x"}, modelled_s or {})
    with ThreadPoolExecutor(1) as workers:
        return await load_program(message, compiled, LAYOUTS, None, workers, ProcessRank(0))


async def test_each_run_gets_the_executable_for_what_it_donates(made):
    keeps, donates = executable(), executable()
    compiled = Compiled(keeps=keeps, donates=donates)
    (plan, executables, names, *_, process_rank), reply = await load(compiled)
    assert (plan.program, compiled.blobs, process_rank) == (PROGRAM, {"k": b"blob"}, ProcessRank(0))
    assert compiled.loaded == [("k", ()), ("k", (0,))]
    assert (executables, names) == ({1: keeps, 2: donates}, {0: "x"})
    assert reply == Loaded(1.0, {3: 64})


async def test_a_loaded_program_knows_how_long_its_executables_are_to_last(made):
    compiled = Compiled(keeps=executable(), donates=executable())
    (_, _, _, modelled_s, *_), _ = await load(compiled)
    assert modelled_s == {}
    (_, _, _, modelled_s, *_), _ = await load(compiled, modelled_s={3: 0.5})
    assert modelled_s == {3: 0.5}


@pytest.mark.parametrize(
    ("modelled_s", "of_runs", "quick"),
    [({}, {}, {1, 2}), ({3: 1e-5}, {1: 1e-5}, {2}), ({3: 1e-5, 4: 9.0, 5: 1.0}, {1: 1e-5, 2: 9.0}, set())],
)
def test_each_run_lasts_as_long_as_its_executable_and_is_never_quick_then(modelled_s, of_runs, quick):
    plan = make_plan(ActorProgram(0, (Input(0, 0), RUNS[0], Run("g", 4, (1,), (2,))), (F4,) * 3))
    layouts, pool = SimpleNamespace(of=layout, devices=SimpleNamespace(size=1)), SimpleNamespace()
    executables = {1: executable(), 2: executable()}
    program = LoadedProgram(plan, executables, {}, modelled_s, layouts, pool, ProcessRank(0))
    for instruction in (1, 2) * 5:
        program.record_time(instruction, 1e-5)
    assert (program.modelled_s, program.quick) == (of_runs, quick)


async def test_an_executable_that_is_not_what_the_program_takes_it_for_is_refused_with_the_instruction(made):
    with pytest.raises(ValueError) as caught:
        await load(Compiled(keeps=executable((5,)), donates=executable((5,))))
    said = str(caught.value)
    assert said.startswith('#1 run    "f" exe 3 (b0) -> (b1): input 0: the executable has float32[5] as ')
    assert ", the program float32[4] as " in said


async def test_an_executable_that_the_program_came_without_is_refused_with_the_instruction(made):
    with pytest.raises(ValueError) as caught:
        await load(Compiled(keeps=executable(), donates=executable()), {4: "k"})
    said = 'run    "f" exe 3 (b0) -> (b1): the program came without this executable'
    assert str(caught.value) == f"#1 {said}"
