"""Direct tests of how a missing package is installed, as errors tell it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jaxpp_async as jpp
from jaxpp_async.base import install_hints
from jaxpp_async.base.install_hints import cuda_error, extra_of, pip_install
from jaxpp_async.errors import InstallError

ROOT = Path(jpp.__file__).parents[1]


@pytest.mark.parametrize(
    ("platform", "cuda", "extra"),
    [("cpu", None, "cpu"), ("cuda", None, "cuda13"), ("cuda", (13, 1), "cuda13"), ("cuda", (12, 4), "cuda12"),
     ("cuda", (11, 8), "cuda12")],
)  # fmt: skip
def test_the_extra_that_a_driver_can_run(platform, cuda, extra):
    assert extra_of(platform, cuda) == extra


def test_a_jax_without_cuda_is_told_with_the_extra(monkeypatch):
    installed: Any = SimpleNamespace(read_text=lambda name: '{"url": "file:///a%20b/clone"}')
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = cuda_error("platform='cuda'")
    assert (
        missing is not None and "pip install '/a b/clone[cuda13]'" in str(missing) and "580" in str(missing)
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "jax_cuda12_plugin" or None)
    assert cuda_error("platform='cuda'") is None


GIT = '{"url": "https://host/a/clone", "vcs_info": {"vcs": "git", "commit_id": "ab12"}}'


@pytest.mark.parametrize(
    ("direct_url", "says"),
    [
        ('{"url": "file://HERE", "dir_info": {}}', "pip install 'HERE[cpu]'"),
        ('{"url": "file://HERE", "dir_info": {"editable": true}}', "pip install -e 'HERE[cpu]'"),
        ('{"url": "file://localhostHERE", "dir_info": {}}', "pip install 'HERE[cpu]'"),
        (
            '{"url": "file:///gone/a.whl", "archive_info": {}}',
            "pip install '/gone/a.whl[cpu]'  (there is no source of this package at /gone/a.whl any more",
        ),
        (
            '{"url": "file:///a%27b", "dir_info": {}}',
            """pip install '/a'"'"'b[cpu]'  (there is no source of this package at /a'b any""",
        ),
        (GIT, "pip install 'jaxpp-async[cpu] @ git+https://host/a/clone@ab12'"),
        (
            GIT[:-1] + ', "subdirectory": "x"}',
            "'jaxpp-async[cpu] @ git+https://host/a/clone@ab12#subdirectory=x'",
        ),
        (
            '{"url": "https://host/a.whl", "archive_info": {}}',
            "pip install 'jaxpp-async[cpu] @ https://host/a.whl'",
        ),
        (None, f"pip install -e '{ROOT}[cpu]'"),  # a clone on the path
        ("[]", f"pip install -e '{ROOT}[cpu]'"),
        ('{"url": null}', f"pip install -e '{ROOT}[cpu]'"),
        ('{"url": "file://other/a"}', f"pip install -e '{ROOT}[cpu]'"),
    ],
)
def test_what_is_missing_comes_from_where_the_package_came_from(direct_url, says, monkeypatch, tmp_path):
    here = tmp_path / "a b"
    here.mkdir()
    text = direct_url and direct_url.replace("HERE", str(here).replace(" ", "%20"))
    installed: Any = SimpleNamespace(read_text=lambda name: text)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
    assert says.replace("HERE", str(here)) in pip_install("cpu")


@pytest.mark.parametrize(
    ("direct_url", "says"),
    [
        (None, "pip install 'jaxpp-async[cpu]'"),  # by its name, from an index
        ("[", "pip install '/site[cpu]'  (there is no source of this package at /site any"),
        ("none", "pip install '/site[cpu]'  (there is no source of this package at /site any"),
    ],
)
def test_the_name_alone_is_suggested_only_where_pip_had_it_by_name(direct_url, says, monkeypatch):
    def distribution(name):
        if direct_url == "none":
            raise importlib.metadata.PackageNotFoundError
        return SimpleNamespace(read_text=lambda name: direct_url)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(install_hints, "__file__", "/site/jaxpp_async/base/install_hints.py")
    assert pip_install("cpu").startswith(says)


def test_no_text_names_an_extra_in_another_way():
    texts = {path: path.read_text() for path in (ROOT / "jaxpp_async").rglob("*.py")}
    assert not [str(path) for path, text in texts.items() if re.search(r"jaxpp-async\[", text)]


@pytest.mark.skipif(cuda_error("") is None, reason="JAX for GPUs is installed here")
async def test_a_mesh_on_gpus_without_jax_for_gpus_says_which_extra_to_install():
    with pytest.raises(
        InstallError,
        match=r"^platform='cuda' needs JAX with CUDA.*cuda13",  # no actor had to start to say so
    ) as raised:
        async with jpp.RemoteMesh(1, platform="cuda"):
            raise AssertionError("it has started")
    assert "Traceback" not in str(raised.value)
