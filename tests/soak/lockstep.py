"""lockstep: trains one tiny model on two meshes, one that faults are let loose on and one that is left alone,
and compares the losses of every step bit for bit. Knows nothing of how faults are made."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
from fault_plan import Fault

import jaxpp_async as jpp

STEP_LIMIT_S = 90.0
"""What a step may take: an actor that is stopped for ever is noticed after 10 s and replaced in a few more.
"""

NUM_MICROBATCHES = 4

ODD_BYTES = [byte for byte in range(1, 256) if byte != ord("/")]
"""All that may stand in a file's name."""


class SoakFailure(Exception):
    """What a soak must never see."""


def make_step(num_stages: int) -> tuple[models.Model, Any]:
    """A model, and a training step whose state has all kinds: parameters, momentum, a key and a counter."""
    model = models.mlp(num_stages)

    def step(state: Any, batch: Any) -> Any:
        key, noise_key = jax.random.split(state["key"])
        batch = {**batch, "x": batch["x"] + 0.01 * jax.random.normal(noise_key, batch["x"].shape)}

        def microbatch_grads(mb: Any) -> Any:
            loss, grads = jax.value_and_grad(model.loss)(state["params"], mb)
            return grads, loss

        grads, losses = jpp.accumulate_grads(microbatch_grads, jpp.Std1F1B(num_stages))(batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - 0.003 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum, "key": key, "count": state["count"] + 1}, losses

    return model, step


class Trainer:
    """Trains on `mesh` and, step by step, on `reference`.

    Args:
        folder: for checkpoints.

    Attributes:
        number: of the next step.
        num_run: how many steps were run, those after a restore again.
        wishes: faults that it is to commit itself, and those it has, in order.
    """

    def __init__(self, mesh: jpp.RemoteMesh, reference: jpp.RemoteMesh, num_actors: int, folder: Path):
        self._mesh, self._reference, self._folder = mesh, reference, folder
        self._model, step = make_step(num_actors)
        self._step = mesh.distributed(step, donate_argnums=0)
        self._kept_step = mesh.distributed(step)  # for runs that are cancelled and made again
        self._reference_step = reference.distributed(step, donate_argnums=0)
        self._reference_kept_step = reference.distributed(step)
        self._state, self._reference_state = self._initial_state(), self._initial_state()
        self._expected: dict[int, bytes] = {}
        self._saved: tuple[int, Path] | None = None
        self._saving: tuple[int, Any] | None = None
        self.number, self.num_run = 0, 0
        self.wishes: deque[Fault] = deque()
        self.granted: list[Fault] = []

    async def warm_up(self) -> None:
        """Compile everything on both, which leaves arrays there: both are to have the same."""
        for mesh, step in ((self._mesh, self._kept_step), (self._reference, self._reference_kept_step)):
            await mesh.run(step, self._initial_state(), self._batch(0))
        await self.run_one()

    async def run_one(self) -> None:
        """One step on both, with the oldest wish if there is one.

        Raises:
            SoakFailure: it took too long, or the losses differ.
        """
        wish = self.wishes.popleft() if self.wishes else None
        number = self.number
        try:
            async with asyncio.timeout(STEP_LIMIT_S):
                losses = await self._one(wish)
        except TimeoutError as error:
            raise SoakFailure(f"step {number} took more than {STEP_LIMIT_S:g} s (with {wish})") from error
        if wish is not None:
            self.granted.append(wish)
        if losses is not None:
            await self._compare(losses)
            self.number, self.num_run = self.number + 1, self.num_run + 1

    @property
    def is_behind(self) -> bool:
        """The other mesh has gone further: this one was restored."""
        return self.number in self._expected

    async def compare_states(self) -> None:
        """The whole state of both, bit for bit.

        Raises:
            SoakFailure: they differ.
        """
        ours, theirs = await self._mesh.fetch(self._state), await self._reference.fetch(self._reference_state)
        for (path, a), (_, b) in zip(
            jax.tree_util.tree_leaves_with_path(ours),
            jax.tree_util.tree_leaves_with_path(theirs),
            strict=True,
        ):
            if _bytes(a) != _bytes(b):
                raise SoakFailure(
                    f"after step {self.number - 1} the state differs at {jax.tree_util.keystr(path)}"
                )

    # ------------------------------------------------------------ one step

    async def _one(self, wish: Fault | None) -> np.ndarray | None:
        """The losses of a step; None if the wish was no step."""
        batch = self._batch(self.number)
        match wish.kind if wish else None:
            case "cancel a run":
                self._state, losses = await self._cancelled_run(wish, batch)
            case "interrupt the loop":
                await self._interrupted_run(wish, batch)
                return None
            case "cancel an await":
                future = await self._mesh.submit(self._step, self._state, batch)
                self._state, losses = future.outputs
                await _cancelled(future, wish.seconds)
                await future
            case "save" | "cancel a save":
                await self._save(wish)
                return None
            case "save to an odd path":
                await self._save_to_odd_path(wish)
                return None
            case "save beside another driver":
                await self._save_beside_another(wish)
                return None
            case "restore":
                await self._restore()
                return None
            case _:
                self._state, losses = await self._mesh.run(self._step, self._state, batch)
        if wish is not None and wish.kind == "cancel a fetch":
            await _cancelled(losses, wish.seconds)
        return await losses

    async def _cancelled_run(self, wish: Fault, batch: Any) -> Any:
        """Without donation a `run` that is cancelled can be made again."""
        for seconds in (wish.seconds, wish.seconds / 2):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._mesh.run(self._kept_step, self._state, batch)
        return await self._mesh.run(self._kept_step, self._state, batch)

    async def _interrupted_run(self, wish: Fault, batch: Any) -> None:
        """A `run` with donation that is cut short, as training is that somebody stops; the state knows if it
        counts."""

        async def one() -> None:
            self._state, _ = await self._mesh.run(self._step, self._state, batch)

        running, way = one(), wish.number % 3
        if way == 0:
            await _cancelled(running, wish.seconds)
        else:
            running.send(None)  # up to where it waits
            await asyncio.sleep(wish.seconds)
            with contextlib.suppress(KeyboardInterrupt):
                running.close() if way == 1 else running.throw(KeyboardInterrupt())
        self.number = int(await self._state["count"])

    async def _save(self, wish: Fault) -> None:
        await self._finish_save()
        path = self._folder / f"step-{self.number}-{self.num_run}"
        if wish.kind == "cancel a save":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wish.seconds):
                    await self._mesh.save(path, {"state": self._state})
            return
        saving = await self._mesh.save(path, {"state": self._state}, wait=wish.number % 2 == 0)
        self._saving = self.number, saving

    async def _finish_save(self) -> None:
        if self._saving is not None:
            (number, saving), self._saving = self._saving, None
            await saving
            self._saved = number, Path(saving.path)

    async def _save_to_odd_path(self, wish: Fault) -> None:
        """To a name that a file system allows; it must come back from there bit for bit."""
        rng = random.Random(wish.number)
        name = b"odd-" + bytes(rng.choice(ODD_BYTES) for _ in range(rng.randint(1, 60)))
        path = os.path.join(os.fsencode(self._folder), name)
        state = await self._mesh.fetch(self._state)
        await self._mesh.save(path, {"state": self._state})
        _check_is_one_of((await self._mesh.restore(path, {"state": state}))["state"], [state], str(path))

    async def _save_beside_another(self, wish: Fault) -> None:
        """The other mesh saves its own state into the same folder at the same time, or a little later.
        Whoever is told that it has saved has; the other one is told that it has not."""
        path = self._folder / "of two drivers"
        states = await self._mesh.fetch(self._state), await self._reference.fetch(self._reference_state)

        async def save(mesh: jpp.RemoteMesh, state: Any, after_s: float) -> bool:
            await asyncio.sleep(after_s)
            try:
                await mesh.save(path, {"state": state})
            except jpp.errors.CheckpointError as error:
                if "another save has put" not in str(error):
                    raise
                return False
            return True

        told = await asyncio.gather(
            save(self._mesh, self._state, 0.0), save(self._reference, self._reference_state, wish.seconds)
        )
        found = (await self._mesh.restore(path, {"state": states[0]}))["state"]
        saved = [state for state, is_saved in zip(states, told, strict=True) if is_saved]
        _check_is_one_of(found, saved, str(path))

    async def _restore(self) -> None:
        """Back to the last checkpoint; the losses of the steps since must come out again."""
        await self._finish_save()
        if self._saved is None:
            await self._save(Fault(0, "save", 0, 0, 0))
            await self._finish_save()
        assert self._saved is not None
        number, path = self._saved
        self._state = (await self._mesh.restore(path, {"state": (self._step, 0)}))["state"]
        self.number = number

    # ------------------------------------------------------------ the other mesh

    async def _compare(self, losses: np.ndarray) -> None:
        while self.number not in self._expected:  # steps that were interrupted have no losses to compare
            self._expected[len(self._expected)] = await self.run_reference()
        if _bytes(losses) != self._expected[self.number]:
            expected = np.frombuffer(self._expected[self.number], losses.dtype)
            raise SoakFailure(f"step {self.number} has the losses {losses}, undisturbed {expected}")

    async def run_reference(self) -> bytes:
        """One more step on the other mesh: its losses."""
        batch = self._batch(len(self._expected))
        self._reference_state, losses = await self._reference.run(
            self._reference_step, self._reference_state, batch
        )
        return _bytes(await losses)

    def _initial_state(self) -> Any:
        params = self._model.init(0)
        momentum = jax.tree.map(np.zeros_like, params)
        return {"params": params, "momentum": momentum, "key": jax.random.key(7), "count": jnp.int32(0)}

    def _batch(self, number: int) -> Any:
        return self._model.batch(number, NUM_MICROBATCHES)


def _check_is_one_of(found: Any, expected: Sequence[Any], what: str) -> None:
    """Raises:
    SoakFailure: a tree is none of those that it may be, bit for bit.
    """
    leaves = [_bytes(leaf) for leaf in jax.tree.leaves(found)]
    if leaves not in [[_bytes(leaf) for leaf in jax.tree.leaves(tree)] for tree in expected]:
        raise SoakFailure(f"{what} does not have what was saved there")


async def _cancelled(awaitable: Any, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await awaitable


def _bytes(value: Any) -> bytes:
    if jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value).tobytes()
