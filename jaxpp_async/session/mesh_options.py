"""Check the options that a user passes to `RemoteMesh`, and convert them for the controller and launcher.

The functions of this module start nothing.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
from jax.sharding import AbstractMesh

from jaxpp_async.base.gpu_inventory import host_gpus
from jaxpp_async.base.install_hints import cuda_error, jax_cuda_majors
from jaxpp_async.base.printable import shown_value
from jaxpp_async.compiler.export import Target
from jaxpp_async.controller.options import ActorConfig
from jaxpp_async.errors import MeshError, ShardingError
from jaxpp_async.jax_bridge import jax_config
from jaxpp_async.jax_bridge.tracebacks import HiddenFrames, deliberate
from jaxpp_async.launch.choose import choose_launcher
from jaxpp_async.launch.options import LaunchOptions
from jaxpp_async.launch.remote import RemoteLauncher
from jaxpp_async.launch.run_module import script_folder
from jaxpp_async.markers.logical_axes import AXIS_TYPES
from jaxpp_async.program.work import DeviceModel
from jaxpp_async.transport.registry import kind_of

_LOG = logging.getLogger("jaxpp_async")

P = ParamSpec("P")
R = TypeVar("R")


def check_count(name: str, value: Any, *, least: int) -> int:
    """Check that an option's value is a whole number of at least `least`, and return it.

    Args:
        name: the option's name, for the error message.
        value: the value that the user gave.
        least: the smallest number allowed.

    Raises:
        MeshError: the value is something else.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise MeshError(f"{name} is {value!r}; give a whole number of at least {least}")
    return value


def check_seconds(name: str, value: Any, *, least: float = 0.0, most: float = math.inf) -> float:
    """Check that an option's value is a time in seconds, and return it as a float.

    Args:
        name: the option's name, for the error message.
        value: the value that the user gave.
        least: the shortest time allowed.
        most: the longest time allowed.

    Raises:
        MeshError: the value is not a positive number, or not between `least` and `most`.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise MeshError(f"{name} is {value!r}; give a positive number of seconds")
    if not least <= value <= most:
        raise MeshError(f"{name} is {value!r}; give from {least:g} to {most:g} seconds")
    return float(value)


def check_device_model(device_model: Any, platform: str) -> DeviceModel | None:
    """Check the option `device_model`, and return it.

    Args:
        device_model: the user's cost model, or None.
        platform: the actors' platform, `"cpu"` or `"cuda"`.

    Raises:
        MeshError: the option is no cost model, or the actors run on GPUs.
    """
    if device_model is None:
        return None
    if isinstance(device_model, type) or not callable(getattr(device_model, "task_s", None)):
        raise MeshError(
            f"device_model is {device_model!r}, which has no method task_s(work); give an object whose "
            "task_s returns the seconds of a task, such as a cost model"
        )
    if platform != "cpu":
        raise MeshError(
            f"device_model makes tasks last as long as a model says, but platform is {platform!r}, whose "
            "devices have a speed of their own; give platform='cpu', or leave device_model= out"
        )
    return device_model


def check_loggers(loggers: Any) -> tuple[Any, ...]:
    """Check the option `loggers`, and return it as a tuple.

    Args:
        loggers: a sequence of objects with a method `log(step, values)`.

    Raises:
        MeshError: the option is no list or tuple, or one of its entries cannot be called so.
    """
    if not isinstance(loggers, list | tuple):
        advice = "put it into a list" if callable(getattr(loggers, "log", None)) else "give a list of loggers"
        raise MeshError(f"loggers is {shown_value(loggers)}; {advice}")
    for logger in loggers:
        log = getattr(logger, "log", None)
        if isinstance(logger, type) or not callable(log):
            raise MeshError(
                f"loggers has {shown_value(logger)}; give objects with a method log(step, values)"
            )
        if isinstance(logger, logging.Logger | logging.LoggerAdapter):
            raise MeshError(
                f"loggers has {shown_value(logger)}, whose method `log` takes a level and a text; give an "
                "object whose log(step, values) calls it"
            )
        try:
            inspect.signature(log).bind(0, {})
        except ValueError:  # Python knows no signature, as of some builtins
            continue
        except TypeError as error:
            raise MeshError(
                f"loggers has {shown_value(logger)}, whose `log` cannot be called as log(step, values): "
                f"{error}"
            ) from None
    return tuple(loggers)


def check_page(page: Any) -> int | None:
    """Check the option `page`, and return the port of the live page: 0 for any, None without a page.

    Raises:
        MeshError: the option is neither a bool nor the number of a port.
    """
    if page is None or page is False:
        return None
    if page is True:
        return 0
    if not isinstance(page, int) or not 1 <= page <= 65535:
        raise MeshError(
            f"page is {shown_value(page)}; give True for any free port, or a port from 1 to 65535"
        )
    return page


def only_known(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate `fn` so that an unknown keyword argument raises an error that suggests a similar known one.

    Raises:
        TypeError: the decorated function was called with an unknown keyword argument.
    """
    known = [name for name in inspect.signature(fn).parameters if name != "self"]
    name = fn.__qualname__.removesuffix(".__init__")

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with HiddenFrames():
            for option in kwargs:
                if option not in known:
                    near = difflib.get_close_matches(option, known, 1, 0.5)
                    what = f"did you mean {near[0]}=?" if near else f"it has {', '.join(known)}"
                    raise deliberate(TypeError(f"{name} has no option {option}=; {what}"))
            return fn(*args, **kwargs)

    return call


def check_actor_count(num_actors: Any) -> int:
    """Check the option `num_actors`, an int or a tuple of one int, and return the number of actors."""
    count = num_actors[0] if isinstance(num_actors, tuple) and len(num_actors) == 1 else num_actors
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise MeshError(f"num_actors is an int of at least 1 or a tuple of one such int; got {num_actors!r}")
    return count


def check_axes(spmd_mesh: Any) -> dict[str, int]:
    """Check the option `spmd_mesh`, and return the size of each axis of an actor's device mesh, by name.

    Args:
        spmd_mesh: a mapping of axis name to size, or a sequence of at most two sizes: the first for the axis
            `"data"`, the second for the axis `"model"`.
    """
    names = ("data", "model")
    if not isinstance(spmd_mesh, Mapping | tuple | list):
        raise MeshError(
            f"spmd_mesh is {spmd_mesh!r}; it is a mapping of axis name to size, or a tuple of sizes"
        )
    if not isinstance(spmd_mesh, Mapping) and len(spmd_mesh) > len(names):
        raise MeshError(
            f"spmd_mesh {spmd_mesh} has {len(spmd_mesh)} sizes without names; pass a mapping name to size"
        )
    found: dict[str, int] = dict(
        spmd_mesh if isinstance(spmd_mesh, Mapping) else zip(names, spmd_mesh, strict=False)
    )
    for name, size in found.items():
        if not isinstance(name, str) or not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise MeshError(f"spmd_mesh has {name!r}: {size!r}; an axis is a name and a size of at least 1")
    return found


def check_axis_types(given: Any, mesh_axes: Mapping[str, int]) -> tuple[str, ...]:
    """Check the option `axis_types`, and return the type of each mesh axis: `"auto"` or `"explicit"`.

    Args:
        given: the option: a mapping of axis name to type, or a sequence of types in the order of `mesh_axes`.
            Axes for which no type is given are `"auto"`.
        mesh_axes: the mesh axes, a mapping of axis name to size.
    """
    by_name = dict(given) if isinstance(given, Mapping) else dict(zip(mesh_axes, given, strict=False))
    for name, kind in by_name.items():
        if name not in mesh_axes:
            raise MeshError(f"axis_types names the axis {name!r}, but spmd_mesh has {sorted(mesh_axes)}")
        if kind not in AXIS_TYPES:
            raise MeshError(f"axis_types[{name!r}] is {kind!r}; it is 'auto' or 'explicit'")
    return tuple(by_name.get(name, "auto") for name in mesh_axes)


def check_axis_rules(rules: Mapping[str, Any], mesh_axes: Mapping[str, int]) -> dict[str, Any]:
    """Check the option `axis_rules`, which maps logical axis names to mesh axes, and return a copy of it.

    Raises:
        ShardingError: a rule names an axis that the mesh does not have, or is something other than an axis, a
            tuple of axes, or None.
    """
    for name, entry in rules.items():
        if not (entry is None or isinstance(entry, str | tuple | list)):
            raise ShardingError(
                f"axis_rules[{name!r}] is {entry!r}; it is a mesh axis, several in a tuple, or None"
            )
        for axis in (entry,) if isinstance(entry, str) else entry or ():
            if axis not in mesh_axes:
                raise ShardingError(
                    f"axis_rules[{name!r}] names the axis {axis!r}, but spmd_mesh has "
                    f"{sorted(mesh_axes) or 'no axes'}; give spmd_mesh that axis, or map {name!r} to another "
                    "or None"
                )
    return dict(rules)


def make_launcher(
    launcher: Any, num_actors: int = 1, processes_per_actor: int | None = None, **options: Any
) -> tuple[Any, bool, int]:
    """Make the launcher, which starts the actors' processes, from a mesh's options.

    Args:
        launcher: the user's choice of launcher.
        num_actors: number of actors.
        processes_per_actor: the number of processes that the user asked for; None: as few as the hosts allow.
        options: the other options of `LaunchOptions`, and `spmd_mesh`.

    Returns:
        The launcher; whether its actors live in this process; and the number of processes per actor.
    """
    sizes = options.pop("spmd_mesh", {}).values()
    if processes_per_actor is not None:
        check_count("processes_per_actor", processes_per_actor, least=1)
    options |= {"processes_per_actor": processes_per_actor, "num_devices": math.prod(sizes)}
    made, each = choose_launcher(LaunchOptions(launcher=launcher, **options), num_actors)
    return made, not isinstance(made, RemoteLauncher) and made.listen_host is None, each


def choose_transport(
    given: str | None, launcher: Any, inline: bool, *, platform: str, num_actors: int
) -> str:
    """Choose the transport (the means by which actors send arrays to each other), and return its name.

    Args:
        given: the transport that the user asked for; None: the launcher's preferred one.
        launcher: the launcher of the actors.
        inline: whether the actors live in this process.
        platform: the actors' platform, `"cpu"` or `"cuda"`.
        num_actors: number of actors, for the error message.

    Raises:
        MeshError: the launcher's actors cannot use the transport, or lack the GPUs that it needs.
    """
    allowed = tuple(launcher.transports)
    chosen = given or allowed[0]
    if chosen not in allowed:
        where = "inside one process" if inline else "between processes"
        names = " or ".join(map(repr, allowed))
        raise MeshError(f"transport {chosen!r} does not work {where}; leave it out or use {names}")
    if kind_of(chosen).ordered and not inline and platform != "cuda":
        actors = f"actors 0 to {num_actors - 1}" if num_actors > 1 else "actor 0"
        raise MeshError(
            f"transport {chosen!r} moves GPU memory, and {actors} have none: their platform is {platform!r}; "
            "pass platform='cuda' where there are GPUs, or leave transport= out for UCX, which moves either"
        )
    return chosen


def choose_platform(given: str | None) -> str:
    """Return the actors' platform, `"cpu"` or `"cuda"`: the one that the user asked for, or else a default.

    The default is the platform that `jax_platforms` (or `JAX_PLATFORMS`) sets for this process. If none is
    set, the default is `"cuda"` if this machine has GPUs and JAX is installed for them, and `"cpu"`
    otherwise. The actors' hosts are not examined. Therefore, if the controller runs on a machine without
    GPUs, a user who wants the actors to use GPUs has to name the platform (see `refuse_idle_devices`). This
    function does not initialize JAX.
    """
    if given not in (None, "cpu", "cuda"):
        raise MeshError(f"platform is {given!r}; it is 'cpu' or, for GPUs, 'cuda'")
    if given is not None:
        return given
    preferred = jax_config.default_platform()
    if preferred is not None:
        return "cuda" if preferred in ("cuda", "gpu") else "cpu"
    return "cuda" if jax_cuda_majors() and host_gpus(os.environ) else "cpu"


def refuse_idle_devices(given: str | None, chosen: str, launcher: Any, devices: Any) -> None:
    """Raise an error if the user named GPUs with `devices=`, but the actors would run on CPUs.

    Args:
        given: the platform that the user asked for, or None. If the user gave one, nothing is checked.
        chosen: the platform that was chosen.
        launcher: the launcher, whose hosts may have `devices=` of their own.
        devices: the option `devices=` of the mesh.

    Raises:
        MeshError: GPUs are named, and the actors would run on CPUs.
    """
    if given is not None or chosen != "cpu":
        return
    hosts = launcher.hosts if isinstance(launcher, RemoteLauncher) else ()
    named = ["devices="] if devices is not None else []
    named += [f"devices= of host {host}" for host in hosts if launcher.devices_on(host) is not None]
    if named:
        raise MeshError(
            f"{named[0]} names GPUs, and platform= was not given: this process runs JAX on CPUs, and so "
            "would the actors; give platform='cuda', or platform='cpu' if that is what you mean"
        )


def spare_gpus(platform: str, *, inline: bool) -> None:
    """Make JAX in this process leave GPU memory to the actors on this machine.

    If JAX has taken the memory already, this only logs a warning. Nothing is done for actors on CPUs, or for
    inline actors, which share this process's JAX.

    Args:
        platform: the actors' platform, `"cpu"` or `"cuda"`.
        inline: whether the actors live in this process.
    """
    if platform == "cuda" and not inline and not jax_config.spare_gpus():
        _LOG.warning(
            "JAX in this process has taken most of a GPU's memory already; actors on the same GPU may find "
            "too little: make the mesh before JAX's first use, or set XLA_PYTHON_CLIENT_PREALLOCATE=false "
            "for this process"
        )


async def prepare(launcher: Any, config: ActorConfig, *, same_python: bool) -> None:
    """If the actors run on GPUs, check that JAX can use GPUs; if the launcher is remote, prepare it.

    Call this before processes start.

    Args:
        launcher: the launcher of the actors.
        config: the configuration of the actors.
        same_python: whether the actors run this process's interpreter on this machine. If so, the actors have
            this process's packages, and these are checked; otherwise no packages are checked.

    Raises:
        InstallError: the actors run on GPUs, and this process's packages lack JAX's support for GPUs.
        MeshError: the launcher cannot be prepared; see `RemoteLauncher.prepare`.
    """
    same_packages = same_python and "PYTHONPATH" not in config.env
    if same_packages and config.platform == "cuda" and (missing := cuda_error("platform='cuda'")) is not None:
        raise missing
    if isinstance(launcher, RemoteLauncher):
        await launcher.prepare()


def make_actor_config(
    *,
    spmd_mesh: Mapping[str, int],
    axis_types: Sequence[str],
    platform: str,
    setup: str | None,
    env: Mapping[str, str],
    cache_dir: str | None,
    transport: str,
    inline: bool,
    processes_per_actor: int = 1,
) -> ActorConfig:
    """Check a mesh's options for its actors, and return the configuration that every actor gets.

    The parameters are those of `RemoteMesh`, as checked by the other functions of this module; `inline` says
    whether the actors live in this process.

    Raises:
        MeshError: `setup` does not name a function, `env` contains a name or value that is not a string,
            `env` contains `JAX_PLATFORMS`, which the mesh sets, or this process has too few devices for
            inline actors.
    """
    if setup is not None and not all(setup.partition(":")):
        raise MeshError(f"setup is {setup!r}; name a function as 'module:function'")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise MeshError(f"env has {name!r}: {value!r}; environment variables are strings")
    if "JAX_PLATFORMS" in env:
        raise MeshError(
            f"env has JAX_PLATFORMS={env['JAX_PLATFORMS']!r}, which the mesh sets; give platform='cpu' or "
            "'cuda'"
        )
    if inline:
        _check_local_devices(spmd_mesh, platform)
    return ActorConfig(
        spmd_mesh=tuple(spmd_mesh.items()),
        axis_types=tuple(axis_types),
        platform=platform,
        jax_config={} if inline else jax_config.copied_config(),
        cache_dir=cache_dir,
        setup=setup,
        setup_folder=None if setup is None or inline else script_folder(),
        transport=transport,
        env=dict(env),
        defaults={} if inline else dict(kind_of(transport).environment or {}),
        processes_per_actor=processes_per_actor,
    )


def _check_local_devices(spmd_mesh: Mapping[str, int], platform: str) -> None:
    needed = math.prod(spmd_mesh.values())
    try:
        present = jax.local_device_count(platform)
    except RuntimeError as error:
        raise MeshError(
            f"JAX in this process, which inline actors share, has no {platform} devices: {error}"
        ) from None
    if needed > present:
        raise MeshError(
            f"spmd_mesh {dict(spmd_mesh)} needs {needed} devices, but this process has {present}; inline "
            f"actors share them: set `jax.config.update('jax_num_cpu_devices', {needed})` before JAX is "
            "first used, or use launcher='local'"
        )


def make_target(
    spmd_mesh: Mapping[str, int], kinds: Sequence[str], rules: Mapping[str, Any], platform: str
) -> Target:
    """Return the description of one actor's devices, for which the compiler lowers executables.

    Args:
        spmd_mesh: a mapping of axis name to size. If empty, the actor has one device, and needs no shardings.
        kinds: the type of each axis, `"auto"` or `"explicit"`.
        rules: a mapping of logical axis name to mesh axes.
        platform: `"cpu"` or `"cuda"`.
    """
    mesh = None
    if spmd_mesh:
        mesh = AbstractMesh(
            tuple(spmd_mesh.values()), tuple(spmd_mesh), axis_types=tuple(AXIS_TYPES[k] for k in kinds)
        )
    return Target(mesh, platform, dict(rules))
