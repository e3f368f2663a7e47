"""compiler.texts: what each pass left, as text for people, dumps and golden files. Decides nothing; no jax.

Texts are long and seldom read, so `Texts` holds what makes them and makes one when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxpp_async.compiler.graph import PlacedStep
from jaxpp_async.compiler.partition import StagedLoop
from jaxpp_async.compiler.recipes import Recipe
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


def format_staged(staged: StagedLoop) -> str:
    lines = [f"loop at {staged.num_stages} stages, {staged.loop.num_microbatches} microbatches"]
    for (ty, stage), task in staged.tasks.items():
        lines.append(f"{ty} stage {stage}")
        lines += [f"  {' '.join(f'%{o}' for o in op.outputs)} = {op.name} {_refs(op)}" for op in task.ops]
    for k, parts in enumerate(staged.outputs):
        joined = " + ".join(f"{_ref(p.value)} of {p.task[0]} stage {p.task[1]}" for p in parts)
        lines.append(f"result {k}: {type(staged.loop.reductions[k]).__name__} {joined}")
    return "\n".join(lines)


def _refs(op: Any) -> str:
    return " ".join(_ref(r) for r in op.inputs)


def _ref(ref: Any) -> str:
    return f"%{ref}" if isinstance(ref, int) else "const"


def format_graph(placed: PlacedStep) -> str:
    graph = placed.graph
    lines = [f"in  v{i.value} {graph.values[i.value].label} on {list(i.actors)}" for i in graph.inputs]
    for n in graph.nodes:
        ins, outs = " ".join(f"v{v}" for v in n.inputs), " ".join(f"v{v}" for v in n.outputs)
        lines.append(f"actor {n.actor}: {n.label} exe {n.executable} ({ins}) -> ({outs})")
    lines += [f"out {o.result} v{o.value} on {list(o.actors)}" for o in graph.outputs]
    return "\n".join(lines + [_format_recipe(i, r) for i, r in enumerate(placed.recipes)])


def _format_recipe(index: int, recipe: Recipe) -> str:
    ins, outs = " ".join(f"%{v}" for v in recipe.inputs), " ".join(_ref(v) for v in recipe.outputs)
    return f"exe {index} {recipe.name} ({ins}) -> ({outs}) ops {len(recipe.ops)}"


def format_specs(placed: PlacedStep) -> str:
    return "\n".join(
        f"v{i} {value.label} {value.aval.dtype}{list(value.aval.shape)} {value.aval.spec or 'replicated'}"
        for i, value in enumerate(placed.graph.values)
    )
