"""Draw whole training steps: what comes before the loops, the loops, and the update, as the text of a Python
program.

The text runs by itself: a failing one is its own reproduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bodies import Body, BodyWriter, Draw
from hypothesis import strategies as st

SCHEDULES = (
    "GPipe",
    "Std1F1B",
    "Interleaved1F1B",
    "Eager1F1B",
    "LoopedBFS",
    "ZeroBubbleH1",
    "ZeroBubbleH2",
    "rows",
    "rows",
    "rows",
)

GRADIENTS = (
    "(value, aux), g = jax.value_and_grad({loss}, has_aux=True)(q, mb, i)",
    "value, pull, aux = jax.vjp(lambda q: {loss}(q, mb, i), q, has_aux=True); (g,) = pull(jnp.float32(8))",
    "(value, aux), (g, gx) = jax.value_and_grad({loss}, (0, 1), has_aux=True, allow_int=True)(q, mb, i)",
    "(value, aux), g = jax.value_and_grad(jax.checkpoint({loss}), has_aux=True)(q, mb, i)",
    "(value, aux), g = jax.jit(jax.value_and_grad({loss}, has_aux=True))(q, mb, i)",
    "(value, aux), g = jax.value_and_grad(twice({loss}), has_aux=True)(q, mb, i)",
)

CALLS = (
    *["{loop}(batch)"] * 6,
    "jax.jit({loop})(batch)",
    """{loop}({{**batch, "x": batch["x"] + jnp.mean({loop}(batch)[1])}})""",
)

BEFORE = (
    "p = jax.tree.map(lambda a: a * 1.5, p)",
    'batch = {**batch, "x": batch["x"] * 2 + p["b0"]}',
    'batch = {**batch, "x": batch["x"] - jnp.mean(batch["x"])}',
    'p = {**p, "w1": p["w0"].T}',
    'p = {**p, "w2": jnp.sin(p["w0"] @ p["w1"])}',
    'p = {**p, "b0": p["b0"] / norm(p)}',
    "batch = jax.tree.map(lambda a: a[::-1], batch)",
    "key = jax.random.fold_in(key, count)",
    "p = jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)",
    'p = {**p, "w0": lax.cond(count > 2, lambda: p["w0"], lambda: p["w1"])}',
)

AFTER = (
    "g = jax.tree.map(lambda a: a / {n}, g)",
    "scale = jnp.minimum(1.0, 1.0 / (norm(g) + 0.1)); g = jax.tree.map(lambda a: a * scale, g)",
    'out["norm"] = norm(g)',
    'out["biggest"] = biggest(g), biggest(new)',
    "ok = finite(g); g = jax.tree.map(lambda a: jnp.where(ok, a, 0), g)",
    "g = {{k: a + 0.01 * old[k] for k, a in g.items()}}",
    "g = jax.tree.map(jnp.tanh, g)",
    "g = {{k: a / (1e-3 + jnp.max(jnp.abs(a))) for k, a in g.items()}}",
    'out["dots"] = {{k: jnp.vdot(a, old[k]) for k, a in g.items()}}',
    "g = {{k: a * (1.0 if k[0] == 'w' else 0.5) for k, a in g.items()}}",
)

# What a microbatch does with its gradients, inside the loop.
TAILS = (
    "g = jax.tree.map(lambda a: a * 2.0, g)",
    "clip = jnp.minimum(1.0, 1.0 / (norm(g) + 0.1)); g = jax.tree.map(lambda a: a * clip, g)",
    "g = jax.tree.map(lambda a: a.T.T, g)",
    "g = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), g)",
    "g = jax.tree.map(lambda a: a.astype(jnp.bfloat16), g)",
    "g = jax.tree.map(lambda a: a.astype(jnp.float32), g)",
    "g = {k: a + 0.01 * q[k] for k, a in g.items()}",
    "g = jax.tree.map(lambda a: jnp.concatenate([a.ravel(), a.ravel()])[: a.size].reshape(a.shape), g)",
    "g = jax.tree.map(lambda a: a * value, g)",
    "g = jax.tree.map(lambda a: jnp.where(finite(g), a, 0), g)",
    "g = jax.tree.map(lambda a: a if a.ndim else a + 1, g)",
    "g = {k: a + sum(jnp.sum(b) for b in g.values()) for k, a in g.items()}",
    "g = dict(zip(g, jax.tree.leaves(jax.tree.map(lambda a: a - jnp.mean(a), g))))",
    "g = lax.cond(value > 0.0, lambda: g, lambda: jax.tree.map(lambda a: 0.5 * a, g))",
)

UPDATES = (
    "new = {k: old[k] - 0.1 * a for k, a in g.items()}",
    "new = lax.cond(finite(g), lambda: {k: old[k] - 0.1 * a for k, a in g.items()}, lambda: old)",
    "new = lax.cond(count % 2 == 0, lambda: old, lambda: {k: old[k] - 0.1 * a for k, a in g.items()})",
    "large = norm(g) > 0.5; new = {k: jnp.where(large, old[k] - a, old[k]) for k, a in g.items()}",
)

MOMENTUM = ("m = {k: 0.9 * state['m'][k] + a for k, a in g.items()}", "g = m", 'out["m"] = m')

EXTRAS = (
    'out["count"] = count + 1',
    'out["constant"] = jnp.zeros((2, 4)), 3',
    'out["unused"] = state["p"]["unused"]',
    'out["average"] = {k: 0.9 * a + 0.1 * new[k] for k, a in old.items()}',
    'out["total"] = sum(jnp.sum(a) for a in jax.tree.leaves(new))',
    'out["key"] = jax.random.split(key)',
    'out["value2"] = value * 2',
    'out["again"] = {k: (a, a.T) for k, a in new.items()}',
    'out["batch"] = batch["y"]',
)

TRAINED = (None, ("w0", "w1", "w2"), ("w0", "b0"), ("w2", "k", "e"), ("b1",))


@dataclass(frozen=True)
class Program:
    """A training step as a Python program, which checks itself when it runs."""

    source: str

    def __repr__(self) -> str:
        return f"\n{self.source}"

    def _repr_pretty_(self, printer, cycle) -> None:
        """How hypothesis prints it: as the program, not as a string with escapes."""
        printer.text(repr(self))


@st.composite
def programs(draw, largest: int = 4) -> Program:
    """Random training steps.

    Args:
        largest: number of stages, microbatches, actors.
    """
    return Program(_Writer(Draw(draw), largest).write())


class _Writer:
    def __init__(self, draw: Draw, largest: int):
        self.draw, self.largest = draw, largest
        self.actors, self.microbatches = self._size(largest), self._size(largest)
        self.bfloat16 = draw.chance(20)
        self.momentum = draw.chance(15)

    def write(self) -> str:
        main = self._body(self.largest)
        other = self._body(min(3, self.largest)) if self.draw.chance(20) else None
        lines = ['p, out = dict(state["p"]), {}']
        lines += [self.draw.pick(self._allowed(BEFORE)) for _ in range(self._few(2))]
        lines += self._loss("loss", main)
        names = self.draw.pick(TRAINED)
        lines += self._training(main, names)
        second = self.draw.pick(("evaluate", "train again")) if other else None
        lines += [
            f"old = {{k: state['p'][k] for k in {names!r}}}" if names else "old = state['p']",
            "new = old",
        ]
        if other and second == "train again":
            lines += self._loss("loss2", other)
            lines += self._training(other, names, "2")
            lines += ["g = jax.tree.map(jnp.add, g, g2)", 'out["aux2"] = aux2']
        lines += [self.draw.pick(AFTER).format(n=self.microbatches) for _ in range(self._few(3))]
        if self.momentum:
            lines += MOMENTUM
        lines.append(self.draw.pick(UPDATES))
        lines += [self.draw.pick(EXTRAS) for _ in range(self._few(3))]
        if other and second == "evaluate":
            lines += self._evaluation(other)
        lines.append('return {"p": {**state["p"], **new}}, value, aux, out')
        return self._program(lines)

    def _size(self, largest: int) -> int:
        """2 first: a program of one stage, actor or microbatch is smaller, but says less."""
        return self.draw.pick([n for n in (2, 3, 4, 2, 3, 4, 1) if n <= largest])

    def _few(self, most: int) -> int:
        return self.draw.count(0, most)

    def _allowed(self, texts: Sequence[str]) -> list[str]:
        return [t for t in texts if self.bfloat16 or "bfloat16" not in t]

    def _body(self, most: int) -> Body:
        return BodyWriter(self.draw, self._size(most), self.bfloat16).write()

    def _loss(self, name: str, body: Body) -> list[str]:
        lines = ["p, key, aux = {**p, **q}, key0, {}", *body.lines, "return value, aux"]
        return ["key0 = key", f"def {name}(q, mb, i, p=p):", *[f"    {line}" for line in lines]]

    def _training(self, body: Body, names: Sequence[str] | None, suffix: str = "") -> list[str]:
        q = f"{{k: p[k] for k in {names!r}}}" if names else "p"
        loss = f"loss{suffix}"
        if self.draw.chance(15):
            loss = self.draw.pick((f"jax.checkpoint({loss})", f"jax.jit({loss})"))
        lines = [
            f"q = {q}",
            self.draw.pick(GRADIENTS if self.draw.chance(30) else GRADIENTS[:1]).format(loss=loss),
        ]
        lines += [self.draw.pick(self._allowed(TAILS)) for _ in range(self._few(2))]
        reductions = [
            self.draw.pick(("jpp.Sum()", "jpp.Mean()")),
            self.draw.pick(("jpp.Stack()", "jpp.Mean()", "jpp.Max()")),
        ]
        metrics = dict(body.reductions)
        if self.draw.chance(15):
            lines.append('aux = {**aux, "g": norm(g)}')
            metrics["g"] = self.draw.pick(("jpp.Stack()", "jpp.Max()", "jpp.Sum()"))
        aux = "{" + ", ".join(f'"{k}": {r}' for k, r in metrics.items()) + "}"
        return [
            f"def microbatch{suffix}(mb, i):",
            *[f"    {line}" for line in lines],
            "    return g, value, aux",
            f"loop{suffix} = jpp.accumulate_grads(",
            f"    microbatch{suffix}, {self._schedule(body.stages)},",
            f"    reduce=({', '.join(reductions)}, {aux}), pass_index=True,",
            ")",
            f"g{suffix}, value{suffix}, aux{suffix} = {self.draw.pick(CALLS).format(loop=f'loop{suffix}')}",
        ]

    def _evaluation(self, body: Body) -> list[str]:
        aux = "{" + ", ".join(f'"{k}": {r}' for k, r in body.reductions.items()) + "}"
        # A gradient that a stage takes for itself counts as backward, so a list of tasks must have some.
        backward = any("jax.grad(" in line for line in body.lines)
        return [
            *self._loss("evaluate", body),
            "evaluation = jpp.accumulate_grads(",
            f"    lambda mb, i: evaluate(new, mb, i), {self._schedule(body.stages, backward=backward)},",
            f"    reduce=(jpp.Mean(), {aux}), pass_index=True,",
            ")",
            'out["evaluated"] = evaluation(batch)',
        ]

    def _schedule(self, stages: int, *, backward: bool = True) -> str:
        name = self.draw.pick(SCHEDULES)
        if name == "rows":
            seed = self.draw.count(0, 1 << 16)
            return f"random_rows({stages}, {self.microbatches}, {self.actors}, {seed}, backward={backward})"
        return f"jpp.{name}({stages})"

    def _program(self, lines: Sequence[str]) -> str:
        donate = (0,) if self.draw.chance(50) else ()
        tolerance = "3e-2" if self.bfloat16 else "1e-5"
        old_key = self.draw.chance(10)
        return "\n".join(
            [
                "import jax",
                "import jax.numpy as jnp",
                "from jax import lax",
                "",
                "import jaxpp_async as jpp",
                "from checking import check",
                "from vocabulary import TABLE, arguments, biggest, block, clipped, doubled, finite, norm",
                "from vocabulary import random_rows, stage, twice",
                "",
                "",
                "def step(state, batch, key, count):",
                *[f"    {line}" for line in lines],
                "",
                "",
                f"args = arguments({self.microbatches}, momentum={self.momentum}, old_key={old_key})",
                f"check(step, *args, actors={self.actors}, donate={donate}, "
                f"rtol={tolerance}, atol={tolerance})",
                "",
            ]
        )
