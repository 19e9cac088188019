"""Attacks by complete calls: small valid messages, and calls held open. Pure."""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.hostile import wire
from benchmarks.hostile.attack import Attack, Calls

MIB = 1 << 20
FLOATS = 64


def ids(rows: int) -> pa.Array:
    """The column of the model `ids`."""
    return pa.array(range(rows), pa.int64())


def _exchange(model: str, columns: dict[str, pa.Array], **more: Any) -> Calls:  # noqa: ANN401
    """One stream that sends its last batch again and again."""

    @cache
    def messages() -> list[bytes]:
        batch = pa.record_batch(list(columns.values()), list(columns))
        return wire.flight_messages(model, [batch])

    return Calls(
        wire.EXCHANGE,
        lambda _: messages()[:-1],
        lambda _, __: messages()[-1],
        **more,
    )


def _runs(rows: int, value: pa.Array) -> pa.Array:
    return pa.RunEndEncodedArray.from_arrays(pa.array([rows], pa.int32()), value)


def _vector() -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(FLOATS, np.float32)), FLOATS)


def _tensor_schema(_: int) -> list[bytes]:
    tensor = pa.fixed_shape_tensor(pa.int8(), [1 << 30])
    return [wire.schema_message("ids", pa.schema([("x", pa.int64()), ("t", tensor)]))]


@cache
def _decimals() -> list[bytes]:
    """Schema and batch with a scale that pyarrow writes, and does not check."""
    scaled = pa.decimal128(38, 9)
    columns = [pa.array([1, 2], pa.timestamp("us")), pa.array([1, 2], scaled)]
    schema, batch = wire.flight_messages("decimals", [pa.record_batch(columns, ["t", "p"])])
    for old, new in (((9, 38), (16_777_216, 38)), ((38, 9), (38, 16_777_216))):
        schema = schema.replace(struct.pack("<ii", *old), struct.pack("<ii", *new))
    return [schema, batch]


@cache
def _small() -> list[bytes]:
    return wire.flight_messages("ids", [pa.record_batch([ids(4)], ["x"])])


def _with_metadata(_: int, repetition: int) -> bytes:
    """A batch with 60 MB of `app_metadata`, which differ from batch to batch."""
    text = b'{"iskander":{"priority":1},"a":"' + b"x" * 60_000_000 + b'%d"}' % repetition
    return _small()[1] + wire.field(3, text)


@cache
def _deltas() -> tuple[list[bytes], list[bytes]]:
    """Schema, dictionary of 56 MiB and a batch; then a delta of one value, and the batch."""
    values = pa.array(np.arange(56 * MIB // 8))
    first = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), values)
    whole = wire.flight_messages("ids", [pa.record_batch([ids(1), first], ["x", "d"])])
    grown = [
        pa.record_batch(
            [ids(1), pa.DictionaryArray.from_arrays(pa.array([at], pa.int32()), pa.array(found))],
            ["x", "d"],
        )
        for at, found in ((0, [7]), (1, [7, 8]))
    ]
    _, _, _, delta, _ = wire.flight_messages("ids", grown, has_deltas=True)
    return whole, [delta, whole[-1]]


@cache
def _nested_dictionary() -> dict[str, pa.Array]:
    values = pa.array(np.arange(3 * MIB // 8))
    inner = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), values)
    return {"x": ids(1), "d": pa.StructArray.from_arrays([inner], ["d"])}


def _views(rows: int) -> pa.Array:
    """String views of 1 MiB each, of the same bytes."""
    words = np.zeros((rows, 4), np.int32)
    words[:, 0], words[:, 1] = MIB, int.from_bytes(b"aaaa", "little")
    buffers = [None, pa.py_buffer(words.tobytes()), pa.py_buffer(b"a" * MIB)]
    return pa.Array.from_buffers(pa.string_view(), rows, buffers)


def _null_views(rows: int) -> pa.Array:
    """Null string views, whose lengths are undefined."""
    words = np.zeros((rows, 4), np.int32)
    words[:, 0] = (1 << 30) // rows
    buffers = [pa.py_buffer(bytes(rows // 8 + 1)), pa.py_buffer(words.tobytes())]
    return pa.Array.from_buffers(pa.string_view(), rows, buffers, rows)


def _shared_lists(rows: int) -> pa.Array:
    """List views of the same 64 values."""
    return pa.ListViewArray.from_arrays(
        pa.array(np.zeros(rows, np.int32)),
        pa.array(np.full(rows, FLOATS, np.int32)),
        pa.array(np.zeros(FLOATS, np.float32)),
    )


def _schema(columns: int, name_bytes: int, number: int) -> bytes:
    """A schema that no other stream has."""
    rest = "y" * name_bytes
    fields = [(f"c{index} {number}{rest}", pa.int32()) for index in range(columns)]
    return wire.schema_message("ids", pa.schema([("x", pa.int64()), *fields]))


def _schemas(columns: int, name_bytes: int, **more: Any) -> Calls:  # noqa: ANN401
    return Calls(wire.EXCHANGE, lambda number: [_schema(columns, name_bytes, number)], **more)


def _lists(columns: int) -> dict[str, pa.Array]:
    each = pa.array([[1], [2]], pa.list_(pa.int8()))
    return {"x": ids(2)} | {f"c{index}": each for index in range(columns)}


def _struct(fields: int) -> dict[str, pa.Array]:
    each = pa.array([1, 2], pa.int8())
    names = [f"f{index}" for index in range(fields)]
    return {"x": ids(2), "s": pa.StructArray.from_arrays([each] * fields, names)}


def _action(name: str) -> Calls:
    return Calls(wire.ACTION, lambda _: [wire.field(1, name.encode())], concurrent=40)


def _ticket(port: int) -> bytes:
    """A ticket for a large source."""
    from pyarrow import flight  # Only the attacker's process uses gRPC.

    with flight.FlightClient(f"grpc://127.0.0.1:{port}") as client:
        info = client.get_flight_info(flight.FlightDescriptor.for_path("many"))
    return wire.field(1, info.endpoints[0].ticket.ticket)


CALL_ATTACKS: dict[str, Calls] = {
    "fixed_shape_tensor of 2^30 values": Calls(wire.EXCHANGE, _tensor_schema),
    "decimals with scale 16,777,216": Calls(
        wire.EXCHANGE,
        lambda _: _decimals()[:1],
        lambda _, __: _decimals()[1],
        repeats=1,
    ),
    "batches with 60 MB of app_metadata": Calls(
        wire.EXCHANGE, lambda _: _small()[:1], _with_metadata, repeats=60, is_held=True
    ),
    "run-end-encoded vectors": _exchange("vectors", {"x": _runs(262_144, _vector())}),
    "run-end-encoded vectors, 8 streams": _exchange(
        "vectors", {"x": _runs(15_000, _vector())}, concurrent=8
    ),
    "dictionary-encoded vectors": _exchange(
        "vectors",
        {"x": pa.DictionaryArray.from_arrays(pa.array(np.zeros(262_144, np.int8)), _vector())},
    ),
    "run-end-encoded text": _exchange("words", {"x": _runs(20_000, pa.array(["a" * 80]))}),
    "list views that share values": _exchange("lists", {"x": _shared_lists(80_000)}),
    "string views that share bytes": _exchange("ids", {"x": ids(2000), "v": _views(2000)}),
    "null string views with lengths": _exchange("words", {"x": _null_views(8)}),
    "56 MiB of dictionary, then deltas": Calls(
        wire.EXCHANGE,
        lambda _: _deltas()[0],
        lambda _, repetition: _deltas()[1][repetition % 2],
        repeats=400,
        ahead=2,
    ),
    "3 MiB of dictionary in a struct": _exchange("ids", _nested_dictionary()),
    "new schemas of 52 kB": _schemas(800, 16, concurrent=8),
    "new schemas of 984 kB": _schemas(1000, 900, concurrent=4),
    "batches of 1,000 list columns": _exchange("ids", _lists(1000)),
    "a struct of 12,000 fields": _exchange("ids", _struct(12_000)),
    "a struct of 4,000 fields": _exchange("ids", _struct(4000)),
    "256 different schemas": _schemas(600, 20, total=256),
    "150 open streams with schemas of 984 kB": _schemas(
        1000, 900, concurrent=150, total=150, is_held=True
    ),
    "1,200 open streams, 12 connections": Calls(
        wire.EXCHANGE, lambda _: _small()[:1], concurrent=100, total=100, is_held=True
    ),
    "1,200 streams without a schema, 12 connections": Calls(
        wire.EXCHANGE, concurrent=100, total=100, is_held=True
    ),
    "6 reads of a source, not read": Calls(
        wire.GET, concurrent=6, total=6, window=0, first_message=_ticket
    ),
    "stats, 40 at once": _action("stats"),
    "models, 40 at once": _action("models"),
    "ListFlights, 40 at once": Calls(wire.LIST, lambda _: [b""], concurrent=40),
}
"""Calls by the name of their row."""


def _attack(name: str, calls: Calls) -> Attack:
    connections = 12 if "12 connections" in name else 1
    probe = "source" if calls.path == wire.GET else ""
    is_flight = name == "ListFlights, 40 at once"
    return Attack(name, connections=connections, is_flight=is_flight, calls=calls, probe=probe)


ATTACKS = tuple(_attack(name, calls) for name, calls in CALL_ATTACKS.items())
