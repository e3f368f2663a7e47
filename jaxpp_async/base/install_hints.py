"""extras: what is missing in, which extra of this package brings it out. Imports nothing that could be missing.

pages: where a page of docs/ is to be read, for messages that name one. In: its name. Out: its path, or whose it is.

The pages are in the repository and are not installed, so a project of one's own has none beside it. Reads no page.
"""

from __future__ import annotations

import json
import shlex
from importlib import metadata, util
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from jaxpp_async.errors import InstallError

CUDA_MAJORS = (13, 12)
"""For which there are extras; the preferred one first."""

_NAME, _GONE = "jaxpp-async", "gone: "

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
    gone, source = source.startswith(_GONE), source.removeprefix(_GONE)
    option, source = ("-e ", source.removeprefix("-e ")) if source.startswith("-e ") else ("", source)
    name, at, url = source.partition(" @ ") if source.startswith(f"{_NAME} @ ") else (source, "", "")
    command = f"pip install {option}{shlex.quote(f'{name}[{extra}]{at}{url}')}"
    missing = f"  (there is no source of this package at {source} any more: name the folder where it is now)"
    return f"{f'{shlex.quote(python)} -m ' if python else ''}{command}{missing * gone}"


def cuda_install() -> str:
    """The commands that install what GPUs need here."""
    preferred, other = (pip_install(f"cuda{major}") for major in CUDA_MAJORS)
    return f"{preferred}  (for a driver older than 580: {other})"


def source_here() -> str:
    """What pip is to install this package from here, as `pip_install` takes it.

    Returns:
        The folder or file that it came from, behind `-e ` where it is used there; before it `gone: ` where it is there
        no more. `jaxpp-async @ URL` for a wheel or a repository of the network, at the commit that is here. The name
        alone where pip had it by name, from an index: elsewhere whoever takes that name would be installed.
    """
    found = _installed_from()
    if found is not None and (known := _source_of(found)):
        return known
    folder = Path(__file__).resolve().parents[2]
    if (folder / "pyproject.toml").is_file():  # a clone that is only on the path, not installed
        return f"-e {folder}"
    return _NAME if found == {} else f"{_GONE}{folder}"


def _source_of(found: dict[str, Any]) -> str:
    """What a `direct_url.json` (PEP 610) names; nothing if it names nothing that pip could be given."""
    url = found.get("url")
    if not isinstance(url, str) or not url:
        return ""
    parts, vcs = urlsplit(url), _part(found, "vcs_info")
    if vcs:
        inside = found.get("subdirectory")
        at = f"@{vcs['commit_id']}" if "commit_id" in vcs else ""
        return f"{_NAME} @ {vcs.get('vcs', 'git')}+{url}{at}{f'#subdirectory={inside}' if inside else ''}"
    if parts.scheme != "file":
        return f"{_NAME} @ {url}"
    if parts.netloc not in ("", "localhost"):
        return ""
    path = unquote(parts.path)
    editable = _part(found, "dir_info").get("editable") is True
    return f"{'' if Path(path).exists() else _GONE}{'-e ' * editable}{path}"


def _part(found: dict[str, Any], key: str) -> dict[str, Any]:
    value = found.get(key)
    return value if isinstance(value, dict) else {}


def _installed_from() -> dict[str, Any] | None:
    """Where pip says that it got this package; `{}`: by its name, from an index. None: it was not installed."""
    try:
        found = json.loads(metadata.distribution(_NAME).read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        return None
    except ValueError:  # nobody's JSON
        return {"url": ""}
    return found if isinstance(found, dict) else {"url": ""}


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
    return InstallError(
        f"{what} needs JAX with CUDA, and the JAX here is without; install it with: {cuda_install()}"
    )


# ---------------------------------------------------------------- pages


def page(name: str) -> str:
    """Its path in the folder that this package came from; else its place in the repository.

    Args:
        name: as `restarts.md`.
    """
    path = Path(source_here().removeprefix("-e "), "docs", name)
    return str(path) if path.is_absolute() and path.is_file() else f"docs/{name} in jaxpp-async's repository"
