"""The real CuPy, nccl4py and NCCL have what the code calls, as it calls it; without a GPU they refuse just
for that.

Stand-ins (`fake_nccl`, `fake_device`, `nccl_over_sockets`) take the place of `NcclLibrary` and `CudaDevice`;
behind those stand the two modules that are held against the real libraries here. `make test-contracts`
installs them.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxpp_async.actors import cuda
from jaxpp_async.transport.base import Memory
from jaxpp_async.transport.nccl import library

if "JAXPP_TEST_CONTRACTS" not in os.environ:
    pytest.skip("make test-contracts installs what this needs", allow_module_level=True)

import cupy  # pyright: ignore[reportMissingImports]
import nccl.core as core  # pyright: ignore[reportMissingImports]
from nccl.bindings.nccl import NCCLError, Result  # pyright: ignore[reportMissingImports]

RUNTIME = cupy.cuda.runtime
WANTS_GPU = (RUNTIME.CUDARuntimeError, NCCLError)

ROOTS = {"cupy": cupy, "_cupy": cupy, "cuda": cupy.cuda, "_cuda": cupy.cuda, "runtime": RUNTIME}
ROOTS |= {"core": core, "_core": core}
"""What the two modules call the libraries."""


def names_used(module: Any) -> set[tuple[str, ...]]:
    """Chains of attributes that begin at a library: `("_cuda", "runtime", "free")`."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        chain = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        names = chain.removeprefix("self.").split(".")
        if len(names) > 1 and names[0] in ROOTS and all(map(str.isidentifier, names)):
            found.add(tuple(names))
    return found


@pytest.mark.parametrize("module", [cuda, library])
def test_every_name_is_there(module):
    used = names_used(module)
    assert len(used) > 5
    for root, *names in used:
        functools.reduce(getattr, names, ROOTS[root])


def test_what_has_no_call_of_its_own_is_there():
    """Attributes of objects that are made on a GPU only."""
    assert {"synchronize", "record"} <= set(dir(cupy.cuda.Event)) and cupy.cuda.Stream(null=True).ptr == 0
    assert {"ptr", "get_async_error", "get_last_error", "abort"} <= set(dir(core.Communicator))
    assert {"data", "device", "get"} <= set(dir(cupy.ndarray)) and "ptr" in dir(cupy.cuda.MemoryPointer)
    assert not inspect.signature(core.Communicator.get_async_error).parameters.keys() - {"self"}
    assert (int(Result.Success), int(Result.InProgress)) == (library._SUCCESS, library._IN_PROGRESS)


CALLS = {
    "device": lambda: cupy.cuda.Device(0).use(),
    "device, entered": lambda: cupy.cuda.Device(0).__enter__(),
    "stream": lambda: cupy.cuda.Stream(non_blocking=True),
    "current stream": lambda: cupy.cuda.get_current_stream().synchronize(),
    "event": lambda: cupy.cuda.Event(block=True, disable_timing=True),
    "array": lambda: cupy.asarray(np.array([1], np.uint64)),
    "count": RUNTIME.getDeviceCount,
    "memory": RUNTIME.memGetInfo,
    "properties": lambda: RUNTIME.getDeviceProperties(0),
    "bus": lambda: RUNTIME.deviceGetPCIBusId(0),
    "free": lambda: RUNTIME.free(0),
    "copy": lambda: RUNTIME.memcpyPeerAsync(8, 0, 8, 0, 8, 0),
    "communicator": lambda: core.Communicator.init(
        2,
        0,
        core.UniqueId.from_bytes(core.get_unique_id().as_bytes),
        core.NCCLConfig(blocking=False, max_ctas=1),
    ),
}


# CuPy's half-made `Stream` in __del__
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_understood_and_refused_for_want_of_a_gpu(name):
    with pytest.raises(WANTS_GPU):
        CALLS[name]()


def test_the_driver_says_its_version_as_a_number():
    assert isinstance(RUNTIME.driverGetVersion(), int)


def test_loading_says_that_there_is_no_gpu():
    with pytest.raises(library.NcclFailure, match="this process sees no GPU"):
        library.load_library()


@pytest.fixture
def real() -> Any:
    found = core.get_version().libnccl
    return library.NcclLibrary(cupy, core, str(found.path), str(found.version))


def test_the_real_library_makes_ids(real):
    ids = {real.make_id() for _ in range(3)}
    assert len(ids) == 3 and {(type(each), len(each)) for each in ids} == {(bytes, 128)}
    assert core.UniqueId.from_bytes(min(ids)).as_bytes == min(ids)
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", real.version)


def test_the_real_library_refuses_in_our_words(real):
    with pytest.raises(library.NcclFailure) as refused:
        real.join(real.make_id(), 0, 0)
    assert isinstance(refused.value.__cause__, WANTS_GPU)
    with pytest.raises(library.NcclFailure) as refused:
        real.word(0, 1)
    assert isinstance(refused.value.__cause__, WANTS_GPU)


def test_transfers_have_the_signature_of_the_public_header(real):
    header = (Path(core.get_version().libnccl.path).parents[1] / "include" / "nccl.h").read_text()
    for name in ("ncclSend", "ncclRecv"):
        (arguments,) = re.findall(rf"ncclResult_t +{name}\(([^)]*)\)", header)
        kinds = [re.sub(r"^const | ?\w+$", "", part.strip()) for part in arguments.split(",")]
        assert kinds == ["void*", "size_t", "ncclDataType_t", "int", "ncclComm_t", "cudaStream_t"]
    for name, value in (("Uint8", library._NCCL_UINT8), ("Success", library._SUCCESS)):
        assert re.search(rf"nccl{name} *= *{value},", header)
    assert re.search(rf"ncclInProgress *= *{library._IN_PROGRESS},", header)
    memory = Memory(8, 8, None)
    nobody = SimpleNamespace(ptr=0, get_last_error=lambda: "no communicator")
    channel = library.Channel(cupy, real._calls, nobody, SimpleNamespace(ptr=0), 1, 0)
    channel._device = contextlib.nullcontext()
    for transfer in (channel.send, channel.recv):
        with pytest.raises(
            library.NcclFailure, match=f"returned {int(Result.InvalidArgument)}: no communicator"
        ):
            transfer(memory)
