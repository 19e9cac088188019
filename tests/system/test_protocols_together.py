"""One gateway and every protocol at once: each answer is its caller's own, in a drain as before it.

The clients of each way to ask run in a process of their own, `support/together_client.py`.
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
"""Of each client, while all others send theirs."""
REQUESTS_BEFORE_DRAIN = 20
UNREAD = {"requests": 40, "bytes_each": 4 * MIB}
WINDOW_LEAST = 4
"""Requests of the unread stream that the server takes, with their results."""
BATCHES_UNDER_WAY = 2
"""That a worker may have been given before others came: one that runs and one that is next."""


def start(folder: Path, **inferential: Any) -> contextlib.AbstractContextManager[Gateway]:
    """A gateway with every port, one worker, and `broad` for a client that holds a drain up."""
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


def ids(gateway: Gateway) -> dict[str, Any]:
    """What the lane has come to."""
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
def holder() -> Iterator[ReferenceClient]:
    """A client that does not read, for whom a drain waits as long as the test looks at it."""
    reference = ReferenceClient(str(SUPPORT / "oip_client.py"))
    yield reference
    reference.close()


def begin_load(references: dict[str, ReferenceClient], gateway: Gateway, requests: int) -> None:
    """Let all clients send; none stops before all the others have had their answers."""
    for way, address in addresses(gateway).items():
        references[way].begin("load", way=way, address=address, requests=requests)
    assert [reference.facts() for reference in references.values()] == ["enough"] * len(WAYS)


def hold(holder: ReferenceClient, gateway: Gateway) -> None:
    """Have the server wait for the holder to read, once it is told to stop."""
    assert holder.ask("stream_unread", address=gateway.address, **UNREAD) == "under way"

    def is_held() -> bool:
        lane = gateway.stats()["lanes"]["broad/1"]
        return bool(lane.get("completed", 0) >= WINDOW_LEAST)

    eventually(is_held, what="answers that nobody reads")


def met(references: dict[str, ReferenceClient]) -> dict[str, list[Facts]]:
    """What the clients of each way met; every answer was right, and the same over all protocols."""
    found = {way: reference.facts() for way, reference in references.items()}
    clients = [client for each in found.values() for client in each]
    assert [client["wrong"] for client in clients] == [[]] * len(WAYS) * CLIENTS
    assert len({client.get("same") for client in clients}) == 1, clients
    assert all("same" in client for client in clients)
    return found


def answered(found: dict[str, list[Facts]], way: str = "") -> int:
    ways = [way] if way else WAYS
    return sum(client["answered"] for each in ways for client in found[each])


def test_every_answer_is_its_askers_own(
    tmp_path: Path, references: dict[str, ReferenceClient]
) -> None:
    """Clients of all ways at once, with rows that all send and rows that nobody else sends."""
    with start(tmp_path) as gateway:
        begin_load(references, gateway, REQUESTS)
        for reference in references.values():
            reference.tell("stop")
        found = met(references)

        assert {client["end"] for each in found.values() for client in each} == {"told"}
        lane = ids(gateway)
        assert lane["requests"] == lane["completed"] == answered(found)
        assert lane["batches"] < lane["completed"]
        assert (lane["refused"], lane["failed"]) == ({}, {})
        idle = gateway.wait_idle()
        assert idle["inferential"]["observations"] == {"answered": answered(found, "inferential")}
        assert idle["input_arena"]["leased_bytes"] == 0


def test_requests_of_different_protocols_run_in_one_batch(
    tmp_path: Path, references: dict[str, ReferenceClient]
) -> None:
    """One of each way comes while the worker is stopped; those that waited have one batch."""
    with start(tmp_path) as gateway:
        (worker,) = gateway.worker_pids()
        with suspended(worker):
            for number, (way, address) in enumerate(addresses(gateway).items(), 1):
                references[way].begin("one", way=way, address=address, number=number)
                eventually(lambda wanted=number: ids(gateway)["requests"] == wanted, what=way)
        for number, way in enumerate(WAYS, 1):
            wanted = 3 * rows_of(way, 0, 2 * number) + 1
            assert references[way].facts() == wanted.tolist(), way
        lane = ids(gateway)
        assert lane["completed"] == len(WAYS)
        assert lane["batches"] <= BATCHES_UNDER_WAY + 1
        gateway.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize("errors", ["metadata", "silent"])
def test_a_drain_under_load_answers_all_that_was_accepted(
    tmp_path: Path, references: dict[str, ReferenceClient], holder: ReferenceClient, errors: str
) -> None:
    """Every client has a request in the server when the drain begins, and is refused the next.

    The worker is stopped meanwhile, so that none slips through. Accepted is what the lane counted;
    its clients have as many answers. One refusal a client, by name, is all that is not answered;
    Inferential's are told nothing where the server is silent, and there its own count says it.
    """
    told = {"silent": "unanswered"}.get(errors, "draining")
    with start(tmp_path, errors=errors) as gateway:
        begin_load(references, gateway, REQUESTS_BEFORE_DRAIN)
        hold(holder, gateway)
        (worker,) = gateway.worker_pids()
        with suspended(worker):
            eventually(lambda: waiting(gateway) == len(WAYS) * CLIENTS, what="all to wait")
            gateway.signal(signal.SIGTERM)
            eventually(lambda: "draining" in gateway.text(), what="the drain")
            accepted = ids(gateway)["requests"]
        finish_load(references, gateway, is_silent=errors == "silent")
        require_none_lost(gateway, met(references), told, accepted)
        end(holder, gateway)


@pytest.mark.slow
def test_a_drain_at_any_moment_answers_all_that_was_accepted(
    tmp_path: Path, references: dict[str, ReferenceClient], holder: ReferenceClient
) -> None:
    """As it comes: requests are being read, queued, run and written when the drain begins."""
    with start(tmp_path, errors="metadata") as gateway:
        begin_load(references, gateway, REQUESTS_BEFORE_DRAIN)
        hold(holder, gateway)
        gateway.signal(signal.SIGTERM)
        finish_load(references, gateway)
        require_none_lost(gateway, met(references), "draining")
        end(holder, gateway)


def waiting(gateway: Gateway) -> int:
    lane = ids(gateway)
    requests: int = lane["requests"] - lane["completed"]
    return requests


def finish_load(
    references: dict[str, ReferenceClient], gateway: Gateway, *, is_silent: bool = False
) -> None:
    """Let all clients go on until they are refused; whom nobody tells, until it has happened."""
    for way, reference in references.items():
        if way == "inferential" and is_silent:
            eventually(
                lambda: gateway.stats()["inferential"]["observations"].get("draining") == CLIENTS,
                what="silent refusals",
            )
            reference.tell("stop")
        else:
            reference.tell("until refused")


def require_none_lost(
    gateway: Gateway, found: dict[str, list[Facts]], told: str, accepted: int | None = None
) -> None:
    """What the clients counted is what the server counted; it waits for the holder, no more."""
    ends = {way: [client["end"] for client in each] for way, each in found.items()}
    wanted = dict.fromkeys(WAYS, ["draining"] * CLIENTS)
    assert ends == wanted | {"inferential": [told] * CLIENTS}
    for client in (client for each in found.values() for client in each):
        assert client["sent"] == client["answered"] + 1
    lane = ids(gateway)
    assert lane["requests"] == lane["completed"] == answered(found)
    assert accepted in (None, lane["requests"])
    assert lane["failed"] == {} and lane.get("withdrawn", 0) == 0
    observations = gateway.stats()["inferential"]["observations"]
    assert observations == {"answered": answered(found, "inferential"), "draining": CLIENTS}
    only_holder = "draining: 0 streams, 1 calls, 0 requests in queues, 0 batches in flight"
    eventually(lambda: only_holder in gateway.text(), what="a drain that waits for one client")


def end(holder: ReferenceClient, gateway: Gateway) -> None:
    """Let the server go, which was all that its drain waited for."""
    holder.tell("read")
    holder.facts()
    assert gateway.wait() == 0
    assert "not drained in" not in gateway.text()
