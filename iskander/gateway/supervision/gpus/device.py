"""A GPU as a device of CUDA, its names, and the environment that shows it alone.

Pure. Source: CUDA C++ Programming Guide, "CUDA Environment Variables"; NVIDIA Multi-Instance GPU
User Guide, "Device Names" and "Device Nodes and Capabilities".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

PREFIX: Final = "gpu:"
"""Prefix of an entry of `workers.groups` that names a GPU."""
ALL: Final = "auto"
DEVICES_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
GIB: Final = 1 << 30


class Gpu(msgspec.Struct, frozen=True):
    """A card, or a MIG slice of one.

    Attributes:
        index: Number of the card in the order of PCI addresses, as in `nvidia-smi`.
        uuid: Name in `CUDA_VISIBLE_DEVICES`.
        pci: Address of the card, as in sysfs: `0000:17:00.0`.
        node: NUMA node of the card; None if the firmware does not report it.
        cpus: Cpus near the card; empty if unknown.
        memory_bytes: Memory of the device; 0 if unknown.
        minor: Number of the card's device node, `/dev/nvidiaN`; None if unknown.
        parent: UUID of the card of a slice; empty for a card.
        position: Number of a slice on its card.
        profile: Profile of a slice, such as `1g.10gb`.
        caps: Numbers of a slice's device nodes, `/dev/nvidia-caps/nvidia-capN`.
    """

    index: int
    uuid: str
    pci: str
    node: int | None = None
    cpus: tuple[int, ...] = ()
    memory_bytes: int = 0
    name: str = ""
    minor: int | None = None
    parent: str = ""
    position: int = 0
    profile: str = ""
    caps: tuple[int, ...] = ()

    @property
    def number(self) -> str:
        """Number in `workers.groups`: `0` for a card, `0:1` for a slice."""
        return f"{self.index}:{self.position}" if self.parent else str(self.index)

    @property
    def title(self) -> str:
        return f"GPU {self.number}"

    @property
    def description(self) -> str:
        """Title with the kind and the memory, as far as they are known."""
        facts = [each for each in (self.name, self.profile) if each]
        facts += [format_gib(self.memory_bytes)] if self.memory_bytes else []
        return f"{self.title} ({', '.join(facts)})" if facts else self.title

    def is_named(self, text: str) -> bool:
        """Return whether a name without `gpu:` is that of the device.

        A name is a number, a UUID or its beginning, or the PCI address of a card.
        """
        if text == self.number:
            return True
        if text.startswith(("GPU-", "MIG-")):
            return self.uuid.lower().startswith(text.lower())
        return not self.parent and pci_address(text) == self.pci


def pci_address(text: str) -> str:
    """Return a PCI address as in sysfs: at least four digits of the domain, lower case.

    NVML writes eight digits of the domain, and people often none. Other texts are unchanged.
    """
    match = re.fullmatch(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", text.lower())
    return f"{int(match[1] or '0', 16):04x}:{match[2]}" if match else text


def visible(gpus: Sequence[Gpu], variable: str | None) -> tuple[Gpu, ...]:
    """Return the devices that `CUDA_VISIBLE_DEVICES` leaves to this process; None: unset, so all.

    As in CUDA, the first entry without a device ends the list.
    """
    if variable is None:
        return tuple(gpus)
    found: list[Gpu] = []
    for text in filter(None, (each.strip() for each in variable.split(","))):
        matching = [gpu for gpu in gpus if gpu.is_named(text)]
        if not matching and text.isdecimal():
            # A number names a card; its slices are what it has.
            matching = [gpu for gpu in gpus if gpu.parent and gpu.index == int(text)]
        if not matching:
            break
        found += [gpu for gpu in matching if gpu not in found]
    return tuple(found)


def environment_of(gpu: Gpu | None) -> dict[str, str]:
    """Return the variables that make a device the only one of a process; None: no device."""
    if gpu is None:
        return {DEVICES_VARIABLE: ""}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", DEVICES_VARIABLE: gpu.uuid}


def format_gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.4g} GiB"
