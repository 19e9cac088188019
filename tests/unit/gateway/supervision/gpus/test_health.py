"""Loss and return of a device: slots, requests, reasons, and the state that metrics show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.gpus import MIG
from support.lanes import model_of

from iskander.config.models import LaneConfig
from iskander.errors import IskanderError, NotReady
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.supervision.gpus import health as health_module
from iskander.gateway.supervision.gpus.device import Gpu
from iskander.gateway.supervision.gpus.health import GpuHealth
from iskander.gateway.supervision.gpus.readings import GpuReading, throttles_of
from iskander.gateway.supervision.lifecycle import Event, State, step
from iskander.gateway.supervision.readiness import reason_of
from iskander.gateway.supervision.supervisor import _is_running
from iskander.gateway.supervision.worker import SlotPlan, Worker

LOST = "it is lost (GPU is lost)"


class Harness:
    """A card with two workers, one with a slice, and one without a GPU; three models."""

    def __init__(self, gpus: tuple[Gpu, ...]) -> None:
        card, first = gpus[:2]
        self.card, self.first = card, first
        plans = [
            SlotPlan(0, 0, (0,), None),
            SlotPlan(1, 1, (1,), None, gpu=card),
            SlotPlan(2, 1, (1,), None, gpu=card, pool="own/1"),
            SlotPlan(3, 2, (2,), None, gpu=first),
        ]
        self.workers = [Worker(plan) for plan in plans]
        self.lanes: dict[int, Lane] = {}
        for key, (name, devices) in enumerate(
            {"any": ("cpu", "gpu"), "gpu": ("gpu",), "own": ("gpu",)}.items()
        ):
            pool = "own/1" if name == "own" else ""
            spec = msgspec.structs.replace(model_of(key), name=name, devices=devices, pool=pool)
            self.lanes[key] = Lane(spec, LaneConfig())
        for worker in self.workers:
            worker.state, worker.incarnation = State.READY, worker.index + 1
            for lane in self.lanes.values():
                if lane.is_for(worker):
                    lane.workers[worker.incarnation] = worker
        self.rejected: list[tuple[str, IskanderError]] = []
        self.events: list[tuple[int, Event]] = []
        self.health = GpuHealth(self.workers, self.lanes, self._on_event, self._on_reject)

    def read(self, gpu: Gpu, **fields: Any) -> None:
        self.health.on_readings([GpuReading(gpu.uuid, **fields)])

    @property
    def states(self) -> list[State]:
        return [worker.state for worker in self.workers]

    def _on_event(self, worker: Worker, event: Event) -> None:
        self.events.append((worker.index, event))
        worker.state, _ = step(worker.state, event)
        if worker.state is not State.READY:
            for lane in self.lanes.values():
                lane.workers.pop(worker.incarnation, None)

    def _on_reject(self, lane: Lane, error: IskanderError) -> None:
        self.rejected.append((lane.model.name, error))


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(MIG.gpus(tmp_path))


def test_good_readings_change_nothing(harness: Harness) -> None:
    harness.read(harness.card, utilization=0.5, throttles=("power cap",))
    harness.read(harness.card, error="Unknown Error")
    assert harness.events == [] and harness.rejected == []


def test_lost_card_takes_all_its_workers_out_of_service_once(harness: Harness) -> None:
    for _ in range(2):
        harness.read(harness.card, lost=LOST)
    out = State.OUT_OF_SERVICE
    assert harness.states == [State.READY, out, out, State.READY]
    assert harness.events == [(1, Event.DEVICE_LOST), (2, Event.DEVICE_LOST)]
    reason = f"gpu lost: {harness.card.description}: {LOST}"
    assert harness.workers[1].device_error == reason


def test_models_with_other_workers_continue_and_others_are_rejected_with_the_reason(
    harness: Harness,
) -> None:
    harness.read(harness.card, lost=LOST)
    assert [name for name, _ in harness.rejected] == ["own"]
    error = harness.rejected[0][1]
    assert isinstance(error, NotReady) and error.retryable and error.retry_after_ms
    assert "gpu lost: GPU 0" in str(error) and LOST in str(error)
    assert list(harness.lanes[1].workers) == [4]
    with pytest.raises(NotReady, match="gpu lost: GPU 0"):
        harness.lanes[2].require_worker()
    assert f"worker 2: {harness.workers[2].device_error}" in reason_of(
        harness.lanes[2], harness.workers
    )
    harness.read(harness.first, lost=LOST)
    assert [name for name, _ in harness.rejected] == ["own", "gpu"]
    assert not harness.lanes[0].absence and list(harness.lanes[0].workers) == [1]


def test_returned_card_starts_its_workers(harness: Harness) -> None:
    harness.read(harness.card, lost=LOST)
    harness.read(harness.card, error="Unknown Error")
    harness.read(harness.card, age_s=60.0)
    assert harness.workers[1].state is State.OUT_OF_SERVICE
    harness.read(harness.card, utilization=0.0)
    assert harness.states == [State.READY, State.ABSENT, State.ABSENT, State.READY]
    assert harness.workers[1].device_error == "" and harness.lanes[2].absence == ""


@pytest.mark.parametrize(
    ("fields", "state", "reason"),
    [
        ({}, "ok", ""),
        ({"throttles": ("power cap", "hardware thermal")}, "throttled",
         "power cap, hardware thermal"),
        ({"error": "Unknown Error"}, "error", "Unknown Error"),
        ({"lost": LOST, "error": "GPU is lost"}, "lost", LOST),
        ({"age_s": 11.0}, "no answer", ""),
        ({"age_s": 11.0, "lost": LOST}, "lost", LOST),
    ],
)  # fmt: skip
def test_state_of_a_reading(
    harness: Harness, fields: dict[str, Any], state: str, reason: str
) -> None:
    harness.read(harness.card, **fields)
    found = harness.health.states[0]
    assert (found.state, found.reason) == (state, reason)
    assert found.state in health_module.STATES


def test_silence_of_nvml_is_no_loss(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.read(harness.card)
    found = harness.health.states[0]
    now = health_module.now_ns()
    monkeypatch.setattr(health_module, "now_ns", lambda: now + 3600 * health_module.NS_PER_S)
    assert found.state == "no answer"
    assert harness.events == []
    assert harness.health.states[1].state == "unknown"


def test_xid_errors_are_counted_over_restarts_of_the_monitor(harness: Harness) -> None:
    state = harness.health.states[0]
    uuid = harness.card.uuid
    assert state.update(GpuReading(uuid, xids={"13": 2}), 1) == ["13"]
    assert state.update(GpuReading(uuid, xids={"13": 2}), 1) == []
    assert state.update(GpuReading(uuid, xids={"13": 1, "79": 1}), 2) == ["13", "79"]
    assert state.xids == {"13": 3, "79": 1}


def test_reasons_for_lower_clocks_are_those_that_slow_a_busy_card() -> None:
    assert throttles_of(0x01 | 0x02 | 0x10) == ()
    assert throttles_of(0x04 | 0x48) == ("power cap", "hardware slowdown", "hardware thermal")


def test_shutdown_does_not_wait_for_a_process_of_a_lost_card(harness: Harness) -> None:
    """A process in a call of the driver may not end, even when it is killed."""
    harness.read(harness.card, lost=LOST)
    killed, other = harness.workers[1], harness.workers[3]
    for worker in (killed, other):
        worker.child = object()  # type: ignore[assignment]
        worker.state = State.STOPPED
    assert not _is_running(killed) and _is_running(other)
