"""Memory of a scoring job: the reader waits for results."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.scoring_bench import (
    WITHIN_S,
    Bench,
)

from iskander.errors import (
    Cancelled,
)
from iskander.lake.job import Job
from iskander.lake.run import unit_run
from iskander.lake.run.flow import Flow
from iskander.lake.run.runner import memory_bytes


def test_reader_waits_for_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_run, "IN_FLIGHT_BATCHES", 2)
    bench = Bench(tmp_path, units=1, batch_rows=1)
    seen: list[int] = []
    bench.client.answer = lambda x: seen.append(bench.source.read_batches - x[0])
    bench.run()
    # Two in flight, and one in the reader's hands.
    assert max(seen) <= 3 + 1


def test_flow_is_bounded_in_bytes_and_takes_one_large_item() -> None:
    flow = Flow(100, 10)
    flow.put("large", 1000)
    is_put = threading.Event()

    def put() -> None:
        flow.put("next", 1)
        is_put.set()

    thread = threading.Thread(target=put)
    thread.start()
    assert flow.take() == "large"
    assert not is_put.wait(0.05)
    flow.release(1000)
    assert is_put.wait(WITHIN_S)
    thread.join(WITHIN_S)
    assert flow.take() == "next"
    flow.end()
    assert flow.take() is None


def test_flow_is_bounded_in_items_and_cancel_ends_its_waits() -> None:
    flow = Flow(100, 1)
    flow.put("first", 1)
    caught: list[Exception] = []

    def put() -> None:
        try:
            flow.put("second", 1)
        except Cancelled as error:
            caught.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    flow.cancel()
    thread.join(WITHIN_S)
    assert len(caught) == 1
    with pytest.raises(Cancelled):
        flow.take()


def test_memory_grows_with_streams_and_batches() -> None:
    def job(**options: Any) -> Job:
        return Job(model="m", inputs=("in",), output="out", **options)

    one = memory_bytes(job(concurrency=1))
    assert memory_bytes(job(concurrency=4)) == 4 * one
    assert memory_bytes(job(concurrency=1), 1 << 30) > 1 << 30
    assert memory_bytes(job(concurrency=1, partition_by=("a",))) > one
