"""List the published figures of devices and of links between them, for costs that nobody has measured.

Each figure is the vendor's: dense peak rates, without sparsity, and rates of links in one direction. Real
programs reach a part of these rates; how large a part is for the user of the table to say. A figure that the
vendor does not publish is None.

The figures of TPUs were compared with Google's pages, those of NVIDIA's GPUs with copies of the datasheets
on pages of others, and the latencies with NCCL's source. The rates of `ici-v4`, InfiniBand and Ethernet are
those that the cited documents are known for; no copy of these was at hand.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from jaxpp_async.errors import MeshError

MEMORY, BETWEEN_DEVICES, SAME_HOST, BETWEEN_HOSTS = "memory", "devices", "same host", "between hosts"
"""The kinds of links: between actors of one process, between the devices of one actor, between actors whose
devices the vendor joins by a fast link, such as those of one host, and between any other actors."""


@dataclass(frozen=True)
class Link:
    """A kind of link between devices or hosts.

    Args:
        name: the name of the row.
        bytes_per_s: the bytes that one device sends in a second, in one direction.
        latency_s: the seconds that a message takes however small it is; None if no figure is published.
    """

    name: str
    bytes_per_s: float
    latency_s: float | None


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Args:
        name: the name of the row.
        platform: JAX's name of the platform, for which executables are lowered.
        bf16_flops_per_s: the peak rate of matrix products of bfloat16; None if unknown.
        f32_flops_per_s: the peak rate of float32 arithmetic outside the matrix units; None if unknown.
        memory_bytes: the bytes of a device's memory; None if unknown.
        memory_bytes_per_s: the bytes that a device reads and writes in a second; None if unknown.
        link: the name of the link between devices of one group; None if unknown.
        devices_in_group: the number of devices that this link joins, such as those of a host.
        note: a sentence about a figure that does not agree with other sources; empty if all figures do.
    """

    name: str
    platform: str
    bf16_flops_per_s: float | None = None
    f32_flops_per_s: float | None = None
    memory_bytes: int | None = None
    memory_bytes_per_s: float | None = None
    link: str | None = None
    devices_in_group: int = 1
    note: str = ""


_TERA, _GIGA = 1e12, 1e9


def _link(name: str, gigabytes_per_s: float, latency_us: float | None) -> Link:
    return Link(name, gigabytes_per_s * _GIGA, None if latency_us is None else latency_us / 1e6)


# Latencies of NVLink, PCI Express and networks: those of one step of a ring with the protocol "Simple", by
# which NVIDIA's NCCL predicts its collectives (table `hwLat` in NCCL's src/graph/tuning.cc, version 2.21; the
# entry for networks was 9.6 us in early versions).
_NVLINK_US, _PCI_US, _NETWORK_US = 3.4, 5.7, 14.0

_LINKS = (
    # NVIDIA A100 Tensor Core GPU, datasheet, 2021: NVLink 600 GB/s, PCIe Gen4 64 GB/s, both ways together.
    _link("nvlink3", 300, _NVLINK_US),
    _link("pcie4", 32, _PCI_US),
    # NVIDIA H100 Tensor Core GPU, datasheet, 2023: NVLink 900 GB/s (SXM), 600 GB/s (PCIe, bridge), PCIe Gen5
    # 128 GB/s, both directions together.
    _link("nvlink4", 450, _NVLINK_US),
    _link("nvlink4-bridge", 300, _NVLINK_US),
    _link("pcie5", 64, _PCI_US),
    # NVIDIA GB200 NVL72, product page and datasheet, 2024: NVLink 1.8 TB/s a GPU, both directions together.
    _link("nvlink5", 900, _NVLINK_US),
    # NVIDIA ConnectX-6 and ConnectX-7, product briefs: 200 Gb/s (HDR) and 400 Gb/s (NDR) a port. One port for
    # each GPU, as in NVIDIA's DGX A100 and DGX H100 system architectures.
    _link("infiniband-hdr", 25, _NETWORK_US),
    _link("infiniband-ndr", 50, _NETWORK_US),
    # IEEE 802.3: 10, 100 and 400 Gb/s a port.
    _link("ethernet-10g", 1.25, _NETWORK_US),
    _link("ethernet-100g", 12.5, _NETWORK_US),
    _link("ethernet-400g", 50, _NETWORK_US),
    # All links of a chip together. TPU v4: Jouppi et al., TPU v4, ISCA 2023 (six links of 50 GB/s each way).
    # The others: Google Cloud, TPU system architecture, page of each version: the bidirectional bandwidth of
    # the inter-chip interconnect per chip is 400 (v5e), 1,200 (v5p) and 800 GB/s (v6e), half of it each way.
    _link("ici-v4", 300, None),
    _link("ici-v5e", 200, None),
    _link("ici-v5p", 600, None),
    _link("ici-v6e", 400, None),
)

LINKS: Mapping[str, Link] = {link.name: link for link in _LINKS}
"""The table of links, by name."""


_B200_NOTE = (
    "8 TB/s are published for the memory of b200; its bus and clock, as the driver shows them, make 7.7"
)


def _gpu(
    name: str,
    bf16: float,
    f32: float,
    gigabytes: float,
    gigabytes_per_s: float,
    link: str,
    group: int,
    note: str = "",
) -> Device:
    return Device(
        name,
        "cuda",
        bf16 * _TERA,
        f32 * _TERA,
        int(gigabytes * _GIGA),
        gigabytes_per_s * _GIGA,
        link,
        group,
        note,
    )


def _tpu(name: str, bf16: float, gibibytes: int, gigabytes_per_s: float, link: str, group: int) -> Device:
    return Device(name, "tpu", bf16 * _TERA, None, gibibytes * 2**30, gigabytes_per_s * _GIGA, link, group)


_DEVICES = (
    # Any processor without an accelerator. Its figures differ by orders of magnitude, so that none are given:
    # measure steps on it, and calibrate a cost model with their timelines.
    Device("cpu", "cpu"),
    # NVIDIA A100 Tensor Core GPU, datasheet, 2021 (SXM). BF16 312 and FP32 19.5 TFLOPS, 1,555 and 2,039 GB/s.
    # HGX boards of 8.
    _gpu("a100-40g", 312, 19.5, 40, 1555, "nvlink3", 8),
    _gpu("a100-80g", 312, 19.5, 80, 2039, "nvlink3", 8),
    # NVIDIA H100 Tensor Core GPU, datasheet, 2023. BF16 1,979 (SXM) and 1,513 (PCIe) TFLOPS with sparsity,
    # half of it without; FP32 67 and 51 TFLOPS; 3.35 and 2 TB/s.
    _gpu("h100-sxm", 989.5, 67, 80, 3350, "nvlink4", 8),
    _gpu("h100-pcie", 756.5, 51, 80, 2000, "nvlink4-bridge", 2),
    # NVIDIA H200 Tensor Core GPU, datasheet, 2024. BF16 1,979 TFLOPS with sparsity, 141 GB, 4.8 TB/s.
    _gpu("h200", 989.5, 67, 141, 4800, "nvlink4", 8),
    # NVIDIA HGX platform, product page, and DGX B200, datasheet, 2024, for 8 GPUs: BF16 36 PFLOPS with
    # sparsity, FP32 600 TFLOPS, 1,440 GB, 64 TB/s.
    _gpu("b200", 2250, 75, 180, 8000, "nvlink5", 8, note=_B200_NOTE),
    # NVIDIA GB200 NVL72, product page and datasheet, 2024, for 72 GPUs: BF16 360 PFLOPS with sparsity, FP32
    # 5,760 TFLOPS, 13.4 TB, 576 TB/s.
    _gpu("gb200", 2500, 80, 186, 8000, "nvlink5", 72),
    # Google Cloud, TPU system architecture, page of each version: BF16 peak, HBM capacity and bandwidth per
    # chip, chips per pod. No rate of float32 is published. The page of v5e says 819 GB/s (earlier 800 GiB/s).
    _tpu("tpu-v4", 275, 32, 1200, "ici-v4", 4096),
    _tpu("tpu-v5e", 197, 16, 819, "ici-v5e", 256),
    _tpu("tpu-v5p", 459, 95, 2765, "ici-v5p", 8960),
    _tpu("tpu-v6e", 918, 32, 1638, "ici-v6e", 256),
)

DEVICES: Mapping[str, Device] = {device.name: device for device in _DEVICES}
"""The table of devices, by name."""


def find_device(device: str | Device) -> Device:
    """Return the row of a device.

    Args:
        device: the name of the row, or a row that the user made.

    Raises:
        MeshError: the table has no such row.
    """
    if isinstance(device, Device):
        return device
    if device not in DEVICES:
        raise MeshError(_unknown("device", device, DEVICES, "Device"))
    return DEVICES[device]


def missing_figures(device: Device, dtype: str = "bfloat16") -> str | None:
    """Return a sentence that says which figures of a device are not published; None if tasks can be priced.

    Args:
        device: the device.
        dtype: the type of numbers in which tasks compute, `"bfloat16"` or `"float32"`.
    """
    flops_per_s = device.bf16_flops_per_s if dtype == "bfloat16" else device.f32_flops_per_s
    if flops_per_s is not None and device.memory_bytes_per_s is not None:
        return None
    return (
        f"of device {device.name!r} no rate of {dtype} or of memory is published; measure a few steps on it "
        "(`CostModel.from_timelines`), or describe it by a `Device` with your own figures"
    )


def find_link(link: str | Link) -> Link:
    """Return the row of a link.

    Args:
        link: the name of the row, or a row that the user made.

    Raises:
        MeshError: the table has no such row.
    """
    if isinstance(link, Link):
        return link
    if link not in LINKS:
        raise MeshError(_unknown("link", link, LINKS, "Link"))
    return LINKS[link]


OWN_FIGURES = " Or pass a"
"""The beginning of the part of an error that is of no use on a command line."""


def _unknown(what: str, name: object, table: Mapping[str, object], kind: str) -> str:
    given = str(name).lower().replace("_", "-")
    close = [row for row in table if row.startswith(given)] or difflib.get_close_matches(given, table, 1)
    meant = f"did you mean {' or '.join(map(repr, close))}?" if close else f"the table has {', '.join(table)}"
    without = f"{what} is {name!r}, of which there are no figures; {meant}"
    return f"{without}{OWN_FIGURES} `{kind}` with your own figures"
