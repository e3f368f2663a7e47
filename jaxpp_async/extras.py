"""extras: what is missing in, which extra of this package brings it out. Imports nothing that could be missing."""

from __future__ import annotations

import json
from importlib import metadata, util
from pathlib import Path
from urllib.parse import unquote

from jaxpp_async.errors import InstallError

CUDA_MAJORS = (13, 12)
"""For which there are extras; the preferred one first."""

SYSTEM_UCX = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"
"""Has ucxx load the UCX that the system finds, and pip's where it finds none."""


def extra_of(platform: str, cuda: tuple[int, int] | None = None) -> str:
    """The extra for a platform.

    Args:
        cuda: the newest CUDA that the driver runs; None: not known.
    """
    if platform == "cpu":
        return "cpu"
    fitting = [major for major in CUDA_MAJORS if cuda is None or major <= cuda[0]]
    return f"cuda{fitting[0] if fitting else CUDA_MAJORS[-1]}"


def pip_install(extra: str, python: str = "", source: str | None = None) -> str:
    """The command that installs it.

    Args:
        source: where the package comes from, as `source_here` has it on the host in question; None: on this one.
    """
    source = source_here() if source is None else source
    option, source = ("-e ", source.removeprefix("-e ")) if source.startswith("-e ") else ("", source)
    return f"{f'{python} -m ' if python else ''}pip install {option}'{source}[{extra}]'"


def cuda_install() -> str:
    """The commands that install what GPUs need here."""
    preferred, other = (pip_install(f"cuda{major}") for major in CUDA_MAJORS)
    return f"{preferred}  (for a driver older than 580: {other})"


def source_here() -> str:
    """What pip is to install this package from here: the folder that it came from, behind `-e ` if it is used there.

    Its name alone, where there is no such folder.
    """
    url, editable = _installed_from()
    if url.startswith("file:///"):
        return f"{'-e ' * editable}{unquote(url.removeprefix('file://'))}"
    folder = Path(__file__).resolve().parents[1]  # a clone that is only on the path, not installed
    return f"-e {folder}" if (folder / "pyproject.toml").is_file() else "jaxpp-async"


def _installed_from() -> tuple[str, bool]:
    """The URL that pip installed this package from, and whether editably."""
    try:
        text = metadata.distribution("jaxpp-async").read_text("direct_url.json")
        found = json.loads(text or "{}")
        return str(found.get("url", "")), bool(found.get("dir_info", {}).get("editable", False))
    except (metadata.PackageNotFoundError, ValueError, AttributeError):  # not installed, or by no pip
        return "", False


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
    return InstallError(f"{what} needs JAX with CUDA, and the JAX here is without; install it with: {cuda_install()}")
