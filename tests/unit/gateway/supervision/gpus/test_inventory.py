"""GPUs from files and NVML: numbers, nodes, cpus, slices, names, and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.gpus import (
    CONTAINER,
    DGX,
    H100_BYTES,
    MACHINES,
    MIG,
    NO_NODE,
    ONE,
    SLICE_BYTES,
    card_files,
    slice_uuid,
    uuid_of,
)

from iskander.gateway.supervision.gpus.device import Gpu, environment_of, pci_address, visible
from iskander.gateway.supervision.gpus.inventory import read_gpus, unusable_cards
from iskander.gateway.supervision.placement.topology import parse_cpu_list

SLICES = [slice_uuid(1, gi) for gi in (2, 3, 9)]


def test_card_has_the_facts_of_its_files_and_of_nvml(tmp_path: Path) -> None:
    (gpu,) = ONE.gpus(tmp_path)
    assert (gpu.number, gpu.uuid, gpu.pci) == ("0", uuid_of(0), "0000:00:06.0")
    assert (gpu.node, gpu.cpus, gpu.minor) == (0, tuple(range(16)), 0)
    assert gpu.memory_bytes == H100_BYTES
    assert gpu.description == "GPU 0 (NVIDIA H100 80GB HBM3, 79.65 GiB)"


def test_cards_are_numbered_by_address_and_have_the_node_of_their_socket(tmp_path: Path) -> None:
    gpus = DGX.gpus(tmp_path)
    assert [gpu.index for gpu in gpus] == list(range(8))
    assert [gpu.node for gpu in gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [gpu.uuid for gpu in gpus] == [uuid_of(minor) for minor in range(8)]
    assert gpus[4].cpus == parse_cpu_list("56-111,168-223")


def test_slices_replace_their_card_and_have_their_device_nodes(tmp_path: Path) -> None:
    card, *slices = MIG.gpus(tmp_path)
    assert (card.number, card.parent) == ("0", "")
    assert [each.uuid for each in slices] == SLICES
    assert [each.number for each in slices] == ["1:0", "1:1", "1:2"]
    assert [each.profile for each in slices] == ["3g.40gb", "2g.20gb", "1g.10gb"]
    assert [each.memory_bytes for each in slices] == [SLICE_BYTES[s.profile] for s in slices]
    assert [each.caps for each in slices] == [(21, 22), (30, 31), (84, 85)]
    assert {each.parent for each in slices} == {uuid_of(1)}


def test_slices_without_nvml_have_the_names_of_older_drivers(tmp_path: Path) -> None:
    slices = MIG.gpus(tmp_path, has_nvml=False)[1:]
    assert [each.uuid for each in slices] == [f"MIG-{uuid_of(1)}/{gi}/0" for gi in (2, 3, 9)]
    assert {each.memory_bytes for each in slices} == {0}


def test_card_in_mig_mode_without_a_slice_is_no_device(tmp_path: Path) -> None:
    cards = (msgspec.structs.replace(MIG.cards[1], slices=()),)
    assert read_gpus(tmp_path, cards) == ()


def test_node_of_minus_one_is_unknown(tmp_path: Path) -> None:
    (gpu,) = NO_NODE.gpus(tmp_path)
    assert gpu.node is None and gpu.cpus == tuple(range(24))


def test_nvml_alone_is_enough(tmp_path: Path) -> None:
    (gpu,) = read_gpus(tmp_path, ONE.cards)
    assert (gpu.uuid, gpu.pci, gpu.minor, gpu.node) == (uuid_of(0), "0000:00:06.0", 0, None)


@pytest.mark.parametrize("has_nvml", [True, False])
def test_machine_without_a_card_has_no_device(tmp_path: Path, has_nvml: bool) -> None:
    assert MACHINES["none"].gpus(tmp_path, has_nvml=has_nvml) == ()
    assert unusable_cards(tmp_path) == []


def test_container_has_the_cards_that_the_driver_shows_and_no_note_on_others(
    tmp_path: Path,
) -> None:
    for has_nvml in (True, False):
        (gpu,) = CONTAINER.gpus(tmp_path, has_nvml=has_nvml)
        assert (gpu.number, gpu.uuid, gpu.node) == ("0", uuid_of(4), 1)
        assert gpu.cpus == parse_cpu_list("56-111,168-223")
    assert unusable_cards(tmp_path) == []


def test_card_that_does_not_answer_is_no_device_and_keeps_its_number(tmp_path: Path) -> None:
    gpus = DGX._replace(cards=DGX.cards[1:3]).gpus(tmp_path)
    assert [(gpu.number, gpu.uuid) for gpu in gpus] == [("1", uuid_of(1)), ("2", uuid_of(2))]


def test_excluded_card_is_no_device_and_one_without_a_driver_is_reported(tmp_path: Path) -> None:
    files = card_files("0000:17:00.0", 0, 0, "0", excluded="Yes") | {
        "sys/bus/pci/devices/0000:31:00.0/vendor": "0x10de",
        "sys/bus/pci/devices/0000:31:00.0/class": "0x030200",
        "sys/bus/pci/devices/0000:31:00.0/uevent": "DRIVER=vfio-pci\nPCI_CLASS=30200",
        "sys/bus/pci/devices/0000:65:00.0/vendor": "0x10de",
        "sys/bus/pci/devices/0000:65:00.0/class": "0x030000",
        "sys/bus/pci/devices/0000:65:00.1/vendor": "0x10de",
        "sys/bus/pci/devices/0000:65:00.1/class": "0x040300",
    }
    assert ONE._replace(files=files).gpus(tmp_path, has_nvml=False) == ()
    assert unusable_cards(tmp_path) == [
        "0000:17:00.0 (excluded by its driver)",
        "0000:31:00.0 (vfio-pci)",
        "0000:65:00.0 (no driver)",
    ]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("0000:1b:00.0", "0000:1b:00.0"),
        ("1B:00.0", "0000:1b:00.0"),
        ("00010000:1B:00.0", "10000:1b:00.0"),
        ("0001:1B:00.0", "0001:1b:00.0"),
        ("3", "3"),
    ],
)
def test_pci_addresses_have_one_form(text: str, address: str) -> None:
    assert pci_address(text) == address


def test_device_is_named_by_number_uuid_or_address(tmp_path: Path) -> None:
    card, first, *_ = MIG.gpus(tmp_path)
    for text in ("0", uuid_of(0), "GPU-00000000", "17:00.0", "00000000:17:00.0"):
        assert card.is_named(text) and not first.is_named(text), text
    for text in ("1:0", SLICES[0], SLICES[0][:12]):
        assert first.is_named(text) and not card.is_named(text), text
    assert not first.is_named("65:00.0") and not first.is_named("1")


@pytest.mark.parametrize(
    ("variable", "numbers"),
    [
        (None, ["0", "1:0", "1:1", "1:2"]),
        ("", []),
        ("-1", []),
        ("0", ["0"]),
        ("1", ["1:0", "1:1", "1:2"]),
        (f"{SLICES[2]},0", ["1:2", "0"]),
        ("0,7,1", ["0"]),
        ("0, 0", ["0"]),
    ],
)
def test_cuda_visible_devices_limits_the_devices(
    tmp_path: Path, variable: str | None, numbers: list[str]
) -> None:
    assert [gpu.number for gpu in visible(MIG.gpus(tmp_path), variable)] == numbers


def test_environment_shows_one_device_or_none() -> None:
    assert environment_of(Gpu(3, "GPU-x", "0000:17:00.0")) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "GPU-x",
    }
    assert environment_of(None) == {"CUDA_VISIBLE_DEVICES": ""}
