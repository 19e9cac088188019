"""Plan of workers with GPUs: devices, cores and nodes near them, models, and budgets of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.gpus import DGX, MIG, NO_NODE, NONE, ONE, GpuMachine, slice_uuid, uuid_of

from iskander.cli.startup.check import render_plan
from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.gateway.supervision.gpus.placement import wants_gpus
from iskander.gateway.supervision.placement.plan import PlacementPlan, plan
from iskander.gateway.supervision.placement.topology import render_cpu_list
from iskander.gateway.supervision.worker import SlotPlan, Worker

GIB = 1 << 30
CUDA = {"execution_providers": ["cuda", "cpu"]}


def config(*models: dict[str, Any], groups: Any = "auto", **sections: Any) -> Config:
    named = [{"name": f"m{n}", "path": "p", "version": "1"} | m for n, m in enumerate(models)]
    workers = {"groups": groups, **sections.pop("workers", {})}
    return msgspec.convert({"models": named, "workers": workers, **sections}, Config)


def planned(machine: GpuMachine, folder: Path, *models: Any, **settings: Any) -> PlacementPlan:
    return plan(config(*models, **settings), machine.topology, machine.gpus(folder))


def refusal(machine: GpuMachine, folder: Path, *models: Any, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        planned(machine, folder, *models, **settings)
    return caught.value.message


def rows(slots: list[SlotPlan]) -> list[tuple[int, str, str, int | None]]:
    """Group, GPU, cpus and node of each slot."""
    return [
        (s.group, s.gpu.number if s.gpu else "", render_cpu_list(s.cpus), s.node) for s in slots
    ]


def test_one_card_has_all_cores_if_no_other_worker_needs_them(tmp_path: Path) -> None:
    placed = planned(ONE, tmp_path, CUDA)
    assert rows(placed.slots) == [(1, "0", "0-15", None)]
    assert placed.slots[0].environment["CUDA_VISIBLE_DEVICES"] == uuid_of(0)
    assert placed.notes == ()


def test_workers_without_a_gpu_keep_their_cores_and_see_no_gpu(tmp_path: Path) -> None:
    placed = planned(ONE, tmp_path, CUDA, {})
    assert rows(placed.slots) == [(0, "", "0-11", None), (1, "0", "12-15", None)]
    assert [s.environment.get("CUDA_VISIBLE_DEVICES") for s in placed.slots] == ["", uuid_of(0)]
    assert [slot.index for slot in placed.slots] == [0, 1]


def test_eight_cards_divide_the_cores_of_their_sockets(tmp_path: Path) -> None:
    placed = planned(DGX, tmp_path, CUDA)
    assert [slot.node for slot in placed.slots] == [0, 0, 0, 0, 1, 1, 1, 1]
    cpus = [render_cpu_list(slot.cpus) for slot in placed.slots]
    assert cpus[0] == "0-13,112-125" and cpus[7] == "98-111,210-223"
    assert {slot.cores for slot in placed.slots} == {14}
    used = [cpu for slot in placed.slots for cpu in slot.cpus]
    assert len(used) == len(set(used)) == 224
    assert len({slot.environment["CUDA_VISIBLE_DEVICES"] for slot in placed.slots}) == 8


def test_cards_take_a_few_cores_each_from_workers_of_their_node(tmp_path: Path) -> None:
    placed = planned(DGX, tmp_path, CUDA, {}, server={"cores": "auto"})
    shared, gpus = placed.slots[:2], placed.slots[2:]
    assert placed.gateway == (0, 112)
    assert [(slot.node, slot.cores) for slot in shared] == [(0, 39), (1, 40)]
    assert [(slot.node, slot.cores) for slot in gpus] == [(0, 4)] * 4 + [(1, 4)] * 4
    used = [cpu for slot in placed.slots for cpu in slot.cpus]
    assert len(used) == len(set(used)) == 222


def test_listed_cpus_are_not_those_of_a_card(tmp_path: Path) -> None:
    placed = planned(ONE, tmp_path, CUDA, {}, groups=["0-7", "gpu:0"])
    assert rows(placed.slots) == [(0, "", "0-7", None), (1, "0", "8-15", None)]


def test_card_without_free_cores_near_it_has_others_with_a_note(tmp_path: Path) -> None:
    placed = planned(DGX, tmp_path, CUDA, {}, groups=["0-55,112-167", "gpu:0"])
    (gpu,) = placed.slots[1:]
    assert gpu.node == 1 and not set(gpu.cpus) & set(placed.slots[0].cpus)
    assert any("GPU 0: no free cpu is near it" in note for note in placed.notes)


def test_too_few_cores_are_shared_with_a_note(tmp_path: Path) -> None:
    topology = ONE.topology.only([0])
    placed = plan(config(CUDA, {}), topology, ONE.gpus(tmp_path))
    assert rows(placed.slots) == [(0, "", "0", None), (1, "0", "0", None)]
    assert any("too few cores are near" in note for note in placed.notes)


def test_card_of_no_node_has_any_cores_with_a_note(tmp_path: Path) -> None:
    placed = planned(NO_NODE, tmp_path, CUDA, {})
    (gpu,) = placed.slots[2:]
    assert (render_cpu_list(gpu.cpus), gpu.node) == ("20-23", 1)
    assert any("GPU 0: the firmware reports no NUMA node" in note for note in placed.notes)


def test_each_slice_has_a_worker_that_sees_it_alone(tmp_path: Path) -> None:
    placed = planned(MIG, tmp_path, CUDA | {"gpu_memory_bytes": GIB})
    assert [slot.gpu and slot.gpu.number for slot in placed.slots] == ["0", "1:0", "1:1", "1:2"]
    seen = [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in placed.slots]
    assert seen == [uuid_of(0), *(slice_uuid(1, gi) for gi in (2, 3, 9))]
    assert len({slot.cpus for slot in placed.slots}) == 4


@pytest.mark.parametrize(
    ("groups", "numbers"),
    [
        (["gpu:0"], ["0"]),
        (["gpu:1:2", "gpu:0"], ["1:2", "0"]),
        ([f"gpu:{uuid_of(0)}"], ["0"]),
        (["gpu:17:00.0"], ["0"]),
        ([f"gpu:{slice_uuid(1, 3)}"], ["1:1"]),
        (["gpu:auto"], ["0", "1:0", "1:1", "1:2"]),
    ],
)
def test_devices_are_chosen_by_number_uuid_or_address(
    tmp_path: Path, groups: list[str], numbers: list[str]
) -> None:
    slots = planned(MIG, tmp_path, CUDA | {"gpu_memory_bytes": GIB}, groups=groups).slots
    assert [slot.gpu and slot.gpu.number for slot in slots] == numbers


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (["gpu:1"], "the card is divided into slices: name them, gpu:1:0, gpu:1:1, gpu:1:2"),
        (["gpu:7"], "there is no such GPU; there are gpu:0"),
        (["gpu:MIG-"], "names several GPUs"),
        (["gpu:0", "gpu:17:00.0"], "GPU 0 is in another group too"),
        (["gpu:0", "gpu:auto"], "GPU 0 is in another group too"),
        (["0-3"], 'needs a GPU: workers.groups lists none; add "gpu:0", "gpu:1:0"'),
        (["auto", "0-3", "gpu:0"], "`auto` takes the cores of all other core groups"),
    ],
)
def test_wrong_groups_are_rejected(tmp_path: Path, groups: list[str], words: str) -> None:
    assert words in refusal(MIG, tmp_path, CUDA, groups=groups)


def test_core_groups_of_the_topology_and_a_listed_card(tmp_path: Path) -> None:
    placed = planned(DGX, tmp_path, CUDA, {}, groups=["auto", "gpu:5"])
    assert [(slot.node, slot.gpu is not None) for slot in placed.slots] == [
        (0, False), (1, False), (1, True),
    ]  # fmt: skip


def test_model_that_needs_a_gpu_is_rejected_without_one(tmp_path: Path) -> None:
    words = "needs a GPU: this machine has no GPU that this process may use, and the CPU is not"
    assert words in refusal(NONE, tmp_path, CUDA)
    placed = planned(NONE, tmp_path, CUDA | {"placement": "any"})
    assert rows(placed.slots) == [(0, "", "0-3", None)]
    assert placed.slots[0].environment == {}


def test_model_without_a_gpu_is_rejected_if_only_gpus_are_listed(tmp_path: Path) -> None:
    assert "`m1` needs a core group" in refusal(ONE, tmp_path, CUDA, {}, groups=["gpu:0"])


def test_gpus_are_read_only_if_a_model_or_a_group_wants_one() -> None:
    assert not wants_gpus(config({}))
    assert not wants_gpus(config({}, groups=["0-3"]))
    assert wants_gpus(config({}, groups=["0-3", "gpu:0"]))
    assert wants_gpus(config(CUDA))
    assert wants_gpus(config({"placement": "any"}))


def test_models_with_their_own_workers_have_them_on_cards_with_space(tmp_path: Path) -> None:
    own = CUDA | {"workers": 2, "gpu_memory_bytes": 30 * GIB}
    big = CUDA | {"workers": 1, "gpu_memory_bytes": 50 * GIB, "backend": "torch"}
    small = big | {"gpu_memory_bytes": 40 * GIB}
    groups = ["gpu:0", "gpu:4", "gpu:6"]
    placed = planned(DGX, tmp_path, own, big, small, groups=groups)
    assert [(slot.gpu and slot.gpu.number, slot.pool) for slot in placed.slots] == [
        ("0", "m0/1"), ("4", "m0/1"), ("6", "m1/1"), ("0", "m2/1"),
    ]  # fmt: skip
    budgets = [slot.gpu_budget_bytes for slot in placed.slots]
    assert budgets[0] == budgets[3] == DGX.cards[0].memory_bytes - 2 * GIB
    assert budgets[1] == DGX.cards[4].memory_bytes - GIB


def test_space_counts_more_than_an_idle_card(tmp_path: Path) -> None:
    small = CUDA | {"workers": 1, "gpu_memory_bytes": GIB}
    placed = planned(MIG, tmp_path, small, small | {"gpu_memory_bytes": 50 * GIB})
    assert [slot.gpu and slot.gpu.number for slot in placed.slots] == ["0", "0"]


def test_several_models_share_a_card_by_their_budgets(tmp_path: Path) -> None:
    models = [CUDA | {"gpu_memory_bytes": 26 * GIB} for _ in range(3)]
    (slot,) = planned(ONE, tmp_path, *models[:2]).slots
    assert slot.gpu_budget_bytes == ONE.cards[0].memory_bytes - GIB
    text = refusal(ONE, tmp_path, *models[:2], CUDA | {"gpu_memory_bytes": 27 * GIB})
    assert text.startswith("GPU 0 (NVIDIA H100 80GB HBM3, 79.65 GiB): 79 GiB needed (`m0/1` 26 GiB")
    assert (
        "78.65 GiB available; models may use the device's memory minus workers.gpu_reserve_bytes"
        in text
    )


def test_reserve_of_each_worker_reduces_the_budget(tmp_path: Path) -> None:
    model = CUDA | {"gpu_memory_bytes": 79 * GIB}
    assert "79 GiB needed" in refusal(ONE, tmp_path, model)
    (slot,) = planned(ONE, tmp_path, model, workers={"gpu_reserve_bytes": 0}).slots
    assert slot.gpu_budget_bytes == ONE.cards[0].memory_bytes


def test_model_too_large_for_a_slice_is_rejected(tmp_path: Path) -> None:
    text = refusal(MIG, tmp_path, CUDA | {"gpu_memory_bytes": 9 * GIB})
    assert text.startswith("GPU 1:2 (NVIDIA H100 80GB HBM3, 1g.10gb, 9.5 GiB): 9 GiB needed")
    assert planned(MIG, tmp_path, CUDA | {"gpu_memory_bytes": 8 * GIB}).slots


def test_model_without_a_budget_does_not_share_a_card(tmp_path: Path) -> None:
    assert planned(ONE, tmp_path, CUDA).slots
    text = refusal(ONE, tmp_path, CUDA | {"gpu_memory_bytes": GIB}, CUDA)
    assert "`m1/1` has no gpu_memory_bytes, and shares the device with `m0/1`" in text


def test_limit_of_the_provider_is_a_budget(tmp_path: Path) -> None:
    limited = CUDA | {"provider_options": {"cuda": {"gpu_mem_limit": 78 * GIB}}}
    assert planned(ONE, tmp_path, limited).slots
    text = refusal(ONE, tmp_path, limited, CUDA | {"gpu_memory_bytes": GIB})
    assert "79 GiB needed (`m0/1` 78 GiB, `m1/1` 1 GiB)" in text


def test_budgets_are_not_checked_if_the_memory_is_unknown(tmp_path: Path) -> None:
    gpus = ONE.gpus(tmp_path, has_nvml=False)
    (slot,) = plan(config(CUDA | {"gpu_memory_bytes": 500 * GIB}), ONE.topology, gpus).slots
    assert slot.gpu_budget_bytes == 0


def test_quorum_counts_the_workers_with_a_gpu(tmp_path: Path) -> None:
    model = CUDA | {"gpu_memory_bytes": GIB}
    text = refusal(ONE, tmp_path, model, workers={"quorum": 2})
    assert text == "workers.quorum = 2 can never be met: the plan has 1 GPUs"
    assert planned(MIG, tmp_path, model, workers={"quorum": 4}).slots


def test_repository_has_workers_with_and_without_a_gpu(tmp_path: Path) -> None:
    groups = ["0-7", "gpu:0"]
    placed = plan(
        msgspec.convert({"workers": {"groups": groups}, "repository": {"path": "p"}}, Config),
        ONE.topology,
        ONE.gpus(tmp_path),
    )
    assert rows(placed.slots) == [(0, "", "0-7", None), (1, "0", "8-15", None)]


def test_compute_threads_are_checked_for_the_workers_that_load_the_model(tmp_path: Path) -> None:
    groups = ["0-1", "gpu:0"]
    assert planned(ONE, tmp_path, CUDA | {"intra_threads": 4}, {}, groups=groups).slots
    text = refusal(ONE, tmp_path, CUDA, {"intra_threads": 4}, groups=groups)
    assert "worker 0 has 2 cpus" in text


def test_check_prints_the_devices(tmp_path: Path) -> None:
    lines = render_plan(planned(MIG, tmp_path, CUDA | {"gpu_memory_bytes": GIB}, {}))
    assert lines[0].split() == ["process", "group", "cpus", "cores", "node", "L3", "GPU"]
    assert [line.split()[-1] for line in lines[1:7]] == ["-", "-", "0", "1:0", "1:1", "1:2"]
    head = next(line for line in lines if line.startswith("GPU "))
    table = lines[lines.index(head) + 1 :]
    assert "0000:65:00.0" in table[3] and "1g.10gb" in table[3]
    assert table[3].endswith("9.5 GiB    8.5 GiB") and slice_uuid(1, 9) in table[3]
    without = render_plan(planned(NONE, tmp_path / "none", {}))
    assert without[0].split()[-1] == "L3" and len(without) == 3


def test_worker_has_the_kind_and_the_environment_of_its_slot(tmp_path: Path) -> None:
    placed = planned(ONE, tmp_path, CUDA, {})
    assert [Worker(slot).device for slot in placed.slots] == ["cpu", "gpu"]
