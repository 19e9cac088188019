"""Random traffic: each request is answered once, with its own rows or an expected error.

About a thousand requests per example: sizes from one row to several batches, lanes with different
rules, withdrawn requests, rows that the model rejects, rows that crash workers, and worker
restarts. Simulated workers return the rows that they read from the arenas, so a result identifies
its request. A failing example prints its seed.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.lanes import CONTRACT, MS, RecordingCaller, lane_of
from support.simulation import SimulatedWorker, Simulation

from iskander.contract.column_types import ColumnType
from iskander.contract.processing.row_relation import RowRelation
from iskander.contract.processing.rows import RowCopier
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import IskanderError
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.request import Request, Terms
from iskander.interprocess.control.messages import Execute
from iskander.interprocess.memory.heartbeat import write_heartbeat

EXAMPLES, REQUESTS = 10, 1000
DEPENDENT, APPROXIMATE = RowRelation("dependent", ""), RowRelation("approximate", "")
REJECTED, CRASHING = 7_777_777, 6_666_666
"""Values that the model rejects, and that crash the worker."""

FLAGGED = Contract(
    inputs=(*CONTRACT.inputs, TensorSpec("f", "f", ColumnType("bool"), ())),
    outputs=(*CONTRACT.outputs, TensorSpec("g", "g", ColumnType("bool"), ())),
)
ERROR_CODES = {
    "execution_failed",
    "poisoned",
    "deadline_exceeded",
    "deadline_unreachable",
    "superseded",
    "dropped",
    "not_ready",
    "client_over_share",  # Queued requests of a client that ended a worker.
}
ADMISSION_CODES = {"queue_full", "client_over_share", "deadline_unreachable", "not_ready", "limit"}


class SentRequest:
    """A request and its expected outcome."""

    def __init__(self, gateway: Simulation, lane: int, values: Any, terms: Terms) -> None:
        self.caller = RecordingCaller()
        self.values = values
        self.flags = values % 3 == 0
        self.is_withdrawn = False
        flags = np.packbits(self.flags, bitorder="little")
        self.request = Request(
            gateway.lanes[lane],
            self.caller,
            len(values),
            [memoryview(values).cast("B"), memoryview(flags.tobytes())],
            terms=terms,
            arrived_ns=gateway.loop.now_ns,
        )

    def check(self) -> None:
        """Requires one correct response; a withdrawn request may have none."""
        caller, is_bad = self.caller, {REJECTED, CRASHING} & set(self.values.tolist())
        assert caller.outcome_count <= 1 and (caller.outcome_count or self.is_withdrawn), (
            self.request
        )
        assert self.request.is_over and not self.request.running
        assert self.request.lease is None
        assert set(caller.codes) <= ERROR_CODES, caller.errors
        if "execution_failed" in caller.codes or "poisoned" in caller.codes:
            assert is_bad, "failed because of the rows of another request"
        for result in caller.results:
            assert not is_bad
            rows = len(self.values)
            offsets, _ = RowCopier(FLAGGED.outputs).layout(rows)
            assert np.array_equal(np.frombuffer(result, np.int64, rows), self.values)
            bits = np.frombuffer(result, np.uint8)[offsets[1] : offsets[1] + (rows + 7) // 8]
            actual = np.unpackbits(bits, bitorder="little")[:rows]
            assert np.array_equal(actual.astype(bool), self.flags)


def reference(values: Any) -> str | None:
    if CRASHING in values:
        return "die"
    return "execution_failed" if REJECTED in values else None


def cost(execute: Execute) -> int:
    """Cost of a batch, whose composition its model permits."""
    if execute.model in (4, 5):
        (part,) = execute.slices
        assert part.rows == execute.rows
        assert part.rows == part.request_rows or execute.model == 5
    return 20_000 + 500 * execute.rows


def lanes_of(rng: random.Random) -> list[Lane]:
    common = {"contract": FLAGGED, "client_requests": 10**6, "queue_bytes": 4 << 20}
    return [
        lane_of(0, rows_max=rng.choice([5, 8, 64]), **common),
        lane_of(1, rows_max=32, pad_to=(4, 16, 32), policy="round_robin", weight=3, **common),
        lane_of(2, rows_max=16, linger_us=300, overflow="drop_oldest", queue_rows=200, **common),
        lane_of(
            3,
            rows_max=64,
            preferred_batch_rows=(8, 32),
            policy="tiered_deadline",
            overflow="drop_lowest_priority",
            queue_requests=20,
            **common,
        ),
        lane_of(4, rows_max=64, pad_to=(64,), linger_us=300, relation=DEPENDENT, **common),
        lane_of(5, rows_max=8, linger_us=300, relation=APPROXIMATE, **common),
    ]


class Traffic:
    """One example; its events are drawn from the seed."""

    def __init__(self, gateway: Simulation, rng: random.Random) -> None:
        self.gateway = gateway
        self.rng = rng
        self.sent: list[SentRequest] = []
        self.count = 0
        self.has_crashes = rng.random() < 0.5

    def run(self) -> None:
        for _ in range(3):
            self.configure(self.gateway.start())
        while self.count < REQUESTS:
            for _ in range(self.rng.choice([1, 1, 3, 10, 30])):
                self.submit()
            if self.rng.random() < 0.2:
                self.withdraw()
            if self.rng.random() < 0.02:
                self.lose_worker()
            self.gateway.loop.run(self.rng.choice([0, 0, 20_000, 300_000, 2 * MS]))
            self.revive()
        while any(len(lane.queue) for lane in self.gateway.lanes.values()) or (
            self.gateway.dispatcher.in_flight
        ):
            self.gateway.loop.run(10 * MS)
            self.revive()

    def configure(self, worker: SimulatedWorker) -> None:
        worker.reference = reference
        worker.cost = cost
        worker.play()

    def submit(self) -> None:
        rng = self.rng
        self.count += 1
        rows = rng.choice([1, 1, 1, 2, 5, 8, 9, 33, 64, 150])
        values = np.arange(self.count * 1000, self.count * 1000 + rows, dtype=np.int64)
        if rng.random() < 0.01:
            values[rng.randrange(rows)] = REJECTED
        elif self.has_crashes and rng.random() < 0.002:
            values[rng.randrange(rows)] = CRASHING
        terms = Terms(
            client=f"c{rng.randrange(6)}",
            is_named=True,
            priority=rng.randrange(10),
            budget_ms=rng.choice([None, None, 0.5, 5.0, 100.0]),
            is_newest_wins=rng.random() < 0.05,
        )
        sent = SentRequest(self.gateway, rng.randrange(6), values, terms)
        try:
            self.gateway.submit(sent.request)
        except IskanderError as error:
            assert error.code in ADMISSION_CODES, error
            assert error.code != "limit" or rows > 64
            assert sent.request.lease is None and not sent.caller.outcome_count
            return
        self.sent.append(sent)

    def withdraw(self) -> None:
        for sent in self.rng.sample(self.sent, min(5, len(self.sent))):
            if not sent.request.is_over:
                sent.is_withdrawn = True
                self.gateway.dispatcher.withdraw(sent.request)

    def lose_worker(self) -> None:
        """Loses a worker whose heartbeat names none of its batches."""
        worker = self.rng.choice(self.gateway.workers)
        if worker.incarnation and worker.beat is not None:
            write_heartbeat(worker.beat.view, 0, 0)
            self.gateway.lose(worker)

    def revive(self) -> None:
        for worker in self.gateway.workers:
            if not worker.incarnation:
                self.gateway.revive(worker)
        for lane in self.gateway.lanes.values():
            lane.queue.validate()


# No shrinking: a smaller seed is not a simpler example.
@pytest.mark.long
@settings(
    deadline=None,
    max_examples=EXAMPLES,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(st.integers(0, 1 << 32))
def test_every_request_is_answered_once_with_its_own_rows_or_an_error(seed: int) -> None:
    rng = random.Random(seed)
    with Simulation(*lanes_of(rng)) as gateway:
        traffic = Traffic(gateway, rng)
        traffic.run()

        for sent in traffic.sent:
            sent.check()
        answered = sum(len(sent.caller.results) for sent in traffic.sent)
        assert answered > REQUESTS / 4, "too few requests were served"
        assert gateway.is_clean()
        assert all(worker.credits for worker in gateway.workers)
        gateway.input_arena.arena.validate()
