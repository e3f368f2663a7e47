"""Write the function of a loop at random: stages of a few layers, branches, metrics and markers, as Python
lines.

Every line has the value flowing through the stages in `x`. What is drawn first is the simplest, since a
failing program is shrunk toward the first choice of every draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


class Draw:
    """Hypothesis's `draw`, in the few forms that are needed."""

    def __init__(self, draw):
        self._draw = draw

    def pick(self, options: Sequence[T]) -> T:
        return options[self._draw(st.integers(0, len(options) - 1))] if len(options) > 1 else options[0]

    def count(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def chance(self, percent: int) -> bool:
        return self._draw(st.integers(0, 99)) >= 100 - percent


# ---------------------------------------------------------------- what lines are made of

WEIGHTS = (
    'p["w0"]',
    'p["w1"]',
    'p["w2"]',
    'p["w0"].T',
    '(p["w1"] * 0.5)',
    '(p["w0"] + p["w1"])',
    'p["k"][1]',
    'lax.stop_gradient(p["w2"])',
    'jnp.concatenate([p["w0"][:2], p["w1"][2:]])',
    'p["w2"].astype(jnp.bfloat16).astype(jnp.float32)',
    'jnp.diag(p["b0"])',
    'lax.transpose(p["w1"], (1, 0))',
)

LAYERS = (
    "jnp.tanh({x} @ {w})",
    "{x} @ {w}",
    "jnp.sin({x})",
    '{x} + p["b0"]',
    '{x} * p["b1"]',
    "{x} - jnp.mean({x}, -1, keepdims=True)",
    "jax.nn.softmax({x})",
    "jax.nn.relu({x})",
    "0.3 * jnp.cumsum({x}, 1)",
    "jnp.where({x} > 0, {x}, 0.1 * {x})",
    '0.5 * ({x} + p["e"][{ids}])',
    'jax.nn.one_hot(({ids} + 1) % 5, 5) @ p["e"] + {x}',
    "{x}[:, ::-1]",
    "({x}.T @ {x}) [:2]",
    "0.5 * ({x} + {saved})",
    "{x} * jnp.tanh({saved})",
    "jnp.concatenate([{x}, {saved}], -1)[:, ::2]",
    "jnp.where({saved} > 0, {x}, {saved})",
    "{x} + lax.stop_gradient({saved})",
    "lax.stop_gradient({x})",
    "block({x}, {w})",
    "jax.jit(lambda a: jnp.sin(a @ {w}))({x})",
    "jax.checkpoint(lambda a: jnp.tanh(a @ {w}))({x})",
    "jax.vmap(lambda row: jnp.tanh(row @ {w}))({x})",
    "clipped({x})",
    "doubled({x} @ {w})",
    'lax.scan(lambda c, w: (jnp.tanh(c @ w), None), {x}, p["k"])[0]',
    'lax.scan(lambda c, w: (0.9 * c, c @ w), {x}, p["k"])[1].sum(0)',
    "lax.fori_loop(0, 2, lambda j, a: jnp.sin(a @ {w}), {x})",
    "lax.cond(jnp.sum({x}) > 0, lambda a: jnp.sin(a), lambda a: a @ {w}, {x})",
    "lax.cond(i % 2 == 0, lambda a: a @ {w}, lambda a: a, {x})",
    "{x} + lax.while_loop(lambda a: jnp.max(a) > 0.1, lambda a: a * 0.5, lax.stop_gradient({x}))",
    "{x} * jax.random.bernoulli(jax.random.fold_in({key}, i), 0.5, {x}.shape)",
    "{x} + 0.1 * jax.random.normal(jax.random.fold_in({key}, 1), {x}.shape)",
    "{x} + TABLE[3] * TABLE[:2]",
    "{x} * (1.0 + i)",
    "{x} + 0.1 * jnp.arange(4.0)",
    "({x}.astype(jnp.bfloat16) @ {w}.astype(jnp.bfloat16)).astype(jnp.float32)",
    "jnp.sort({x}, -1)",
    "{x} / jnp.sqrt(1 + jnp.sum({x} * {x}))",
    'jnp.einsum("rd,de->re", {x}, {w})',
    "lax.dynamic_slice({x}, (0, 0), (2, 4)) * 0.5",
    "jax.grad(lambda a: jnp.sum(jnp.sin(a @ {w})))({x})",
    "jax.jvp(lambda a: jnp.sin(a @ {w}), ({x},), ({x},))[1]",
    '{x} + p["s"]',
    "jnp.round({x} * 4) / 4 + {x}",
    "jnp.roll({x}, 1, 0)",
    "lax.associative_scan(jnp.add, {x}, axis=1)",
    "jax.nn.gelu({x} @ {w})",
    "jnp.linalg.norm({x}, axis=-1, keepdims=True) * {x}",
    "lax.custom_linear_solve(lambda a: 2.0 * a, {x}, lambda f, b: b / 2.0, symmetric=True)",
    "jnp.pad({x}, ((0, 1), (0, 0)))[1:]",
    "{x}.at[0].add({x}[1])",
    "jnp.take_along_axis({x}, jnp.argsort({x}, -1), -1)",
    "lax.map(lambda row: jnp.sin(row @ {w}), {x})",
    "lax.switch(i % 3, [jnp.sin, jnp.tanh, lambda a: a @ {w}], {x})",
    "{x} * (p['w0'].T @ p['w1']).sum()",
)

MARKERS = (
    "x = jpp.pipeline_yield(x)",
    "x, {saved} = jpp.pipeline_yield((x, {saved}))",
    'x = jpp.pipeline_yield({{"a": x, "b": jnp.sum(x)}}, name="named")["a"]',
    "x, ids = jpp.pipeline_yield((x, {ids}))",
    "x, key = jpp.pipeline_yield((x, key))",
    "x = jpp.pipeline_yield(x.astype(jnp.bfloat16)).astype(jnp.float32)",
    "x = stage(x, {w})",
    "x = jax.checkpoint(stage)(x, {w})",
    "x, n = jpp.pipeline_yield((x, jnp.sum(x > 0)))",
    "x = jax.vmap(jpp.pipeline_yield)(x)",
    "{saved} = jpp.pipeline_yield({saved}); x = x + 0.1 * {saved}",
    'x = x + jpp.pipeline_yield(p["b0"])',
    "x = jax.jit(jpp.pipeline_yield)(x)",
    "x = jpp.pipeline_yield(lax.stop_gradient(x))",
    "x = jpp.pipeline_yield(jnp.stack([x, {x}]))[1]",
)

ENTRIES = ('mb["x"]', 'p["e"][mb["ids"]].astype(jnp.float32)', 'mb["x"] @ p["w0"]')
LOSSES = ('jnp.mean((x - mb["y"]) ** 2)', "jnp.sum(x)", "jnp.sum(jnp.sin(x) * x)")
SCANS = (
    'lax.scan(lambda c, w: (jpp.pipeline_yield(jnp.tanh(c @ w)), None), x, p["k"])[0]',
    'lax.scan(lambda c, w: (jpp.pipeline_yield(jnp.tanh(c @ w)), jnp.sin(c)), x, p["k"])[1].sum(0)',
    "lax.scan(lambda c, w: (jnp.sin(jpp.pipeline_yield(c)) @ w, None), x, jnp.stack([{w}, {w}]))[0]",
    'lax.scan(jax.checkpoint(lambda c, w: (stage(c, w), None)), x, p["k"])[0]',
    "lax.fori_loop(0, 2, lambda j, a: stage(a, {w}), x)",
)
BLOCKS = ("jax.jit({f})", "jax.checkpoint({f})", "jax.checkpoint(jax.jit({f}))", "jax.named_call({f})")

SCALARS = ("Sum()", "Mean()", "Max()", "Min()", "Stack()")
ARRAYS = (*SCALARS, "Concat()", "Concat(-1)")
COUNTS = ("Sum()", "Max()", "Stack()", "Min()")
FLAGS = ("Max()", "Stack()", "Min()", "Concat()")
METRICS = (
    ("jnp.sum(x)", SCALARS),
    ("jnp.max(jnp.abs(x))", SCALARS),
    ("x", ARRAYS),
    ("jnp.sum(x, 0)", ARRAYS),
    ("jnp.argmax(x, -1).astype(jnp.int32)", (*COUNTS, "Concat()")),
    ("jnp.sum(x > 0)", COUNTS),
    ("x > 0", FLAGS),
    ("jnp.all(jnp.isfinite(x))", ("Min()", "Stack()")),
    ("x.astype(jnp.bfloat16)", ARRAYS),
    ("jnp.float32(3)", SCALARS),
    ('p["b0"]', ARRAYS),
    ('jnp.sum(p["w0"] * p["w1"])', SCALARS),
    ("i", COUNTS),
    ("{ids}", (*COUNTS, "Concat()")),
    ("jax.random.fold_in(key, i)", ("Stack()",)),
    ("{saved} + x", ARRAYS),
    ('mb["y"]', ARRAYS),
    ("lax.stop_gradient(jnp.mean(x))", SCALARS),
    ("TABLE[:2] + x", ARRAYS),
    # Linear in values of several stages, so that a sum over microbatches may be taken apart.
    ('jnp.sum({saved} + x + p["b0"])', SCALARS),
    ('{saved}[:1] + x[:1] + p["b0"]', ARRAYS),
    ("(2.0 * ({saved} + x)).T", ARRAYS),
    ("jnp.concatenate([{saved}, x])", ARRAYS),
    ("jnp.stack([x, {saved}])", ARRAYS),
    ("({saved} + x).astype(jnp.bfloat16)", ARRAYS),
    ("-({saved} + x) / 3", ARRAYS),
    ("jnp.sum(({saved} > 0).astype(jnp.int32) + (x > 0), 0)", COUNTS),
    ("jnp.broadcast_to({saved}[0] + x[0], (2, 4))", ARRAYS),
    ("jnp.sum({saved}[:1] * jnp.ones((2, 1)) + x)", SCALARS),
    ('(p["b0"] + {saved}[0]) + p["b1"]', ARRAYS),
    ('jnp.mean(x) + jnp.mean({saved}) + jnp.mean(p["w0"])', SCALARS),
    ("jnp.pad({saved} + x, ((0, 1), (0, 0)), constant_values=1.0)", ARRAYS),
    ("({saved}.sum(0, keepdims=True) + x.sum(0, keepdims=True)) * jnp.arange(8.0).reshape(2, 4)", ARRAYS),
    ("jnp.sum({saved} - x, 1) * jnp.float32(2)", ARRAYS),
)
TERMS = (
    "0.01 * jnp.sum({w} ** 2)",
    "0.1 * jnp.mean({saved} ** 2)",
    'jnp.mean({saved} + p["b0"])',
    "jnp.sum({saved}) / 8 + jnp.float32(1)",
)


# ---------------------------------------------------------------- bodies


@dataclass
class Scope:
    """Names that a line may use."""

    saved: list[str]
    ids: list[str]

    def inner(self) -> Scope:
        return Scope(list(self.saved), list(self.ids))


@dataclass
class Body:
    """A loss function, or one that only evaluates.

    Args:
        lines: of a function of (p, mb, i); they end with `x`, `value` and `aux`.
        reductions: one a metric, by name.
    """

    stages: int
    lines: list[str] = field(default_factory=list)
    reductions: dict[str, str] = field(default_factory=dict)


class BodyWriter:
    """Draws one body."""

    def __init__(self, draw: Draw, stages: int, bfloat16: bool):
        self.draw, self.body, self.names = draw, Body(stages), 0
        allowed = lambda texts: [t for t in texts if bfloat16 or "bfloat16" not in str(t)]  # noqa: E731
        self.layers, self.weights, self.markers = allowed(LAYERS), allowed(WEIGHTS), allowed(MARKERS)
        self.metrics = allowed(METRICS)

    def write(self) -> Body:
        scope = Scope(['mb["x"]'], ['mb["ids"]'])
        lines = [f"x = {self.draw.pick(ENTRIES)}"]
        items = self._items()
        begin, end = self._block(items)
        for at, item in enumerate(items):
            if at == begin:
                lines += self._wrapped(items[begin:end], scope)
            elif not begin < at < end:
                lines += self._line(item, scope, top=True)
        lines.append(f"value = {self.draw.pick(LOSSES)}")
        if self.draw.chance(25):
            lines.append(f"value = value + {self._filled(TERMS, scope)}")
        self.body.lines = lines
        return self.body

    def _items(self) -> list[str]:
        """Kinds of lines, in order."""
        draw, stages = self.draw, self.body.stages
        ends = ["marker"] * (stages - 1)
        if stages >= 3 and draw.chance(10):
            at = draw.count(0, stages - 3)
            ends[at : at + 2] = ["scan"]  # of two layers, each ending a stage
        items = []
        for end in [*ends, None]:
            items += [
                draw.pick(("layer", "layer", "layer", "save", "metric")) for _ in range(draw.count(0, 3))
            ]
            items += [end] if end else []
        return items

    def _block(self, items: Sequence[str]) -> tuple[int, int]:
        """A range of lines that go into a function of their own; often none."""
        if not items or not self.draw.chance(30):
            return len(items), len(items)
        begin = self.draw.count(0, len(items) - 1)
        return begin, begin + self.draw.count(1, len(items) - begin)

    def _wrapped(self, items: Sequence[str], scope: Scope) -> list[str]:
        name = self._name("block")
        inner = scope.inner()
        lines = [line for item in items for line in self._line(item, inner, top=False)]
        # Assigned in the block, so local to it: the outer ones come in as arguments.
        local = [
            n
            for n in ("ids", "key", *scope.saved)
            if n.isidentifier() and any(_assigns(line, n) for line in lines)
        ]
        parameters = ", ".join(["x", *local])
        call = self.draw.pick(BLOCKS).format(f=name)
        outer = ", ".join(
            ["x", *("mb['ids']" if n == "ids" and "ids" not in scope.ids else n for n in local)]
        )
        return [
            f"def {name}({parameters}):",
            *[f"    {line}" for line in lines],
            "    return x",
            f"x = {call}({outer})",
        ]

    def _line(self, kind: str, scope: Scope, *, top: bool) -> list[str]:
        if kind == "marker":
            line = self._filled(self._markers(scope), scope)
            if "ids = " in line and "ids" not in scope.ids:
                scope.ids.append("ids")
            return [line]
        if kind == "scan":
            return [f"x = {self._filled(SCANS, scope)}"]
        if kind == "save":
            name = self._name("a")
            line = f"{name} = {self._filled(self.layers, scope)}"
            scope.saved.append(name)
            return [line]
        if kind == "metric" and top:
            expression, reductions = self.draw.pick(self.metrics)
            name = self._name("m")
            self.body.reductions[name] = f"jpp.{self.draw.pick(reductions)}"
            return [f'aux["{name}"] = {self._fill(expression, scope)}']
        return [f"x = {self._filled(self.layers, scope)}"]

    def _markers(self, scope: Scope) -> list[str]:
        """Without those that would assign to an entry of the batch."""
        return [m for m in self.markers if "{saved} = " not in m or len(scope.saved) > 1]

    def _filled(self, templates: Sequence[str], scope: Scope) -> str:
        return self._fill(self.draw.pick(templates), scope)

    def _fill(self, template: str, scope: Scope) -> str:
        assigns = "{saved} = " in template
        return template.format(
            x="x",
            key="key",
            w=self.draw.pick(self.weights) if "{w}" in template else "",
            saved=self.draw.pick(scope.saved[1:] if assigns else scope.saved)
            if "{saved}" in template
            else "",
            ids=self.draw.pick(scope.ids) if "{ids}" in template else "",
        )

    def _name(self, kind: str) -> str:
        self.names += 1
        return f"{kind}{self.names - 1}"


def _assigns(line: str, name: str) -> bool:
    return name in [target.strip() for target in line.split(" = ")[0].split(",")]
