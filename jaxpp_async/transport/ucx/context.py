"""Open UCX contexts with the settings for a given network, and check conditions first that UCX handles badly.

If descriptors or shared memory run out, UCX only reports "Input/output error", so this module checks both in
advance. If every port of `UCX_TCP_PORT_RANGE` is in use, UCX tries ports for ever, and if the range is a
single port, UCX prints messages of its own. This module therefore looks for a free port first. A setting that
the user has made is never overridden. This is the only module that imports ucxx.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

from jaxpp_async.base.descriptors import check_descriptors, num_descriptors
from jaxpp_async.base.install_hints import CUDA_MAJORS, SYSTEM_UCX, pip_install
from jaxpp_async.errors import InstallError, MeshError, TransferError
from jaxpp_async.transport.network import Network
from jaxpp_async.transport.ucx.net_devices import DEVICES, addresses_of_devices, check_devices, devices_with

_LOG = logging.getLogger("jaxpp_async")

# Larger segments of shared memory (UCX_POSIX_SEG_SIZE) were measured and are not set: they make messages of
# 16 MiB a tenth faster, but then each small message that comes before its receive occupies a larger segment,
# and from 64 KiB on a full segment has length 0 (16 bits). Copies from process to process (cma) cannot be
# used, because UCX does not allow them for endpoints with error handling.
_ENVIRONMENT = {
    # Otherwise error handling excludes shared memory, which is four times faster than TCP.
    "UCX_MM_ERROR_HANDLING": "y",
    "UCX_TLS": "^sysv",  # the user's group can map System V segments; POSIX ones belong to the user alone
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    # Otherwise a connect blocks the event loop until it is answered: 131 s if packets are lost. With two
    # retries it gives up after 7 s.
    "UCX_TCP_CONN_NB": "y",
    "UCX_TCP_SYN_CNT": "2",
}


CONFIG_FILE = "ucx.conf"

START_DESCRIPTORS: Final = 24
"""The number of file descriptors that a UCX context and its worker open together: 16 with shared memory
alone, and 2 more for each network device."""


@cache
def _first_process() -> int:
    """Return the id of the process that called this function first, which is the process that started UCX. A
    child process that was forked from that process cannot use UCX, because the child lacks UCX's threads."""
    return os.getpid()


class Context(NamedTuple):
    """A UCX context with one worker.

    Args:
        ucxx: the low-level module of ucxx.
        ucp: the context.
        worker: its only worker.
    """

    ucxx: Any
    ucp: Any
    worker: Any


def open_context(network: Network | None) -> Context:
    """Open a UCX context and its worker, which starts to listen.

    Each transport has its own context, so that one process may have both a transport that other machines can
    reach and one that they cannot.

    Args:
        network: the network on which to listen; None: UCX chooses the network. If the user has set
            `UCX_NET_DEVICES`, UCX listens on those devices instead.

    Raises:
        InstallError: ucxx is not installed.
        TransferError: this process was forked after UCX had started.
        MeshError: a network device that `UCX_NET_DEVICES` names does not exist, no port of the range is free,
            or UCX lacks descriptors or shared memory.
    """
    ucxx = _import_ucxx()
    if _first_process() != os.getpid():
        raise TransferError(
            "this process was forked after UCX started; start actors with spawn or exec instead"
        )
    check_devices(os.environ.get(DEVICES))
    check_descriptors(START_DESCRIPTORS, "the data plane (UCX)")
    settings = _settings(network)

    def make(port: str | None) -> Context:
        own = settings if port is None else {**settings, "TCP_PORT_RANGE": port}
        ucp = ucxx.UCXContext(own, feature_flags=(ucxx.Feature.TAG, ucxx.Feature.WAKEUP))
        worker = ucxx.UCXWorker(ucp, enable_delayed_submission=False, enable_python_future=False)
        worker.init_blocking_progress_mode()
        return Context(ucxx, ucp, worker)

    try:
        return with_free_port(make, settings.get("NET_DEVICES", os.environ.get(DEVICES)))
    except (ucxx.UCXError, OSError) as error:
        raise MeshError(
            f"UCX does not start on host {socket.gethostname()}: {error} ({describe_limits()})"
        ) from error


def _settings(network: Network | None) -> dict[str, str]:
    """Return the settings to pass to a UCX context in addition to the environment variables.

    Args:
        network: the network on which the context is to listen; see `open_context`.

    Returns:
        A dictionary. Its keys are UCX's names of the settings without the prefix `UCX_`, and its values are
        the settings' values as text.

    Raises:
        MeshError: all processes are on this machine and are to exchange data in shared memory, but no folder
            can be used for that memory.
    """
    found: dict[str, str] = {}
    if network is not None and network.addresses is not None and DEVICES not in os.environ:
        is_users = os.environ.get("UCX_TLS", _ENVIRONMENT["UCX_TLS"]) != _ENVIRONMENT["UCX_TLS"]
        # If the user asks for TCP among the processes of one machine, it uses the loopback interface only.
        addresses = network.addresses or (("127.0.0.1",) if is_users and _names("tcp") else ())
        devices = devices_with(addresses)
        if devices is None:
            _LOG.warning(
                "no network interface here has the address %s, by which the others reach this process: its "
                "data plane listens on all; name one with interface=",
                " or ".join(network.addresses),
            )
        else:
            found["NET_DEVICES"] = devices
    if FOLDER not in os.environ and MIN_SIZE not in os.environ and shares_memory():
        folder, why = shared_memory_folder()
        if folder is None and found.get("NET_DEVICES") == "":
            raise MeshError(
                "the processes of this mesh exchange data in shared memory, and there is none to be had: "
                f"{why}; give the container a larger one (--shm-size=1g), name a folder that has room "
                "(UCX_POSIX_DIR), or have them use TCP on this machine: interface='lo'"
            )
        if why:
            instead = f"uses files in {folder} instead" if folder else "uses the network instead"
            _LOG.warning("no shared memory for the data plane: %s; it %s", why, instead)
        if folder is not None and why:
            found["POSIX_DIR"] = folder
    return found


def resources(text: str) -> list[tuple[str, str]]:
    """Return the (transport, device) pairs that a UCX context can use.

    Args:
        text: the description of the context that UCX prints (`ucp_context_print_info`), with lines such as
            `resource 1  :  md 1  dev 1  flags -- tcp/eth0`.
    """
    return re.findall(r"^#\s+resource\s+\d+\s*:.*\s([\w.-]+)/(\S+)\s*$", text, re.MULTILINE)


def check_takes_gpu_memory(found: Sequence[tuple[str, str]]) -> None:
    """Check that a UCX context supports GPU memory. A UCX without this support would treat GPU addresses as
    host addresses and crash the process.

    Args:
        found: the (transport, device) pairs of the context, from `resources`.

    Raises:
        MeshError: the context does not support GPU memory.
    """
    names = {name for name, _ in found}
    if not names or any(name.startswith("cuda") for name in names):
        return
    if given := os.environ.get("UCX_TLS"):
        remedy = f"UCX_TLS={given} leaves it out: add cuda"
    elif _wants_system_ucx():
        remedy = f"take a UCX that is built with CUDA, or pip's: unset {SYSTEM_UCX}"
    else:
        remedy = "is it built with CUDA, and is the driver there (`jaxpp-async doctor --platform cuda`)?"
    raise MeshError(
        f"UCX on host {socket.gethostname()} cannot take GPU memory, it has no cuda_copy; {remedy}"
    )


def shares_memory() -> bool:
    """Return whether the environment variable `UCX_TLS` allows UCX to use shared memory among the processes
    of one host. If the user forbids that to UCX, this package does not share memory either."""
    return _names("sm", "shm", "mm", "posix")


def _names(*kinds: str) -> bool:
    """Return whether the environment variable `UCX_TLS` allows UCX to use at least one of the UCX transports
    named in `kinds`."""
    names = os.environ.get("UCX_TLS", _ENVIRONMENT["UCX_TLS"])
    named = {"all", *kinds} & set(names.removeprefix("^").split(","))
    return not named if names.startswith("^") else bool(named)


def describe_limits() -> str:
    """Describe how many file descriptors this process uses and where its shared memory is. Error messages
    contain this text if UCX does not report the cause of the error."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    folder, why = shared_memory_folder()
    return f"{num_descriptors()} of {most} descriptors in use; shared memory: {why or folder}"


def set_environment() -> None:
    """Set the environment variables that UCX reads when it is loaded, except those that the user has set."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def check_config_file() -> None:
    """Check that UCX will not read somebody else's settings file (`ucx.conf`) from the working directory when
    UCX is loaded. Such a file can make UCX load any library.

    Raises:
        MeshError: the working directory contains a settings file, and that directory is neither the user's
            home nor named by `UCX_CONFIG_DIR`.
    """
    named = [os.environ.get("UCX_CONFIG_DIR"), os.environ.get("HOME")]
    if os.path.lexists(CONFIG_FILE) and not any(
        folder and os.path.exists(folder) and os.path.samefile(folder, ".") for folder in named
    ):
        raise MeshError(
            f"the working directory {os.getcwd()} has a file {CONFIG_FILE}, which UCX would read, and which "
            "may have it load any library; remove it, start in another folder, or set UCX_CONFIG_DIR to this "
            "one if it is yours"
        )


def _import_ucxx() -> Any:
    set_environment()
    if "ucxx" not in sys.modules:  # UCX reads the file once, when it is loaded
        check_config_file()
    try:
        import ucxx._lib.libucxx as libucxx  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InstallError(
            f"transport 'ucx' needs the package ucxx, which does not import here ({error}); "
            f"{_import_remedy()}"
        ) from None
    return libucxx


def _wants_system_ucx() -> bool:
    return os.environ.get(SYSTEM_UCX, "false").lower() != "false"


def _import_remedy() -> str:
    if _wants_system_ucx():
        return f"it looks for the system's UCX first ({SYSTEM_UCX}): have it find a newer one, or unset that"
    extras = " or ".join(f"[cuda{n}]" for n in CUDA_MAJORS)
    return f"install it with: {pip_install('cpu')}  (with GPUs: {extras})"


# ---------------------------------------------------------------- shared memory

SHARED_MEMORY: Final = "/dev/shm"
FOLDER: Final = "UCX_POSIX_DIR"
MIN_SIZE: Final = "UCX_POSIX_SHM_MIN_SIZE"
MIN_FREE_BYTES: Final = 16 << 20
"""The free space in bytes that the folder for shared memory must have; with less, UCX does not use shared
memory."""


def shared_memory_folder() -> tuple[str | None, str]:
    """Choose the folder for the memory that UCX shares among the processes of this host.

    If /dev/shm cannot be used, the choice is another folder in which this user may make files (UCX deletes a
    file there as soon as the file is open).

    Returns:
        The folder, and the reason why the folder is not /dev/shm. The folder is None if no folder can be
        used. The reason is empty if the folder is /dev/shm.
    """
    why = _unfit(SHARED_MEMORY)
    if not why:
        return SHARED_MEMORY, ""
    others = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()]
    return next((folder for folder in others if folder and not _unfit(folder)), None), why


def _unfit(folder: str) -> str:
    """Return the reason why a folder cannot be used for shared memory; empty if it can be used."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    free_bytes = found.f_bsize * found.f_bavail
    if found.f_flag & os.ST_RDONLY:
        return f"{folder} is read-only"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} may not be written"
    if free_bytes < MIN_FREE_BYTES:
        return f"{folder} has {free_bytes >> 10:,} KiB left, and UCX wants {MIN_FREE_BYTES >> 20} MiB"
    return ""


# ---------------------------------------------------------------- ports

T = TypeVar("T")

PORTS: Final = "UCX_TCP_PORT_RANGE"

_LAST_PORT: Final = 65535
_MIN_PORTS_TRIED: Final = 2000  # some 20 ms, until a range counts as full; small ranges are repeated
_MIN_ROUNDS: Final = 3


def with_free_port(make: Callable[[str | None], T], devices: str | None) -> T:
    """Call `make` with the free ports of `UCX_TCP_PORT_RANGE`, one after another, until UCX listens on one of
    them. Return the result of that last call.

    Args:
        make: a function that makes a listening worker, given a range of one port, such as `"47000-47000"`, or
            None to let UCX choose the port as the environment variables say.
        devices: the devices on which UCX listens, as in the environment variable `UCX_NET_DEVICES`.

    Raises:
        MeshError: no port is free, or the variable does not contain a range of TCP ports.
    """
    given = os.environ.get(PORTS, "")
    ports = _read_range(given)
    if ports is None or devices == "":  # any port will do, UCX raises its own error, or UCX listens nowhere
        return make(None)
    for port in _free_ports(ports, addresses_of_devices(devices)):
        try:
            return make(f"{port}-{port}")
        except Exception as error:
            # An error of ucxx, which is not imported at this point, so that its type is known by name only.
            if type(error).__name__ != "UCXXBusyError":  # the port was taken since; try the next
                raise
    raise MeshError(
        f"ports= {given} ({PORTS}) has no free port left on host {socket.gethostname()}; each process there "
        "needs one, and one that was given back rests for a minute (TIME-WAIT): give a larger range, or one "
        "that no other program uses (`ss -tanp` there lists who does, and ports at rest)"
    )


def _read_range(given: str) -> range | None:
    """Parse a range of ports, `"47000-47100"` or `"47000"`, as UCX does. Blanks before a number are ignored,
    and so is any text after it.

    Returns:
        The ports; None if any port may be used (`"0"`), or if the text is not a range that UCX can parse.

    Raises:
        MeshError: the numbers cannot be TCP ports. UCX would truncate them, or search for ever.
    """
    first, dash, last = given.partition("-")
    numbers = [re.match(r"\s*\+?(\d+)", part, re.ASCII) for part in (first, last if dash else first)]
    begin, end = (int(number[1]) if number else -1 for number in numbers)
    if begin <= 0 or end < 0:
        return None
    if not begin <= end <= _LAST_PORT:
        raise MeshError(
            f"{PORTS}={given} (ports=) is no range of TCP ports: give the first and the last, up to 65535"
        )
    return range(begin, end + 1)


def _free_ports(ports: range, addresses: list[str]) -> Iterator[int]:
    """Yield ports of a range on which nobody listens now, going through the range several times.

    Processes that start together begin at different ports. A port may seem in use only because another
    process binds it for a moment to see whether it is free. A small range is therefore tried again, after
    other processes have run.

    Args:
        ports: the range.
        addresses: the IPv4 addresses on which the port has to be free.
    """
    begin = os.getpid() % len(ports)
    for _ in range(max(_MIN_ROUNDS, _MIN_PORTS_TRIED // len(ports))):
        for port in (*ports[begin:], *ports[:begin]):
            if _is_free(port, addresses):
                yield port
        os.sched_yield()


def _is_free(port: int, addresses: list[str]) -> bool:
    with contextlib.ExitStack() as sockets:
        try:
            for address in addresses:
                # Without SO_REUSEADDR, as UCX binds its own sockets.
                sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)).bind((address, port))
        except OSError:
            return False
    return True
