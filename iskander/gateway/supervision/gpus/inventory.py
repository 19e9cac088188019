"""GPUs of the machine: addresses, NUMA nodes and near cpus from files, the rest from NVML.

Without the files (a sandbox has no sysfs) NVML alone is used; without NVML, memory sizes and the
UUIDs of slices are unknown, and slices have the names of older drivers.

Source: Documentation/ABI/testing/sysfs-bus-pci of the Linux kernel; NVIDIA driver README, "The
/proc/driver/nvidia interface"; NVIDIA Multi-Instance GPU User Guide, "Device Nodes and
Capabilities".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from iskander.gateway.supervision.gpus.device import Gpu, pci_address
from iskander.gateway.supervision.gpus.readings import NvmlCard
from iskander.gateway.supervision.placement.topology import parse_cpu_list

NVIDIA = "0x10de"
DRIVER = "nvidia"
_CLASSES = ("0x0300", "0x0302")
"""Display and 3D controllers; a card also has audio and USB functions."""


class _Slice(NamedTuple):
    """Numbers of the GPU instance and compute instance, and of the device nodes of both."""

    instance: tuple[int, int]
    caps: tuple[int, ...]


def read_gpus(root: Path = Path("/"), cards: Sequence[NvmlCard] = ()) -> tuple[Gpu, ...]:
    """Return the devices that CUDA can use, the slices of a card in place of the card.

    Args:
        root: Has `proc` and `sys`.
        cards: The cards of NVML; empty without NVML.
    """
    by_address = {pci_address(card.pci): card for card in cards}
    found: list[Gpu] = []
    # A card that does not answer NVML keeps its number, so that the others keep theirs.
    for index, address in enumerate(sorted({*by_address, *_driven(root)})):
        nvml = by_address.get(address)
        if by_address and nvml is None:
            continue
        card = _card(root, index, address, nvml)
        slices = list(_slices(root, card, nvml))
        if slices or not (nvml is not None and nvml.is_mig):
            found += slices or [card]
    return tuple(found)


def unusable_cards(root: Path = Path("/")) -> list[str]:
    """Return the NVIDIA cards that no process can use, with the reason.

    A card of the driver that it does not show here belongs to other containers.
    """
    found = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        is_card = _read(folder / "class").startswith(_CLASSES)
        if not is_card or _read(folder / "vendor") != NVIDIA:
            continue
        driver = _pairs(_read(folder / "uevent"), "=").get("DRIVER", "")
        if driver != DRIVER:
            found.append(f"{folder.name} ({driver or 'no driver'})")
        elif _is_excluded(root / "proc/driver/nvidia/gpus" / folder.name):
            found.append(f"{folder.name} (excluded by its driver)")
    return found


def _driven(root: Path) -> list[str]:
    """Return the addresses of the driver's cards, without those that it excludes."""
    folders = sorted((root / "proc/driver/nvidia/gpus").glob("*"))
    return [each.name for each in folders if not _is_excluded(each)]


def _is_excluded(folder: Path) -> bool:
    return _fields(folder).get("GPU Excluded") == "Yes"


def _card(root: Path, index: int, address: str, nvml: NvmlCard | None) -> Gpu:
    fields = _fields(root / "proc/driver/nvidia/gpus" / address)
    folder = root / "sys/bus/pci/devices" / address
    node = _number(_read(folder / "numa_node"))
    minor = _number(fields.get("Device Minor", ""))
    gpu = Gpu(
        index=index,
        uuid=fields.get("GPU UUID", ""),
        pci=address,
        # -1: the firmware assigns the card to no node.
        node=node if node is not None and node >= 0 else None,
        cpus=_cpus(folder),
        name=fields.get("Model", ""),
        minor=minor,
    )
    if nvml is None:
        return gpu
    return Gpu(
        index=index,
        uuid=nvml.uuid,
        pci=address,
        node=gpu.node,
        cpus=gpu.cpus or nvml.cpus,
        memory_bytes=nvml.memory_bytes,
        name=nvml.name,
        minor=minor if minor is not None else nvml.minor,
    )


def _slices(root: Path, card: Gpu, nvml: NvmlCard | None) -> Iterator[Gpu]:
    """Yield the MIG slices of a card, in the order of their instances."""
    files = {each.instance: each for each in _instances(root, card.minor)}
    known = {each.instance: each for each in nvml.slices} if nvml is not None else {}
    for position, instance in enumerate(sorted(known if nvml is not None else files)):
        facts = known.get(instance)
        # Drivers before 470 know slices by the numbers of their instances only.
        older = f"MIG-{card.uuid}/{instance[0]}/{instance[1]}"
        yield Gpu(
            index=card.index,
            uuid=facts.uuid if facts is not None else older,
            pci=card.pci,
            node=card.node,
            cpus=card.cpus,
            memory_bytes=facts.memory_bytes if facts is not None else 0,
            name=card.name,
            minor=card.minor,
            parent=card.uuid,
            position=position,
            profile=facts.profile if facts is not None else "",
            caps=files[instance].caps if instance in files else (),
        )


def _instances(root: Path, minor: int | None) -> Iterator[_Slice]:
    folder = root / f"proc/driver/nvidia/capabilities/gpu{minor}/mig"
    for path in folder.glob("gi*/ci*"):
        match = re.fullmatch(r"gi(\d+)/ci(\d+)", f"{path.parent.name}/{path.name}")
        if match:
            nodes = (_capability(path.parent), _capability(path))
            caps = tuple(each for each in nodes if each is not None)
            yield _Slice((int(match[1]), int(match[2])), caps)


def _capability(folder: Path) -> int | None:
    """Return the number of the device node that grants access to an instance."""
    return _number(_pairs(_read(folder / "access")).get("DeviceFileMinor", ""))


def _cpus(folder: Path) -> tuple[int, ...]:
    try:
        return parse_cpu_list(_read(folder / "local_cpulist"))
    except ValueError:
        return ()


def _fields(folder: Path) -> dict[str, str]:
    return _pairs(_read(folder / "information"))


def _pairs(text: str, separator: str = ":") -> dict[str, str]:
    """Parse lines of a name, a separator and a value."""
    pairs = (line.partition(separator) for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
