"""Models whose data ends workers: moved to a worker of their own, then refused by name."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from support import models
from support.dealt import by_process, client_of
from support.processes import Gateway, eventually, running

from iskander.errors import IskanderError, ModelQuarantined, PoisonedRequest

WORKERS = {"groups": ["0"], "model_deaths": 3, "quarantine_s": 2.0}
GOOD, BAD = pa.record_batch({"x": [1, 4]}), pa.record_batch({"x": [1, -(1 << 63)]})


def served(folder: Path) -> list[dict[str, object]]:
    return [
        {"name": "ids", "path": str(models.row_ids(folder / "ids")), "intra_threads": 1},
        {"name": "fragile", "path": str(models.fragile(folder / "fragile")), "intra_threads": 1},
        {"name": "slow", "path": str(models.slow(folder / "slow", 10)), "intra_threads": 1},
    ]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    with running(tmp_path, served(tmp_path), workers=dict(WORKERS)) as ready:
        yield ready


class Innocent(threading.Thread):
    """A client of another model, which asks all the time."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__()
        self._gateway = gateway
        self._is_over = threading.Event()
        self.answered = 0
        self.errors: list[Exception] = []

    def __enter__(self) -> Innocent:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()

    def run(self) -> None:
        with self._gateway.client() as client:
            while not self._is_over.wait(0.005):
                try:
                    assert client.score("ids", GOOD)["y"].to_pylist() == [4, 13]
                    self.answered += 1
                except Exception as error:
                    self.errors.append(error)


def ask(gateway: Gateway, batch: pa.RecordBatch, model: str = "fragile") -> list[int]:
    with gateway.client() as client:
        found: list[int] = client.score(model, batch)["y"].to_pylist()
        return found


def is_poison(gateway: Gateway, model: str = "fragile", batch: pa.RecordBatch = BAD) -> str:
    with pytest.raises(IskanderError) as caught:
        ask(gateway, batch, model)
    return caught.value.code


def shared_worker(gateway: Gateway) -> int:
    pids = [w["pid"] for w in gateway.stats()["workers"] if not w["pool"]]
    assert len(pids) == 1
    return int(pids[0])


def test_a_model_that_ends_workers_is_isolated_and_then_refused(gateway: Gateway) -> None:
    """Clients of another model get every answer meanwhile, at most later."""
    with Innocent(gateway) as innocent:
        # Two deaths of the first request, the third of the second: it moves.
        assert is_poison(gateway) == PoisonedRequest.code
        assert not gateway.stats()["lanes"]["fragile/1"]["isolated"]
        assert is_poison(gateway) == PoisonedRequest.code
        assert gateway.stats()["lanes"]["fragile/1"]["isolated"]
        assert ask(gateway, GOOD) == [-1, -4]
        eventually(lambda: shared_worker(gateway), what="the shared worker")
        pid = shared_worker(gateway)
        # One death more there by the second request, two by the third: it is refused.
        assert is_poison(gateway) in (PoisonedRequest.code, ModelQuarantined.code)
        with pytest.raises(ModelQuarantined, match="`fragile/1` is in quarantine") as caught:
            ask(gateway, GOOD)
        assert caught.value.retryable and caught.value.retry_after_ms == 2000
        stats = gateway.stats()
        assert stats["ready"] and "ended 3 workers" in stats["lanes"]["fragile/1"]["quarantine"]
        assert shared_worker(gateway) == pid
        # Over, and one death is enough for the next, which is twice as long.
        eventually(lambda: not gateway.stats()["lanes"]["fragile/1"]["quarantine"], what="its end")
        assert ask(gateway, GOOD) == [-1, -4]
        assert is_poison(gateway) in (PoisonedRequest.code, ModelQuarantined.code)
        with pytest.raises(ModelQuarantined) as caught:
            ask(gateway, GOOD)
        assert caught.value.retry_after_ms == 4000
        assert shared_worker(gateway) == pid
    assert innocent.errors == [] and innocent.answered > 10


@pytest.mark.slow
def test_an_operator_who_kills_workers_isolates_no_model(gateway: Gateway) -> None:
    with Innocent(gateway) as innocent:
        for _ in range(4):
            pid = gateway.kill_worker()
            eventually(lambda pid=pid: pid not in gateway.worker_pids() != [], what="another")
    stats = gateway.stats()
    assert not any(lane["isolated"] for lane in stats["lanes"].values())
    assert innocent.errors == []


@pytest.mark.slow
def test_a_run_far_longer_than_any_before_is_taken_for_hung(gateway: Gateway) -> None:
    """Long before `workers.hang_s`, here 30 s; the model then moves as one that crashes does."""
    with gateway.client() as client:
        for _ in range(20):
            client.score("slow", pa.record_batch({"x": [1]}))
    with Innocent(gateway) as innocent:
        endless = pa.record_batch({"x": [1 << 40]})
        assert is_poison(gateway, "slow", endless) == PoisonedRequest.code
        assert is_poison(gateway, "slow", endless) == PoisonedRequest.code
        assert gateway.stats()["lanes"]["slow/1"]["isolated"]
    assert innocent.errors == []
    silences = [int(ms) for ms in re.findall(r"silent for (\d+) ms", gateway.text())]
    assert len(silences) == 4 and max(silences) < 25_000


@pytest.mark.slow
def test_several_gateway_processes_isolate_a_model_together(tmp_path: Path) -> None:
    """The first starts the isolated worker, whichever process has the callers; others follow."""
    server = {"processes": 2}
    with (
        running(tmp_path, served(tmp_path), workers=dict(WORKERS), server=server) as gateway,
        client_of(gateway, 1) as client,
    ):
        for _ in range(2):
            with pytest.raises(PoisonedRequest):
                client.score("fragile", BAD)

        def is_isolated() -> bool:
            return all(
                stats["lanes"]["fragile/1"]["isolated"]
                and stats["lanes"]["fragile/1"]["workers"]
                and stats["lanes"]["ids/1"]["workers"]
                for stats in by_process(gateway, 2).values()
            )

        eventually(is_isolated, what="an isolated worker for both")
        assert client.score("fragile", GOOD)["y"].to_pylist() == [-1, -4]
        assert client.score("ids", GOOD)["y"].to_pylist() == [4, 13]
