"""A sampler with a real observer process, and finished requests without workers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from iskander.config.models import ModelConfig
from iskander.config.observation import ModelLogConfig, ObservationConfig, PredictionLogConfig
from iskander.config.schema import Config, LimitsConfig
from iskander.foundation.clock import now_ns
from iskander.gateway.observation.process import ObserverProcess
from iskander.gateway.scheduling.entry import Entry
from iskander.gateway.scheduling.input_arena import InputArena
from iskander.gateway.scheduling.request import Request
from iskander.gateway.scheduling.worker_slot import BatchPart, InFlightBatch
from iskander.interprocess.memory.arena import Arena
from iskander.interprocess.memory.segment import Segment
from support.lanes import lane_of, request_of
from support.observed import make_worker

ARENA_BYTES = 1 << 20
WITHIN_S = 30.0
MODEL = ModelConfig(name="m0", path="p", version="1", prediction_log=ModelLogConfig(share=1.0))


class Observing:
    """A gateway's arenas and sampler. The model is `y = x`, so that every row proves itself."""

    def __init__(self, folder: Path, **observation: Any) -> None:
        self.log = folder / "log"
        self.config = Config(
            observation=ObservationConfig(**observation),
            prediction_log=PredictionLogConfig(path=str(self.log), file_s=0.5),
            models=(MODEL,),
        )
        self.input_arena = InputArena(ARENA_BYTES)
        self.entry = Entry(self.input_arena, lambda request, victims: None, LimitsConfig())
        self.lane = lane_of(rows_max=1 << 16)
        self.worker = make_worker()
        self.worker.output = Segment.create("iskander-output-test", ARENA_BYTES)
        self.worker.output_arena = Arena(ARENA_BYTES)
        self.lane.workers[self.worker.incarnation] = self.worker
        self.process = ObserverProcess(self.config, self.input_arena, lambda name, version: MODEL)
        self.sampler = self.process.sampler

    @property
    def counts(self) -> dict[str, int]:
        return {name: count for name, count in self.sampler.counts.items() if count}

    @property
    def pid(self) -> int:
        pid: int = self.process.stats()["pid"]
        return pid

    def admit(self, value: int, rows: int = 8) -> Request:
        """A request in the input arena, of rows with one value."""
        request = request_of(self.lane, rows, arrived_ns=now_ns())
        request.expires_ns = now_ns() + 60_000_000_000
        request.tensors = [memoryview(np.full(rows, value, np.int64)).cast("B")]
        assert self.entry.enter(request)
        request.todo = []
        return request

    def finish(self, request: Request, value: int, cut: tuple[int, ...] = ()) -> None:
        """Results of a request in one or more batches, as the dispatcher handles them."""
        assert self.worker.output is not None
        first = 0
        sizes = cut or (request.rows,)
        for rows in sizes:
            lease = self.worker.output_arena.lease(rows * 8)
            assert lease is not None
            body = np.full(rows, value, np.int64).tobytes()
            self.worker.output.view[lease.offset : lease.offset + len(body)] = body
            batch = InFlightBatch(self.lane, [], lease, rows, 0, 0)
            part = BatchPart(request, first, rows, lease.offset)
            first += rows
            results = b"" if first == request.rows else None
            self.sampler.on_results(self.worker, batch, part, results)
            if not self.sampler.holds_output(lease):
                self.worker.output_arena.give_back(lease)
        if request.lease is not None:
            self.input_arena.give_back(request)
        request.is_over = True

    def overwrite(self, value: int) -> None:
        """Write other values into all free memory of both arenas."""
        assert self.worker.output is not None
        pattern = np.full(ARENA_BYTES // 8, value, np.int64).tobytes()
        for arena, view in (
            (self.input_arena.arena, self.input_arena.segment.view),
            (self.worker.output_arena, self.worker.output.view),
        ):
            leases = []
            while (lease := arena.lease(4096)) is not None:
                view[lease.offset : lease.offset + 4096] = pattern[:4096]
                leases.append(lease)
            for lease in leases:
                arena.give_back(lease)

    @property
    def leased_bytes(self) -> int:
        return self.input_arena.arena.leased_bytes + self.worker.output_arena.leased_bytes

    async def until(self, predicate: Any, what: str) -> None:
        """Run the event loop until a predicate is true."""
        deadline = time.monotonic() + WITHIN_S
        while not predicate():
            assert time.monotonic() < deadline, f"{what}: {self.process.stats()}"
            await asyncio.sleep(0.01)

    def logged(self) -> pl.DataFrame:
        """All rows of complete files."""
        if not list(self.log.glob("model=*/**/*.parquet")):
            return pl.DataFrame({"trace_id": [], "x": [], "y": []})
        return pl.read_parquet(self.log / "model=*/**/*.parquet")


@contextlib.asynccontextmanager
async def observing(folder: Path, **observation: Any) -> AsyncIterator[Observing]:
    """Everything, with the process; the log is complete at the end."""
    made = Observing(folder, **observation)
    made.process.start(0)
    try:
        await made.until(lambda: made.process.last_report, "the first report")
        yield made
    finally:
        await made.process.stop()
        made.input_arena.close()
        assert made.worker.output is not None
        made.worker.output.close()
