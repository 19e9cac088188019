"""Reports of NVML: the cards at the start, and a reading of each device every second.

Pure: the messages of the process that calls NVML, and the decision whether a device is lost.
"""

from __future__ import annotations

from typing import Final

import msgspec

XIDS_MAX: Final = 16
"""Distinct Xid codes that are counted for a card; later ones count as `other`."""
OFF_THE_BUS: Final = 79
"""The Xid error after which no process can use a card. Source: NVIDIA, "Xid Errors"."""
XIDS: Final = (13, 31, 32, 43, 45, 48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 154)
"""Xid errors with a counter of their own."""
THROTTLES: Final = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
"""Reasons for lower clocks that slow a busy card; idle clocks and chosen ones do not."""


class NvmlSlice(msgspec.Struct, frozen=True):
    """A MIG device; `instance` has the numbers of its GPU instance and compute instance."""

    uuid: str
    profile: str
    memory_bytes: int
    instance: tuple[int, int]


class NvmlCard(msgspec.Struct, frozen=True):
    """A card; `is_mig`: only its slices can be used."""

    pci: str
    uuid: str
    name: str
    memory_bytes: int
    cpus: tuple[int, ...] = ()
    minor: int | None = None
    is_mig: bool = False
    slices: tuple[NvmlSlice, ...] = ()


class NvmlReport(msgspec.Struct, frozen=True):
    """All cards, or why NVML reports none."""

    cards: tuple[NvmlCard, ...] = ()
    driver: str = ""
    error: str = ""


class GpuValues(msgspec.Struct, frozen=True, kw_only=True):
    """Measured values of a GPU. A value that the GPU does not support is None.

    Attributes:
        utilization: Share of time in which a kernel ran.
        throttles: Why the clocks are lower than they could be, of `THROTTLES`.
        ecc_corrected: Memory errors since the driver was loaded, as `ecc_uncorrected`.
        xids: Number of Xid errors by code, since the monitor was started.
        pcie_replays: Repeated transfers on the PCIe link.
    """

    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttles: tuple[str, ...] = ()
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    xids: dict[str, int] = {}
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_replays: int | None = None


class GpuReading(GpuValues, frozen=True):
    """One reading of a GPU.

    Attributes:
        lost: Why no process can use the GPU; empty if it can be used.
        error: Last failed call; empty if none failed.
        age_s: Time since NVML answered for the GPU.
    """

    uuid: str
    age_s: float = 0.0
    lost: str = ""
    error: str = ""


class MonitorReport(msgspec.Struct, frozen=True):
    """A line of the monitor: the readings of all devices, or a notice for the log."""

    readings: list[GpuReading] = []
    notice: str = ""


decode_report: Final = msgspec.json.Decoder(NvmlReport).decode
decode_monitor_report: Final = msgspec.json.Decoder(MonitorReport).decode


def throttles_of(mask: int) -> tuple[str, ...]:
    return tuple(text for bit, text in THROTTLES.items() if mask & bit)
