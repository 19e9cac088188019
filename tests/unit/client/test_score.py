"""`Client.score` with a server of the test: contracts, cuts, ranks, live readers, arguments."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from iskander.client import client as client_module
from iskander.client.calls.connection import Headers
from iskander.client.client import CACHED_MAX, Client
from iskander.client.slicing import ROWS_MIN
from iskander.errors import ConfigError, ContractError, LimitExceeded, NotReady
from iskander.foundation.clock import NS_PER_MS

BFLOAT16 = {"ARROW:extension:name": "iskander.bfloat16"}


class Server:
    """A server with one model, which returns the number of rows of each batch.

    Attributes:
        inputs: Declared type and Arrow type of each input.
        contract: Keys of the contract that differ.
        described: Keys of models whose contract was asked for.
        sent: Batches that were sent.
        headers: Headers of each call with batches.
        failures: Number of calls with one batch that fail first.
        streams: Number of streams.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, tuple[str, pa.DataType]] = {"x": ("int64", pa.int64())}
        self.contract: dict[str, Any] = {}
        self.described: list[tuple[str, str | None]] = []
        self.sent: list[pa.RecordBatch] = []
        self.headers: list[Headers] = []
        self.failures = 0
        self.streams = 0

    def describe(self) -> list[bytes]:
        contract = {
            "name": "m",
            "version": "1",
            "ready": True,
            "backend": "onnx",
            "max_batch_rows": 1024,
            "inputs": [{"column": name, "type": each[0]} for name, each in self.inputs.items()],
            "passthrough": "none",
            "ranked_within": [],
            "limits": {"rows": 1 << 20, "bytes": 1 << 24, "string_bytes": 1 << 24},
            "versions": ["1"],
            "aliases": {},
        }
        inputs = pa.schema([(name, kind) for name, (_, kind) in self.inputs.items()])
        schemas = [inputs, pa.schema([("rows", pa.int64())])]
        texts = [schema.serialize().to_pybytes() for schema in schemas]
        return [json.dumps(contract | self.contract).encode(), *texts]

    def result(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        self.sent.append(batch)
        return pa.record_batch({"rows": np.full(batch.num_rows, batch.num_rows)})


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def client(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    class Connection:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def action(self, name: str, fields: Any, **_: Any) -> list[bytes]:
            assert name == "contract"
            server.described.append((fields["model"], fields["version"]))
            return server.describe()

        def may_share(self, batch: pa.RecordBatch) -> bool:
            return False

        def score(
            self, path: list[str], batch: pa.RecordBatch, headers: Headers, *_: Any
        ) -> pa.RecordBatch:
            server.headers.append(headers)
            if len(server.headers) <= server.failures:
                raise NotReady("no workers")
            return server.result(batch)

        def exchange(
            self, path: list[str], feed: Any, headers: Headers, *_: Any
        ) -> Iterator[pa.RecordBatch]:
            server.streams += 1
            server.headers.append(headers)
            for batch, _terms in feed:
                yield server.result(batch)

        def close(self) -> None: ...

    monkeypatch.setattr(client_module, "Connection", Connection)
    with Client("127.0.0.1:1") as client:
        yield client


def tagged(metadata: dict[str, str] | None) -> pa.RecordBatch:
    field = pa.field("x", pa.uint16(), metadata=metadata)
    return pa.RecordBatch.from_arrays([pa.array([0x3F80], pa.uint16())], schema=pa.schema([field]))


# ---- Cached matchings and contracts


@pytest.mark.parametrize("tagged_first", [False, True])
def test_columns_that_differ_in_metadata_only_have_matchings_of_their_own(
    client: Client, tagged_first: bool
) -> None:
    for is_tagged in (tagged_first, not tagged_first):
        if is_tagged:
            with pytest.raises(ContractError, match="wanted int64, got bfloat16"):
                client.score("m", tagged(BFLOAT16))
        else:
            assert client.score("m", tagged(None)).to_pydict() == {"rows": [1]}


def test_metadata_of_passed_through_columns_is_that_of_their_table(
    client: Client, server: Server
) -> None:
    server.contract = {"passthrough": "all"}
    for unit in ("A", "B"):
        fields = [pa.field("x", pa.int8()), pa.field("k", pa.int8(), metadata={"unit": unit})]
        column = pa.array([1], pa.int8())
        client.score("m", pa.RecordBatch.from_arrays([column] * 2, schema=pa.schema(fields)))
    assert [b.schema.field("k").metadata for b in server.sent] == [{b"unit": b"A"}, {b"unit": b"B"}]


def test_metadata_of_a_table_does_not_fill_the_cache(client: Client) -> None:
    batch = pa.record_batch({"x": [1]})
    for number in range(3):
        client.score("m", batch.replace_schema_metadata({"number": str(number)}))
    assert len(client._matchings) == 1


def test_cache_of_matchings_is_bounded(client: Client) -> None:
    for number in range(CACHED_MAX + 5):
        client.score("m", tagged({"number": str(number)}))
    assert len(client._matchings) <= CACHED_MAX


def test_contract_is_asked_for_once_for_all_schemas(client: Client, server: Server) -> None:
    for kind in (pa.int64(), pa.int8(), pa.int64()):
        client.score("m", pa.record_batch({"x": pa.array([1], kind)}))
    assert server.described == [("m", None)]


def test_renamed_input_is_found_by_a_client_that_knew_the_old_name(
    client: Client, server: Server
) -> None:
    client.score("m", pa.record_batch({"x": [1]}))
    server.inputs = {"xx": ("int64", pa.int64())}
    assert client.score("m", pa.record_batch({"xx": [1, 2]}))["rows"].to_pylist() == [2, 2]
    with pytest.raises(ContractError, match="column `xx` is missing"):
        client.score("m", pa.record_batch({"x": [1]}))
    # Once at first, and once for each table that did not match.
    assert len(server.described) == 3


@pytest.mark.parametrize("kind", ["batch", "reader"])
def test_value_is_cast_for_an_input_whose_type_has_changed(
    client: Client, server: Server, kind: str
) -> None:
    batch = pa.record_batch({"x": [0.5]})
    client.score("m", pa.record_batch({"x": [1.0]}))
    server.inputs = {"x": ("float32", pa.float32())}
    reader = pa.RecordBatchReader.from_batches(batch.schema, [batch])
    scored = client.score("m", batch if kind == "batch" else reader)
    assert (scored if kind == "batch" else scored.read_all()).num_rows == 1
    assert server.sent[-1].to_pydict() == {"x": [0.5]}


def test_new_contract_is_not_asked_for_twice(client: Client, server: Server) -> None:
    for _ in range(2):
        with pytest.raises(ContractError, match=r"row 0 has 0\.5"):
            client.score("m", pa.record_batch({"x": [0.5]}))
    assert len(server.described) == 2


def test_error_of_the_source_is_raised_after_the_contract_was_asked_for(client: Client) -> None:
    class Source:
        def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
            def batches() -> Iterator[pa.RecordBatch]:
                raise ContractError("no such file")
                yield

            schema = pa.schema([("x", pa.int64())])
            reader = pa.RecordBatchReader.from_batches(schema, batches())
            return reader.__arrow_c_stream__(requested_schema)

    client.score("m", pa.record_batch({"x": [1]}))
    with pytest.raises((ContractError, pa.ArrowException), match="no such file"):
        client.score("m", Source())


def test_error_of_a_later_batch_forgets_the_contract(client: Client, server: Server) -> None:
    batches = [pa.record_batch({"x": np.full(ROWS_MIN, value)}) for value in (1.0, 0.5)]
    reader = client.score("m", pa.RecordBatchReader.from_batches(batches[0].schema, batches))
    with pytest.raises(ContractError, match=rf"row {ROWS_MIN} has 0\.5"):
        reader.read_all()
    client.score("m", pa.record_batch({"x": [1]}))
    assert len(server.described) == 2


# ---- Cuts


def encoded(kind: str) -> Any:
    text, rows = "z" * 1000, 4000
    if kind == "dictionary":
        return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int8)), pa.array([text]))
    return pa.RunEndEncodedArray.from_arrays(pa.array([rows], pa.int32()), pa.array([text]))


@pytest.mark.parametrize("kind", ["dictionary", "runs"])
def test_one_batch_of_encoded_text_is_cut_to_the_limit_on_strings(
    client: Client, server: Server, kind: str
) -> None:
    server.contract = {
        "passthrough": "all",
        "limits": {"rows": 1 << 20, "bytes": 1 << 20, "string_bytes": 1 << 20},
    }
    client.score("m", pa.table({"x": np.arange(4000), "k": encoded(kind)}))
    assert sum(batch.num_rows for batch in server.sent) == 4000
    assert max(batch.num_rows for batch in server.sent) * 1000 <= 1 << 20


def test_one_batch_that_a_cast_widens_is_cut(client: Client, server: Server) -> None:
    server.inputs = {"x": ("fixed_size_list<float64>[64]", pa.list_(pa.float64(), 64))}
    limit = 1 << 20
    server.contract = {"limits": {"rows": 1 << 20, "bytes": limit, "string_bytes": limit}}
    values = np.arange(4096 * 64).astype(np.int8).reshape(-1, 64)
    client.score("m", {"x": values})
    assert sum(batch.num_rows for batch in server.sent) == 4096
    assert max(map(pa.ipc.get_record_batch_size, server.sent)) <= limit
    table = pa.Table.from_batches(server.sent)["x"].combine_chunks()
    np.testing.assert_array_equal(table.flatten().to_numpy().reshape(-1, 64), values)


# ---- Models that rank


def test_ranked_table_is_sent_as_one_batch(client: Client, server: Server) -> None:
    server.contract = {"ranked_within": [""]}
    batches = [pa.record_batch({"x": np.arange(10_000)}) for _ in range(8)]
    assert client.score("m", pa.Table.from_batches(batches))["rows"][0].as_py() == 80_000
    assert server.streams == 0


@pytest.mark.parametrize("name", ["rows", "bytes"])
def test_ranked_reader_is_read_to_the_limit_only(client: Client, server: Server, name: str) -> None:
    limits = {"rows": 1 << 30, "bytes": 1 << 30, "string_bytes": 1 << 30}
    server.contract = {"ranked_within": [""], "limits": limits | {name: 50_000}}
    read = 0

    def endless() -> Iterator[pa.RecordBatch]:
        nonlocal read
        for read in itertools.count():
            assert read < 1000
            yield pa.record_batch({"x": np.arange(1000)})

    reader = pa.RecordBatchReader.from_batches(pa.schema([("x", pa.int64())]), endless())
    text = rf"model `m` ranks all rows of a batch: at least [\d,]+ {name} .*`limits.{name}`"
    with pytest.raises(LimitExceeded, match=text):
        client.score("m", reader)
    assert read <= 60
    assert server.sent == []


def test_limit_that_was_raised_holds_for_the_next_table(client: Client, server: Server) -> None:
    limits = {"rows": 10, "bytes": 1 << 30, "string_bytes": 1 << 30}
    server.contract = {"ranked_within": [""], "limits": limits}
    table = pa.table({"x": np.arange(11)})
    for _ in range(2):
        with pytest.raises(LimitExceeded, match=r"11 rows in one batch, limit 10"):
            client.score("m", table)
    server.contract = {"ranked_within": [""], "limits": limits | {"rows": 11}}
    client.score("m", table)


# ---- Models whose rows depend on each other

WHOLE = {"verdict": "dependent", "is_whole": True, "reason": "its rows are dependent: row 3"}


def test_table_of_related_rows_is_sent_as_one_batch(client: Client, server: Server) -> None:
    server.contract = {"rows": WHOLE}
    batches = [pa.record_batch({"x": np.arange(10_000)}) for _ in range(8)]
    assert client.score("m", pa.Table.from_batches(batches))["rows"][0].as_py() == 80_000
    assert (server.streams, server.headers) == (0, [[]])


def test_table_of_related_rows_above_the_limit_is_an_error(client: Client, server: Server) -> None:
    limits = {"rows": 1024, "bytes": 1 << 30, "string_bytes": 1 << 30}
    server.contract = {"rows": WHOLE, "limits": limits}
    with pytest.raises(LimitExceeded) as caught:
        client.score("m", pa.table({"x": np.arange(1025)}))
    for part in ("1,025 rows", "1,024 (`models.max_batch_rows`)", "row 3", "combine = true"):
        assert part in caught.value.message
    assert server.sent == []


@pytest.mark.parametrize("rows", [None, {"verdict": "independent", "is_whole": False}])
def test_cut_table_says_so_to_servers_that_check_it(
    client: Client, server: Server, rows: dict[str, Any] | None
) -> None:
    """Only if it is cut: a server of an earlier release rejects the unknown header."""
    server.contract = {} if rows is None else {"rows": rows}
    client.score("m", pa.table({"x": np.arange(10)}))
    client.score("m", pa.table({"x": np.arange(100_000)}), terms={"priority": 3})
    cut = [] if rows is None else [(b"iskander-cut", b"true")]
    assert server.headers == [[], [(b"iskander-priority", b"3"), *cut]]


# ---- Live readers


def test_first_result_of_a_live_reader_does_not_wait_for_the_second_batch(
    client: Client, server: Server
) -> None:
    read: list[int] = []

    def live() -> Iterator[pa.RecordBatch]:
        for number in range(2):
            # The source waits for the reader of results.
            if number and not server.sent:
                raise AssertionError("the second batch was read before the first was sent")
            read.append(number)
            yield pa.record_batch({"x": np.arange(ROWS_MIN)})

    reader = client.score(
        "m", pa.RecordBatchReader.from_batches(pa.schema({"x": pa.int64()}), live())
    )
    assert reader.read_all().num_rows == 2 * ROWS_MIN
    assert read == [0, 1]


def test_small_reader_is_one_call(client: Client, server: Server) -> None:
    client.score("m", pa.table({"x": [1, 2]}).to_reader()).read_all()
    assert (server.streams, len(server.sent)) == (0, 1)


def test_deadline_of_one_batch_does_not_start_again_with_a_retry(
    client: Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.failures = 2
    now = iter([0, 30 * NS_PER_MS, 70 * NS_PER_MS])
    client.model("m")
    monkeypatch.setattr(client._calls, "pause", lambda _: None)
    monkeypatch.setattr(client_module.clock, "now_ns", now.__next__)
    client.score("m", pa.record_batch({"x": [1]}), terms={"deadline_ms": "50"})
    name = b"iskander-deadline-ms"
    assert server.headers == [[(name, b"50")], [(name, b"20.0")], [(name, b"0.0")]]


# ---- Arguments


@pytest.mark.parametrize("columns", [["x"], "x", {"x": 5}, {1: "x"}])
def test_columns_that_are_no_names_are_an_error(client: Client, columns: Any) -> None:
    with pytest.raises(ConfigError, match=r"`columns` is .*expected a dict"):
        client.score("m", pa.record_batch({"x": [1]}), columns=columns)


def test_version_may_be_a_number(client: Client, server: Server) -> None:
    client.score("m", pa.record_batch({"x": [1]}), version=1)
    client.score("m", pa.record_batch({"x": [1]}), version="1")
    assert client.model("m", version=1).score({"x": [1]})["rows"].tolist() == [1]
    assert set(server.described) == {("m", "1")}


@pytest.mark.parametrize("version", [1.5, True, b"1"])
def test_version_that_is_no_text_is_an_error(client: Client, version: Any) -> None:
    with pytest.raises(ConfigError, match="`version` is"):
        client.score("m", pa.record_batch({"x": [1]}), version=version)
    with pytest.raises(ConfigError, match="`version` is"):
        client.model("m", version=version)
