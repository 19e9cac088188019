"""All protocols at once on one gateway: correct results for each client, also in a drain.

The clients of each protocol run in their own process, `support/together_client.py`.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto
from support import models
from support.processes import MIB, Gateway, eventually, running, suspended
from support.reference_client import Facts, ReferenceClient
from support.together_client import CLIENTS, WAYS, rows_of

SUPPORT = Path(models.__file__).parent
REQUESTS = 100
"""Requests of each client, while all others send theirs."""
REQUESTS_BEFORE_DRAIN = 20
UNREAD = {"requests": 40, "bytes_each": 4 * MIB}
WINDOW_LEAST = 4
"""Requests of the unread stream that the server accepts, with their results."""
BATCHES_IN_FLIGHT = 2
"""Batches that the worker may have before it is suspended: one running, one next."""


def start(folder: Path, **inferential: Any) -> contextlib.AbstractContextManager[Gateway]:
    """A gateway with all listeners, one worker, and the model `broad` to block a drain."""
    paths = {
        "ids": models.row_ids(folder / "ids"),
        "broad": models.identity(folder / "broad", TensorProto.FLOAT, ["rows", 64]),
    }
    return running(
        folder,
        [{"name": name, "path": str(path), "intra_threads": 1} for name, path in paths.items()],
        workers={"groups": ["0"], "count": 1, "reattach_s": 5.0},
        arena={"input_bytes": 48 * MIB, "output_bytes": 32 * MIB},
        http={"address": "127.0.0.1:0"},
        inferential={"address": "tcp://127.0.0.1:0", **inferential},
    )


def addresses(gateway: Gateway) -> dict[str, str]:
    stats = gateway.stats()
    by_http = dict.fromkeys(("json", "binary"), stats["http_address"])
    by_robots = {"inferential": stats["inferential"]["address"]}
    return dict.fromkeys(WAYS, gateway.address) | by_http | by_robots


def ids_stats(gateway: Gateway) -> dict[str, Any]:
    """Counts of the lane `ids/1`."""
    lane = gateway.stats()["lanes"]["ids/1"]
    return {"requests": 0, "completed": 0, "batches": 0} | lane


@pytest.fixture(scope="module")
def references() -> Iterator[dict[str, ReferenceClient]]:
    with contextlib.ExitStack() as stack:
        references = {}
        for way in WAYS:
            references[way] = ReferenceClient(str(SUPPORT / "together_client.py"))
            stack.callback(references[way].close)
        yield references


@pytest.fixture
def unread_client() -> Iterator[ReferenceClient]:
    """A client that does not read, so the drain cannot finish."""
    reference = ReferenceClient(str(SUPPORT / "oip_client.py"))
    yield reference
    reference.close()


def start_load(references: dict[str, ReferenceClient], gateway: Gateway, requests: int) -> None:
    """Starts all clients and waits until each has `requests` responses."""
    for way, address in addresses(gateway).items():
        references[way].begin("load", way=way, address=address, requests=requests)
    assert [reference.result() for reference in references.values()] == ["enough"] * len(WAYS)


def block_drain(unread_client: ReferenceClient, gateway: Gateway) -> None:
    """Opens a stream with unread results; the drain waits for it."""
    assert unread_client.run("stream_unread", address=gateway.address, **UNREAD) == "under way"

    def is_blocked() -> bool:
        lane = gateway.stats()["lanes"]["broad/1"]
        return bool(lane.get("completed", 0) >= WINDOW_LEAST)

    eventually(is_blocked, what="unread results")


def client_facts(references: dict[str, ReferenceClient]) -> dict[str, list[Facts]]:
    """Facts of all clients, after a check that results are correct and equal in all protocols."""
    facts = {way: reference.result() for way, reference in references.items()}
    clients = [client for each in facts.values() for client in each]
    assert [client["wrong"] for client in clients] == [[]] * len(WAYS) * CLIENTS
    assert len({client.get("same") for client in clients}) == 1, clients
    assert all("same" in client for client in clients)
    return facts


def answered(facts: dict[str, list[Facts]], way: str = "") -> int:
    ways = [way] if way else WAYS
    return sum(client["answered"] for each in ways for client in facts[each])


def test_every_client_gets_its_own_results(
    tmp_path: Path, references: dict[str, ReferenceClient]
) -> None:
    """Clients of all protocols at once; some rows are common to all, the others unique."""
    with start(tmp_path) as gateway:
        start_load(references, gateway, REQUESTS)
        for reference in references.values():
            reference.send("stop")
        facts = client_facts(references)

        assert {client["end"] for each in facts.values() for client in each} == {"told"}
        lane = ids_stats(gateway)
        assert lane["requests"] == lane["completed"] == answered(facts)
        assert lane["batches"] < lane["completed"]
        assert (lane["refused"], lane["failed"]) == ({}, {})
        idle = gateway.wait_idle()
        assert idle["inferential"]["observations"] == {"answered": answered(facts, "inferential")}
        assert idle["input_arena"]["leased_bytes"] == 0


@pytest.mark.slow
def test_requests_of_different_protocols_run_in_one_batch(
    tmp_path: Path, references: dict[str, ReferenceClient]
) -> None:
    """One request of each protocol arrives while the worker is suspended."""
    with start(tmp_path) as gateway:
        (worker,) = gateway.worker_pids()
        with suspended(worker):
            for number, (way, address) in enumerate(addresses(gateway).items(), 1):
                references[way].begin("one", way=way, address=address, number=number)
                eventually(
                    lambda expected=number: ids_stats(gateway)["requests"] == expected, what=way
                )
        for number, way in enumerate(WAYS, 1):
            expected = 3 * rows_of(way, 0, 2 * number) + 1
            assert references[way].result() == expected.tolist(), way
        lane = ids_stats(gateway)
        assert lane["completed"] == len(WAYS)
        assert lane["batches"] <= BATCHES_IN_FLIGHT + 1
        gateway.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize("errors", ["metadata", "silent"])
def test_drain_under_load_completes_all_accepted_requests(
    tmp_path: Path,
    references: dict[str, ReferenceClient],
    unread_client: ReferenceClient,
    errors: str,
) -> None:
    """Each client has one accepted request when the drain begins; its next one is rejected.

    The worker is suspended meanwhile, so no request completes before the drain. The clients receive
    as many responses as the lane accepted requests. With `errors = "silent"`, Inferential's clients
    receive no error; the server's counter shows the rejections.
    """
    inferential_end = {"silent": "unanswered"}.get(errors, "draining")
    with start(tmp_path, errors=errors) as gateway:
        start_load(references, gateway, REQUESTS_BEFORE_DRAIN)
        block_drain(unread_client, gateway)
        (worker,) = gateway.worker_pids()
        with suspended(worker):
            eventually(
                lambda: open_requests(gateway) == len(WAYS) * CLIENTS,
                what="a queued request of each client",
            )
            gateway.signal(signal.SIGTERM)
            eventually(lambda: "draining" in gateway.text(), what="the drain")
            accepted = ids_stats(gateway)["requests"]
        finish_load(references, gateway, is_silent=errors == "silent")
        require_no_losses(gateway, client_facts(references), inferential_end, accepted)
        unblock_drain(unread_client, gateway)


@pytest.mark.slow
def test_drain_at_any_moment_completes_all_accepted_requests(
    tmp_path: Path, references: dict[str, ReferenceClient], unread_client: ReferenceClient
) -> None:
    """Requests are being read, queued, run and written when the drain begins."""
    with start(tmp_path, errors="metadata") as gateway:
        start_load(references, gateway, REQUESTS_BEFORE_DRAIN)
        block_drain(unread_client, gateway)
        gateway.signal(signal.SIGTERM)
        finish_load(references, gateway)
        require_no_losses(gateway, client_facts(references), "draining")
        unblock_drain(unread_client, gateway)


def open_requests(gateway: Gateway) -> int:
    lane = ids_stats(gateway)
    requests: int = lane["requests"] - lane["completed"]
    return requests


def finish_load(
    references: dict[str, ReferenceClient], gateway: Gateway, *, is_silent: bool = False
) -> None:
    """Lets all clients continue until they are rejected; silent ones until the server counts it."""
    for way, reference in references.items():
        if way == "inferential" and is_silent:
            eventually(
                lambda: gateway.stats()["inferential"]["observations"].get("draining") == CLIENTS,
                what="silent rejections",
            )
            reference.send("stop")
        else:
            reference.send("until refused")


def require_no_losses(
    gateway: Gateway,
    facts: dict[str, list[Facts]],
    inferential_end: str,
    accepted: int | None = None,
) -> None:
    """Checks that clients and server count the same, and that only the unread stream is open."""
    ends = {way: [client["end"] for client in each] for way, each in facts.items()}
    expected = dict.fromkeys(WAYS, ["draining"] * CLIENTS)
    assert ends == expected | {"inferential": [inferential_end] * CLIENTS}
    for client in (client for each in facts.values() for client in each):
        assert client["sent"] == client["answered"] + 1
    lane = ids_stats(gateway)
    assert lane["requests"] == lane["completed"] == answered(facts)
    assert accepted in (None, lane["requests"])
    assert lane["failed"] == {} and lane.get("withdrawn", 0) == 0
    observations = gateway.stats()["inferential"]["observations"]
    assert observations == {"answered": answered(facts, "inferential"), "draining": CLIENTS}
    only_unread_call = "draining: 0 streams, 1 calls, 0 requests in queues, 0 batches in flight"
    eventually(
        lambda: only_unread_call in gateway.text(), what="a drain that waits for the unread stream"
    )


def unblock_drain(unread_client: ReferenceClient, gateway: Gateway) -> None:
    """Reads the unread stream, so the drain ends."""
    unread_client.send("read")
    unread_client.result()
    assert gateway.wait() == 0
    assert "not drained in" not in gateway.text()
