"""Runs with clients that answer as a test needs it."""

from __future__ import annotations

import threading
from typing import Any

import pyarrow as pa
import pytest

from iskander.cli.load_generator import run
from iskander.cli.load_generator.run import Run
from iskander.cli.load_generator.schedule import Load
from iskander.errors import Cancelled, QueueFull
from iskander.foundation import clock

BATCHES = [pa.record_batch({"x": [number, number]}) for number in range(3)]


class FakeClient:
    """A client whose calls run a function, which gets an event that `close` sets."""

    def __init__(self, score: Any) -> None:
        self._score = score
        self._closed = threading.Event()
        self.sent: list[int] = []

    def score(self, model: str, batch: pa.RecordBatch, *, version: str | None) -> None:
        self.sent.append(batch["x"][0].as_py())
        self._score(self._closed)

    def close(self) -> None:
        self._closed.set()


def measured(score: Any, load: Load, duration_s: float = 0.4) -> tuple[Any, list[FakeClient]]:
    clients: list[FakeClient] = []

    def connect() -> Any:
        clients.append(FakeClient(score))
        return clients[-1]

    return Run(connect, "m", None, BATCHES, load).measure(0.05, duration_s), clients


def at_once(closed: threading.Event) -> None:
    del closed


def hang(closed: threading.Event) -> None:
    assert closed.wait(30)
    raise Cancelled("closed")


def test_open_loop_sends_each_due_request_once() -> None:
    found, clients = measured(at_once, Load(4, 100.0, "constant"))
    assert found.requests == 40 and found.unanswered == 0
    assert sum(len(client.sent) for client in clients) >= 40
    assert found.rows == 2 and found.errors == {}


def test_requests_without_an_answer_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were sent and cancelled, and those that no client was idle for."""
    monkeypatch.setattr(run, "GRACE_S", 0.2)
    found, clients = measured(hang, Load(2, 100.0, "constant"))
    assert sum(len(client.sent) for client in clients) == 2
    # The two were due in the warm-up or after it.
    assert found.completed == 0 and 38 <= found.unanswered <= found.requests == 40


@pytest.mark.long
def test_a_slow_server_delays_all_later_requests() -> None:
    """Each call takes 50 ms, and one is due every 10 ms for the only client."""
    found, _ = measured(lambda closed: closed.wait(0.05), Load(1, 100.0, "constant"))
    assert found.busy > 0.8 and found.p99 > 500 and found.completed < 25
    assert not found.is_late, "the generator itself was in time"


def test_closed_loop_sends_the_batches_in_turn() -> None:
    found, (client,) = measured(lambda closed: closed.wait(0.01), Load(1))
    assert client.sent[:4] == [0, 1, 2, 0]
    assert found.title == "1 clients" and found.requests > 5 and found.busy == 0


def test_errors_do_not_end_a_client() -> None:
    def reject(closed: threading.Event) -> None:
        closed.wait(0.005)
        raise QueueFull("full")

    found, _ = measured(reject, Load(1))
    assert set(found.errors) == {"queue_full"} and found.errors["queue_full"] > 5


def test_a_full_run_ends_early_and_its_rates_are_those_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "ANSWERS_MAX", 10)
    found, _ = measured(lambda closed: closed.wait(0.01), Load(1), duration_s=60.0)
    assert found.requests == 10 and found.seconds < 60.0
    assert found.completed == pytest.approx(10 / found.seconds)


@pytest.mark.parametrize(("share", "is_expected"), [(0, False), (2, True)])
def test_generator_that_uses_its_core_is_marked(
    monkeypatch: pytest.MonkeyPatch, share: int, is_expected: bool
) -> None:
    monkeypatch.setattr(run, "process_cpu_ns", lambda: share * clock.now_ns())
    found, _ = measured(lambda closed: closed.wait(0.01), Load(1), duration_s=0.1)
    assert found.is_saturated is is_expected
