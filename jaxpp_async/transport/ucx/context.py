"""Open UCX contexts with the settings that a network needs, after checks of what UCX takes without saying so.

UCX only says "Input/output error" where it lacks descriptors or shared memory, so both are checked before.
Where every port of `UCX_TCP_PORT_RANGE` is taken, UCX draws one after the other for ever, and where the range
is one port it prints lines of its own, so a free port is found before. A setting that the user has made is
never overridden. This is the only module that imports ucxx.
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

# Not set, after measuring: larger segments (UCX_POSIX_SEG_SIZE) make messages of 16 MiB a tenth faster, but
# then each small message that comes before its receive holds a larger one; and from 64 KiB on a full one has
# length 0 (16 bits). A copy from process to process (cma) is not to be had: UCX keeps it from endpoints with
# error handling.
_ENVIRONMENT = {
    # Error handling drops shared memory else, which is four times faster than TCP.
    "UCX_MM_ERROR_HANDLING": "y",
    "UCX_TLS": "^sysv",  # the user's whole group may map its segments; POSIX shared memory is the user's own
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    # A connect stops the event loop else until it is answered: 131 s where packets are lost. With 2 it gives
    # up after 7 s.
    "UCX_TCP_CONN_NB": "y",
    "UCX_TCP_SYN_CNT": "2",
}


CONFIG_FILE = "ucx.conf"

START_DESCRIPTORS: Final = 24
"""How many descriptors a UCX context and its worker open at once: 16 with shared memory alone, 2 more for
each network device."""


@cache
def _first_process() -> int:
    """Return the process in which UCX was started first: a process that was forked from it lacks UCX's
    threads."""
    return os.getpid()


class Context(NamedTuple):
    """A UCX context with one worker.

    Args:
        ucxx: the low-level module.
        ucp: the context.
        worker: its only worker.
    """

    ucxx: Any
    ucp: Any
    worker: Any


def open_context(network: Network | None) -> Context:
    """Open a context and its worker, which listens from now on.

    Each transport has its own, so that a process may have one that leaves the machine beside one that does
    not.

    Args:
        network: where it listens, unless the user says so in the environment; None: as UCX likes.

    Raises:
        InstallError: ucxx is not installed. TransferError: this process was forked.
        MeshError: no network device of that name here, no port left in the range, or less than UCX needs.
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
    """Choose the settings that a context gets beside the environment, under UCX's names without `UCX_`."""
    found: dict[str, str] = {}
    if network is not None and network.addresses is not None and DEVICES not in os.environ:
        is_users = os.environ.get("UCX_TLS", _ENVIRONMENT["UCX_TLS"]) != _ENVIRONMENT["UCX_TLS"]
        # A user who asks for TCP among the processes of one machine gets it there alone.
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
    """List transports and their devices.

    Args:
        text: as UCX prints it (`ucp_context_print_info`), with lines such as `resource 1  :  md 1  dev 1
            flags -- tcp/eth0`.
    """
    return re.findall(r"^#\s+resource\s+\d+\s*:.*\s([\w.-]+)/(\S+)\s*$", text, re.MULTILINE)


def check_takes_gpu_memory(found: Sequence[tuple[str, str]]) -> None:
    """Check that UCX knows GPU memory: it would take its addresses for the host's else, and end the process.

    Args:
        found: of `resources`.

    Raises:
        MeshError: it does not.
    """
    names = {name for name, _ in found}
    if not names or any(name.startswith("cuda") for name in names):
        return
    if given := os.environ.get("UCX_TLS"):
        remedy = f"UCX_TLS={given} leaves it out: add cuda"
    elif _wants_system_ucx():
        remedy = f"take a UCX that is built with CUDA, or pip's: unset {SYSTEM_UCX}"
    else:
        remedy = (
            "is it built with CUDA, and is the driver there (`python -m jaxpp_async doctor --platform cuda`)?"
        )
    raise MeshError(
        f"UCX on host {socket.gethostname()} cannot take GPU memory, it has no cuda_copy; {remedy}"
    )


def shares_memory() -> bool:
    """Whether `UCX_TLS` lets processes of one host share memory: a user who keeps UCX from it keeps us from
    it too."""
    return _names("sm", "shm", "mm", "posix")


def _names(*kinds: str) -> bool:
    """Whether `UCX_TLS` leaves UCX a transport of any of these names."""
    names = os.environ.get("UCX_TLS", _ENVIRONMENT["UCX_TLS"])
    named = {"all", *kinds} & set(names.removeprefix("^").split(","))
    return not named if names.startswith("^") else bool(named)


def describe_limits() -> str:
    """Describe this process's descriptors and shared memory, for errors whose cause UCX does not tell."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    folder, why = shared_memory_folder()
    return f"{num_descriptors()} of {most} descriptors in use; shared memory: {why or folder}"


def set_environment() -> None:
    """Set the variables that UCX reads when it is loaded, except those that the user has set."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def check_config_file() -> None:
    """Refuse to load UCX where the working directory has settings for it, which may name libraries to load.

    Raises:
        MeshError: so it is, and the user has not named this folder.
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
    if "ucxx" not in sys.modules:  # UCX reads it once, as it is loaded
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
"""UCX does without shared memory where the folder has less free space than this."""


def shared_memory_folder() -> tuple[str | None, str]:
    """Choose the folder in which UCX keeps the memory that processes of this host share.

    Returns:
        The folder: /dev/shm, else one where this user may have files that are deleted already; None: there is
        no fit one. And the reason why it is not /dev/shm; empty if it is.
    """
    why = _unfit(SHARED_MEMORY)
    if not why:
        return SHARED_MEMORY, ""
    others = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()]
    return next((folder for folder in others if folder and not _unfit(folder)), None), why


def _unfit(folder: str) -> str:
    """Say why a folder cannot hold shared memory; empty if it can."""
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
_MIN_PORTS_TRIED: Final = 2000  # before a range has none, some 20 ms; a small range several times
_MIN_ROUNDS: Final = 3


def with_free_port(make: Callable[[str | None], T], devices: str | None) -> T:
    """Call `make` with free ports of `UCX_TCP_PORT_RANGE` until UCX listens on one.

    Args:
        make: makes a worker that listens; takes a range of one port, or None: as the environment says.
        devices: on which UCX listens, as `UCX_NET_DEVICES` has them.

    Raises:
        MeshError: no port is free, or the variable has no range of ports.
    """
    given = os.environ.get(PORTS, "")
    ports = _read_range(given)
    if ports is None or devices == "":  # any port, or UCX's own error; or it listens nowhere
        return make(None)
    for port in _free_ports(ports, addresses_of_devices(devices)):
        try:
            return make(f"{port}-{port}")
        except Exception as error:
            # of ucxx, which is not imported here, so that its type is known by the name
            if type(error).__name__ != "UCXXBusyError":  # taken since: the next
                raise
    raise MeshError(
        f"ports= {given} ({PORTS}) has no free port left on host {socket.gethostname()}; each process there "
        "needs one, and one that was given back rests for a minute (TIME-WAIT): give a larger range, or one "
        "that no other program uses (`ss -tanp` there lists who does, and ports at rest)"
    )


def _read_range(given: str) -> range | None:
    """Read `"47000-47100"` or `"47000"` as UCX does: blanks in front of a number, anything behind it.

    Returns:
        The ports; None: any port (0), or a text that UCX cannot read either.

    Raises:
        MeshError: these cannot be TCP ports. UCX would cut the numbers off, or look for ever.
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

    Processes that start together begin at different ports. A port may still look taken for the moment in
    which another process binds it to see whether it is free: so a small range is gone through again, after
    other processes have run.

    Args:
        ports: the range.
        addresses: IPv4 addresses on which the port has to be free.
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
                # As UCX binds its own: without SO_REUSEADDR.
                sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)).bind((address, port))
        except OSError:
            return False
    return True
