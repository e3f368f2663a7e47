"""extras: what is missing in, which extra of this package brings it out. Imports nothing that could be missing."""

from __future__ import annotations

import json
from importlib import metadata, util
from urllib.parse import unquote

from jaxpp_async.errors import InstallError

CUDA_MAJORS = (13, 12)
"""For which there are extras; the preferred one first."""


def extra_of(platform: str, cuda: tuple[int, int] | None = None) -> str:
    """The extra for a platform.

    Args:
        cuda: the newest CUDA that the driver runs; None: not known.
    """
    if platform == "cpu":
        return "cpu"
    fitting = [major for major in CUDA_MAJORS if cuda is None or major <= cuda[0]]
    return f"cuda{fitting[0] if fitting else CUDA_MAJORS[-1]}"


def pip_install(extra: str, python: str = "", source: str = "jaxpp-async") -> str:
    """The command that installs it.

    Args:
        source: where the package comes from, as pip takes it.
    """
    return f"{f'{python} -m ' if python else ''}pip install '{source}[{extra}]'"


def source_here() -> str:
    """The folder that the package was installed from here; its name alone, where that was none: no index has it."""
    try:
        text = metadata.distribution("jaxpp-async").read_text("direct_url.json")
        url: str = json.loads(text or "{}").get("url", "")
    except (metadata.PackageNotFoundError, ValueError, AttributeError):  # not installed, or by no pip
        return "jaxpp-async"
    return unquote(url.removeprefix("file://")) if url.startswith("file:///") else "jaxpp-async"


def jax_cuda_majors() -> tuple[int, ...]:
    """The CUDAs for which JAX has a plugin here, the preferred one first; usually one, and none without GPUs."""
    return tuple(major for major in CUDA_MAJORS if util.find_spec(f"jax_cuda{major}_plugin") is not None)


def cuda_error(what: str) -> InstallError | None:
    """Why there is no JAX for CUDA here, if it was never installed; None if it was.

    Args:
        what: asked for it, such as `"platform='cuda'"`.
    """
    if jax_cuda_majors():
        return None
    preferred, other = (pip_install(f"cuda{major}", source=source_here()) for major in CUDA_MAJORS)
    return InstallError(
        f"{what} needs JAX with CUDA, and the JAX here is without; install it with: {preferred}  "
        f"(for a driver older than 580: {other})"
    )
