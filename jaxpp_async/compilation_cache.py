"""compilation_cache: where JAX's compilation cache lies. Whoever can write it runs code in every process that reads it:
the folder that nobody has named is its user's alone, and one that the user has named may be shared.
"""

from __future__ import annotations

import os
import socket

import jax

from jaxpp_async.errors import MeshError
from jaxpp_async.private_folder import NotPrivateError, make_private_folder

DEFAULT = "default"
"""Instead of a folder: whatever `JAX_COMPILATION_CACHE_DIR` names, else `default_folder`."""


def default_folder() -> str:
    """The folder of this host in the user's cache folder: a home shared by several hosts would mix CPU types."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.abspath(os.path.join(root, "jaxpp_async", socket.gethostname(), f"jax-{jax.__version__}"))


def make_cache(given: str) -> str:
    """The folder of the cache, which is made where it is missing.

    Args:
        given: a folder, or `DEFAULT`.

    Raises:
        MeshError: it cannot be made; or nobody has named it, and somebody else can write it.
    """
    named = os.environ.get("JAX_COMPILATION_CACHE_DIR") if given == DEFAULT else given
    folder = named or default_folder()
    try:
        if not named:
            make_private_folder(folder)
        elif "://" not in named:  # else JAX finds it in a bucket
            os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise MeshError(
            f"compilation_cache={folder!r}: host {socket.gethostname()} has no such folder, and it cannot be made "
            f"({error.strerror}); give one that actors may write, or None"
        ) from None
    except NotPrivateError as error:
        raise MeshError(
            f"the compilation cache {folder} on host {socket.gethostname()} may hold code of others, which actors "
            f"would run: {error}. Or give compilation_cache= a folder: one that you name may be shared"
        ) from None
    return folder
