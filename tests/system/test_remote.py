"""A model of the backend `remote` in front of a server with faults."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support import models
from support.oip_stub import MODES, Stub
from support.processes import Gateway, running
from support.reference_client import ReferenceClient
from support.remotes import mode, remote, score, served
from support.robots import Peer, address_of, observation, response

from iskander.errors import (
    DeadlineExceeded,
    IskanderError,
    LimitExceeded,
    RemoteAnswerInvalid,
    RemoteDenied,
    RemoteFailed,
    RemoteNotReady,
    RemoteOverloaded,
    RemoteRejected,
    RemoteTimeout,
)

OIP_CLIENT = str(Path(models.__file__).with_name("oip_client.py"))
X = [1.0, 2.5, -3.0]
FAULTS: dict[str, tuple[type[IskanderError], str, int | None]] = {
    "unavailable": (RemoteOverloaded, "Exceeds maximum queue size", 2000),
    "exhausted": (RemoteOverloaded, "busy", 250),
    "too large": (RemoteRejected, "larger than max", None),
    "invalid": (RemoteRejected, "x is out of range", None),
    "missing": (RemoteNotReady, "unknown model", None),
    "denied": (RemoteDenied, "no token", None),
    "failed": (RemoteFailed, "the model raised an error", None),
    "no output": (RemoteAnswerInvalid, "output `y` is missing", None),
    "wrong name": (RemoteAnswerInvalid, "output `y` is missing; it has z", None),
    "wrong type": (RemoteAnswerInvalid, "datatype FP32, expected FP64", None),
    "wrong shape": (RemoteAnswerInvalid, "has the shape [1, 1] for a batch of 1 rows", None),
    "wrong rows": (RemoteAnswerInvalid, "the shape [2] for a batch of 1 rows", None),
    "short": (RemoteAnswerInvalid, "has 7 bytes, and its shape needs 8", None),
    "garbage": (RemoteAnswerInvalid, "no ModelInferResponse", None),
    "huge": (RemoteAnswerInvalid, "(`remote.message_bytes`)", None),
}


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    with Stub(tmp_path_factory.mktemp("stub")) as started:
        yield started


@pytest.fixture(scope="module")
def gateway(stub: Stub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway in front of the stub, which has no metadata."""
    folder = tmp_path_factory.mktemp("front")
    faulty = remote(folder / "faulty", stub.address, message_bytes=1 << 18)
    brief = remote(folder / "brief", stub.address, timeout_s=0.4)
    with running(
        folder,
        [served(faulty, max_batch_rows=200_000), served(brief)],
        workers={"hang_s": 1.0},
        http={"address": "127.0.0.1:0"},
        inferential={"address": "tcp://127.0.0.1:0", "errors": "metadata"},
    ) as ready:
        yield ready


@pytest.mark.parametrize("name", ["double", "typed"])
def test_results(gateway: Gateway, name: str) -> None:
    first = float(MODES.index(name))
    batch = pa.record_batch({"x": [first, *X]})
    assert score(gateway, "faulty", batch) == {"y": [2 * first, 2.0, 5.0, -6.0]}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_its_error(gateway: Gateway, stub: Stub, name: str) -> None:
    kind, text, retry_after_ms = FAULTS[name]

    with pytest.raises(kind) as raised:
        score(gateway, "faulty", mode(name))

    assert type(raised.value) is kind
    assert text in raised.value.message
    assert f"remote model `stub` at {stub.address}" in raised.value.message
    assert raised.value.retry_after_ms == retry_after_ms
    assert score(gateway, "faulty", mode("double")) == {"y": [0.0]}


def test_faults_end_no_worker_and_no_service(gateway: Gateway) -> None:
    for _ in range(4):
        with pytest.raises(RemoteFailed):
            score(gateway, "faulty", mode("failed"))
    stats = gateway.stats()
    assert stats["ready"]
    assert [each["ends"] for each in stats["workers"]] == [{}, {}]
    assert stats["lanes"]["faulty/1"]["quarantine"] == ""


def test_lost_server_answer_is_not_the_callers_fault(gateway: Gateway) -> None:
    """A batch of several callers is not repeated for each of them."""
    before = gateway.stats()["lanes"]["faulty/1"].get("retried", 0)
    with pytest.raises(RemoteOverloaded):
        score(gateway, "faulty", mode("exhausted"))
    assert gateway.stats()["lanes"]["faulty/1"].get("retried", 0) == before


def test_request_above_the_limit_is_not_sent(gateway: Gateway) -> None:
    with pytest.raises(LimitExceeded, match=r"limit 262144 \(`remote.message_bytes`"):
        score(gateway, "faulty", pa.record_batch({"x": np.zeros(200_000)}))


def test_timeout_is_an_error_and_cancels_the_call(gateway: Gateway, stub: Stub) -> None:
    count = len(stub.events("cancelled"))
    with pytest.raises(RemoteTimeout, match=r"did not answer within 0.4 s \(`remote.timeout_s`\)"):
        score(gateway, "brief", mode("slow"))
    stub.wait_for("cancelled", count + 1)


def test_deadline_of_a_batch_ends_its_call(gateway: Gateway, stub: Stub) -> None:
    """The remote server receives the deadline, and sees the cancellation."""
    count = len(stub.events("cancelled"))
    with gateway.client() as client:
        (outcome,) = client.outcomes("faulty", [mode("slow")], terms={"deadline_ms": 600})
    assert isinstance(outcome, DeadlineExceeded)
    assert f"remote model `stub` at {stub.address}" in outcome.message
    stub.wait_for("cancelled", count + 1)
    remaining_s = [event["remaining_s"] for event in stub.events("ModelInfer")][-1]
    assert 0 < remaining_s < 1


def test_call_is_cancelled_when_its_caller_leaves(gateway: Gateway, stub: Stub) -> None:
    """Without a deadline, by the end of the caller's connection."""
    counts = {name: len(stub.events(name)) for name in ("ModelInfer", "cancelled")}
    tensor = {"name": "x", "datatype": "FP64", "shape": [1], "data": [MODES.index("slow")]}
    connection = http.client.HTTPConnection(gateway.stats()["http_address"], timeout=20)
    with contextlib.closing(connection):
        connection.request("POST", "/v2/models/faulty/infer", json.dumps({"inputs": [tensor]}))
        stub.wait_for("ModelInfer", counts["ModelInfer"] + 1)
    stub.wait_for("cancelled", counts["cancelled"] + 1)


def test_worker_that_waits_longer_than_the_hang_limit_is_not_killed(
    gateway: Gateway, stub: Stub
) -> None:
    """`workers.hang_s` is 1 s; the caller leaves after 2.5 s, which cancels the call."""
    count = len(stub.events("cancelled"))
    with pytest.raises(IskanderError), gateway.client() as client:
        client.score("faulty", mode("slow"), timeout_s=2.5)
    stub.wait_for("cancelled", count + 1)
    assert score(gateway, "faulty", mode("double")) == {"y": [0.0]}
    assert [each["starts"] for each in gateway.stats()["workers"]] == [1, 1]


def test_statuses_of_the_other_protocols(gateway: Gateway) -> None:
    stats = gateway.stats()
    x = float(MODES.index("exhausted"))
    tensors = {"x": ["FP64", [1], np.array([x]).tobytes().hex()]}
    reference = ReferenceClient(OIP_CLIENT)
    try:
        status = reference.run("infer", address=gateway.address, model="faulty", tensors=tensors)
    finally:
        reference.close()
    assert status["refused"][0] == "RESOURCE_EXHAUSTED"

    connection = http.client.HTTPConnection(stats["http_address"], timeout=20)
    with contextlib.closing(connection):
        tensor = {"name": "x", "datatype": "FP64", "shape": [1], "data": [x]}
        body = json.dumps({"inputs": [tensor]})
        connection.request("POST", "/v2/models/faulty/infer", body)
        answer = connection.getresponse()
        assert answer.status == 503
        assert "remote_overloaded" in answer.read().decode()

    with Peer(address_of(gateway), b"robot") as peer:
        peer.send(b"", *observation("faulty", {"x": np.array([x])}))
        error = response(peer.read())
    assert error.metadata["error_code"] == "remote_overloaded"
    assert error.metadata["error_retryable"] == "true"


def test_missing_metadata_is_a_notice(gateway: Gateway) -> None:
    for worker in gateway.stats()["workers"]:
        assert "its tensors are not compared" in worker["notices"][0]
