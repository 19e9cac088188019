"""Results of a real client, gateway and workers: correct, in order, for every type."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from onnx import TensorProto
from pyarrow import flight
from support import models, raw
from support.processes import Gateway, eventually, running

from iskander.client import Client
from iskander.gateway.protocols.flight.data import read_flight_data

ELEMENTS = {
    "bool": TensorProto.BOOL,
    "int8": TensorProto.INT8,
    "int16": TensorProto.INT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "uint8": TensorProto.UINT8,
    "uint16": TensorProto.UINT16,
    "uint32": TensorProto.UINT32,
    "uint64": TensorProto.UINT64,
    "float16": TensorProto.FLOAT16,
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("serving")
    served = [
        {"name": "two-tower", "path": str(models.TWO_TOWER), "intra_threads": 1},
        {"name": "wide", "path": str(models.WIDE), "intra_threads": 1},
    ]
    for name, element in ELEMENTS.items():
        path = models.identity(folder / name, element, ["rows"])
        served.append({"name": f"same-{name}", "path": str(path), "intra_threads": 1})
        path = models.identity(folder / f"{name}-3d", element, ["rows", 2, 3])
        served.append({"name": f"cube-{name}", "path": str(path), "intra_threads": 1})
    path = models.row_ids(folder / "ids")
    served.append({"name": "ids", "path": str(path), "intra_threads": 1})
    path = models.row_ids(folder / "ids-all")
    (path / "manifest.toml").write_text(models.MANIFEST_ALL)
    served.append({"name": "ids-all", "path": str(path), "intra_threads": 1})
    served.append({"name": "ids", "version": 10, "path": str(path), "intra_threads": 1})
    with running(
        folder, served, workers={"groups": ["0"], "reattach_s": 5.0}, limits={"rows": 200_000}
    ) as ready:
        yield ready
        ready.wait_idle()


@pytest.fixture
def client(gateway: Gateway) -> Iterator[Client]:
    with gateway.client() as client:
        yield client


@pytest.mark.parametrize("rows", [1, 2, 127, 128, 1000, 65_536])
def test_two_tower_equals_onnx_runtime_bit_for_bit(client: Client, rows: int) -> None:
    random = np.random.default_rng(rows)
    users = random.integers(-5, 1000, rows)
    items = random.integers(-5, 200_000, rows)
    scored = client.score("two-tower", pa.record_batch({"user_id": users, "item_id": items}))
    (expected,) = models.in_process(models.TWO_TOWER, {"user_id": users, "item_id": items})
    assert scored["score"].to_numpy().tobytes() == expected.tobytes()
    assert scored["user_id"].to_numpy().tolist() == users.tolist()


@pytest.mark.parametrize("rows", [1, 77, 8192])
def test_wide_equals_onnx_runtime_bit_for_bit(client: Client, rows: int) -> None:
    features = np.random.default_rng(rows).normal(size=(rows, 64)).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(features.reshape(-1), 64)
    scored = client.score("wide", pa.record_batch({"features": column}))
    (expected,) = models.in_process(models.WIDE, {"features": features})
    assert scored["score"].to_numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 1001])
@pytest.mark.parametrize("name", ELEMENTS)
def test_every_dtype_is_returned_unchanged(client: Client, name: str, rows: int) -> None:
    random = np.random.default_rng(rows)
    values = (random.integers(0, 120, rows) % 2 == 0) if name == "bool" else None
    if values is None:
        values = random.integers(0, 120, rows).astype(name)
    column = pa.array(values)
    scored = client.score(f"same-{name}", pa.record_batch({"x": column}))
    assert scored["y"].combine_chunks() == column


@pytest.mark.parametrize("name", ELEMENTS)
def test_tensors_of_rank_three_as_nested_lists_and_as_tensors(client: Client, name: str) -> None:
    rows = 5
    arrow = pa.bool_() if name == "bool" else getattr(pa, name)()
    values = pa.array((np.arange(rows * 6) % 2).astype(bool if name == "bool" else name), arrow)
    nested = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(values, 3), 2)
    scored = client.score(f"cube-{name}", pa.record_batch({"x": nested}))
    assert scored["y"].combine_chunks() == nested
    kind = pa.fixed_shape_tensor(arrow, (2, 3))
    tensor = pa.ExtensionArray.from_storage(kind, pa.FixedSizeListArray.from_arrays(values, 6))
    scored = client.score(f"cube-{name}", pa.record_batch({"x": tensor}))
    assert scored["y"].combine_chunks() == nested


def test_columns_in_any_order_and_sliced(client: Client) -> None:
    batch = pa.record_batch({"item_id": np.arange(100), "user_id": np.arange(100)})
    whole = client.score("two-tower", batch)
    part = client.score("two-tower", batch.slice(13, 40))
    assert part["score"].combine_chunks() == whole["score"].combine_chunks().slice(13, 40)


def test_zero_rows_give_zero_rows(client: Client) -> None:
    for model in ("two-tower", "wide"):
        columns = {"two-tower": {"user_id": [], "item_id": []}, "wide": None}[model]
        if columns is None:
            batch = pa.record_batch({"features": pa.array([], pa.list_(pa.float32(), 64))})
        else:
            batch = pa.record_batch({name: pa.array([], pa.int64()) for name in columns})
        assert client.score(model, batch).num_rows == 0
    mixed = [pa.record_batch({"x": np.arange(n)}) for n in (0, 3, 0, 1)]
    assert [b.num_rows for b in client.stream("ids", mixed)] == [0, 3, 0, 1]


def test_stream_returns_each_batch_in_order_with_its_metadata(gateway: Gateway) -> None:
    """200 batches of mixed sizes, written while results are read, each with its own label."""
    client = flight.connect(f"grpc://{gateway.address}")
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_path("ids"))
    sizes = [1 + (i * 37) % 500 for i in range(200)]
    schema = pa.schema([("x", pa.int64())])

    def write() -> None:
        writer.begin(schema)
        for index, rows in enumerate(sizes):
            start = index * 1000
            batch = pa.record_batch([pa.array(np.arange(start, start + rows))], schema=schema)
            writer.write_with_metadata(batch, b"label %d" % index)
        writer.done_writing()

    thread = threading.Thread(target=write)
    thread.start()
    chunks = list(reader)
    thread.join()
    writer.close()
    client.close()
    assert [chunk.app_metadata.to_pybytes() for chunk in chunks] == [
        b"label %d" % index for index in range(200)
    ]
    for index, (chunk, rows) in enumerate(zip(chunks, sizes, strict=True)):
        expected = 3 * np.arange(index * 1000, index * 1000 + rows) + 1
        assert chunk.data["y"].to_numpy().tolist() == expected.tolist()


def test_passthrough_columns_of_any_type_are_returned_unchanged(client: Client) -> None:
    columns = {
        "id": pa.array(["a", None, "ccc"]),
        "when": pa.array([1, 2, None], pa.timestamp("us", "UTC")),
        "price": pa.array([None, 1, 2], pa.decimal128(12, 3)),
        "flag": pa.array([True, None, False]),
        "x": pa.array([1, 2, 3]),
        "vector": pa.array([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float64(), 2)),
        "raw": pa.array([b"\0\1", b"", None], pa.large_binary()),
    }
    unusual = {
        "tags": pa.array([["a"], [], None], pa.list_(pa.utf8())),
        "point": pa.array([{"a": 1, "b": None}, None, {"a": 3, "b": "z"}]),
        "kind": pa.array(["low", "high", None]).dictionary_encode(),
        "nothing": pa.nulls(3),
        "view": pa.array(["a string longer than twelve bytes", None, "b"], pa.string_view()),
        "map": pa.array([[("k", 1)], None, []], pa.map_(pa.utf8(), pa.int32())),
        "runs": pc.run_end_encode(pa.array([1, 1, 2])),
        "union": pa.UnionArray.from_dense(
            pa.array([0, 1, 0], pa.int8()),
            pa.array([0, 0, 1], pa.int32()),
            [pa.array([5, 6]), pa.array(["u"])],
        ),
    }
    for batch in (pa.record_batch(columns), pa.record_batch(columns | unusual)):
        (scored,) = client.stream("ids-all", [batch])
        scored.validate(full=True)
        for name in batch.schema.names:
            if name != "x":
                assert scored[name].equals(batch[name]), name
        assert scored["y"].to_pylist() == [4, 7, 10]
        assert scored.schema.names == [n for n in batch.schema.names if n != "x"] + ["y"]


def test_dictionary_inputs_and_dictionaries_that_change_in_a_stream(client: Client) -> None:
    kinds = [["a", "b", "a"], ["c", "a", "d"], ["c", "a", "d"]]
    batches = [
        pa.record_batch(
            {
                "x": pa.array([index, 7, 7]).dictionary_encode(),
                "kind": pa.array(kind).dictionary_encode(),
            }
        )
        for index, kind in enumerate(kinds)
    ]
    scored = list(client.stream("ids-all", batches))
    assert [batch["y"].to_pylist() for batch in scored] == [
        [3 * index + 1, 22, 22] for index in range(3)
    ]
    assert [batch["kind"].to_pylist() for batch in scored] == kinds


def test_results_after_large_dictionaries_are_in_order(gateway: Gateway) -> None:
    """Each batch has another dictionary, larger than a frame; several results are ready together.

    The frames are as small as those of other gRPC implementations by default.
    """
    options = [
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.max_frame_size", 16_384),
        ("grpc.http2.lookahead_bytes", 1 << 22),
    ]
    client = flight.connect(f"grpc://{gateway.address}", generic_options=options)
    batches = []
    for index in range(60):
        x = np.arange(2000) + 2000 * index
        kinds = pa.array([f"{index:10}{row:10}" for row in range(2000)])
        batches.append(pa.record_batch({"x": x, "kind": kinds.dictionary_encode()}))
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_path("ids-all"))

    def write() -> None:
        writer.begin(batches[0].schema)
        for batch in batches:
            writer.write_batch(batch)
        writer.done_writing()

    thread = threading.Thread(target=write)
    thread.start()
    chunks = list(reader)
    thread.join()
    writer.close()
    client.close()
    for batch, chunk in zip(batches, chunks, strict=True):
        assert chunk.data["y"].to_numpy().tolist() == (3 * batch["x"].to_numpy() + 1).tolist()
        assert chunk.data["kind"].to_pylist() == batch["kind"].to_pylist()


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_streams(gateway: Gateway, compression: str) -> None:
    client = flight.connect(f"grpc://{gateway.address}")
    options = flight.FlightCallOptions(
        timeout=20, write_options=pa.ipc.IpcWriteOptions(compression=compression)
    )
    descriptor = flight.FlightDescriptor.for_path("ids-all")
    writer, reader = client.do_exchange(descriptor, options)
    batch = pa.record_batch({"x": np.arange(5000), "id": [str(i) for i in range(5000)]})
    with writer:
        writer.begin(batch.schema)
        for _ in range(3):
            writer.write_batch(batch)
            scored = reader.read_chunk().data
            assert scored["y"].to_numpy().tolist() == (3 * np.arange(5000) + 1).tolist()
            assert scored["id"].equals(batch["id"])
        writer.done_writing()
    client.close()


def test_large_batches_between_small_ones(client: Client) -> None:
    """Batches of 8 MB are copied in chunks."""
    random = np.random.default_rng(5)
    shape = pa.list_(pa.list_(pa.float64(), 3), 2)
    batches = []
    for rows in (3, 180_000, 5, 180_000, 180_000, 1):
        values = pa.array(random.random(rows * 6))
        nested = pa.FixedSizeListArray.from_arrays(
            pa.FixedSizeListArray.from_arrays(values, 3), type=shape
        )
        batches.append(pa.record_batch({"x": nested}))

    scored = list(client.stream("cube-float64", batches))

    assert len(scored) == len(batches)
    for batch, result in zip(batches, scored, strict=True):
        assert result["y"].equals(batch["x"])


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_large_batches_decoded_in_a_thread(gateway: Gateway, compression: str | None) -> None:
    """7 MB of text that is validated, and decompressed if needed."""
    client = flight.connect(f"grpc://{gateway.address}")
    options = flight.FlightCallOptions(
        timeout=60, write_options=pa.ipc.IpcWriteOptions(compression=compression)
    )
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_path("ids-all"), options)
    random = np.random.default_rng(6)
    with writer:
        for rows in (2, 180_000, 3, 180_000):
            numbers = random.integers(0, 1 << 60, rows)
            text = pa.array([random.bytes(20).hex() for _ in range(rows)])
            batch = pa.record_batch({"x": numbers, "id": text})
            if rows == 2:
                writer.begin(batch.schema)
            writer.write_batch(batch)
            scored = reader.read_chunk().data
            assert scored["y"].to_numpy().tolist() == (3 * numbers + 1).tolist()
            assert scored["id"].equals(text)
        writer.done_writing()
    client.close()


@pytest.mark.parametrize("is_alone", [True, False])
def test_descriptor_alone_or_on_the_schema_message(gateway: Gateway, is_alone: bool) -> None:
    """C++ and Python clients send the descriptor alone; Go, Java and Rust with the schema."""
    client = raw.RawClient(gateway.address)
    batch = pa.record_batch({"x": [1, 2]})
    schema = raw.schema_data(batch.schema)
    head = [raw.descriptor("ids", "1"), schema]
    frames = head if is_alone else [raw.descriptor("ids", "1") + schema]
    response = client.exchange([*frames, raw.batch_data(batch, app_metadata=b"m")])
    client.close()
    assert response["code"] == "OK", response
    (scored,), metadata = raw.read_batches(response["frames"])
    assert scored.to_pydict() == {"y": [4, 7]}
    assert metadata == [b"m"]


def test_schema_is_sent_before_any_batch(gateway: Gateway) -> None:
    client = raw.RawClient(gateway.address)
    frames = [raw.descriptor("ids"), raw.schema_data(pa.schema([("x", pa.int64())]))]
    response = client.exchange(frames)
    client.close()
    assert response["code"] == "OK"
    assert len(response["frames"]) == 1
    assert raw.read_batches(response["frames"])[0] == []


def test_response_has_no_bytes_of_earlier_results(gateway: Gateway, client: Client) -> None:
    """One row uses 8 of the 64 bytes of its column; the same memory had 16 rows before."""
    client.score("ids", pa.record_batch({"x": np.arange(1, 17)}), version="1")
    batch = pa.record_batch({"x": [1]})
    frames = [raw.descriptor("ids", "1"), raw.schema_data(batch.schema), raw.batch_data(batch)]
    with raw.RawClient(gateway.address) as attacker:
        response = attacker.exchange(frames)
    body = bytes(read_flight_data(response["frames"][-1]).body)
    assert body == (4).to_bytes(8, "little") + bytes(56)


def test_two_versions_and_the_highest_by_default(client: Client) -> None:
    batch = pa.record_batch({"x": [1], "id": ["a"]})
    assert client.score("ids", batch).column_names == ["id", "y"]
    assert client.score("ids", batch.select(["x"]), version="1").column_names == ["y"]


def test_client_that_stops_reading_does_not_affect_others(gateway: Gateway) -> None:
    """The unread stream gets backpressure, and its memory stays bounded."""
    stuck = flight.connect(f"grpc://{gateway.address}")
    writer, reader = stuck.do_exchange(flight.FlightDescriptor.for_path("ids"))
    batch = pa.record_batch({"x": np.arange(50_000)})
    writer.begin(batch.schema)

    def write() -> None:
        try:
            while True:
                writer.write_batch(batch)
        except (flight.FlightError, pa.ArrowException, OSError):
            return

    thread = threading.Thread(target=write)
    thread.start()
    with gateway.client() as client:
        small = [pa.record_batch({"x": np.arange(100)})] * 300
        assert sum(scored.num_rows for scored in client.stream("ids", small)) == 30_000
        stats = client.stats()
    assert stats["input_arena"]["leases"] <= 8
    reader.cancel()
    thread.join()
    with contextlib.suppress(flight.FlightError, pa.ArrowException, OSError):
        writer.close()
    stuck.close()


def test_discovery_and_actions(gateway: Gateway) -> None:
    client = flight.connect(f"grpc://{gateway.address}")
    paths = [info.descriptor.path for info in client.list_flights()]
    assert [b"two-tower", b"1"] in paths and [b"ids", b"10"] in paths
    info = client.get_flight_info(flight.FlightDescriptor.for_path("two-tower"))
    assert info.schema == pa.schema([("score", pa.float32())])
    assert json.loads(info.app_metadata)["inputs"][0]["column"] == "user_id"
    schema = client.get_schema(flight.FlightDescriptor.for_path("wide", "1")).schema
    assert schema == pa.schema([("score", pa.float32())])
    assert {a.type for a in client.list_actions()} == {
        "health",
        "models",
        "load",
        "unload",
        "contract",
        "shared-memory",
        "drain",
        "reload",
        "stats",
        "metrics",
    }
    (health,) = client.do_action(flight.Action("health", b""))
    assert json.loads(health.body.to_pybytes())["models"]["wide"]["ready"] is True
    contract, inputs, outputs = client.do_action(flight.Action("contract", b'{"model": "wide"}'))
    assert json.loads(contract.body.to_pybytes())["name"] == "wide"
    assert pa.ipc.read_schema(inputs.body) == pa.schema([("features", pa.list_(pa.float32(), 64))])
    assert pa.ipc.read_schema(outputs.body) == pa.schema([("score", pa.float32())])
    for call in (
        lambda: client.do_get(flight.Ticket(b"x")).read_all(),
        lambda: list(client.do_action(flight.Action("reboot", b""))),
    ):
        with pytest.raises(pa.ArrowNotImplementedError, match=r"no data to get|unknown action"):
            call()
    with pytest.raises(pa.ArrowInvalid, match="the body of `contract`"):
        list(client.do_action(flight.Action("contract", b"{")))
    client.close()


def test_health_service_on_the_same_port(gateway: Gateway) -> None:
    client = raw.RawClient(gateway.address)
    check = "/grpc.health.v1.Health/Check"
    for name in ("", "two-tower", "two-tower/1"):
        response = client.call(check, [raw.field(1, name.encode()) if name else b""])
        assert (response["code"], response["frames"]) == ("OK", [b"\x08\x01"])
    response = client.call(check, [raw.field(1, b"unknown")])
    assert response["code"] == "NOT_FOUND"
    assert response["trailers"]["iskander-code"] == "model_not_found"
    watch = "/grpc.health.v1.Health/Watch"
    response = client.call(watch, [b""], cancel_after=1)
    assert response["frames"] == [b"\x08\x01"]
    client.close()


@pytest.mark.over_zmq(is_slow=False)
def test_two_workers_eight_streams_and_a_mix_of_sizes(tmp_path: Path) -> None:
    """Every stream gets its own results in order, from either worker."""
    ids = models.row_ids(tmp_path / "ids")
    served = [
        {"name": "ids", "path": str(ids), "intra_threads": 1},
        {"name": "slow", "path": str(models.slow(tmp_path / "slow", 100)), "intra_threads": 1},
    ]
    failures: list[str] = []
    with running(tmp_path, served, workers={"groups": ["0", "1"], "reattach_s": 5.0}) as gateway:

        def stream(number: int) -> None:
            random = np.random.default_rng(number)
            sizes = random.choice([1, 2, 5, 128, 1000, 9000], 60)
            starts = random.integers(0, 1 << 40, 60)
            sent = [np.arange(s, s + n) for s, n in zip(starts, sizes, strict=True)]
            with gateway.client() as client:
                batches = (pa.record_batch({"x": values}) for values in sent)
                for values, scored in zip(sent, client.stream("ids", batches), strict=True):
                    if scored["y"].to_numpy().tolist() != (3 * values + 1).tolist():
                        failures.append(f"stream {number}")

        def occupy() -> None:
            """Keep one worker busy, so the other one gets work too."""
            with gateway.client() as client:
                client.score("slow", pa.record_batch({"x": [2000]}))

        threads = [threading.Thread(target=stream, args=(n,)) for n in range(8)]
        threads.insert(0, threading.Thread(target=occupy))
        threads[0].start()
        eventually(
            lambda: any(worker["in_flight"] for worker in gateway.stats()["workers"]),
            what="a busy worker",
        )
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join()
        stats = gateway.wait_idle()
    assert failures == []
    assert stats["lanes"]["ids/1"]["completed"] == 480
    assert all(worker["batches"] > 0 for worker in stats["workers"])


def test_unix_socket_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "flight.sock"
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids")), "intra_threads": 1}]
    server = {"address": [f"unix:{path}", "127.0.0.1:0"], "unix_mode": "0640"}
    with running(tmp_path, served, server=server) as gateway:
        assert path.stat().st_mode & 0o777 == 0o640
        with Client(gateway.address) as client:
            assert client.score("ids", pa.record_batch({"x": [5]}))["y"].to_pylist() == [16]
    assert not path.exists()
