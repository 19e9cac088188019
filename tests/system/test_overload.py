"""Overload: excess requests are rejected with their error code, and all others complete."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support import models
from support.chaos import quiet
from support.processes import Gateway, running

from iskander.errors import IskanderError

STREAMS, BATCHES = 8, 150
ROWS_MAX = 16


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("overload")
    path = str(models.priced(folder / "priced", 500, 1000))
    model = {"path": path, "intra_threads": 1, "max_batch_rows": ROWS_MAX}
    lanes: dict[str, dict[str, Any]] = {
        "priced": {},
        "short": {"queue_requests": 4},
        "small": {"queue_rows": 2 * ROWS_MAX, "overflow": "drop_oldest"},
        "shared": {"client_requests": 3},
    }
    served = [{"name": name, **model, "lane": lane} for name, lane in lanes.items()]
    limits = {"window_batches": 1000}
    with running(folder, served, workers={"groups": ["0"]}, limits=limits) as ready:
        yield ready


class Sender(threading.Thread):
    """A client that sends all its batches without waiting for results."""

    def __init__(self, gateway: Gateway, model: str, seed: int, **terms: object) -> None:
        super().__init__()
        self._gateway, self._model, self._terms = gateway, model, terms
        random = np.random.default_rng(seed)
        self._sent = [random.integers(0, 1 << 40, random.integers(1, 9)) for _ in range(BATCHES)]
        self.counts: Counter[str] = Counter()
        self.without_retry_after: list[IskanderError] = []
        self.start()

    def run(self) -> None:
        batches = (pa.record_batch({"x": values}) for values in self._sent)
        with self._gateway.client() as client:
            outcomes = client.outcomes(self._model, batches, terms=self._terms, timeout_s=60)
            for values, outcome in zip(self._sent, outcomes, strict=True):
                if isinstance(outcome, IskanderError):
                    self.counts[outcome.code] += 1
                    if outcome.retryable and not outcome.retry_after_ms:
                        self.without_retry_after.append(outcome)
                else:
                    is_correct = np.array_equal(outcome["y"].to_numpy(), 3 * values + 1)
                    self.counts["correct" if is_correct else "WRONG"] += 1


def overload(gateway: Gateway, model: str, **terms: object) -> Counter[str]:
    """Returns the outcomes of all batches of all streams; checks that each batch has one."""
    before = gateway.stats()["lanes"][f"{model}/1"]
    senders = [Sender(gateway, model, seed, **terms) for seed in range(STREAMS)]
    for sender in senders:
        sender.join()
    counts = sum((sender.counts for sender in senders), Counter[str]())
    assert counts.total() == STREAMS * BATCHES, counts
    assert [error for sender in senders for error in sender.without_retry_after] == []
    after = quiet(gateway)["lanes"][f"{model}/1"]
    assert after["completed"] - before.get("completed", 0) == counts["correct"]
    rejected = Counter(after["refused"]) - Counter(before["refused"])
    assert Counter(correct=counts["correct"]) + rejected == counts
    return counts


def test_late_requests_are_rejected_and_the_others_complete(gateway: Gateway) -> None:
    """Runs twice: run times learned under overload must not block the model."""
    for _ in range(2):
        counts = overload(gateway, "priced", deadline_ms=100)
        assert counts["correct"] and counts["deadline_unreachable"]
        assert counts.keys() <= {"correct", "deadline_unreachable", "deadline_exceeded"}


def test_full_queue_error_has_a_retry_delay(gateway: Gateway) -> None:
    counts = overload(gateway, "short")
    assert counts["correct"] and counts["queue_full"]
    assert counts.keys() == {"correct", "queue_full"}


def test_drop_oldest_rejects_the_oldest_requests(gateway: Gateway) -> None:
    counts = overload(gateway, "small")
    assert counts["correct"] and counts["dropped"]
    assert counts.keys() == {"correct", "dropped"}


def test_client_is_limited_to_its_share(gateway: Gateway) -> None:
    counts = overload(gateway, "shared", client="shared")
    assert counts["correct"] and counts["client_over_share"]
    assert counts.keys() == {"correct", "client_over_share"}
