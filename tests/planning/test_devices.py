"""The table of devices: complete rows, plausible figures, and errors that name the nearest row."""

from __future__ import annotations

import pytest

from jaxpp_async.errors import MeshError
from jaxpp_async.planning.devices import DEVICES, LINKS, Device, Link, find_device, find_link


@pytest.mark.parametrize("name", sorted(set(DEVICES) - {"cpu"}))
def test_an_accelerator_has_all_figures_that_its_vendor_publishes(name):
    row = DEVICES[name]
    assert row.name == name and row.platform == ("tpu" if name.startswith("tpu") else "cuda")
    assert 1e14 < row.bf16_flops_per_s < 1e16 and (row.f32_flops_per_s is None) == (row.platform == "tpu")
    assert 16e9 <= row.memory_bytes < 1e12 and 5e11 < row.memory_bytes_per_s < 1e13
    assert row.link in LINKS and row.devices_in_group > 1


def test_a_processor_has_no_figures_before_it_is_measured():
    assert DEVICES["cpu"] == Device("cpu", "cpu")


def test_links_are_slower_than_memory_and_networks_slower_than_links_in_a_host():
    for row in DEVICES.values():
        if row.link is not None:
            assert LINKS[row.link].bytes_per_s < row.memory_bytes_per_s
    assert LINKS["infiniband-ndr"].bytes_per_s < LINKS["pcie5"].bytes_per_s < LINKS["nvlink3"].bytes_per_s
    assert LINKS["pcie5"].latency_s < LINKS["infiniband-ndr"].latency_s < 1e-4


def test_a_row_is_found_by_name_or_is_the_user_s_own():
    mine, wire = Device("mine", "cuda"), Link("wire", 1e9, 1e-6)
    assert find_device("h200").memory_bytes == 141e9 and find_device(mine) is mine
    assert find_link("nvlink5").bytes_per_s == 9e11 and find_link(wire) is wire


@pytest.mark.parametrize(
    ("find", "name", "message"),
    [
        (
            find_device,
            "H100_SXM",
            "device is 'H100_SXM', of which there are no figures; did you mean 'h100-sxm'?",
        ),
        (find_device, "abacus", "the table has cpu, a100-40g, .*Or pass a `Device` with your own figures"),
        (find_link, "infiniband", "did you mean 'infiniband-(ndr|hdr)'"),
        (find_link, 3, "link is 3, of which there are no figures; the table has nvlink3"),
    ],
)
def test_an_unknown_row_is_named_with_the_nearest(find, name, message):
    with pytest.raises(MeshError, match=message):
        find(name)
