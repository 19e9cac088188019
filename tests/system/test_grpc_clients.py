"""Unmodified gRPC clients: the sync and asyncio clients of grpcio, and Arrow's in C++.

The grpcio clients run in their own process, `support/grpc_client.py`; pyarrow.flight runs here.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import StreamEnded
from h2.settings import SettingCodes
from onnx import TensorProto
from pyarrow import flight
from support import models, raw
from support.grpc_client import CHECK, WIDTH, ReferenceClient, opening, wide_batch
from support.processes import MIB, Gateway, eventually, running, suspended

from iskander.gateway.transport.http2.status import Status

INFER = "/inference.GRPCInferenceService/ModelInfer"
SERVING = "0801"
"""A HealthCheckResponse, in hexadecimal."""
STREAMS = 256
LARGE_LIMITS = {
    "workers": {"groups": ["0"], "reattach_s": 5.0},
    "limits": {
        "rows": 200_000,
        "bytes": 36 * MIB,
        "message_bytes": 40 * MIB,
        "window_bytes": 64 * MIB,
        "streams": STREAMS,
    },
    "arena": {"input_bytes": 96 * MIB, "output_bytes": 96 * MIB},
}
TINY_WINDOWS = [
    ["grpc.http2.lookahead_bytes", 4096],
    ["grpc.http2.max_frame_size", 16_384],
    ["grpc.http2.bdp_probe", 0],
]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def served(folder: Path) -> list[dict[str, Any]]:
    """Returns `ids`, `same` with results as large as its inputs, and `slow`."""
    paths = {
        "ids": models.row_ids(folder / "ids"),
        "same": models.identity(folder / "same", TensorProto.FLOAT, ["rows", WIDTH]),
        "slow": models.slow(folder / "slow", 100),
    }
    return [{"name": n, "path": str(p), "intra_threads": 1} for n, p in paths.items()]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("clients")
    addresses = ["127.0.0.1:0", f"unix:{folder}/flight.sock", *["[::1]:0"] * has_ipv6()]
    with running(folder, served(folder), server={"address": addresses}, **LARGE_LIMITS) as ready:
        yield ready
        ready.wait_idle()


@pytest.fixture(scope="module")
def reference(gateway: Gateway) -> Iterator[ReferenceClient]:
    reference = ReferenceClient()
    yield reference
    reference.close()


def addresses_of(gateway: Gateway) -> dict[str, str]:
    """Returns the gateway's addresses by kind."""
    (listed,) = re.findall(r"ready on (.*) after", gateway.text())
    tcp, unix, *ipv6 = listed.split(", ")
    return {"tcp": tcp, "unix": unix, **({"ipv6": f"ipv6:{ipv6[0]}"} if ipv6 else {})}


def descriptors_of(gateway: Gateway) -> int:
    return psutil.Process(gateway.pid).num_fds()


@pytest.mark.parametrize("kind", ["tcp", "unix", "ipv6"])
def test_both_grpcio_clients_work_over_each_kind_of_address(
    gateway: Gateway, reference: ReferenceClient, kind: str
) -> None:
    addresses = addresses_of(gateway)
    if kind not in addresses:
        pytest.skip("this machine has no IPv6")
    expected = [SERVING, "OK"]
    assert reference.run("unary", address=addresses[kind]) == {"sync": expected, "aio": expected}


def test_cancelled_watchers_of_one_connection_free_their_slots(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    """The sum over all rounds exceeds the limit of open streams."""
    rounds = STREAMS // 50 + 1
    result = reference.run("watchers", address=gateway.address, count=50, rounds=rounds)
    assert result == {"heard": {SERVING: 50 * rounds}, "codes": {"CANCELLED": 50 * rounds}}


def test_streams_of_one_grpcio_connection_get_their_own_results(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    result = reference.run("interleaved", address=gateway.address, streams=20, batches=15)
    assert result == [[15, "OK"]] * 20


def test_streams_of_one_arrow_connection_get_their_own_results(gateway: Gateway) -> None:
    all_open = threading.Barrier(20)
    wrong: list[str] = []

    def stream(client: flight.FlightClient, number: int) -> None:
        writer, reader = client.do_exchange(
            flight.FlightDescriptor.for_path("ids"), flight.FlightCallOptions(timeout=20)
        )
        with writer:
            writer.begin(pa.schema([("x", pa.int64())]))
            all_open.wait(20)
            for turn in range(15):
                start = number << 32 | turn << 16
                sent = np.arange(start, start + 1 + 97 * (number + turn) % 3000)
                writer.write_batch(pa.record_batch({"x": sent}))
                tripled = reader.read_chunk().data["y"].to_numpy()
                if tripled.tolist() != (3 * sent + 1).tolist():
                    wrong.append(f"stream {number}, batch {turn}")
            writer.done_writing()

    with flight.connect(f"grpc://{gateway.address}") as client:
        threads = [threading.Thread(target=stream, args=(client, n)) for n in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert not all_open.broken


@pytest.mark.parametrize(
    "is_awaiting_worker", [True, False], ids=["while-open", "after-half-close"]
)
@pytest.mark.parametrize(
    ("options", "rows", "count"),
    [([], 32_000, 3), ([["grpc.http2.bdp_probe", 0]], 4000, 3), (TINY_WINDOWS, 4000, 2)],
    ids=["default", "fixed-windows", "tiny-windows"],
)
def test_messages_larger_than_the_windows_of_a_grpcio_client(
    gateway: Gateway,
    reference: ReferenceClient,
    options: list[list[Any]],
    rows: int,
    count: int,
    is_awaiting_worker: bool,
) -> None:
    """After half-close, too, the status follows a result that waits for window updates."""
    result = reference.run(
        "large",
        address=gateway.address,
        rows=rows,
        count=count,
        options=options,
        is_awaiting_worker=is_awaiting_worker,
    )
    assert result == {"code": "OK", "details": "", "right": count}


def test_settings_ack_precedes_data_that_needs_the_wider_window(
    gateway: Gateway,
) -> None:
    """A client counts by its old window until the ACK; beyond it, h2 and grpcio end the call."""
    sent = wide_batch(1000)
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", raw.EXCHANGE),
        (":authority", "iskander"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    host, _, port = gateway.address.rpartition(":")
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    client.increment_flow_control_window(1 << 30)
    client.send_headers(1, headers)
    with socket.create_connection((host, int(port)), timeout=20) as connection:

        def receive() -> list[Any]:
            connection.sendall(client.data_to_send())
            data = connection.recv(1 << 20)
            assert data, "the server closed the connection"
            return client.receive_data(data)

        while client.remote_settings.initial_window_size < sent.nbytes:
            receive()
        for frame in (opening("same", sent), raw.batch_data(sent)):
            message = b"\0" + len(frame).to_bytes(4) + frame
            for at in range(0, len(message), 16_384):
                client.send_data(1, message[at : at + 16_384])
        client.end_stream(1)
        while client.remote_flow_control_window(1):
            receive()
        client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 24})
        events: list[Any] = []
        while not any(isinstance(event, StreamEnded) for event in events):
            events += receive()
    assert dict(events[-2].headers)[b"grpc-status"] == b"0"


@pytest.mark.parametrize(
    "is_awaiting_worker", [True, False], ids=["while-open", "after-half-close"]
)
def test_arrow_client_exchanges_messages_of_tens_of_megabytes(
    gateway: Gateway, is_awaiting_worker: bool
) -> None:
    sent = wide_batch(32_000)
    with flight.connect(f"grpc://{gateway.address}") as client:
        writer, reader = client.do_exchange(
            flight.FlightDescriptor.for_path("same"), flight.FlightCallOptions(timeout=20)
        )
        with writer:
            writer.begin(sent.schema)
            writer.write_batch(sent)
            if not is_awaiting_worker:
                writer.done_writing()
            assert reader.read_chunk().data["y"].equals(sent["x"])
            if is_awaiting_worker:
                writer.done_writing()


@pytest.mark.parametrize("kind", ["gzip", "deflate"])
def test_compressed_messages_are_accepted(
    gateway: Gateway, reference: ReferenceClient, kind: str
) -> None:
    result = reference.run("compressed", address=gateway.address, kind=kind)
    # The unary call names an unknown service.
    assert result == {"unary": "NOT_FOUND", "is_right": True}


def test_expired_deadline_frees_the_stream(gateway: Gateway, reference: ReferenceClient) -> None:
    result = reference.run(
        "deadline", address=gateway.address, model="slow", units=1000, timeout_s=0.2
    )
    assert result["code"] == "DEADLINE_EXCEEDED"
    gateway.wait_idle()


@pytest.mark.slow
def test_server_enforces_the_deadline_of_a_suspended_client(gateway: Gateway) -> None:

    def withdrawn() -> int:
        count: int = gateway.stats()["lanes"]["slow/1"].get("withdrawn", 0)
        return count

    def is_computing() -> bool:
        return any(worker["in_flight"] for worker in gateway.stats()["workers"])

    before = withdrawn()
    reference = ReferenceClient()
    try:
        reference.begin(
            "deadline", address=gateway.address, model="slow", units=4000, timeout_s=1.0
        )
        eventually(is_computing, what="a running batch")
        with suspended(reference.pid):
            eventually(lambda: gateway.stats()["streams"] == 0, what="the end of the stream")
            # Withdrawn at its deadline, before the batch completed.
            assert withdrawn() == before + 1
        assert reference.result()["code"] == "DEADLINE_EXCEEDED"
    finally:
        reference.close()
    gateway.wait_idle()


def test_connection_works_after_cancelled_streams(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    result = reference.run("cancelled", address=gateway.address, count=50)
    assert result == {"codes": {"CANCELLED": 50}, "after": "OK"}
    gateway.wait_idle()


def test_text_and_binary_metadata_are_accepted(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    batch = pa.record_batch({"x": [1, 2]})
    frames = [
        raw.descriptor("ids").hex(),
        raw.schema_data(batch.schema).hex(),
        raw.batch_data(batch).hex(),
    ]
    every_byte = base64.b64encode(bytes(range(256))).decode()
    printable = "".join(map(chr, range(0x21, 0x7F)))
    pairs = [
        ("iskander-client", "robot-7"),
        ("iskander-priority", "3"),
        ("letters", printable),
        ("twice", "a,b"),
        ("twice", "c"),
        ("every-byte-bin", every_byte),
        ("every-byte-bin", ""),
        ("long-bin", base64.b64encode(os.urandom(3000)).decode()),
        ("long", "x" * 3000),
    ]

    def exchange(metadata: list[tuple[str, str]]) -> dict[str, Any]:
        response: dict[str, Any] = reference.run(
            "outcome",
            address=gateway.address,
            method=raw.EXCHANGE,
            frames=frames,
            metadata=metadata,
        )
        return response

    result = exchange(pairs)
    assert (result["code"], result["frames"]) == ("OK", 2)
    rejected = exchange([*pairs, ("iskander-errors", "some~day")])
    assert rejected["code"] == "INVALID_ARGUMENT"
    assert "some~day" in rejected["details"]
    assert rejected["next"] == "OK"


def test_metadata_above_the_limit_fails_only_its_call(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    result = reference.run(
        "outcome",
        address=gateway.address,
        method=CHECK,
        frames=[""],
        metadata=[("long", "x" * 20_000)],
    )
    # Not RESOURCE_EXHAUSTED, because a retry cannot succeed.
    assert (result["code"], result["next"]) == ("INVALID_ARGUMENT", "OK")


@pytest.mark.slow
def test_idle_client_that_pings_every_second_stays_connected(gateway: Gateway) -> None:
    reference = ReferenceClient()
    try:
        result = reference.run("keepalive", address=gateway.address, quiet_s=5.0)
        assert result == {"meanwhile": [], "code": "OK"}
        # Its pings detect a suspended server, so they were sent.
        with suspended(gateway.pid):
            assert reference.result()["then"] != "READY"
    finally:
        reference.close()


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Guess", "/no.such.Service/Call"])
def test_unknown_methods_and_services_are_unimplemented(
    gateway: Gateway, reference: ReferenceClient, method: str
) -> None:
    result = reference.run("outcome", address=gateway.address, method=method, frames=[""])
    assert (result["code"], result["next"]) == ("UNIMPLEMENTED", "OK")
    assert method in result["details"]
    assert (
        reference.run("unknown_by_aio", address=gateway.address, method=method) == "UNIMPLEMENTED"
    )


@pytest.mark.parametrize(
    ("method", "frames", "code", "name"),
    [
        (CHECK, [raw.field(1, b"nobody")], "NOT_FOUND", "model_not_found"),
        (CHECK, [b"\xff"], "INVALID_ARGUMENT", "malformed"),
        (CHECK, [], "INVALID_ARGUMENT", "malformed"),
        ("/no.such.Service/Call", [], "UNIMPLEMENTED", "unsupported"),
        (INFER, [b"\xff"], "INVALID_ARGUMENT", "malformed"),
        (INFER, [raw.field(1, b"nobody")], "NOT_FOUND", "model_not_found"),
        (raw.EXCHANGE, [raw.descriptor("nobody")], "NOT_FOUND", "model_not_found"),
        (raw.EXCHANGE, [], "INVALID_ARGUMENT", "malformed"),
    ],
)
def test_error_trailers_have_the_code_and_the_detail(
    gateway: Gateway,
    reference: ReferenceClient,
    method: str,
    frames: list[bytes],
    code: str,
    name: str,
) -> None:
    hexed = [frame.hex() for frame in frames]
    result = reference.run("outcome", address=gateway.address, method=method, frames=hexed)
    trailers = result["trailers"]
    assert (result["code"], trailers["iskander-code"], result["next"]) == (code, name, "OK")
    detail = base64.b64decode(trailers["grpc-status-details-bin"])
    if method == raw.EXCHANGE:
        error = json.loads(detail)
        assert (error["code"], error["message"]) == (name, result["details"])
    else:
        number = bytes([Status[code]])  # A google.rpc.Status; its ErrorInfo has the code.
        assert detail.startswith(b"\x08" + number + raw.field(2, result["details"].encode()))
        assert raw.field(1, b"code") + raw.field(2, name.encode()) in detail


def test_short_connections_leak_no_descriptors(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    reference.run("unary", address=gateway.address)
    eventually(lambda: gateway.stats()["streams"] == 0, what="the end of all streams")
    before = descriptors_of(gateway)
    result = reference.run("short_connections", address=gateway.address, count=300)
    assert result == {"OK": 300}
    eventually(lambda: descriptors_of(gateway) <= before, what="closed descriptors")


def test_idle_streams_of_many_connections_do_not_block_an_active_one(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    result = reference.run("idle_streams", address=gateway.address, count=200, batches=50)
    assert result == {"worked": 50, "codes": {"OK": 200}}
    gateway.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [10, 5000], ids=["small", "large"])
def test_drain_fails_calls_as_draining_or_unavailable_never_cancelled(
    tmp_path: Path, rows: int
) -> None:
    """Clients open calls on existing connections until the gateway exits."""
    reference = ReferenceClient()
    try:
        with running(tmp_path, served(tmp_path), **LARGE_LIMITS) as gateway:
            progress = reference.run(
                "hammer", address=gateway.address, connections=3, streams=3, rows=rows
            )
            assert progress == "under way"
            gateway.signal(signal.SIGTERM)
            result = reference.result()
            gateway.wait()
    finally:
        reference.close()
    assert result["wrong"] == []
    assert set(result["outcomes"]) <= {"OK", "UNAVAILABLE draining", "UNAVAILABLE"}


@pytest.mark.slow
def test_wait_for_ready_call_succeeds_when_a_server_starts(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    reference = ReferenceClient()
    try:
        result = reference.run("wait_for_ready", address=address)
        assert result == {"impatient": "UNAVAILABLE"}
        with running(tmp_path, served(tmp_path), server={"address": address}, **LARGE_LIMITS):
            result = reference.result()
    finally:
        reference.close()
    assert (result["code"], result["frames"]) == ("OK", 1)
