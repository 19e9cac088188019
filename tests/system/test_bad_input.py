"""Invalid input over the wire: clear errors without effect on other clients."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight
from support import models, raw
from support.processes import Gateway, eventually, running

from iskander.arrow import ipc
from iskander.errors import (
    ContractError,
    DeadlineExceeded,
    DeadlineUnreachable,
    IskanderError,
    LimitExceeded,
    ModelNotFound,
    Overloaded,
)

LIMITS = {"rows": 100_000, "columns": 8, "streams": 4, "string_bytes": 1000, "nesting": 3}
LIMITS |= {"bytes": 1 << 20, "message_bytes": 3 << 20, "window_bytes": 4 << 20}
LIMITS |= {"result_bytes": 720_000}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("bad")
    ids = models.row_ids(folder / "ids")
    (ids / "manifest.toml").write_text(models.MANIFEST_ALL)
    slow = models.slow(folder / "slow", turns=100)
    served = [
        {"name": "ids", "path": str(ids), "intra_threads": 1, "max_batch_rows": 50_000},
        {"name": "wide", "path": str(models.WIDE), "intra_threads": 1},
        {"name": "slow", "path": str(slow), "intra_threads": 1},
    ]
    with running(
        folder, served, limits=dict(LIMITS), workers={"groups": ["0"], "reattach_s": 5.0}
    ) as ready:
        yield ready


@pytest.fixture(autouse=True)
def valid_stream(gateway: Gateway) -> Iterator[None]:
    """Keeps a valid stream open; it gets correct results before and after each test."""
    client = flight.connect(f"grpc://{gateway.address}")
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_path("ids"))
    batch = pa.record_batch({"x": [1, 2, 3]})
    with writer:
        writer.begin(batch.schema)
        writer.write_batch(batch)
        assert reader.read_chunk().data["y"].to_pylist() == [4, 7, 10]
        yield
        writer.write_batch(batch)
        assert reader.read_chunk().data["y"].to_pylist() == [4, 7, 10]
        writer.done_writing()
    client.close()
    stats = gateway.wait_idle()
    assert stats["ready"] and stats["workers"][0]["starts"] == 1


@pytest.fixture
def client(gateway: Gateway) -> Iterator[raw.RawClient]:
    client = raw.RawClient(gateway.address)
    yield client
    client.close()


def column(kind: str) -> pa.Array:
    values = {
        "float64": pa.array([1.0, 2.0]),
        "utf8": pa.array(["a", "b"]),
        "uint64": pa.array([1, 2], pa.uint64()),
        "list": pa.array([[1], [2]]),
        "fixed list": pa.array([[1], [2]], pa.list_(pa.int64(), 1)),
        "dictionary": pa.array(["a", "b"]).dictionary_encode(),
        "null": pa.nulls(2),
        "timestamp": pa.array([1, 2], pa.timestamp("s")),
    }
    return values[kind]


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        ({}, ContractError, "column `x` is missing: wanted int64"),
        ({"X": [1]}, ContractError, "column `x` is missing"),
        ({"x": [1, None, None]}, ContractError, "column `x` has 2 nulls"),
        ({"x": [1], "y": [1]}, ContractError, "columns `y` would be passed through"),
        ({f"c{n}": [1] for n in range(9)}, LimitExceeded, "9 columns, limit 8"),
        ({"x": [1], "s": ["a" * 1001]}, LimitExceeded, "1001 string bytes, limit 1000"),
        ({"x": [1], "n": [[[["deep"]]]]}, LimitExceeded, "`n` has more than 3 levels"),
        ({"x": np.arange(100_001)}, LimitExceeded, "100001 rows, limit 100000"),
        ({"x": np.arange(100_000)}, LimitExceeded, "800000 bytes of results, limit 720000"),
        ({"x": np.arange(9), "b": [b"x" * 200_000] * 9}, LimitExceeded, "bytes, limit 1048576"),
    ],
)
def test_batches_outside_contract_or_limits_are_rejected(
    gateway: Gateway, batch: dict[str, object], error: type[IskanderError], words: str
) -> None:
    with gateway.client() as client, pytest.raises(error, match=words) as caught:
        client.score("ids", pa.record_batch(batch))
    assert caught.value.fault == "client" and not caught.value.retryable


@pytest.mark.parametrize(
    "kind", ["float64", "utf8", "uint64", "list", "fixed list", "dictionary", "null", "timestamp"]
)
def test_columns_of_another_type_are_rejected(gateway: Gateway, kind: str) -> None:
    with gateway.client() as client, pytest.raises(ContractError, match="`x`: wanted int64, got"):
        client.score("ids", pa.record_batch({"x": column(kind)}))


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.float32(), 63),
        pa.list_(pa.float64(), 64),
        pa.list_(pa.float32()),
        pa.list_(pa.list_(pa.float32(), 8), 8),
        pa.fixed_shape_tensor(pa.float32(), (8, 8)),
        pa.float32(),
    ],
    ids=str,
)
def test_columns_with_other_nesting_are_rejected(gateway: Gateway, kind: pa.DataType) -> None:
    batch = pa.record_batch({"features": pa.nulls(0, kind)})
    with gateway.client() as client, pytest.raises(ContractError, match="features") as caught:
        client.score("wide", batch)
    assert "wanted fixed_size_list<float32>[64], got" in caught.value.message


def test_nulls_inside_a_list_are_rejected(gateway: Gateway) -> None:
    lists = pa.array([[1.0] * 63 + [None]], pa.list_(pa.float32(), 64))
    with gateway.client() as client, pytest.raises(ContractError, match="has 1 nulls"):
        client.score("wide", pa.record_batch({"features": lists}))


def test_unknown_model_or_version_is_rejected(gateway: Gateway) -> None:
    batch = pa.record_batch({"x": [1]})
    with gateway.client() as client:
        with pytest.raises(ModelNotFound, match="there is no model `nobody`; available: ids"):
            client.score("nobody", batch)
        with pytest.raises(ModelNotFound, match="has no version `9`; available: 1"):
            client.score("ids", batch, version="9")


def test_message_above_the_transport_limit_is_rejected(gateway: Gateway) -> None:
    batch = pa.record_batch({"x": np.arange(9), "b": [b"x" * 1_000_000] * 9})
    with gateway.client() as client, pytest.raises(LimitExceeded, match="9,000,321 bytes, limit"):
        client.score("ids", batch)


def test_stream_above_the_limit_is_rejected_until_another_ends(gateway: Gateway) -> None:
    """The limit is 4, and `valid_stream` holds one."""
    batch = pa.record_batch({"x": [1]})
    client = flight.connect(f"grpc://{gateway.address}")
    streams = []
    for _ in range(3):
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_path("ids"))
        writer.begin(batch.schema)
        writer.write_batch(batch)
        reader.read_chunk()
        streams.append(writer)
    with gateway.client() as other:
        with pytest.raises(Overloaded, match="4 streams are open") as caught:
            other.score("ids", batch)
        assert caught.value.retryable and caught.value.retry_after_ms
        for writer in streams:
            writer.close()
        eventually(lambda: gateway.stats()["streams"] == 1, what="closed streams")
        assert other.score("ids", batch).num_rows == 1
    client.close()


HEAD = [raw.descriptor("ids"), raw.schema_data(pa.schema([("x", pa.int64())]))]


def forged(rows: int, node: int, offset: int, length: int, body: bytes) -> bytes:
    """Returns a batch of one int64 column with these values in its header."""
    template = ipc.BatchTemplate(pa.schema([("x", pa.int64())]))
    header = template.render(rows, [node, 0], [0, 0, offset, length], len(body))
    return raw.field(2, bytes(header)) + raw.field(1000, body)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (forged(3_000_000, 3_000_000, 0, 24_000_000, bytes(33_936)), "has 3000000 rows, limit"),
        (forged(40_000, 40_000, 0, 320_000, bytes(33_936)), "requires 320000"),
        (forged(40_000, 40_000, 0, 33_936, bytes(33_936)), "requires 320000"),
        (forged(10, 11, 0, 80, bytes(80)), "has 11 values"),
        (forged(10, 10, -8, 80, bytes(80)), "requires 80"),
        (forged(10, 10, 8, 80, bytes(80)), "requires 80"),
        (forged(10, 10, 1 << 62, 80, bytes(80)), "requires 80"),
        (forged(-1, -1, 0, 80, bytes(80)), "has -1 rows, limit"),
        (raw.field(2, b"") + raw.field(1000, b"x"), "no record batch"),
        (
            raw.field(2, b"\x10\0\0\0" * 8),
            "not an Arrow IPC header|wanted a record batch|header is truncated",
        ),
        (HEAD[1], "a second schema"),
        (b"\xff\xff\xff", "not a FlightData message"),
        (raw.field(2, os.urandom(200)), "."),
        (b"", "no record batch"),
    ],
)
def test_forged_messages_are_rejected(client: raw.RawClient, frame: bytes, words: str) -> None:
    response = client.exchange([*HEAD, frame], half_close=False)
    assert response["code"] == "INVALID_ARGUMENT", response
    assert response["trailers"]["iskander-code"] in ("malformed", "limit")
    assert response["trailers"]["iskander-retryable"] == "false"
    assert re.search(words, response["details"]), response["details"]
    assert_clean(response)


def test_truncated_bodies_are_rejected(client: raw.RawClient) -> None:
    batch = pa.record_batch({"x": np.arange(100), "s": [str(n) for n in range(100)]})
    whole = raw.split(batch.serialize().to_pybytes())[1]
    head = [raw.descriptor("ids"), raw.schema_data(batch.schema)]
    for kept in (0, 1, 799, len(whole) - 1):
        response = client.exchange([*head, raw.batch_data(batch, body=whole[:kept])])
        assert response["code"] == "INVALID_ARGUMENT", kept
        assert "declares a body" in response["details"]


def test_changed_header_byte_gets_a_result_or_a_clear_error(client: raw.RawClient) -> None:
    """120 random bytes of a valid header are changed, one at a time."""
    batch = pa.record_batch({"x": np.arange(3), "s": ["a", None, "c"]})
    head = [raw.descriptor("ids"), raw.schema_data(batch.schema)]
    header, body = raw.split(batch.serialize().to_pybytes())
    random = np.random.default_rng(5)
    codes = set()
    for at in random.permutation(len(header))[:120]:
        changed = bytearray(header)
        changed[at] = random.integers(0, 256)
        frame = raw.field(2, bytes(changed)) + raw.field(1000, body)
        response = client.exchange([*head, frame])
        codes.add(response["code"])
        assert_clean(response)
    assert codes <= {"OK", "INVALID_ARGUMENT"} and "INVALID_ARGUMENT" in codes


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([], "ended before its schema"),
        ([raw.descriptor("ids")], "ended before its schema"),
        ([HEAD[1]], "no descriptor"),
        ([raw.descriptor("ids"), forged(1, 1, 0, 8, bytes(8))], "begin with a schema"),
        ([raw.descriptor(), HEAD[1]], "wanted a path descriptor"),
        ([raw.descriptor("a", "b", "c"), HEAD[1]], "wanted a path descriptor"),
        ([raw.field(1, b"\x08\x02\x12\x01x"), HEAD[1]], "wanted a path descriptor"),
        ([raw.field(1, b"\xff\xff"), HEAD[1]], "not a FlightDescriptor"),
        ([raw.descriptor("ids"), raw.field(2, os.urandom(64))], "."),
    ],
)
def test_streams_with_invalid_first_messages_are_rejected(
    client: raw.RawClient, frames: list[bytes], words: str
) -> None:
    response = client.exchange(frames)
    assert response["code"] == "INVALID_ARGUMENT", response
    assert re.search(words, response["details"]), response["details"]
    assert_clean(response)


def test_union_without_fields_is_rejected_and_ends_no_process(gateway: Gateway) -> None:
    """pyarrow ends the process when it makes an empty array, which an in-band error needs."""
    empty = pa.UnionArray.from_sparse(pa.array([], pa.int8()), [])
    batch = pa.record_batch([pa.array([], pa.int64()), empty], ["x", "u"])
    options = flight.FlightCallOptions(headers=[(b"iskander-errors", b"in-band")])
    with flight.connect(f"grpc://{gateway.address}") as connection:
        descriptor = flight.FlightDescriptor.for_path("ids")
        writer, reader = connection.do_exchange(descriptor, options)
        with pytest.raises(pa.ArrowInvalid, match="`u` has a union without fields"):
            writer.begin(batch.schema)
            writer.write_with_metadata(batch, b'{"iskander": {"priority": "lots"}}')
            reader.read_chunk()


def test_big_endian_streams_are_rejected(client: raw.RawClient) -> None:
    """The endianness field of a valid schema is set to 1."""
    schema = pa.schema([("x", pa.int64())])
    header = bytearray(raw.split(schema.serialize().to_pybytes())[0])
    message = ipc.read_message(header)
    at = ipc._field_at(header, message.table, 0)
    if not at:
        # pyarrow omits the default value: point the field at the value of the next one.
        vtable = message.table - int.from_bytes(header[message.table : message.table + 4], "little")
        header[vtable + 4 : vtable + 6] = header[vtable + 6 : vtable + 8]
    else:
        header[at] = 1
    response = client.exchange([raw.descriptor("ids"), raw.field(2, bytes(header))])
    assert response["code"] == "INVALID_ARGUMENT"
    assert "big-endian" in response["details"]


def test_decompression_bomb_is_rejected_before_expansion(client: raw.RawClient) -> None:
    """48 MB of zeros take 2 kB on the wire; the limit is 1 MiB."""
    batch = pa.record_batch({"x": np.arange(6), "b": [b"\0" * 8_000_000] * 6})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    schema, message = reader.read_next_message(), reader.read_next_message()
    frame = raw.field(2, bytes(message.metadata)) + raw.field(1000, bytes(message.body))
    assert len(frame) < 20_000
    head = raw.descriptor("ids") + raw.field(2, bytes(schema.metadata))
    response = client.exchange([head, frame])
    assert response["code"] == "INVALID_ARGUMENT"
    assert re.search("batch has 48[0-9]* bytes, limit 1048576", response["details"])


def test_decompressed_dictionaries_count_together(client: raw.RawClient) -> None:
    """Six dictionaries of 200 kB of zeros, small on the wire, exceed the limit together."""
    columns = {
        f"d{n}": pa.DictionaryArray.from_arrays(
            pa.array([0], pa.int8()), pa.array([b"\0" * 200_000])
        )
        for n in range(6)
    }
    batch = pa.record_batch({"x": [1]} | columns)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    frames = [
        raw.field(2, bytes(message.metadata)) + raw.field(1000, bytes(message.body))
        for message in pa.ipc.MessageReader.open_stream(sink.getvalue())
    ]
    assert sum(map(len, frames)) < 20_000
    response = client.exchange([raw.descriptor("ids") + frames[0], *frames[1:]])
    assert response["code"] == "INVALID_ARGUMENT"
    assert re.search(
        "dictionaries of the stream too large: [0-9]+ bytes, limit 1048576", response["details"]
    )


def test_do_put_is_unimplemented_and_handshake_echoes(client: raw.RawClient) -> None:
    put = "/arrow.flight.protocol.FlightService/DoPut"
    response = client.call(put, [HEAD[0] + HEAD[1]])
    assert response["code"] == "UNIMPLEMENTED" and "DoExchange" in response["details"]
    response = client.call("/arrow.flight.protocol.FlightService/Handshake", [b"\x08\x01"])
    assert (response["code"], response["frames"]) == ("OK", [b"\x08\x01"])


def test_results_before_a_bad_batch_are_still_delivered(client: raw.RawClient) -> None:
    good = raw.batch_data(pa.record_batch({"x": [1, 2]}))
    bad = raw.batch_data(pa.record_batch({"x": [1, None]}))
    response = client.exchange([*HEAD, good, good, bad, good])
    assert response["code"] == "INVALID_ARGUMENT"
    batches, _ = raw.read_batches(response["frames"])
    assert [batch["y"].to_pylist() for batch in batches] == [[4, 7], [4, 7]]


CLIENT = """
import sys, numpy as np, pyarrow as pa
from pyarrow import flight
client = flight.connect("grpc://" + sys.argv[1])
writer, reader = client.do_exchange(flight.FlightDescriptor.for_path("slow"))
batch = pa.record_batch({"x": np.full(10, 20)})
writer.begin(batch.schema)
for _ in range(6):
    writer.write_batch(batch)
reader.read_chunk()
print("read", flush=True)
reader.read_chunk()
sys.stdin.read()
"""


def test_killed_client_releases_its_stream(gateway: Gateway) -> None:
    """The client has queued and running batches."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, gateway.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == b"read\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stdin.close()
    eventually(lambda: gateway.stats()["streams"] == 1, what="the end of the stream")


def test_timed_out_and_cancelled_streams_release_their_resources(gateway: Gateway) -> None:
    batch = pa.record_batch({"x": np.full(10, 200)})
    with gateway.client() as client:
        # With a learned run time of such batches, the gateway rejects the batch immediately.
        with pytest.raises((DeadlineExceeded, DeadlineUnreachable)):
            list(client.stream("slow", [batch] * 4, timeout_s=0.05))
        quick = pa.record_batch({"x": np.full(10, 1)})
        results = client.stream("slow", [quick, *[batch] * 5])
        assert next(results).num_rows == 10
        results.close()  # The generator cancels the call.


def test_client_that_never_reads_holds_few_leases(gateway: Gateway) -> None:
    """Flow control stops its writes; a cancel releases its leases."""
    client = flight.connect(f"grpc://{gateway.address}")
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_path("ids"))
    batch = pa.record_batch({"x": np.arange(50_000)})
    writer.begin(batch.schema)
    written = threading.Event()

    def write() -> None:
        try:
            for count in range(10_000):
                writer.write_batch(batch)
                if count == 20:
                    written.set()
        except (flight.FlightError, pa.ArrowException, OSError):
            return

    thread = threading.Thread(target=write)
    thread.start()
    assert written.wait(20)
    stats = gateway.stats()
    assert stats["input_arena"]["leases"] <= 8
    reader.cancel()
    thread.join()
    with pytest.raises(flight.FlightCancelledError):
        writer.close()
    client.close()


def assert_clean(response: dict[str, object]) -> None:
    """Asserts that the error contains no traceback, path or module name."""
    text = str(response["details"]) + str(response["trailers"])
    for leak in ("Traceback", str(models.ROOT), "/usr", "/tmp", ".py", "iskander.gateway"):
        assert leak not in text, text
