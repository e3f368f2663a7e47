"""Host arrays on devices (`actors.values.shards`): what is placed is right, and shares memory with nobody."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxpp_async.actors.jax_runtime import Devices
from jaxpp_async.actors.shards import ALIGNMENT, Layouts, buffer_addresses, place
from jaxpp_async.program.instructions import Aval

LAYOUTS = Layouts(Devices(Mesh(np.array(jax.devices()[:1]), ("device",))))

CASES = [
    # shape, dtype: none at all, a scalar, small, around the bound of small ones, large
    ((0, 3), "float32"),
    ((), "int32"),
    ((7, 3), "float32"),
    ((5,), "bool"),
    ((9,), "bfloat16"),
    ((128, 128), "float32"),
    ((128, 129), "float32"),
    ((200, 200), "int8"),
]


@pytest.mark.parametrize("shape, dtype", CASES)
def test_a_placed_array_is_its_own_memory_wherever_the_host_array_lies(shape, dtype):
    layout = LAYOUTS.of(Aval(shape, dtype))
    size_bytes = int(np.prod(shape)) * layout.dtype.itemsize
    memory = np.arange(size_bytes + 3 * ALIGNMENT, dtype=np.int64).astype(np.uint8)
    aligned = -memory.__array_interface__["data"][0] % ALIGNMENT
    for shift in (0, layout.dtype.itemsize, 16, 32):
        host = memory[aligned + shift : aligned + shift + size_bytes].view(layout.dtype).reshape(shape)
        wanted = host.copy()
        array = place(host, layout)
        begin = memory.__array_interface__["data"][0]
        if size_bytes:
            assert not any(begin <= at < begin + memory.nbytes for at in buffer_addresses(array))
        memory += 1  # the host may use it again at once
        assert array.dtype == layout.dtype and np.array_equal(
            np.asarray(array), wanted, equal_nan=dtype != "bool"
        )


def test_a_host_array_need_not_be_contiguous():
    host = np.arange(48, dtype=np.float32).reshape(8, 6)[::2, 1::2]
    assert np.array_equal(np.asarray(place(host, LAYOUTS.of(Aval(host.shape, "float32")))), host)


@pytest.mark.parametrize("dtype", ["float64", "int64", "complex128"])
def test_64_bit_types_stay_what_they_are_whatever_the_settings_of_this_thread(dtype):
    host = np.arange(3, dtype=dtype)
    array = place(host, LAYOUTS.of(Aval((3,), dtype)))
    assert array.dtype == dtype and np.array_equal(np.asarray(array), host)
