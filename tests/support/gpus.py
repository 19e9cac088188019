"""Machines with GPUs: trees of /proc and /sys, the cards of NVML, and a scripted NVML.

The formats are those of driver 535 to 580, with the addresses and the cores of real machines; the
UUIDs are made up.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from iskander.gateway.supervision.gpus.device import Gpu
from iskander.gateway.supervision.gpus.inventory import read_gpus
from iskander.gateway.supervision.gpus.readings import NvmlCard, NvmlSlice
from iskander.gateway.supervision.placement.topology import Topology
from support.machine_trees import Files
from support.sysfs import make_topology

STAND_IN = Path(__file__).with_name("nvml_stand_in")
MIB = 1 << 20
H100 = "NVIDIA H100 80GB HBM3"
H100_BYTES = 81_559 * MIB
SLICE_BYTES = {"1g.10gb": 9_728 * MIB, "2g.20gb": 19_968 * MIB, "3g.40gb": 40_192 * MIB}
_INFORMATION = """\
Model: \t\t {name}
IRQ:   \t\t {irq}
GPU UUID: \t {uuid}
Video BIOS: \t 96.00.74.00.01
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t {pci}
Device Minor: \t {minor}
GPU Firmware: \t 580.65.06
GPU Excluded:\t {excluded}
"""


class GpuMachine(NamedTuple):
    """A machine: its files, the cards of NVML, and its cores."""

    files: Files
    cards: tuple[NvmlCard, ...]
    topology: Topology

    def gpus(self, folder: Path, *, has_nvml: bool = True) -> tuple[Gpu, ...]:
        """The devices that the server finds."""
        for name, text in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return read_gpus(folder, self.cards if has_nvml else ())


def uuid_of(minor: int) -> str:
    return f"GPU-{minor:08x}-5f3e-4a91-b2c7-0d1e2f3a4b5c"


def slice_uuid(minor: int, instance: int) -> str:
    return f"MIG-{minor:04x}{instance:04x}-9a1b-5c2d-8e3f-4a5b6c7d8e9f"


def card_files(
    pci: str, minor: int, node: int, cpus: str, name: str = H100, excluded: str = "No"
) -> Files:
    sysfs, irq = f"sys/bus/pci/devices/{pci}", 18 + minor
    return {
        f"{sysfs}/vendor": "0x10de\n",
        f"{sysfs}/class": "0x030200\n",
        f"{sysfs}/uevent": "DRIVER=nvidia\nPCI_CLASS=30200\nPCI_ID=10DE:2330\n",
        f"{sysfs}/numa_node": f"{node}\n",
        f"{sysfs}/local_cpulist": f"{cpus}\n",
        f"proc/driver/nvidia/gpus/{pci}/information": _INFORMATION.format(
            name=name, irq=irq, uuid=uuid_of(minor), pci=pci, minor=minor, excluded=excluded
        ),
    }


def slice_files(minor: int, instances: tuple[int, ...]) -> Files:
    """One compute instance in each GPU instance, with the numbers of /proc/driver/nvidia-caps."""
    files: Files = {"proc/driver/nvidia/capabilities/mig/config": "DeviceFileMinor: 1\n"}
    for gi in instances:
        folder = f"proc/driver/nvidia/capabilities/gpu{minor}/mig/gi{gi}"
        mode = "DeviceFileMode: 292\nDeviceFileModify: 1\n"
        files[f"{folder}/access"] = f"DeviceFileMinor: {3 + 9 * gi}\n{mode}"
        files[f"{folder}/ci0/access"] = f"DeviceFileMinor: {4 + 9 * gi}\n{mode}"
    return files


def nvml_card(pci: str, minor: int, memory_bytes: int = H100_BYTES, **fields: Any) -> NvmlCard:
    """NVML writes eight digits of the PCI domain."""
    address = f"0000{pci.upper()}"
    return NvmlCard(address, uuid_of(minor), H100, memory_bytes, minor=minor, **fields)


# A virtual machine of Firecracker with one H100: the firmware assigns it to node 0.
_ONE = "0000:00:06.0"
ONE = GpuMachine(card_files(_ONE, 0, 0, "0-15"), (nvml_card(_ONE, 0),), make_topology(1, 16))

# DGX H100: two sockets of 56 cores with SMT, four cards near each.
_DGX = {
    f"0000:{bus}:00.0": node
    for node, buses in ((0, "1b 43 52 61"), (1, "9d c3 d1 df"))
    for bus in buses.split()
}
_DGX_CPUS = ("0-55,112-167", "56-111,168-223")
DGX = GpuMachine(
    {
        name: text
        for minor, (pci, node) in enumerate(_DGX.items())
        for name, text in card_files(pci, minor, node, _DGX_CPUS[node]).items()
    },
    tuple(nvml_card(pci, minor) for minor, pci in enumerate(_DGX)),
    make_topology(2, 56, threads=2),
)

# A container with the fifth of these cards: sysfs shows all, the driver and NVML only this one.
_SHOWN = "0000:9d:00.0"
CONTAINER = GpuMachine(
    {name: text for name, text in DGX.files.items() if name.startswith("sys/") or _SHOWN in name},
    tuple(card for card in DGX.cards if card.pci.lower().endswith(_SHOWN)),
    DGX.topology,
)

# Two cards of which the second has three slices: 3g.40gb, 2g.20gb and 1g.10gb.
_SLICES = {2: "3g.40gb", 3: "2g.20gb", 9: "1g.10gb"}
MIG = GpuMachine(
    card_files("0000:17:00.0", 0, 0, "0-31")
    | card_files("0000:65:00.0", 1, 0, "0-31")
    | slice_files(1, tuple(_SLICES)),
    (
        nvml_card("0000:17:00.0", 0),
        nvml_card(
            "0000:65:00.0",
            1,
            is_mig=True,
            slices=tuple(
                NvmlSlice(slice_uuid(1, gi), profile, SLICE_BYTES[profile], (gi, 0))
                for gi, profile in _SLICES.items()
            ),
        ),
    ),
    make_topology(1, 32),
)

# A workstation of two sockets whose firmware assigns the card to no node.
NO_NODE = GpuMachine(
    card_files("0000:21:00.0", 0, -1, "0-23"),
    (nvml_card("0000:21:00.0", 0),),
    make_topology(2, 12),
)

NONE = GpuMachine(
    {
        "sys/bus/pci/devices/0000:00:02.0/vendor": "0x8086\n",
        "sys/bus/pci/devices/0000:00:02.0/class": "0x030000\n",
    },
    (),
    make_topology(1, 4),
)
MACHINES = {
    "one": ONE,
    "dgx": DGX,
    "container": CONTAINER,
    "mig": MIG,
    "no node": NO_NODE,
    "none": NONE,
}


class ScriptedNvml:
    """A scripted NVML for processes with its `environment`."""

    def __init__(self, folder: Path, *cards: dict[str, Any]) -> None:
        self._path = folder / "nvml.json"
        self.script: dict[str, Any] = {"cards": list(cards) or [scripted_card(0)]}
        self.write()

    def write(self) -> None:
        """Apply changes of `script`."""
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps(self.script))
        temporary.replace(self._path)

    def change(self, card: int = 0, **fields: Any) -> None:
        """Change the state of a card."""
        self.script["cards"][card].update(fields)
        self.write()

    @property
    def environment(self) -> dict[str, str]:
        paths = [str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(paths), "NVML_SCRIPT": str(self._path)}


def scripted_card(minor: int, **fields: Any) -> dict[str, Any]:
    card = {
        "uuid": uuid_of(minor),
        "pci": f"00000000:{0x17 + minor:02X}:00.0",
        "name": H100,
        "memory_mib": 81_559,
        "minor": minor,
        "cpus": [0, 1],
        "busy_percent": 37,
        "celsius": 41,
        "milliwatts": 71_500,
        "throttle": 0,
        "ecc": [0, 0],
        "pcie": [5, 16],
        "replays": 0,
    }
    return card | fields
