"""executables: serialized `jax.export.Exported` in, compiled callables out. Never runs one.

Each callable takes and returns flat lists of arrays. It is JAX's own `Compiled`, whose call is a C++ path once it has
been called: with the arrays in place and synchronous dispatch (`devices.starting`) it costs no more than going to the
loaded executable and wrapping its results by hand.

special_values: keeps for tasks the promise of `jax_debug_nans` and `jax_debug_infs`: an error for a result that has
one, with what the task says of its operations.

JAX itself looks only at the first call of a compiled executable: later ones take a path that checks nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_async.actors.jax_runtime import Devices
from jaxpp_async.actors.shards import Layout
from jaxpp_async.jax_bridge import jax_config
from jaxpp_async.markers import nonfinite

ContentKey = str
_LOOP = b"while_v1"
"""How a loop is called in serialized StableHLO, also one whose number of turns is known."""

ExecutableKey = tuple[ContentKey, tuple[int, ...]]
"""Content key, and the donated positions it is compiled for."""

Signature = tuple[tuple[int, ...], Any, Any]
"""Shape, dtype, sharding."""


@dataclass(frozen=True, slots=True)
class Executable:
    """A compiled task.

    Args:
        call: arrays in argument order to a sequence of arrays in result order.
        temp_bytes: XLA's temporaries, or 0 where the backend does not say.
        inputs: (shape, dtype, sharding) of each argument.
        outputs: the same of each result.
        has_loop: it may take much longer one day than it did the day before.
        places: of an executable that also says which operations make NaNs or infinities: what it looked at. `call` then
            returns two things, the results and what was seen.
    """

    call: Callable[..., Sequence[jax.Array]]
    temp_bytes: int
    inputs: tuple[Signature, ...]
    outputs: tuple[Signature, ...]
    has_loop: bool = False
    places: tuple[str, ...] | None = None


class Executables:
    """What one actor has compiled, by content and donation.

    Args:
        devices: the actor's devices, which the executables are compiled for.
        workers: threads to compile in.
    """

    def __init__(self, devices: Devices, workers: ThreadPoolExecutor):
        self._devices, self._workers = devices, workers
        self._blobs: dict[ContentKey, bytes] = {}
        self._compiled: dict[ExecutableKey, asyncio.Future[Executable]] = {}
        self.compilations = 0

    def add_blobs(self, blobs: Mapping[ContentKey, bytes]) -> None:
        """Keep serialized executables; they are compiled when `load` asks for them."""
        self._blobs.update(blobs)

    async def load(self, keys: Iterable[ExecutableKey]) -> float:
        """Compile what is not compiled yet, several at a time.

        Returns:
            Seconds it took.

        Raises:
            KeyError: a content key whose blob never came.
        """
        start = time.monotonic()
        wanted = dict.fromkeys(keys)
        for key in wanted:
            if key not in self._compiled:
                self._compiled[key] = self._compile(key)
        await asyncio.gather(*(asyncio.shield(self._compiled[key]) for key in wanted))
        return time.monotonic() - start

    def get(self, key: ExecutableKey) -> Executable:
        """A loaded executable."""
        return self._compiled[key].result()

    def _compile(self, key: ExecutableKey) -> asyncio.Future[Executable]:
        content_key, donated = key
        if content_key not in self._blobs:
            raise KeyError(f"no blob came for executable {content_key!r}")
        self.compilations += 1
        future = asyncio.get_running_loop().run_in_executor(
            self._workers, compile_blob, self._blobs[content_key], donated, self._devices
        )
        future.add_done_callback(lambda done: self._forget_failed(key, done))
        return future

    def _forget_failed(self, key: ExecutableKey, future: asyncio.Future[Executable]) -> None:
        if future.cancelled() or future.exception() is not None:
            self._compiled.pop(key, None)


@jax_config.with_exact_types
def compile_blob(blob: bytes, donated: tuple[int, ...], devices: Devices) -> Executable:
    """Compile one serialized executable for these devices.

    An exported function has lost its donation, so it is named again here (`donate_argnums`).

    Raises:
        ValueError: it was exported for another number of devices or another platform.
    """
    exported = export.deserialize(bytearray(blob))
    if exported.nr_devices not in (1, devices.size):
        raise ValueError(f"exported for {exported.nr_devices} devices, the actor has {devices.size}")
    inputs = _signatures(exported.in_avals, _input_shardings(exported, devices))
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype, sharding in inputs]
    # Results' shardings too: an executable without arguments has nothing else that names the actor's devices.
    results = jax.tree.unflatten(exported.out_tree, exported.out_shardings_jax(devices.mesh))
    with _without_donation_warnings():
        lowered = jax.jit(exported.call, donate_argnums=donated, out_shardings=results).lower(*arguments)
    compiled = lowered.compile(compiler_options=_compiler_options(devices))
    analysis = compiled.memory_analysis()
    places = _places(exported.out_tree)
    outputs = _signatures(exported.out_avals, jax.tree.leaves(compiled.output_shardings))
    return Executable(
        call=compiled,
        temp_bytes=int(getattr(analysis, "temp_size_in_bytes", 0) or 0),
        inputs=inputs,
        outputs=outputs if places is None else outputs[:-1],
        has_loop=_LOOP in blob,
        places=places,
    )


def _places(out_tree: Any) -> tuple[str, ...] | None:
    """Read from an executable with a second result what it looked at, as `evaluate.checked_function` wrote it."""
    match jax.tree.unflatten(out_tree, range(out_tree.num_leaves)):
        case list(), {**seen}:
            (places,) = seen
            return tuple(places.split("\n"))
    return None


_SCHEDULER = "xla_cpu_enable_concurrency_optimized_scheduler"


def _compiler_options(devices: Devices) -> dict[str, str | bool]:
    """Not XLA's scheduler that starts operations side by side on CPUs, unless `XLA_FLAGS` says something of it.

    With it all gradients of a stage lie there before the first is added up: for eight matrices eight times the
    temporaries, and twice the time.
    """
    if not devices.is_cpu or _SCHEDULER in os.environ.get("XLA_FLAGS", ""):
        return {}
    return {_SCHEDULER: False}


def check_signature(found: Sequence[Signature], layouts: Sequence[Layout], what: str) -> None:
    """Compare an executable's arguments or results with what a program says of their buffers.

    Transfers and fetches read shards by the program's word, so a difference would move wrong bytes.

    Raises:
        ValueError: they differ; names `what` and the position.
    """
    if len(found) != len(layouts):
        raise ValueError(f"{what}: the executable has {len(found)}, the program gives {len(layouts)}")
    for position, ((shape, dtype, sharding), layout) in enumerate(zip(found, layouts, strict=True)):
        same = shape == layout.aval.shape and dtype == layout.dtype
        if not same or not sharding.is_equivalent_to(layout.sharding, len(shape)):
            raise ValueError(
                f"{what} {position}: the executable has {dtype}{list(shape)} as {sharding}, the program "
                f"{layout.dtype}{list(layout.aval.shape)} as {layout.sharding}"
            )


def _signatures(avals: Sequence[Any], shardings: Sequence[Any]) -> tuple[Signature, ...]:
    return tuple((tuple(a.shape), a.dtype, s) for a, s in zip(avals, shardings, strict=True))


def _input_shardings(exported: Any, devices: Devices) -> list[Any]:
    everywhere = NamedSharding(devices.mesh, PartitionSpec())
    return [sharding or everywhere for sharding in exported.in_shardings_jax(devices.mesh)]


_WARNING_FILTERS = threading.Lock()
"""Warning filters belong to the process: one thread at a time changes and restores them."""


@contextlib.contextmanager
def _without_donation_warnings() -> Iterator[None]:
    """Lowering warns of donated arguments that match no result: the compiler knows, and the user cannot act on it."""
    with _WARNING_FILTERS, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield


# ---------------------------------------------------------------- special values


def call_checked(
    call: Callable[..., Sequence[jax.Array]],
    arguments: Sequence[jax.Array],
    *,
    infs: bool,
    explain: Callable[[], str | None],
) -> Sequence[jax.Array]:
    """Call an executable and look at its results.

    Args:
        infs: look for infinities, if they are asked for; an accumulator of `Max` begins with one.
        explain: says, once `call` has returned, which operation is to blame; None: nobody knows.

    Raises:
        FloatingPointError: a result has a NaN (or an infinity) and the configuration forbids it.
    """
    nans, infs = jax_config.forbids_nans(), infs and jax_config.forbids_infs()
    # JAX's own check names neither result nor task.
    with jax.debug_nans(False), jax.debug_infs(False):
        outputs = call(*arguments)
    for position, array in enumerate(outputs):
        if not jax.numpy.issubdtype(array.dtype, np.inexact):
            continue
        for shard in array.addressable_shards:
            kind = _kind(np.asarray(shard.data), nans, infs)
            if kind is not None:
                what = f"invalid value ({kind}) in result {position} ({array.dtype}{list(array.shape)}) of the task"
                raise FloatingPointError(f"{explain() or what}; jax_debug_{kind}s is on")
    return outputs


def _kind(values: np.ndarray, nans: bool, infs: bool) -> str | None:
    if nans and np.isnan(values).any():
        return "nan"
    return "inf" if infs and np.isinf(values).any() else None


class SelfChecked:
    """An executable that also says which of its operations make NaNs or infinities, as one that does not.

    Args:
        call: to the results and, under one name, what was seen.
        places: what it looked at.
        names: of its arguments, the user's; None: it has none.
    """

    __slots__ = ("_call", "_names", "_places", "_seen")

    def __init__(self, call: Callable[..., Any], places: Sequence[str], names: Sequence[str | None]):
        self._call, self._places, self._names = call, places, names
        self._seen: jax.Array | None = None

    def __call__(self, *arguments: jax.Array) -> Sequence[jax.Array]:
        outputs, seen = self._call(*arguments)
        (self._seen,) = seen.values()
        return outputs

    def explain(self) -> str | None:
        """Which operation made the first NaN or infinity of the last call, and which arguments came with one."""
        if self._seen is None:
            return None
        return nonfinite.describe_origin(self._seen.addressable_shards[0].data, self._places, self._names)
