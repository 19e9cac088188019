"""Every request is answered once, with its own rows or a named error, whatever happens around it.

Random traffic of some thousand requests an example: sizes from one row to several batches, lanes
with different rules, callers that leave, rows that a model refuses, rows that kill workers, workers
that come and go. The played workers return the rows that they find in the arenas, so that a result
says whose it is. A failing example prints its seed.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.lanes import CONTRACT, MS, RecordingCaller, lane_of
from support.simulation import SimulatedWorker, Simulation

from iskander.contract.column_types import ColumnType
from iskander.contract.rows import RowCopier
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import IskanderError
from iskander.memory.heartbeat import write_heartbeat
from iskander.scheduling.lane import Lane
from iskander.scheduling.request import Request, Terms

EXAMPLES, REQUESTS = 10, 1000
REFUSED, DEADLY = 7_777_777, 6_666_666
"""Values that the model refuses, and that kill the worker that runs them."""

FLAGGED = Contract(
    inputs=(*CONTRACT.inputs, TensorSpec("f", "f", ColumnType("bool"), ())),
    outputs=(*CONTRACT.outputs, TensorSpec("g", "g", ColumnType("bool"), ())),
)
NAMED = {
    "execution_failed",
    "poisoned",
    "deadline_exceeded",
    "deadline_unreachable",
    "superseded",
    "dropped",
    "not_ready",
}
AT_THE_DOOR = {"queue_full", "client_over_share", "deadline_unreachable", "not_ready"}


class Asked:
    """A request with what is true of it."""

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
        """Answered once, and rightly; one whose caller left may not be answered."""
        caller, is_bad = self.caller, {REFUSED, DEADLY} & set(self.values.tolist())
        assert caller.told <= 1 and (caller.told or self.is_withdrawn), self.request
        assert self.request.is_over and not self.request.running
        assert self.request.lease is None
        assert set(caller.codes) <= NAMED, caller.errors
        if "execution_failed" in caller.codes or "poisoned" in caller.codes:
            assert is_bad, "one caller's bad rows cost another its answer"
        for result in caller.results:
            assert not is_bad
            rows = len(self.values)
            offsets, _ = RowCopier(FLAGGED.outputs).layout(rows)
            assert np.array_equal(np.frombuffer(result, np.int64, rows), self.values)
            bits = np.frombuffer(result, np.uint8)[offsets[1] : offsets[1] + (rows + 7) // 8]
            got = np.unpackbits(bits, bitorder="little")[:rows]
            assert np.array_equal(got.astype(bool), self.flags)


def reference(values: Any) -> str | None:
    if DEADLY in values:
        return "die"
    return "execution_failed" if REFUSED in values else None


def lanes_of(chance: random.Random) -> list[Lane]:
    common = {"contract": FLAGGED, "client_requests": 10**6, "queue_bytes": 4 << 20}
    return [
        lane_of(0, rows_max=chance.choice([5, 8, 64]), **common),
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
    ]


class Traffic:
    """One example: what happens is drawn from the seed."""

    def __init__(self, gateway: Simulation, chance: random.Random) -> None:
        self.gateway = gateway
        self.chance = chance
        self.asked: list[Asked] = []
        self.count = 0
        self.is_deadly = chance.random() < 0.5

    def run(self) -> None:
        for _ in range(3):
            self.equip(self.gateway.start())
        while self.count < REQUESTS:
            for _ in range(self.chance.choice([1, 1, 3, 10, 30])):
                self.ask()
            if self.chance.random() < 0.2:
                self.withdraw()
            if self.chance.random() < 0.02:
                self.end_one()
            self.gateway.loop.run(self.chance.choice([0, 0, 20_000, 300_000, 2 * MS]))
            self.revive()
        while any(len(lane.queue) for lane in self.gateway.lanes.values()) or (
            self.gateway.dispatcher.in_flight
        ):
            self.gateway.loop.run(10 * MS)
            self.revive()

    def equip(self, worker: SimulatedWorker) -> None:
        worker.reference = reference
        worker.cost = lambda execute: 20_000 + 500 * execute.rows
        worker.play()

    def ask(self) -> None:
        chance = self.chance
        self.count += 1
        rows = chance.choice([1, 1, 1, 2, 5, 8, 9, 33, 64, 150])
        values = np.arange(self.count * 1000, self.count * 1000 + rows, dtype=np.int64)
        if chance.random() < 0.01:
            values[chance.randrange(rows)] = REFUSED
        elif self.is_deadly and chance.random() < 0.002:
            values[chance.randrange(rows)] = DEADLY
        terms = Terms(
            client=f"c{chance.randrange(6)}",
            is_named=True,
            priority=chance.randrange(10),
            budget_ms=chance.choice([None, None, 0.5, 5.0, 100.0]),
            is_newest_wins=chance.random() < 0.05,
        )
        asked = Asked(self.gateway, chance.randrange(4), values, terms)
        try:
            self.gateway.submit(asked.request)
        except IskanderError as error:
            assert error.code in AT_THE_DOOR, error
            assert asked.request.lease is None and not asked.caller.told
            return
        self.asked.append(asked)

    def withdraw(self) -> None:
        for asked in self.chance.sample(self.asked, min(5, len(self.asked))):
            if not asked.request.is_over:
                asked.is_withdrawn = True
                self.gateway.dispatcher.withdraw(asked.request)

    def end_one(self) -> None:
        """A worker is lost for no fault of what it has; by its beat it ran nothing of it."""
        worker = self.chance.choice(self.gateway.workers)
        if worker.incarnation and worker.beat is not None:
            write_heartbeat(worker.beat.view, 0, 0)
            self.gateway.lose(worker)

    def revive(self) -> None:
        for worker in self.gateway.workers:
            if not worker.incarnation:
                self.gateway.revive(worker)
        for lane in self.gateway.lanes.values():
            lane.queue.validate()


# A smaller seed is no simpler one: nothing is gained by shrinking it.
@settings(
    deadline=None,
    max_examples=EXAMPLES,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(st.integers(0, 1 << 32))
def test_every_request_is_answered_once_with_its_own_rows_or_a_named_error(seed: int) -> None:
    chance = random.Random(seed)
    with Simulation(*lanes_of(chance)) as gateway:
        traffic = Traffic(gateway, chance)
        traffic.run()

        for asked in traffic.asked:
            asked.check()
        answered = sum(len(asked.caller.results) for asked in traffic.asked)
        assert answered > REQUESTS / 4, "too little was served for the example to say anything"
        assert gateway.is_clean()
        assert all(worker.credits for worker in gateway.workers)
        gateway.input_arena.arena.validate()
