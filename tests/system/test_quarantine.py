"""Models that end workers: isolated in a dedicated worker, then quarantined."""

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

from iskander.errors import ClientOverShare, IskanderError, ModelQuarantined, PoisonedRequest

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


class OtherClient(threading.Thread):
    """A client of another model that sends requests continuously."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__()
        self._gateway = gateway
        self._is_over = threading.Event()
        self.answered = 0
        self.errors: list[Exception] = []

    def __enter__(self) -> OtherClient:
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


def score(gateway: Gateway, batch: pa.RecordBatch, model: str = "fragile") -> list[int]:
    with gateway.client() as client:
        result: list[int] = client.score(model, batch)["y"].to_pylist()
        return result


def error_code(gateway: Gateway, model: str = "fragile", batch: pa.RecordBatch = BAD) -> str:
    with pytest.raises(IskanderError) as caught:
        score(gateway, batch, model)
    return caught.value.code


def shared_worker(gateway: Gateway) -> int:
    pids = [w["pid"] for w in gateway.stats()["workers"] if not w["pool"]]
    assert len(pids) == 1
    return int(pids[0])


@pytest.mark.over_zmq
@pytest.mark.slow
def test_model_that_ends_workers_is_isolated_and_then_rejected(gateway: Gateway) -> None:
    """Clients of another model get all responses meanwhile."""
    with OtherClient(gateway) as other:
        # The first request ends the shared worker, is run again in an isolated one, and ends it.
        assert error_code(gateway) == PoisonedRequest.code
        assert gateway.stats()["lanes"]["fragile/1"]["isolated"]
        assert score(gateway, GOOD) == [-1, -4]
        eventually(lambda: shared_worker(gateway), what="the shared worker")
        pid = shared_worker(gateway)
        # Two more clients end workers there, and deaths by three are a quarantine.
        assert error_code(gateway) == PoisonedRequest.code
        assert error_code(gateway) in (PoisonedRequest.code, ModelQuarantined.code)
        with pytest.raises(ModelQuarantined, match="`fragile/1` is in quarantine") as caught:
            score(gateway, GOOD)
        assert caught.value.retryable and caught.value.retry_after_ms == 2000
        stats = gateway.stats()
        assert stats["ready"] and "ended 3 workers" in stats["lanes"]["fragile/1"]["quarantine"]
        assert shared_worker(gateway) == pid
        # After the quarantine, one more death starts the next, which is twice as long.
        eventually(
            lambda: not gateway.stats()["lanes"]["fragile/1"]["quarantine"],
            what="the end of the quarantine",
        )
        assert score(gateway, GOOD) == [-1, -4]
        assert error_code(gateway) in (PoisonedRequest.code, ModelQuarantined.code)
        with pytest.raises(ModelQuarantined) as caught:
            score(gateway, GOOD)
        assert caught.value.retry_after_ms == 4000
        assert shared_worker(gateway) == pid
    assert other.errors == [] and other.answered > 10


def test_data_that_ends_workers_of_several_models_harms_no_other(tmp_path: Path) -> None:
    """Each model costs the shared worker one restart, which is no crash loop, and no backoff."""
    several = [
        {"name": name, "path": str(models.fragile(tmp_path / name)), "intra_threads": 1}
        for name in ("first", "second", "third")
    ]
    with (
        running(tmp_path, [*served(tmp_path), *several], workers=dict(WORKERS)) as gateway,
        OtherClient(gateway) as other,
    ):
        for each in several:
            name = str(each["name"])
            assert error_code(gateway, name) == PoisonedRequest.code
            assert score(gateway, GOOD, name) == [-1, -4]
        answered = other.answered
        eventually(lambda: other.answered > answered, what="a response to the other client")
        stats = gateway.stats()
        isolated = {title for title, lane in stats["lanes"].items() if lane["isolated"]}
        assert isolated == {"first/1", "second/1", "third/1"}
        (shared,) = (worker for worker in stats["workers"] if not worker["pool"])
        assert shared["ends"]["crash"] == 3
    assert other.errors == []
    assert "crash loop" not in gateway.text()


def test_client_whose_request_ended_workers_is_slowed(gateway: Gateway) -> None:
    """Its next request is rejected for a moment; other clients are served."""
    with gateway.client() as client:
        with pytest.raises(PoisonedRequest):
            client.score("fragile", BAD)
        with pytest.raises(ClientOverShare, match="ended workers of model `fragile/1`") as caught:
            client.score("fragile", GOOD)
        assert caught.value.retryable and caught.value.retry_after_ms
        assert score(gateway, GOOD) == [-1, -4]
        assert client.score("ids", GOOD)["y"].to_pylist() == [4, 13]


def test_client_that_ends_workers_again_and_again_harms_no_other_of_its_model(
    gateway: Gateway,
) -> None:
    """It is slowed instead of the model; from its second request on, one worker is enough."""
    with gateway.client() as client, OtherClient(gateway) as other:
        for deaths in range(2, 6):
            code = ClientOverShare.code
            while code == ClientOverShare.code:
                with pytest.raises(IskanderError) as caught:
                    client.score("fragile", BAD)
                code = caught.value.code
            assert code == PoisonedRequest.code
            # The response may come before the exit of the process.
            eventually(
                lambda deaths=deaths: (
                    gateway.stats()["lanes"]["fragile/1"]["worker_deaths"] == deaths
                ),
                what=f"{deaths} deaths",
            )
            assert score(gateway, GOOD) == [-1, -4]
        lane = gateway.stats()["lanes"]["fragile/1"]
        assert lane["isolated"] and not lane["quarantine"] and not lane.get("quarantines")
    assert other.errors == []


@pytest.mark.slow
def test_workers_killed_by_an_operator_isolate_no_model(gateway: Gateway) -> None:
    with OtherClient(gateway) as other:
        for _ in range(4):
            pid = gateway.kill_worker()
            eventually(
                lambda pid=pid: pid not in gateway.worker_pids() != [], what="the new worker"
            )
    stats = gateway.stats()
    assert not any(lane["isolated"] for lane in stats["lanes"].values())
    assert other.errors == []


@pytest.mark.slow
def test_run_far_longer_than_earlier_ones_counts_as_hang(gateway: Gateway) -> None:
    """Detected long before `workers.hang_s`, here 30 s; then isolated as after a crash."""
    with gateway.client() as client:
        for _ in range(20):
            client.score("slow", pa.record_batch({"x": [1]}))
    with OtherClient(gateway) as other:
        endless = pa.record_batch({"x": [1 << 40]})
        assert error_code(gateway, "slow", endless) == PoisonedRequest.code
        assert gateway.stats()["lanes"]["slow/1"]["isolated"]
    assert other.errors == []
    silences = [int(ms) for ms in re.findall(r"no heartbeat for (\d+) ms", gateway.text())]
    assert len(silences) == 2 and max(silences) < 25_000


@pytest.mark.over_zmq
@pytest.mark.slow
def test_all_gateway_processes_isolate_a_model(tmp_path: Path) -> None:
    """Process 0 starts the isolated worker, even if only another process has the callers."""
    server = {"processes": 2}
    with (
        running(tmp_path, served(tmp_path), workers=dict(WORKERS), server=server) as gateway,
        client_of(gateway, 1) as client,
    ):
        with pytest.raises(PoisonedRequest):
            client.score("fragile", BAD)

        def is_isolated() -> bool:
            return all(
                stats["lanes"]["fragile/1"]["isolated"]
                and stats["lanes"]["fragile/1"]["workers"]
                and stats["lanes"]["ids/1"]["workers"]
                for stats in by_process(gateway, 2).values()
            )

        eventually(is_isolated, what="an isolated worker at both processes")
        assert client.score("fragile", GOOD)["y"].to_pylist() == [-1, -4]
        assert client.score("ids", GOOD)["y"].to_pylist() == [4, 13]
