"""Choose the folder of JAX's compilation cache, and switch the cache on temporarily in the user's process.

Anyone who can write to a cache can run code in every process that reads it. So the default folder must not be
writable by other users, while a folder that the user has named may be shared.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.monitoring

from jaxpp_async.base.private_folder import NotPrivateError, make_private_folder
from jaxpp_async.errors import MeshError
from jaxpp_async.jax_bridge import jax_config

DEFAULT = "default"
"""The value of the option `compilation_cache` that selects the folder that the environment variable
`JAX_COMPILATION_CACHE_DIR` names, or `default_folder` if the variable is not set."""


def default_folder() -> str:
    """Return the default folder of the compilation cache, which is in the user's cache folder.

    Each host has a folder of its own, because a home folder may be shared by hosts with different CPU types.
    """
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.abspath(os.path.join(root, "jaxpp_async", socket.gethostname(), f"jax-{jax.__version__}"))


def make_cache(given: str) -> str:
    """Return the folder of the compilation cache, and make it if it does not exist.

    Args:
        given: a folder, or `DEFAULT`. `DEFAULT` means the folder in the variable `JAX_COMPILATION_CACHE_DIR`
            or, if the variable is not set, `default_folder()`.

    Raises:
        MeshError: the folder cannot be made, or it is `default_folder()` and another user can write to it.
    """
    named = os.environ.get("JAX_COMPILATION_CACHE_DIR") if given == DEFAULT else given
    folder = named or default_folder()
    try:
        if not named:
            make_private_folder(folder)
        elif "://" not in named:  # else the folder is in a bucket, where JAX finds it
            os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise MeshError(
            f"compilation_cache={folder!r}: host {socket.gethostname()} has no such folder, and it cannot be "
            f"made ({error.strerror}); give one that actors may write, or None"
        ) from None
    except NotPrivateError as error:
        raise MeshError(
            f"the compilation cache {folder} on host {socket.gethostname()} may hold code of others, which "
            f"actors would run: {error}. Or give compilation_cache= a folder: one that you name may be shared"
        ) from None
    return folder


class SharedCache:
    """A compilation cache that JAX uses in this process only while at least one `use` context is open.

    When the last context ends, JAX gets its former settings back. If contexts with several folders are open
    at the same time, JAX uses the folder of the first.
    """

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._given: dict[str, Any] = {}
        self._before: dict[str, Any] = {}

    @property
    def is_users_own(self) -> bool:
        """True if JAX has a compilation cache that the user, and not this object, has set up."""
        return not self._users and bool(jax.config.jax_compilation_cache_dir)

    @contextmanager
    def use(self, folder: str) -> Iterator[None]:
        """Return a context in which JAX stores the programs that it compiles in a cache in `folder`.

        If another context is open already, JAX uses the folder of that context instead.
        """
        with self._lock:
            if not self._users:
                self._given = jax_config.cache_settings(folder)
                self._before = {name: getattr(jax.config, name) for name in self._given}
                jax_config.set_cache(self._given)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    # A setting that the user has changed meanwhile keeps the user's value.
                    ours = [name for name in self._given if getattr(jax.config, name) == self._given[name]]
                    jax_config.set_cache({name: self._before[name] for name in ours})
                    self._given, self._before = {}, {}


_listening = threading.Lock()
_hits = threading.local()


@contextmanager
def cache_hits() -> Iterator[list[str]]:
    """Return a context that finds out whether JAX compiles or takes executables from its compilation cache.

    Yields:
        A list, to which an entry is added for each executable that this thread finds in the cache.
    """
    if _listening.acquire(blocking=False):  # once, and for good: JAX has no way to remove one listener
        jax.monitoring.register_event_listener(_note_hit)
    before, found = getattr(_hits, "found", None), list[str]()
    _hits.found = found
    try:
        yield found
    finally:
        _hits.found = before


def _note_hit(event: str, **_: Any) -> None:
    found = getattr(_hits, "found", None)
    if found is not None and event == "/jax/compilation_cache/cache_hits":
        found.append(event)


SHARED_CACHE = SharedCache()
"""The only `SharedCache` of this process, since JAX has one set of cache settings per process."""
