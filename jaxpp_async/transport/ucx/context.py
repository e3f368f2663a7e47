"""context: UCX with the settings that we need in, the process's one context out. The only importer of ucxx.

It never overrides a setting that the user has made, and never makes a second context.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from typing import Any

from jaxpp_async.errors import InstallError, MeshError, TransferError
from jaxpp_async.extras import CUDA_MAJORS, SYSTEM_UCX, pip_install
from jaxpp_async.transport.ucx.net_devices import DEVICES, check_devices

# Not set, after measuring: larger segments (UCX_POSIX_SEG_SIZE) make messages of 16 MiB a tenth faster, but then each
# small message that comes before its receive holds a larger one; and from 64 KiB on a full one has length 0 (16 bits).
# A copy from process to process (cma) is not to be had: UCX keeps it from endpoints with error handling.
_ENVIRONMENT = {
    "UCX_MM_ERROR_HANDLING": "y",  # else error handling drops shared memory, which is four times faster than TCP
    "UCX_TLS": "^sysv",  # the user's whole group may map its segments; POSIX shared memory is the user's own
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_TCP_CONN_NB": "y",  # else a connect stops the event loop until it is answered: 131 s where packets are lost
    "UCX_TCP_SYN_CNT": "2",  # and gives up after 7 s
}


CONFIG_FILE = "ucx.conf"


class ProcessContext:
    """The process's UCX context, made by the first transport and destroyed with the last."""

    def __init__(self) -> None:
        self._context: Any = None
        self._num_users = 0
        self._pid = 0

    def acquire(self) -> tuple[Any, Any]:
        """Returns ucxx's low-level module and the context; pair with `release`."""
        ucxx = _import_ucxx()
        if self._context is None:
            check_devices(os.environ.get(DEVICES))
            features = (ucxx.Feature.TAG, ucxx.Feature.WAKEUP)
            self._context, self._pid = ucxx.UCXContext({}, feature_flags=features), os.getpid()
        if self._pid != os.getpid():
            raise TransferError("this process was forked after UCX started; start actors with spawn or exec instead")
        self._num_users += 1
        return ucxx, self._context

    def release(self) -> None:
        self._num_users -= 1
        if self._num_users == 0:
            self._context = None


# The one piece of process-wide state: UCX wants a single context in a process (each registers memory and opens devices
# of its own), and transports of one process cannot know of each other.
process_context = ProcessContext()


def resources(text: str) -> list[tuple[str, str]]:
    """Transports and their devices, from UCX's own words (`ucp_context_print_info`).

    Lines such as `resource 1  :  md 1  dev 1  flags -- tcp/eth0`.
    """
    return re.findall(r"^#\s+resource\s+\d+\s*:.*\s([\w.-]+)/(\S+)\s*$", text, re.MULTILINE)


def check_takes_gpu_memory() -> None:
    """Raises:
    MeshError: UCX here does not know GPU memory. It would take its addresses for the host's, and end the process.
    """
    _, context = process_context.acquire()
    try:
        names = {name for name, _ in resources(context.info)}
    finally:
        process_context.release()
    if not names or any(name.startswith("cuda") for name in names):
        return
    if given := os.environ.get("UCX_TLS"):
        remedy = f"UCX_TLS={given} leaves it out: add cuda"
    elif _wants_system_ucx():
        remedy = f"take a UCX that is built with CUDA, or pip's: unset {SYSTEM_UCX}"
    else:
        remedy = "is it built with CUDA, and is the driver there (`python -m jaxpp_async doctor --platform cuda`)?"
    raise MeshError(f"UCX on host {socket.gethostname()} cannot take GPU memory, it has no cuda_copy; {remedy}")


def shares_memory() -> bool:
    """Whether `UCX_TLS` lets processes of one host share memory: a user who keeps UCX from it keeps us from it too."""
    names = os.environ.get("UCX_TLS", _ENVIRONMENT["UCX_TLS"])
    kinds = {"all", "sm", "shm", "mm", "posix"} & set(names.removeprefix("^").split(","))
    return not kinds if names.startswith("^") else bool(kinds)


def set_environment() -> None:
    """Set what UCX reads when it is loaded, except what the user has set."""
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
            f"the working directory {os.getcwd()} has a file {CONFIG_FILE}, which UCX would read, and which may have "
            "it load any library; remove it, start in another folder, or set UCX_CONFIG_DIR to this one if it is yours"
        )


def _import_ucxx() -> Any:
    set_environment()
    if "ucxx" not in sys.modules:  # UCX reads it once, as it is loaded
        check_config_file()
    try:
        import ucxx._lib.libucxx as libucxx  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InstallError(
            f"transport 'ucx' needs the package ucxx, which does not import here ({error}); {_import_remedy()}"
        ) from None
    return libucxx


def _wants_system_ucx() -> bool:
    return os.environ.get(SYSTEM_UCX, "false").lower() != "false"


def _import_remedy() -> str:
    if _wants_system_ucx():
        return f"it looks for the system's UCX first ({SYSTEM_UCX}): have it find a newer one, or unset that"
    return f"install it with: {pip_install('cpu')}  (with GPUs: {' or '.join(f'[cuda{n}]' for n in CUDA_MAJORS)})"
