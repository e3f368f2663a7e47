"""compiler.texts: what each pass left, as text for people, dumps and golden files. Decides nothing; no jax.

Texts are long and seldom read, so `Texts` holds what makes them and makes one when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpp_async import schedules
from jaxpp_async.compiler.graph import PlacedStep
from jaxpp_async.compiler.ir import Flat, Lit, Loop, Op, Ref, Types
from jaxpp_async.compiler.partition import StagedLoop
from jaxpp_async.compiler.recipes import Recipe
from jaxpp_async.compiler.variants import ScheduledLoop
from jaxpp_async.program import ActorProgram


class Texts(Mapping[str, str]):
    """Pass name to text, in the order of the passes; each made anew when it is read.

    Args:
        makers: pass name to what makes its text: a pure function of frozen values.
    """

    def __init__(self, makers: Mapping[str, Callable[[], str]]) -> None:
        self._makers = dict(makers)

    def __getitem__(self, name: str) -> str:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __repr__(self) -> str:
        return f"<texts of {', '.join(self)}>"

    def with_text(self, name: str, maker: Callable[[], str]) -> Texts:
        """These and the text of one more pass."""
        return Texts({**self._makers, name: maker})


def format_programs(programs: Sequence[ActorProgram]) -> str:
    return "\n\n".join(str(p) for p in programs)


def format_executables(executables: Sequence[Any]) -> str:
    return "\n".join(f"exe {i} {e.name} {len(e.blob)} bytes" for i, e in enumerate(executables))


def format_flat(flat: Flat, types: Types, indent: str = "") -> str:
    """Readable text of a body, for dumps and golden files."""
    lines = [f"{indent}inputs {_refs(flat.inputs, types)}"]
    for op in flat.ops:
        left = _refs([o for o in op.outputs if o >= 0], types)
        if isinstance(op, Loop):
            n = op.num_microbatches
            lines.append(f"{indent}{left} = loop[{n} microbatches] {_refs(op.inputs)} {{")
            lines.append(format_flat(op.body, types, indent + "  "))
            lines.append(f"{indent}}} reduce ({', '.join(type(r).__name__ for r in op.reductions)})")
        else:
            mark = " '" if op.transposed else ""
            lines.append(f"{indent}{left} = {op.name} {_refs(op.inputs)}{mark}")
    lines.append(f"{indent}return {_refs(flat.outputs)}")
    return "\n".join(lines)


def format_staged(staged: StagedLoop) -> str:
    """The whole tasks of a loop, as it was cut."""
    lines = [f"loop of {staged.num_stages} stages, {staged.loop.num_microbatches} microbatches"]
    lines += [f"stage {k} ends at pipeline_yield {name!r}" for k, name in enumerate(staged.stage_names) if name]
    for (ty, stage), task in staged.tasks.items():
        lines += [f"{ty} stage {stage}", *_operations(task.ops)]
    for k, parts in enumerate(staged.outputs):
        joined = " + ".join(f"{_ref(p.value)} of {p.task[0]} stage {p.task[1]}" for p in parts)
        lines.append(f"result {k}: {type(staged.loop.reductions[k]).__name__} {joined}")
    return "\n".join(lines)


def format_scheduled(scheduled: ScheduledLoop) -> str:
    """Who runs what when, and what it is that runs: each form of a task with what it reads and what it makes."""
    lines = [schedules.format_grid(scheduled.tasks)]
    for variant, actor in scheduled.on_actors():
        task = variant.task
        reads = _refs(scheduled.staged.reads(task))
        lines.append(f"{task.key[0]} stage {task.key[1]} on actor {actor} ({reads}) -> ({_refs(variant.makes)})")
        lines += _operations(task.ops)
        lines += [f"  result {k} += {_ref(scheduled.staged.outputs[k][j].value)}" for k, j in task.adds]
    return "\n".join(lines)


def _operations(ops: Sequence[Op]) -> list[str]:
    return [f"  {_refs([o for o in op.outputs if o >= 0])} = {op.name} {_refs(op.inputs)}" for op in ops]


def _refs(refs: Iterable[Ref], types: Types | None = None) -> str:
    return " ".join(_ref(r, types) for r in refs)


def _ref(ref: Ref, types: Types | None = None) -> str:
    """An operand; with its type, if types are given."""
    if isinstance(ref, Lit):
        return _literal(ref.value)
    return f"%{ref}" if types is None else f"%{ref}:{_aval(types[ref].aval.dtype, types[ref].aval.shape)}"


def _literal(value: Any) -> str:
    """A constant as text that does not depend on which array class JAX keeps it in."""
    array = np.asarray(value)
    content = array.tolist() if array.size <= 8 else "..."
    return f"#{content}:{_aval(array.dtype.name, array.shape) if array.ndim else array.dtype.name}"


def _aval(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def format_graph(placed: PlacedStep) -> str:
    graph = placed.graph
    lines = [f"in  v{i.value} {graph.values[i.value].label} on {list(i.actors)}" for i in graph.inputs]
    for n in graph.nodes:
        ins, outs = " ".join(f"v{v}" for v in n.inputs), " ".join(f"v{v}" for v in n.outputs)
        lines.append(f"actor {n.actor}: {n.label} exe {n.executable} ({ins}) -> ({outs})")
    lines += [f"out {o.result} v{o.value} on {list(o.actors)}" for o in graph.outputs]
    return "\n".join(lines + [_format_recipe(i, r) for i, r in enumerate(placed.recipes)])


def _format_recipe(index: int, recipe: Recipe) -> str:
    return f"exe {index} {recipe.name} ({_refs(recipe.inputs)}) -> ({_refs(recipe.outputs)}) ops {len(recipe.ops)}"


def format_specs(placed: PlacedStep) -> str:
    return "\n".join(
        f"v{i} {value.label} {value.aval.dtype}{list(value.aval.shape)} {value.aval.spec or 'replicated'}"
        for i, value in enumerate(placed.graph.values)
    )
