"""Far more than the workers can do: refusals come by name at once, and the rest is done."""

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
    """A client that sends all its batches without waiting for one answer."""

    def __init__(self, gateway: Gateway, model: str, seed: int, **terms: object) -> None:
        super().__init__()
        self._gateway, self._model, self._terms = gateway, model, terms
        random = np.random.default_rng(seed)
        self._sent = [random.integers(0, 1 << 40, random.integers(1, 9)) for _ in range(BATCHES)]
        self.counts: Counter[str] = Counter()
        self.unhinted: list[IskanderError] = []
        self.start()

    def run(self) -> None:
        batches = (pa.record_batch({"x": values}) for values in self._sent)
        with self._gateway.client() as client:
            outcomes = client.outcomes(self._model, batches, terms=self._terms, timeout_s=60)
            for values, outcome in zip(self._sent, outcomes, strict=True):
                if isinstance(outcome, IskanderError):
                    self.counts[outcome.code] += 1
                    if outcome.retryable and not outcome.retry_after_ms:
                        self.unhinted.append(outcome)
                else:
                    right = np.array_equal(outcome["y"].to_numpy(), 3 * values + 1)
                    self.counts["right" if right else "WRONG"] += 1


def overload(gateway: Gateway, model: str, **terms: object) -> Counter[str]:
    """What came of everything that all streams sent; nobody hung, and nothing was left."""
    before = gateway.stats()["lanes"][f"{model}/1"]
    senders = [Sender(gateway, model, seed, **terms) for seed in range(STREAMS)]
    for sender in senders:
        sender.join()
    counts = sum((sender.counts for sender in senders), Counter[str]())
    assert counts.total() == STREAMS * BATCHES, counts
    assert [error for sender in senders for error in sender.unhinted] == []
    after = quiet(gateway)["lanes"][f"{model}/1"]
    assert after["completed"] - before.get("completed", 0) == counts["right"]
    refused = Counter(after["refused"]) - Counter(before["refused"])
    assert Counter(right=counts["right"]) + refused == counts
    return counts


def test_what_cannot_be_in_time_is_refused_and_the_rest_is_done(gateway: Gateway) -> None:
    """Twice: what is learned under too much load does not shut the model."""
    for _ in range(2):
        counts = overload(gateway, "priced", deadline_ms=100)
        assert counts["right"] and counts["deadline_unreachable"]
        assert counts.keys() <= {"right", "deadline_unreachable", "deadline_exceeded"}


def test_a_full_queue_says_when_to_come_back(gateway: Gateway) -> None:
    counts = overload(gateway, "short")
    assert counts["right"] and counts["queue_full"]
    assert counts.keys() == {"right", "queue_full"}


def test_the_oldest_give_way_where_that_is_said(gateway: Gateway) -> None:
    counts = overload(gateway, "small")
    assert counts["right"] and counts["dropped"]
    assert counts.keys() == {"right", "dropped"}


def test_a_client_gets_no_more_than_its_share(gateway: Gateway) -> None:
    counts = overload(gateway, "shared", client="one and the same")
    assert counts["right"] and counts["client_over_share"]
    assert counts.keys() == {"right", "client_over_share"}
