"""What unmodified gRPC clients get from the port: grpcio's two, and Arrow's in C++.

grpcio's run in a process of their own, `support/grpc_client.py`; pyarrow.flight's runs here.
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

from iskander.transport.http2.status import Status

INFER = "/inference.GRPCInferenceService/ModelInfer"
SERVING = "0801"
"""A HealthCheckResponse, in hexadecimal."""
STREAMS = 256
ROOM = {
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
TINY = [
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
    """`ids`; `same`, whose results are as large as its inputs; and `slow`."""
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
    with running(folder, served(folder), server={"address": addresses}, **ROOM) as ready:
        yield ready
        ready.wait_idle()


@pytest.fixture(scope="module")
def reference(gateway: Gateway) -> Iterator[ReferenceClient]:
    reference = ReferenceClient()
    yield reference
    reference.close()


def addresses_of(gateway: Gateway) -> dict[str, str]:
    """By their kind."""
    (listed,) = re.findall(r"ready on (.*) after", gateway.text())
    tcp, unix, *ipv6 = listed.split(", ")
    return {"tcp": tcp, "unix": unix, **({"ipv6": f"ipv6:{ipv6[0]}"} if ipv6 else {})}


def descriptors_of(gateway: Gateway) -> int:
    return psutil.Process(gateway.pid).num_fds()


@pytest.mark.parametrize("kind", ["tcp", "unix", "ipv6"])
def test_both_clients_check_over_every_kind_of_address(
    gateway: Gateway, reference: ReferenceClient, kind: str
) -> None:
    addresses = addresses_of(gateway)
    if kind not in addresses:
        pytest.skip("this machine has no IPv6")
    wanted = [SERVING, "OK"]
    assert reference.run("unary", address=addresses[kind]) == {"sync": wanted, "aio": wanted}


def test_fifty_watchers_of_one_connection_hear_and_leave_again(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    """More in all than may watch at once: those that were cancelled have left."""
    rounds = STREAMS // 50 + 1
    found = reference.run("watchers", address=gateway.address, count=50, rounds=rounds)
    assert found == {"heard": {SERVING: 50 * rounds}, "codes": {"CANCELLED": 50 * rounds}}


def test_twenty_streams_of_one_grpcio_connection_each_get_their_own(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    found = reference.run("interleaved", address=gateway.address, streams=20, batches=15)
    assert found == [[15, "OK"]] * 20


def test_twenty_streams_of_one_arrow_connection_each_get_their_own(gateway: Gateway) -> None:
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
                got = reader.read_chunk().data["y"].to_numpy()
                if got.tolist() != (3 * sent + 1).tolist():
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
    "is_awaiting_worker", [True, False], ids=["while-open", "when-input-ended"]
)
@pytest.mark.parametrize(
    ("options", "rows", "count"),
    [([], 32_000, 3), ([["grpc.http2.bdp_probe", 0]], 4000, 3), (TINY, 4000, 2)],
    ids=["default", "fixed-windows", "tiny-windows"],
)
def test_messages_far_larger_than_a_grpcio_clients_windows(
    gateway: Gateway,
    reference: ReferenceClient,
    options: list[list[Any]],
    rows: int,
    count: int,
    is_awaiting_worker: bool,
) -> None:
    """Ended input, too: the last result waits for its windows and the status waits for it."""
    found = reference.run(
        "large",
        address=gateway.address,
        rows=rows,
        count=count,
        options=options,
        is_awaiting_worker=is_awaiting_worker,
    )
    assert found == {"code": "OK", "details": "", "right": count}


def test_what_a_wider_window_lets_out_comes_behind_the_answer_to_the_settings(
    gateway: Gateway,
) -> None:
    """Before it has that answer, a client counts by its old window; h2 and grpcio end the call."""
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
    with socket.create_connection((host, int(port)), timeout=20) as link:

        def receive() -> list[Any]:
            link.sendall(client.data_to_send())
            data = link.recv(1 << 20)
            assert data, "the server went"
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
    "is_awaiting_worker", [True, False], ids=["while-open", "when-input-ended"]
)
def test_messages_of_tens_of_megabytes_by_the_arrow_client(
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
def test_compressed_messages_are_understood(
    gateway: Gateway, reference: ReferenceClient, kind: str
) -> None:
    found = reference.run("compressed", address=gateway.address, kind=kind)
    # The unary call asks for a name that is none.
    assert found == {"unary": "NOT_FOUND", "is_right": True}


def test_a_deadline_is_kept_and_frees_the_stream(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    found = reference.run(
        "deadline", address=gateway.address, model="slow", units=1000, timeout_s=0.2
    )
    assert found["code"] == "DEADLINE_EXCEEDED"
    gateway.wait_idle()


def test_the_server_keeps_a_deadline_that_its_client_does_not(gateway: Gateway) -> None:
    """The client is stopped before its deadline; its stream goes all the same."""

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
        eventually(is_computing, what="a batch")
        with suspended(reference.pid):
            eventually(lambda: gateway.stats()["streams"] == 0, what="the end of the stream")
            # It was not the batch that ended.
            assert withdrawn() == before + 1
        assert reference.facts()["code"] == "DEADLINE_EXCEEDED"
    finally:
        reference.close()
    gateway.wait_idle()


def test_cancelled_streams_leave_their_connection_as_it_was(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    found = reference.run("cancelled", address=gateway.address, count=50)
    assert found == {"codes": {"CANCELLED": 50}, "after": "OK"}
    gateway.wait_idle()


def test_metadata_in_letters_and_in_bytes(gateway: Gateway, reference: ReferenceClient) -> None:
    batch = pa.record_batch({"x": [1, 2]})
    frames = [
        raw.descriptor("ids").hex(),
        raw.schema_data(batch.schema).hex(),
        raw.batch_data(batch).hex(),
    ]
    every_byte = base64.b64encode(bytes(range(256))).decode()
    letters = "".join(map(chr, range(0x21, 0x7F)))
    said = [
        ("iskander-client", "robot-7"),
        ("iskander-priority", "3"),
        ("letters", letters),
        ("twice", "a,b"),
        ("twice", "c"),
        ("every-byte-bin", every_byte),
        ("every-byte-bin", ""),
        ("long-bin", base64.b64encode(os.urandom(3000)).decode()),
        ("long", "x" * 3000),
    ]

    def exchange(metadata: list[tuple[str, str]]) -> dict[str, Any]:
        answer: dict[str, Any] = reference.run(
            "outcome",
            address=gateway.address,
            method=raw.EXCHANGE,
            frames=frames,
            metadata=metadata,
        )
        return answer

    found = exchange(said)
    assert (found["code"], found["frames"]) == ("OK", 2)
    refused = exchange([*said, ("iskander-errors", "some~day")])
    assert refused["code"] == "INVALID_ARGUMENT"
    assert "some~day" in refused["details"]
    assert refused["next"] == "OK"


def test_metadata_beyond_the_limit_ends_its_call_only(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    found = reference.run(
        "outcome",
        address=gateway.address,
        method=CHECK,
        frames=[""],
        metadata=[("long", "x" * 20_000)],
    )
    # As everything of a client that is too large: to be asked again it is never worth.
    assert (found["code"], found["next"]) == ("INVALID_ARGUMENT", "OK")


@pytest.mark.slow
def test_an_idle_client_that_pings_every_second_is_not_sent_away(gateway: Gateway) -> None:
    reference = ReferenceClient()
    try:
        found = reference.run("keepalive", address=gateway.address, quiet_s=5.0)
        assert found == {"meanwhile": [], "code": "OK"}
        # That it did ping: it finds out that nobody answers.
        with suspended(gateway.pid):
            assert reference.facts()["then"] != "READY"
    finally:
        reference.close()


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Guess", "/no.such.Service/Call"])
def test_unknown_methods_and_services_are_unimplemented(
    gateway: Gateway, reference: ReferenceClient, method: str
) -> None:
    found = reference.run("outcome", address=gateway.address, method=method, frames=[""])
    assert (found["code"], found["next"]) == ("UNIMPLEMENTED", "OK")
    assert method in found["details"]
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
def test_an_error_has_its_name_and_its_detail_beside_its_status(
    gateway: Gateway,
    reference: ReferenceClient,
    method: str,
    frames: list[bytes],
    code: str,
    name: str,
) -> None:
    hexed = [frame.hex() for frame in frames]
    found = reference.run("outcome", address=gateway.address, method=method, frames=hexed)
    trailers = found["trailers"]
    assert (found["code"], trailers["iskander-code"], found["next"]) == (code, name, "OK")
    detail = base64.b64decode(trailers["grpc-status-details-bin"])
    if method == raw.EXCHANGE:
        told = json.loads(detail)
        assert (told["code"], told["message"]) == (name, found["details"])
    else:
        number = bytes([Status[code]])  # A google.rpc.Status, with the same in its ErrorInfo.
        assert detail.startswith(b"\x08" + number + raw.field(2, found["details"].encode()))
        assert raw.field(1, b"code") + raw.field(2, name.encode()) in detail


def test_short_connections_leave_no_descriptor(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    reference.run("unary", address=gateway.address)
    eventually(lambda: gateway.stats()["streams"] == 0, what="no stream")
    before = descriptors_of(gateway)
    found = reference.run("short_connections", address=gateway.address, count=300)
    assert found == {"OK": 300}
    eventually(lambda: descriptors_of(gateway) <= before, what="descriptors closed")


def test_idle_streams_of_many_connections_do_not_stand_in_the_way(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    found = reference.run("idle_streams", address=gateway.address, count=200, batches=50)
    assert found == {"worked": 50, "codes": {"OK": 200}}
    gateway.wait_idle()


@pytest.mark.parametrize("rows", [10, 5000], ids=["small", "large"])
def test_a_stop_is_told_by_name_or_as_unavailable_and_never_as_cancelled(
    tmp_path: Path, rows: int
) -> None:
    """Clients go on opening calls on connections that they have, until nobody answers."""
    reference = ReferenceClient()
    try:
        with running(tmp_path, served(tmp_path), **ROOM) as gateway:
            under_way = reference.run(
                "hammer", address=gateway.address, connections=3, streams=3, rows=rows
            )
            assert under_way == "under way"
            gateway.signal(signal.SIGTERM)
            found = reference.facts()
            gateway.wait()
    finally:
        reference.close()
    assert found["wrong"] == []
    assert set(found["outcomes"]) <= {"OK", "UNAVAILABLE draining", "UNAVAILABLE"}


def test_a_call_that_waits_for_a_server_is_answered_by_the_next(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    reference = ReferenceClient()
    try:
        found = reference.run("wait_for_ready", address=address)
        assert found == {"impatient": "UNAVAILABLE"}
        with running(tmp_path, served(tmp_path), server={"address": address}, **ROOM):
            found = reference.facts()
    finally:
        reference.close()
    assert (found["code"], found["frames"]) == ("OK", 1)
