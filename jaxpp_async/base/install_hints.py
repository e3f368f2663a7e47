"""Name the command that installs a missing package, and the page of docs/ that explains an error message.

This module imports no package that could be missing. The pages are in the repository and are not installed,
so a user's own project has no copy of them.
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
"""The major versions of CUDA for which this package has pip extras, the preferred one first."""

SAME_VERSIONS = ("jax", "jaxlib")
"""The packages of which the controller and every actor need the same version, besides this package itself."""

_NAME, _GONE = "jaxpp-async", "gone: "

SYSTEM_UCX = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"
"""The environment variable that makes ucxx load the system's UCX, or, if there is none, the one from pip."""


def extra_of(platform: str, cuda: tuple[int, int] | None = None) -> str:
    """Choose this package's pip extra for a platform: `"cpu"`, `"cuda12"` or `"cuda13"`.

    Args:
        platform: `"cpu"` or `"cuda"`.
        cuda: the newest CUDA version (major, minor) that the host's driver supports; None if it is not known.
    """
    if platform == "cpu":
        return "cpu"
    fitting = [major for major in CUDA_MAJORS if cuda is None or major <= cuda[0]]
    return f"cuda{fitting[0] if fitting else CUDA_MAJORS[-1]}"


def pip_install(extra: str, python: str = "", source: str | None = None) -> str:
    """Return the shell command that installs this package with one of its extras, as text for users.

    Args:
        extra: the name of the extra, such as `"cpu"`.
        python: the interpreter that runs pip; empty if the command is to call `pip` itself.
        source: the pip requirement of this package, as `pip_source` returned it on the host where the
            command will run; None for the host of this process.
    """
    source = pip_source() if source is None else source
    gone, source = source.startswith(_GONE), source.removeprefix(_GONE)
    option, source = ("-e ", source.removeprefix("-e ")) if source.startswith("-e ") else ("", source)
    name, at, url = source.partition(" @ ") if source.startswith(f"{_NAME} @ ") else (source, "", "")
    command = f"pip install {option}{shlex.quote(f'{name}[{extra}]{at}{url}')}"
    missing = f"  (there is no source of this package at {source} any more: name the folder where it is now)"
    return f"{f'{shlex.quote(python)} -m ' if python else ''}{command}{missing * gone}"


def cuda_install() -> str:
    """Return the commands that install this package with JAX for CUDA on this host, as text for users: one
    command for each major version of CUDA.
    """
    preferred, other = (pip_install(f"cuda{major}") for major in CUDA_MAJORS)
    return f"{preferred}  (for a driver older than 580: {other})"


def pip_source() -> str:
    """Return the pip requirement that installs the same copy of this package again on this host.

    Returns:
        One of these, which `pip_install` accepts:

        - `PATH`: the folder or file from which the package was installed.
        - `-e PATH`: the folder of an editable installation, or of a clone that is used without being
          installed.
        - `gone: ` and one of the above: the folder or file does not exist any more.
        - `jaxpp-async @ URL`: a wheel or a repository on the network, at the installed commit.
        - `jaxpp-async`: pip installed the package by this name from an index. The name is not returned in
          other cases, since an index may have somebody else's package under it.
    """
    found = _installed_from()
    if found is not None and (known := _source_of(found)):
        return known
    folder = Path(__file__).resolve().parents[2]
    if (folder / "pyproject.toml").is_file():  # a clone on the path that is not installed
        return f"-e {folder}"
    return _NAME if found == {} else f"{_GONE}{folder}"


def _source_of(found: dict[str, Any]) -> str:
    """Return the pip requirement for the package that a `direct_url.json` file (PEP 610) names, in the form
    of `pip_source`. Return an empty text if the file names nothing that pip could install.

    Args:
        found: the parsed content of the file.
    """
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
    """Return the content of this package's `direct_url.json` file (PEP 610), which says from where pip
    installed it.

    Returns:
        The parsed content; `{}` if pip found the package by its name in an index; None if the package is not
        installed; `{"url": ""}` if the file is not valid.
    """
    try:
        found = json.loads(metadata.distribution(_NAME).read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        return None
    except ValueError:  # the file is not JSON
        return {"url": ""}
    return found if isinstance(found, dict) else {"url": ""}


def jax_cuda_majors() -> tuple[int, ...]:
    """Return the major versions of CUDA for which a JAX plugin is installed in this environment, the
    preferred one first. The tuple usually has one entry; without a plugin for GPUs it is empty.
    """
    return tuple(major for major in CUDA_MAJORS if util.find_spec(f"jax_cuda{major}_plugin") is not None)


def cuda_error(what: str) -> InstallError | None:
    """Return an error that says that JAX for CUDA is not installed in this environment; None if JAX for CUDA
    is installed.

    Args:
        what: the option that asked for CUDA, such as `"platform='cuda'"`.
    """
    if jax_cuda_majors():
        return None
    return InstallError(
        f"{what} needs JAX with CUDA, and the JAX here is without; install it with: {cuda_install()}"
    )


def page(name: str) -> str:
    """Return where a user finds a page of docs/: its path in the folder from which this package was
    installed, or its place in the repository if it is not in that folder.

    Args:
        name: the file name of the page, such as `restarts.md`.
    """
    path = Path(pip_source().removeprefix("-e "), "docs", name)
    return str(path) if path.is_absolute() and path.is_file() else f"docs/{name} in jaxpp-async's repository"
