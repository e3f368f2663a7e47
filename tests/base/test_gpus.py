"""Direct tests of the way to NVIDIA's management library, with a library that plays one."""

from __future__ import annotations

import os
import sys

import pytest

from jaxpp_async.base.gpu_inventory import NvmlFailure, library, uuids


class Nvml:
    """Two GPUs, or a driver that does not answer."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, answers: bool = True):
        self.answers, self.open = answers, 0

    def nvmlInit(self) -> None:
        if not self.answers:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"


@pytest.fixture
def devices(monkeypatch):
    """What `/dev` lists."""
    listed = ["null", "nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"]
    monkeypatch.setattr(os, "listdir", lambda folder: listed)
    return listed


def test_gpus_are_told_by_the_library_which_is_ended_again(monkeypatch):
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert (uuids(), nvml.open) == (("GPU-0", "GPU-1"), 0)


def test_where_the_library_does_not_answer_gpus_are_counted_by_their_devices(monkeypatch, devices):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(answers=False))
    assert uuids() == ("", "")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert uuids() == ("", "")
    devices.clear()
    assert uuids() == ()


def test_why_nobody_can_be_asked_is_said_in_words(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with (
        pytest.raises(NvmlFailure, match=r"^nvidia-ml-py is not installed, so nobody can be asked for GPUs$"),
        library(),
    ):
        pass
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(answers=False))
    with pytest.raises(NvmlFailure, match=r"^Driver Not Loaded$"), library():
        pass


def test_a_call_that_fails_ends_the_library_and_other_errors_pass_through(monkeypatch):
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with pytest.raises(NvmlFailure, match=r"^lost$"), library() as found:
        raise found.NVMLError("lost")
    with pytest.raises(ZeroDivisionError), library():
        raise ZeroDivisionError
    assert nvml.open == 0
