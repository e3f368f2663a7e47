"""Compile serialized tasks (`jax.export.Exported`) for an actor's devices, and check results for NaNs and
infinities.

A compiled task takes and returns flat lists of arrays. The task is a `jax.stages.Compiled`; its calls after
the first one run in C++. If the arguments are already on the devices and dispatch is synchronous (see
`jax_runtime`), such a call costs no more than calling XLA's executable and making arrays of the results
directly.

`call_checked` raises an error for a result that has a NaN or an infinity, as `jax_debug_nans` and
`jax_debug_infs` promise. The error names the operation if the task checks its operations itself
(`SelfChecked`). JAX alone would check only the first call of a compiled executable, since later calls bypass
its checks.
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
from jaxpp_async.jax_bridge.compilation_cache import cache_hits
from jaxpp_async.markers import nonfinite

ContentKey = str
"""A key that identifies a serialized task by its content."""

ExecutableKey = tuple[ContentKey, tuple[int, ...]]
"""The key of one executable: its task's content key, and the positions of the arguments that it donates."""

Signature = tuple[tuple[int, ...], Any, Any]
"""The shape, the dtype and the sharding of one argument or result of an executable."""

_LOOP = b"while_v1"
"""The name of a loop in serialized StableHLO, used also for a loop with a constant number of iterations."""


@dataclass(frozen=True, slots=True)
class Executable:
    """A compiled task, which `Run` instructions of programs call.

    Args:
        call: takes the arguments in order, and returns the results in order.
        temp_bytes: the size of XLA's temporary buffers in bytes; 0 where the backend does not report it.
        inputs: the shape, the dtype and the sharding of each argument.
        outputs: the shape, the dtype and the sharding of each result.
        has_loop: whether the task contains a loop, so that its time may vary much from call to call.
        places: the operations that the executable checks for NaNs and infinities, or None if it checks none.
            If it checks any, `call` returns a pair of the results and the findings.
        is_cached: whether XLA did not compile the task, since JAX's compilation cache had it.
    """

    call: Callable[..., Sequence[jax.Array]]
    temp_bytes: int
    inputs: tuple[Signature, ...]
    outputs: tuple[Signature, ...]
    has_loop: bool = False
    places: tuple[str, ...] | None = None
    is_cached: bool = False


class Executables:
    """The compiled tasks of one actor process, found by their content and their donated arguments.

    Args:
        devices: the actor's devices, for which the tasks are compiled.
        workers: the threads in which they are compiled.
    """

    def __init__(self, devices: Devices, workers: ThreadPoolExecutor):
        self._devices, self._workers = devices, workers
        self._blobs: dict[ContentKey, bytes] = {}
        self._compiled: dict[ExecutableKey, asyncio.Future[Executable]] = {}
        self.compilations = 0

    def add_blobs(self, blobs: Mapping[ContentKey, bytes]) -> None:
        """Keep serialized tasks by content key (a hash of their bytes), so that `load` can compile them when
        a program needs them."""
        self._blobs.update(blobs)

    async def load(
        self, keys: Iterable[ExecutableKey], on_compiled: Callable[[int, int, int], None] = lambda *_: None
    ) -> float:
        """Compile those of the given tasks that are not compiled yet, several at a time.

        Args:
            keys: for each task: its content key (a hash of its bytes), and the positions of its donated
                arguments.
            on_compiled: called at the beginning and whenever one is compiled, with how many are, how many
                have to be, and how many came from JAX's compilation cache.

        Returns:
            The time in seconds that this took.

        Raises:
            KeyError: the controller has not sent the task of a content key.
        """
        start = time.monotonic()
        wanted = dict.fromkeys(keys)
        new = [key for key in wanted if key not in self._compiled]
        done: list[Executable] = []

        def note(future: asyncio.Future[Executable]) -> None:
            if not future.cancelled() and future.exception() is None:
                done.append(future.result())
                on_compiled(len(done), len(new), sum(executable.is_cached for executable in done))

        if new:
            on_compiled(0, len(new), 0)
        for key in new:
            self._compiled[key] = self._compile(key)
            self._compiled[key].add_done_callback(note)
        await asyncio.gather(*(asyncio.shield(self._compiled[key]) for key in wanted))
        return time.monotonic() - start

    def get(self, key: ExecutableKey) -> Executable:
        """Return the executable of a task that `load` has compiled."""
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
    """Compile one serialized task for an actor's devices.

    Args:
        blob: the serialized `jax.export.Exported`.
        donated: the positions of the arguments to donate, which an exported function does not contain.
        devices: the actor's devices.

    Raises:
        ValueError: the task was exported for another number of devices or another platform.
    """
    exported = export.deserialize(bytearray(blob))
    if exported.nr_devices not in (1, devices.size):
        raise ValueError(f"exported for {exported.nr_devices} devices, the actor has {devices.size}")
    inputs = _signatures(exported.in_avals, _input_shardings(exported, devices))
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype, sharding in inputs]
    # The results need shardings too: in a task without arguments nothing else says which devices to use.
    results = jax.tree.unflatten(exported.out_tree, exported.out_shardings_jax(devices.mesh))
    with _without_donation_warnings():
        lowered = jax.jit(exported.call, donate_argnums=donated, out_shardings=results).lower(*arguments)
    with cache_hits() as hits:
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
        is_cached=len(hits) > 0,
    )


def _places(out_tree: Any) -> tuple[str, ...] | None:
    """Return the operations that a task checks for NaNs and infinities, or None if it checks none.

    A task that checks its operations has a second result, which is a dictionary with one key. That key is a
    text, made by `evaluate.checked_function`, which names one operation per line.

    Args:
        out_tree: the tree structure of the task's results.
    """
    match jax.tree.unflatten(out_tree, range(out_tree.num_leaves)):
        case list(), {**seen}:
            (places,) = seen
            return tuple(places.split("\n"))
    return None


_SCHEDULER = "xla_cpu_enable_concurrency_optimized_scheduler"


def _compiler_options(devices: Devices) -> dict[str, str | bool]:
    """Return the XLA options for compiling tasks. On CPUs they switch off the concurrency-optimized
    scheduler.

    That scheduler starts independent operations at the same time, and so computes all gradients of a stage
    before it accumulates the first one. For eight matrices this took eight times the temporary memory and
    twice the time.

    Returns:
        The options; empty for other devices, or if the user has named the scheduler in `XLA_FLAGS`.
    """
    if not devices.is_cpu or _SCHEDULER in os.environ.get("XLA_FLAGS", ""):
        return {}
    return {_SCHEDULER: False}


def check_signature(found: Sequence[Signature], layouts: Sequence[Layout], what: str) -> None:
    """Check that the arguments or the results of an executable have the types and shardings that the program
    expects.

    Transfers and fetches compute the positions of bytes from the program's avals, so a difference would make
    them move wrong bytes.

    Args:
        found: the shape, the dtype and the sharding of each argument, or of each result, of the executable.
        layouts: the layout of the aval that the program has for each argument, or for each result.
        what: the beginning of the error message; names the `Run` instruction, and says input or output.

    Raises:
        ValueError: an argument or a result differs from its layout; the message names its position.
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
"""A lock for Python's warning filters, which belong to the whole process. A thread that changes them holds
the lock until it has restored them."""


@contextlib.contextmanager
def _without_donation_warnings() -> Iterator[None]:
    """Suppress, within a `with` block, the warning that lowering gives for donated arguments that match no
    result.

    The compiler of this project makes such donations on purpose, and the user cannot change them.
    """
    with _WARNING_FILTERS, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield


# ---------------------------------------------------------------- NaNs and infinities


def call_checked(
    call: Callable[..., Sequence[jax.Array]],
    arguments: Sequence[jax.Array],
    *,
    infs: bool,
    explain: Callable[[], str | None] | None,
) -> Sequence[jax.Array]:
    """Call an executable, and raise an error if a result has a NaN or an infinity that JAX's configuration
    forbids.

    Args:
        call: the executable.
        arguments: its arguments.
        infs: whether to check for infinities, if JAX's configuration forbids them. False for a task that
            makes initial accumulators, since an accumulator of `Max` starts with an infinity.
        explain: called if a result is invalid; returns a description of the operation that made the invalid
            value, or None if that is not known. The argument itself is None for a task that does not check
            its operations.

    Returns:
        The results of the executable.

    Raises:
        FloatingPointError: a result has a NaN or an infinity that the configuration forbids.
    """
    nans, infs = jax_config.forbids_nans(), infs and jax_config.forbids_infs()
    # JAX's own check is off, since its error would name neither the result nor the task.
    with jax.debug_nans(False), jax.debug_infs(False):
        outputs = call(*arguments)
    for position, array in enumerate(outputs):
        if not jax.numpy.issubdtype(array.dtype, np.inexact):
            continue
        for shard in array.addressable_shards:
            kind = _kind(np.asarray(shard.data), nans, infs)
            if kind is not None:
                result = f"result {position} ({array.dtype}{list(array.shape)}) of the task"
                blame = (explain() if explain else None) or f"invalid value ({kind}) in {result}"
                raise FloatingPointError(f"{blame}; jax_debug_{kind}s is on")
    return outputs


def _kind(values: np.ndarray, nans: bool, infs: bool) -> str | None:
    if nans and np.isnan(values).any():
        return "nan"
    return "inf" if infs and np.isinf(values).any() else None


class SelfChecked:
    """A callable that calls an executable which checks its own operations for NaNs and infinities, and that
    keeps the findings of the last call.

    Args:
        call: the executable; returns the results, and a dictionary with the findings as its only value.
        places: the operations that the executable checks.
        names: the user's name of each argument, or None for an argument without one.
    """

    __slots__ = ("_call", "_findings", "_names", "_places")

    def __init__(self, call: Callable[..., Any], places: Sequence[str], names: Sequence[str | None]):
        self._call, self._places, self._names = call, places, names
        self._findings: jax.Array | None = None

    def __call__(self, *arguments: jax.Array) -> Sequence[jax.Array]:
        outputs, findings = self._call(*arguments)
        (self._findings,) = findings.values()
        return outputs

    def explain(self) -> str | None:
        """Describe which operation made the first NaN or infinity of the last call, and which arguments
        already had one.

        Returns:
            The description, or None if the call found neither a NaN nor an infinity.
        """
        if self._findings is None:
            return None
        return nonfinite.describe_origin(self._findings.addressable_shards[0].data, self._places, self._names)
