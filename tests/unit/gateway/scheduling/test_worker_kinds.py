"""Order of workers with and without a GPU that serve the same model."""

from __future__ import annotations

import msgspec
import pytest
from support.lanes import model_of

from iskander.config.models import LaneConfig
from iskander.gateway.scheduling.dispatch import _available_workers
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.worker_slot import WorkerSlot


def order(devices: tuple[str, ...], *workers: tuple[str, int, int]) -> list[int]:
    """Indexes of workers with a kind, credits and the end of their work, in the order of use."""
    lane = Lane(msgspec.structs.replace(model_of(), devices=devices), LaneConfig())
    for index, (device, credits, busy_until_ns) in enumerate(workers):
        slot = WorkerSlot(index, device=device)
        slot.credits, slot.busy_until_ns = credits, busy_until_ns
        lane.workers[index + 1] = slot
    return [slot.index for slot in _available_workers(lane, set())]


@pytest.mark.parametrize(
    ("workers", "indexes"),
    [
        ([("cpu", 2, 0), ("gpu", 2, 5), ("cpu", 2, 1)], [1, 0, 2]),
        ([("cpu", 2, 9), ("gpu", 1, 5), ("gpu", 1, 3)], [0, 2, 1]),
        ([("cpu", 1, 0), ("gpu", 0, 0)], [0]),
    ],
)
def test_idle_worker_with_a_gpu_is_first(
    workers: list[tuple[str, int, int]], indexes: list[int]
) -> None:
    assert order(("cpu", "gpu"), *workers) == indexes


def test_workers_of_one_kind_are_ordered_by_their_work() -> None:
    assert order(("gpu",), ("gpu", 2, 7), ("gpu", 2, 1), ("gpu", 1, 0)) == [1, 0, 2]
