"""Health of the GPUs of a plan: readings, and loss and return of their workers.

A device is lost if NVML says so, or after the Xid error of a card that has fallen off the bus. The
silence of NVML alone is no loss: workers that still compute continue, and the watchdog detects
those that do not.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from iskander.errors import IskanderError, NotReady
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.foundation.logs import gpus as log
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.supervision.gpus import nvml
from iskander.gateway.supervision.gpus.device import Gpu
from iskander.gateway.supervision.gpus.monitor_process import SILENT_S, MonitorProcess
from iskander.gateway.supervision.gpus.readings import GpuReading
from iskander.gateway.supervision.lifecycle import Event
from iskander.gateway.supervision.worker import Worker

RETRY_LOST_MS = 1000
STATES = ("ok", "throttled", "error", "no answer", "lost", "unknown")


class GpuState:
    """A device and its last reading.

    Attributes:
        reading: Last reading of the device; None before the first.
        xids: Xid errors by code since the start of the gateway.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.reading: GpuReading | None = None
        self.xids: Counter[str] = Counter()
        self._read_ns = 0
        self._start = 0
        self._seen: Mapping[str, int] = {}

    def update(self, reading: GpuReading, start: int) -> list[str]:
        """Store a reading of the monitor's process number `start`; return its new Xid errors."""
        if start != self._start:
            self._start, self._seen = start, {}
        new = [code for code, n in reading.xids.items() if n > self._seen.get(code, 0)]
        for code in new:
            self.xids[code] += reading.xids[code] - self._seen.get(code, 0)
        self._seen = reading.xids
        self.reading, self._read_ns = reading, now_ns()
        return new

    @property
    def age_s(self) -> float | None:
        """Time since NVML answered for the device; None if it never has."""
        if self.reading is None:
            return None
        return self.reading.age_s + (now_ns() - self._read_ns) / NS_PER_S

    @property
    def state(self) -> str:
        """State of the device, one of `STATES`."""
        reading, age_s = self.reading, self.age_s
        if reading is None or age_s is None:
            return "unknown"
        if reading.lost:
            return "lost"
        if age_s > SILENT_S:
            return "no answer"
        if reading.error:
            return "error"
        return "throttled" if reading.throttles else "ok"

    @property
    def reason(self) -> str:
        """Details of the state."""
        reading = self.reading
        return (
            "" if reading is None else reading.lost or reading.error or ", ".join(reading.throttles)
        )


class GpuHealth:
    """Takes workers of lost devices out of service, and returns them.

    Attributes:
        states: State of each device of the plan.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        lanes: Mapping[int, Lane],
        on_event: Callable[[Worker, Event], None],
        reject_queued: Callable[[Lane, IskanderError], None],
    ) -> None:
        self._workers = workers
        self._lanes = lanes
        self._on_event = on_event
        self._reject_queued = reject_queued
        gpus = dict.fromkeys(w.plan.gpu for w in workers if w.plan.gpu is not None)
        self.states = [GpuState(gpu) for gpu in gpus if gpu.uuid]
        self._process: MonitorProcess | None = None

    def start(self) -> None:
        """Start to read NVML, if there are devices and its binding is installed."""
        if self.states and nvml.is_installed():
            uuids = [state.gpu.uuid for state in self.states]
            self._process = MonitorProcess(uuids, self.on_readings)
            self._process.start()

    async def stop(self) -> None:
        """Stop to read NVML."""
        if self._process is not None:
            await self._process.stop()
            self._process = None

    def on_readings(self, readings: Iterable[GpuReading]) -> None:
        """Store readings, and apply the loss or return of each device to its workers."""
        by_uuid = {reading.uuid: reading for reading in readings}
        start = self._process.starts if self._process is not None else 0
        for state in self.states:
            reading = by_uuid.get(state.gpu.uuid)
            if reading is None:
                continue
            for code in state.update(reading, start):
                log.gpu_xid(
                    uuid=state.gpu.uuid, gpu=state.gpu.title, xid=code, count=state.xids[code]
                )
            if reading.lost:
                self._lose(state)
            elif state.state in ("ok", "throttled"):
                self._return(state)

    def _lose(self, state: GpuState) -> None:
        reason = f"gpu lost: {state.gpu.description}: {state.reason}"
        for worker in self._workers_of(state.gpu):
            if worker.device_error:
                continue
            worker.device_error = reason
            worker.is_replacement_pending = worker.is_recycling = False
            log.gpu_lost(worker=worker.index, gpu=state.gpu.description, reason=state.reason)
            self._on_event(worker, Event.DEVICE_LOST)
        self._update_lanes()

    def _return(self, state: GpuState) -> None:
        for worker in self._workers_of(state.gpu):
            if worker.device_error:
                log.gpu_returned(worker=worker.index, gpu=state.gpu.description)
                self._on_event(worker, Event.DEVICE_RETURNED)
                worker.device_error = ""
        self._update_lanes()

    def _workers_of(self, gpu: Gpu) -> list[Worker]:
        return [w for w in self._workers if w.plan.gpu is not None and w.plan.gpu.uuid == gpu.uuid]

    def _update_lanes(self) -> None:
        """Reject the requests of models that no worker can run."""
        for lane in self._lanes.values():
            pool = lane.pool_workers(self._workers)
            errors = [worker.device_error for worker in pool]
            was_absent = bool(lane.absence)
            lane.absence = errors[0] if errors and all(errors) else ""
            if lane.absence and not was_absent:
                text = f"model `{lane.title}` has no ready worker: {lane.absence}"
                self._reject_queued(lane, NotReady(text, retry_after_ms=RETRY_LOST_MS))
