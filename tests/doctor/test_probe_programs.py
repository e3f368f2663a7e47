"""Tests of the program that starts JAX and prints what it found, in this process."""

from __future__ import annotations

import os

import jax

from jaxpp_async.doctor.facts import JaxStart
from jaxpp_async.doctor.probe_programs import probe_jax


def found(monkeypatch, tmp_path, platform: str):
    for name in ("JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.setenv(name, "")  # the program sets it: put back behind the test
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return probe_jax(platform)


def test_devices_are_counted_on_the_platform_that_is_asked_for(monkeypatch, tmp_path):
    tmp_path.chmod(0o700)
    expected = JaxStart("cpu", len(jax.devices("cpu")), "cpu", cache_error="")
    assert found(monkeypatch, tmp_path, "cpu") == expected
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_a_platform_that_is_not_there_is_told_in_one_line(monkeypatch, tmp_path):
    said = found(monkeypatch, tmp_path, "nonesuch")
    assert said.startswith("RuntimeError: ")
    assert "\n" not in said
