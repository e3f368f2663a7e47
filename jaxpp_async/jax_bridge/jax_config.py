"""Read and change JAX's settings in this process, including the settings of the compilation cache.

Like `private_api`, this module may use private parts of JAX. The module is tested with JAX 0.10 and 0.12.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax
from jax._src import compilation_cache as _compilation_cache
from jax._src import config as _settings
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import lru_cache as _lru_cache
from jax._src import mesh as _mesh
from jax._src import sharding_impls as _sharding_impls
from jax.sharding import AbstractMesh
from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

# Settings that change the meaning or the values of a program that one process traces and another runs.
_COPIED_CONFIG = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_custom_prng",
    "jax_threefry_partitionable",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_softmax_custom_jvp",
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_memory_fitting_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
)


def trace_settings() -> tuple[Any, ...]:
    """Return the values of all settings of this thread on which a traced and exported program depends.

    Callers compare two results to see whether a setting has changed; a result is quick to make and to
    compare. The first entry is JAX's key for its own caches of traces. This key includes settings of one
    thread (`with jax.enable_x64(True)`) and the meshes in context, but lacks some of the settings that are
    copied to actors. The other entries are all settings that are copied to actors.
    """
    config = jax.config
    return _settings.trace_context(), *[getattr(config, name, None) for name in _COPIED_CONFIG]


def copied_config() -> dict[str, Any]:
    """Return the settings of JAX, by name, that actors need to get the same results as this process."""
    found = {}
    for name in _COPIED_CONFIG:
        value = getattr(jax.config, name, None)
        if isinstance(value, enum.Enum):
            value = value.value if isinstance(value.value, str) else value.name
        if value is not None:
            found[name] = value
    return found


_R = TypeVar("_R")

_CONTEXTS = ("mesh_context_manager", "compute_on_context_manager", "xla_metadata_context_manager")


def with_settings_of_this_thread(fn: Callable[..., _R]) -> Callable[..., _R]:
    """Return a function that runs `fn` in any thread under the settings of JAX that this thread has now.

    A context manager such as `jax.enable_x64(True)` changes a setting of one thread. Context variables do not
    carry it to another one.
    """
    states = [*_settings.config_states.values(), *[getattr(_settings, name) for name in _CONTEXTS]]
    mine = [
        (state, value) for state in states if (value := state.get_local()) is not _settings.config_ext.unset
    ]

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> _R:
        with contextlib.ExitStack() as restored:
            for state, value in mine:
                restored.callback(_set_local, state, state.get_local())
                _set_local(state, value)
            return fn(*args, **kwargs)

    return call


def _set_local(state: Any, value: Any) -> None:
    """Give a setting a value in this thread, and tell JAX's own code that has asked to be told."""
    state.set_local(value)
    if (hook := getattr(state, "_update_thread_local_hook", None)) is not None:
        hook(None if value is _settings.config_ext.unset else value)


_CHECKS = ("jax_debug_nans", "jax_debug_infs")
"""The names of the JAX settings that each actor reads when it runs an executable; a compiled executable does
not depend on them."""


def thread_checks() -> dict[str, Any]:
    """Return this thread's values of `jax_debug_nans` and `jax_debug_infs`, by name.

    A compiled program does not contain these settings: an actor that runs it reads the actor's own settings
    and checks for NaN and infinity accordingly.
    """
    return {name: getattr(jax.config, name) for name in _CHECKS}


def global_checks() -> dict[str, Any]:
    """Return this process's values of `jax_debug_nans` and `jax_debug_infs`, by name.

    These values hold in threads that have no values of their own, such as those in which inline actors run.
    """
    return {name: getattr(_settings, name.removeprefix("jax_")).get_global() for name in _CHECKS}


_F = TypeVar("_F", bound=Callable[..., Any])

_GUARDS = (
    _settings.transfer_guard_host_to_device,
    _settings.transfer_guard_device_to_device,
    _settings.transfer_guard_device_to_host,
)


def without_transfer_guard(fn: _F) -> _F:
    """Decorate a function of an actor so that its transfers are allowed whatever transfer guard is set.

    A transfer guard is meant for the user's own code, but inline actors run in the same thread as that code.
    """

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if all(
            guard.value in (None, "allow") for guard in _GUARDS
        ):  # setting a guard takes as long as a small put
            return fn(*args, **kwargs)
        with jax.transfer_guard("allow"):
            return fn(*args, **kwargs)

    return cast(_F, call)


def with_exact_types(fn: _F) -> _F:
    """Decorate a function of an actor so that JAX keeps 64-bit types and allows the function's transfers.

    The types in a program were decided in the process that compiled the program. That process may have had
    x64 on, so the actor must not change 64-bit types to 32-bit ones, even if x64 is off in its own thread.
    """

    @without_transfer_guard
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.enable_x64(True):
            return fn(*args, **kwargs)

    return cast(_F, call)


def mesh_context(mesh: AbstractMesh | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which JAX's mesh is `mesh`, whatever mesh the user has set.

    Args:
        mesh: the abstract mesh; None for a context without any mesh.
    """
    stack = contextlib.ExitStack()
    # `jax.set_mesh` takes no "none", and cannot be called under a trace.
    stack.enter_context(_sharding_impls._internal_use_concrete_mesh(_mesh.empty_concrete_mesh))
    stack.enter_context(jax.sharding.use_abstract_mesh(mesh or _mesh.empty_abstract_mesh))
    return stack


def innermost_locations() -> Any:
    """Return a context in which a lowered operation records the user's line that made it, but no callers.

    Without this context, the bytes of a lowered program would also depend on the line from which the user's
    program called the function.
    """
    return _settings.include_full_tracebacks_in_locations(False)


def forbids_nans() -> bool:
    """Return whether the setting `jax_debug_nans` is on in this thread."""
    return bool(_settings.debug_nans.value)


def forbids_infs() -> bool:
    """Return whether the setting `jax_debug_infs` is on in this thread."""
    return bool(_settings.debug_infs.value)


def runs_op_by_op() -> bool:
    """Return whether JAX executes each operation eagerly (`jax.disable_jit` is on, and nothing is traced)."""
    return bool(_settings.disable_jit.value) and _core.trace_state_clean()


def write_cache_whole() -> None:
    """Make JAX's compilation cache write each entry atomically: to a temporary file, which is then renamed.

    JAX itself writes entries in place, without a lock, and never overwrites one. So another process that
    compiles the same program meanwhile may read half an entry, and a process that is killed while it writes
    leaves half an entry for good.
    """
    _lru_cache.LRUCache.put = _put_whole


_put_in_place = _lru_cache.LRUCache.put  # JAX's own, read before the function above replaces it


def _put_whole(self: Any, key: str, value: bytes) -> None:
    if self.eviction_enabled:  # `jax_compilation_cache_max_size` is set: JAX takes a lock of its own
        _put_in_place(self, key, value)
        return
    place = self.path / f"{key}-cache"
    if place.exists():
        return
    beside = self.path / f"{key}-{uuid.uuid4().hex}-part"
    try:
        beside.write_bytes(value)
        beside.replace(place)
    except BaseException:  # whatever interrupts the write, no partial file may stay
        beside.unlink(missing_ok=True)
        raise


def cache_settings(folder: str) -> dict[str, Any]:
    """Return the settings of JAX, by name, that make it cache all programs in `folder`, even small ones."""
    return {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }


def set_cache(settings: Mapping[str, Any]) -> None:
    """Change settings of JAX's compilation cache, and make JAX read these settings again.

    Without this function, JAX reads these settings only once, at the first compilation.

    Args:
        settings: the new values, by the name of the setting in `jax.config`.
    """
    for name, value in settings.items():
        jax.config.update(name, value)
    _compilation_cache.reset_cache()


def spare_gpus() -> bool:
    """Make JAX in this process allocate GPU memory only as needed, rather than most of it at the first use.

    If the user has set `XLA_PYTHON_CLIENT_PREALLOCATE` or `jax_pjrt_client_create_options`, nothing changes.
    This sets an option of this process and not an environment variable, because actors inherit the
    environment and should allocate most of the memory at their first use of JAX.

    Returns:
        False if this process allocates most of a GPU's memory all the same, because it has done so already or
        because the user's environment variable asks for it; otherwise True.
    """
    from jax._src import xla_bridge

    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"):
        return os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"].lower() in ("false", "0")
    options = _settings.jax_pjrt_client_create_options.value
    if xla_bridge.backends_are_initialized():
        is_spared = isinstance(options, dict) and options.get("preallocate") is False
        return is_spared or jax.default_backend() != "gpu"
    if not options:
        jax.config.update("jax_pjrt_client_create_options", {"preallocate": False})
    return True


def hides_frames() -> bool:
    """Return whether tracebacks are to leave out frames that do not help users.

    The result is False if the user has set JAX's own switch, `JAX_TRACEBACK_FILTERING=off`.
    """
    return getattr(jax.config, "jax_traceback_filtering", "auto") != "off"


def default_platform() -> str | None:
    """Return the first platform in `jax_platforms` (or `JAX_PLATFORMS`); None if JAX itself is to choose."""
    return (getattr(jax.config, "jax_platforms", None) or "").partition(",")[0] or None


# ---------------------------------------------------------------- several processes


def distributed_client() -> Any:
    """Return JAX's client of the key-value store that the processes of `jax.distributed.initialize` share.

    The result is None if that function has not been called.
    """
    return _distributed.global_state.client


def let_gloo_listen_on(address: str) -> None:
    """Make gloo, which runs JAX's CPU collectives, listen on `address` instead of the host name's address.

    This has to be called before JAX is first used.
    """
    _jax.make_gloo_tcp_collectives = functools.partial(_make_gloo, hostname=address)


_make_gloo = _jax.make_gloo_tcp_collectives  # JAX's own, read before the function above replaces it
