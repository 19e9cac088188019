"""Requests of several clients in one lane: batching, splitting, order, and limits."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from onnx import TensorProto, helper
from pyarrow import flight
from support import models
from support.processes import Gateway, eventually, running

from iskander.errors import (
    ClientOverShare,
    DeadlineExceeded,
    DeadlineUnreachable,
    ExecutionFailed,
    IskanderError,
    MalformedInput,
    QueueFull,
    Superseded,
)

ONE = {"groups": ["0"], "reattach_s": 5.0}


def table_lookup(folder: Path) -> Path:
    """Saves `y = table[x]` for three entries; any other index fails the whole run."""
    return models.save(
        folder,
        [helper.make_node("Gather", ["table", "x"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["rows"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows"])],
        [helper.make_tensor("table", TensorProto.FLOAT, [3], [0.5, 1.5, 2.5])],
    )


def fixed_rows(folder: Path) -> Path:
    """Saves `y = -x` for exactly four rows."""
    return models.save(
        folder,
        [helper.make_node("Neg", ["x"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.INT64, [4])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, [4])],
    )


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("lanes")
    slow = str(models.slow(folder / "slow", 100))
    served = [
        {"name": "ids", "path": str(models.row_ids(folder / "ids")), "max_batch_rows": 100},
        {"name": "bits", "path": str(models.identity(folder / "bits", TensorProto.BOOL, ["r"]))},
        {"name": "table", "path": str(table_lookup(folder / "table"))},
        {"name": "fixed", "path": str(fixed_rows(folder / "fixed"))},
        {"name": "slow", "path": slow, "max_batch_rows": 1},
        {"name": "small", "path": slow, "lane": {"queue_requests": 1, "client_requests": 2}},
    ]
    for model in served:
        model["intra_threads"] = 1
    served[1]["max_batch_rows"] = 11
    with running(folder, served, workers=dict(ONE)) as ready:
        yield ready


class Busy:
    """Uses both credits of the worker, so that requests inside the block queue."""

    def __init__(self, gateway: Gateway, model: str = "slow") -> None:
        self._gateway = gateway
        self._client = flight.connect(f"grpc://{gateway.address}")
        self._stream = self._client.do_exchange(flight.FlightDescriptor.for_path(model))

    def __enter__(self) -> None:
        writer, _ = self._stream
        batch = pa.record_batch({"x": [1_000_000]})
        writer.begin(batch.schema)
        for count in (1, 2):
            writer.write_batch(batch)
            eventually(
                lambda count=count: self._gateway.stats()["workers"][0]["in_flight"] == count,  # type: ignore[misc]
                what="a busy worker",
            )

    def __exit__(self, *_: object) -> None:
        writer, reader = self._stream
        reader.cancel()
        with pytest.raises((flight.FlightError, pa.ArrowException, OSError)):
            reader.read_chunk()
        with pytest.raises((flight.FlightError, pa.ArrowException, OSError)):
            writer.close()
        self._client.close()


class Scores(threading.Thread):
    """Scores batches in another thread; records the outcome of each."""

    def __init__(self, gateway: Gateway, model: str, items: list[object], **terms: object) -> None:
        super().__init__()
        self._gateway, self._model, self._items, self._terms = gateway, model, items, terms
        self.outcomes: list[object] = []
        self.start()

    def run(self) -> None:
        with self._gateway.client() as client:
            for outcome in client.outcomes(self._model, self._items, terms=self._terms):  # type: ignore[arg-type]
                is_error = isinstance(outcome, IskanderError)
                self.outcomes.append(outcome if is_error else outcome["y"].to_pylist())


def batch_of(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"x": list(values)})


def count_of(gateway: Gateway, model: str, name: str) -> int:
    count: int = gateway.stats()["lanes"][f"{model}/1"].get(name, 0)
    return count


def test_streams_share_a_batch_and_each_gets_its_rows(gateway: Gateway) -> None:
    """Requests that queued while the worker was busy run in one batch."""
    before = count_of(gateway, "ids", "batches")
    with Busy(gateway):
        scores = [Scores(gateway, "ids", [batch_of(n, n + 1)]) for n in range(8)]
        eventually(lambda: gateway.stats()["lanes"]["ids/1"]["queued"] == 8, what="queued requests")
    for n, each in enumerate(scores):
        each.join()
        assert each.outcomes == [[3 * n + 1, 3 * n + 4]]
    assert count_of(gateway, "ids", "batches") - before == 1


def test_request_larger_than_a_batch_is_split_and_reassembled(gateway: Gateway) -> None:
    values = np.random.default_rng(0).integers(0, 1 << 40, 1234)
    before = count_of(gateway, "ids", "batches")
    with gateway.client() as client:
        scored = client.score("ids", pa.record_batch({"x": values}))
    assert scored["y"].to_numpy().tolist() == (3 * values + 1).tolist()
    assert count_of(gateway, "ids", "batches") - before == 13


def test_booleans_are_split_at_any_bit(gateway: Gateway) -> None:
    """Parts of eleven booleans begin inside a byte."""
    values = np.random.default_rng(0).integers(0, 2, 100).astype(bool)
    with gateway.client() as client:
        scored = client.score("bits", pa.record_batch({"x": values}))
    assert scored["y"].to_pylist() == values.tolist()


def test_fixed_batch_axis_is_padded_and_split(gateway: Gateway) -> None:
    with gateway.client() as client:
        for rows in (1, 4, 5, 11):
            scored = client.score("fixed", batch_of(*range(rows)))
            assert scored["y"].to_pylist() == [-n for n in range(rows)]


def test_invalid_row_fails_only_its_own_request(gateway: Gateway) -> None:
    """A failed batch runs again, one request at a time."""
    with Busy(gateway):
        scores = [Scores(gateway, "table", [batch_of(n)]) for n in (0, 1, 99, 2)]
        eventually(
            lambda: gateway.stats()["lanes"]["table/1"]["queued"] == 4, what="queued requests"
        )
    for each in scores:
        each.join()
    assert [each.outcomes for each in scores[:2]] == [[[0.5]], [[1.5]]]
    assert scores[3].outcomes == [[2.5]]
    (error,) = scores[2].outcomes
    assert isinstance(error, ExecutionFailed) and "idx=99" in error.message


def test_deadline_and_ttl_that_pass_in_the_queue_end_the_request_with_an_error(
    gateway: Gateway,
) -> None:
    with Busy(gateway):
        scores = Scores(gateway, "ids", [batch_of(1)], deadline_ms=50)
        scores.join()
    (error,) = scores.outcomes
    assert isinstance(error, DeadlineExceeded | DeadlineUnreachable)
    with Busy(gateway):
        scores = Scores(gateway, "ids", [batch_of(1)], ttl_ms=50)
        scores.join()
    (error,) = scores.outcomes
    assert isinstance(error, DeadlineExceeded) and "queue time limit passed" in error.message


def test_earliest_deadline_runs_first(gateway: Gateway) -> None:
    """Later deadlines arrive first, and each request is one batch.

    Each runs long enough that the clients receive the results in the order of the runs.
    """
    order: list[int] = []

    def score(deadline_ms: int) -> None:
        with gateway.client() as client:
            list(client.stream("slow", [(batch_of(200), {"deadline_ms": deadline_ms})]))
            order.append(deadline_ms)

    with Busy(gateway):
        threads = []
        for count, deadline_ms in enumerate((60_000, 50_000, 40_000), start=1):
            threads.append(threading.Thread(target=score, args=(deadline_ms,)))
            threads[-1].start()
            eventually(
                lambda count=count: gateway.stats()["lanes"]["slow/1"]["queued"] == count,  # type: ignore[misc]
                what="a queued request",
            )
    for thread in threads:
        thread.join()
    assert order == [40_000, 50_000, 60_000]


def test_full_queue_and_client_share_have_different_errors(gateway: Gateway) -> None:
    with Busy(gateway, "small"):
        waiting = Scores(gateway, "small", [batch_of(0)], client="first")
        eventually(lambda: gateway.stats()["lanes"]["small/1"]["queued"] == 1, what="a full queue")
        rejected = Scores(gateway, "small", [batch_of(0)], client="second")
        rejected.join()
        greedy = Scores(gateway, "small", [batch_of(0)] * 3, client="first")
        greedy.join()
    waiting.join()
    (error,) = rejected.outcomes
    assert isinstance(error, QueueFull) and error.retryable and error.retry_after_ms
    assert {type(outcome) for outcome in greedy.outcomes} <= {QueueFull, ClientOverShare}
    assert waiting.outcomes == [[0]]


def test_newest_wins_supersedes_older_requests_of_the_client(gateway: Gateway) -> None:
    with Busy(gateway):
        terms = {"client": "camera", "newest_wins": True}
        scores = Scores(gateway, "ids", [batch_of(1), batch_of(2), batch_of(3)], **terms)

        def superseded() -> int:
            refused: dict[str, int] = gateway.stats()["lanes"]["ids/1"]["refused"]
            return refused.get("superseded", 0)

        eventually(lambda: superseded() >= 2, what="two superseded")
    scores.join()
    assert [type(outcome) for outcome in scores.outcomes[:2]] == [Superseded, Superseded]
    assert scores.outcomes[2] == [10]


def test_requests_that_run_alone_are_not_combined(gateway: Gateway) -> None:
    batches = [batch_of(value) for value in range(5)]
    counts = []
    for terms in ({}, {"run_alone": True}):
        before = count_of(gateway, "ids", "batches")
        with Busy(gateway):
            scores = Scores(gateway, "ids", batches, **terms)
            eventually(lambda: count_of(gateway, "ids", "queued") >= 5, what="five queued requests")
        scores.join()
        assert [outcome for (outcome,) in scores.outcomes] == [3 * v + 1 for v in range(5)]
        counts.append(count_of(gateway, "ids", "batches") - before)
    assert counts == [1, 5]


def test_errors_in_band_leave_the_stream_open(gateway: Gateway) -> None:
    """The error of an invalid batch is an empty batch with JSON metadata, in its position."""
    with gateway.client() as client:
        invalid = pa.record_batch({"x": pa.array([1, None])})
        outcomes = list(client.outcomes("ids", [batch_of(1), invalid, batch_of(2)]))
    assert [getattr(each, "code", None) for each in outcomes] == [None, "contract", None]
    raw = flight.connect(f"grpc://{gateway.address}")
    options = flight.FlightCallOptions(headers=[(b"iskander-errors", b"in-band")])
    writer, reader = raw.do_exchange(flight.FlightDescriptor.for_path("ids"), options)
    writer.begin(invalid.schema)
    writer.write_batch(invalid)
    chunk = reader.read_chunk()
    assert chunk.data.num_rows == 0
    assert json.loads(bytes(chunk.app_metadata))["iskander"]["error"]["code"] == "contract"
    writer.done_writing()
    writer.close()
    raw.close()


def test_invalid_terms_are_rejected_by_name(gateway: Gateway) -> None:
    with gateway.client() as client:
        with pytest.raises(MalformedInput, match="priority"):
            list(client.stream("ids", [batch_of(1)], terms={"priority": 10}))
        with pytest.raises(MalformedInput, match="urgency"):
            list(client.stream("ids", [(batch_of(1), {"urgency": 2})]))
        assert client.score("ids", batch_of(1))["y"].to_pylist() == [4]
