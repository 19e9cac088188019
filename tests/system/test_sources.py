"""Sources: scored files by GetFlightInfo and DoGet, with plain pyarrow.flight."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import flight
from support.models import row_ids
from support.processes import MIB, Gateway, eventually, running

from iskander.client import Client
from iskander.client.calls.flight_errors import FLIGHT_ERRORS
from iskander.gateway.auth.tokens import add_token

ROWS = 6000
FILES = 3
WIDE_ROWS = 160_000
WIDE_TEXT = 500
"""Characters of each row: the answer has 80 MB."""
CALL_S = 60.0


def connect(gateway: Gateway, token: str | None = None) -> flight.FlightClient:
    middleware = [_Token(token)] if token else []
    return flight.connect(f"grpc://{gateway.address}", middleware=middleware)


class _Token(flight.ClientMiddlewareFactory):  # type: ignore[misc]
    """Sends a token with every call."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def start_call(self, info: Any) -> Any:
        headers = {"authorization": f"Bearer {self._token}"}

        class Middleware(flight.ClientMiddleware):  # type: ignore[misc]
            def sending_headers(self) -> dict[str, str]:
                return headers

        return Middleware()


def options() -> flight.FlightCallOptions:
    return flight.FlightCallOptions(timeout=CALL_S)


def descriptor(source: str, **query: Any) -> flight.FlightDescriptor:
    if not query:
        return flight.FlightDescriptor.for_path(source)
    return flight.FlightDescriptor.for_command(json.dumps({"source": source, **query}))


def get(client: flight.FlightClient, ticket: flight.Ticket) -> pa.Table:
    return client.do_get(ticket, options()).read_all()


def read(client: flight.FlightClient, source: str, **query: Any) -> pa.Table:
    """All endpoints, in order."""
    info = client.get_flight_info(descriptor(source, **query), options())
    return pa.concat_tables([get(client, each.ticket) for each in info.endpoints])


def rejected(client: flight.FlightClient, source: str, **query: Any) -> str:
    """Text of the error of a query or of its first endpoint."""
    with pytest.raises(FLIGHT_ERRORS) as caught:
        read(client, source, **query)
    return str(caught.value)


def write(path: Path, first: int, count: int, group: int) -> None:
    x = list(range(first, first + count))
    labels = pa.array([f"r{each % 7}" for each in x]).dictionary_encode()
    half = pa.array(x, pa.float32())
    table = pa.table({"x": pa.array(x, pa.int64()), "label": labels, "half": half})
    pq.write_table(table, path, row_group_size=group)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, key and files of all tests."""
    folder = tmp_path_factory.mktemp("sources")
    row_ids(folder / "ids")
    (folder / "key").write_text(secrets.token_hex())
    (folder / "in").mkdir()
    each = ROWS // FILES
    for index in range(FILES):
        write(folder / "in" / f"f{index}.parquet", index * each, each, each // 4)
    (folder / "days" / "day=1").mkdir(parents=True)
    (folder / "days" / "day=2").mkdir()
    (folder / "days" / "day=1" / "a.csv").write_text("x,name\n1,one\n2,two\n")
    (folder / "days" / "day=2" / "b.csv").write_text("x,name\n3,three\n")
    (folder / "changing").mkdir()
    text = pa.array([secrets.token_hex(WIDE_TEXT // 2) for _ in range(50)])
    texts = text.take(pa.array([row % 50 for row in range(WIDE_ROWS)]))
    wide = pa.table({"x": range(WIDE_ROWS), "text": texts})
    pq.write_table(wide, folder / "wide.parquet", row_group_size=WIDE_ROWS // 8)
    return folder


def sources(place: Path) -> list[dict[str, Any]]:
    return [
        {"name": "rows", "path": str(place / "in"), "model": "ids"},
        {"name": "one", "path": str(place / "in" / "f1.parquet"), "model": "ids", "unit_rows": 500},
        {"name": "days", "path": str(place / "days"), "model": "ids"},
        {"name": "changing", "path": str(place / "changing"), "model": "ids"},
        {"name": "wide", "path": str(place / "wide.parquet"), "model": "ids"},
        {
            "name": "limited",
            "path": str(place / "in"),
            "model": "ids",
            "version": 1,
            "keep": ["label"],
            "filter": "x < 100",
        },
    ]


def serve(place: Path, folder: Path, **sections: Any) -> Any:
    """A gateway, whose idle reader processes end before the next test counts processes."""
    folder.mkdir(exist_ok=True)
    sections["source_reads"] = {"idle_s": 0.2, **sections.pop("source_reads", {})}
    model = {"name": "ids", "path": str(place / "ids")}
    return running(folder, [model], workers={"count": 1}, sources=sources(place), **sections)


@pytest.fixture(scope="module")
def pair(place: Path) -> Iterator[tuple[Gateway, Gateway]]:
    """Two gateways with one key, each at a unix socket too."""
    sockets = [place / "a.sock", place / "b.sock"]
    reads = {"locations": [f"grpc+unix://{each}" for each in sockets], "key_file": "../key"}

    def one(index: int) -> Any:
        address = ["127.0.0.1:0", f"unix:{sockets[index]}"]
        folder = place / f"gateway-{index}"
        return serve(place, folder, source_reads=reads, server={"address": address})

    with one(0) as first, one(1) as second:
        yield first, second


@pytest.fixture
def gateway(pair: tuple[Gateway, Gateway]) -> Gateway:
    return pair[0]


@pytest.fixture
def client(gateway: Gateway) -> Iterator[flight.FlightClient]:
    with connect(gateway) as client:
        yield client


@pytest.fixture(scope="module")
def strict(place: Path) -> Iterator[Gateway]:
    """A gateway with small limits, and a key of its own."""
    reads = {"streams": 1, "wait_s": 0.3, "ticket_s": 3600, "endpoints": 2}
    with serve(place, place / "strict", source_reads=reads) as gateway:
        yield gateway


def reads_of(gateway: Gateway) -> dict[str, Any]:
    found: dict[str, Any] = gateway.stats()["sources"]
    return found


def test_endpoints_have_each_row_once_in_file_order_as_the_client_scores_them(
    place: Path, gateway: Gateway, client: flight.FlightClient
) -> None:
    info = client.get_flight_info(descriptor("rows", unit_rows=700), options())
    assert len(info.endpoints) > FILES and info.total_records == ROWS and not info.ordered
    assert all(each.expiration_time is not None for each in info.endpoints)
    tables = [get(client, each.ticket) for each in info.endpoints]
    table = pa.concat_tables(tables)
    assert table.schema == info.schema
    assert table["x"].to_pylist() == list(range(ROWS))
    files = pq.read_table(place / "in")
    with Client(gateway.address) as scorer:
        assert table["y"].equals(scorer.score("ids", files.select(["x"]))["y"])
    assert table["label"].to_pylist() == files["label"].to_pylist()


def test_schema_and_list_describe_sources(client: flight.FlightClient) -> None:
    for each in ("rows", "one"):
        schema = client.get_schema(descriptor(each), options()).schema
        assert schema.names == ["x", "label", "half", "y"]
        assert schema.field("label").type == pa.string(), "no dictionaries"
    listed = {tuple(each.descriptor.path) for each in client.list_flights(options=options())}
    assert {(b"ids", b"1"), (b"rows",), (b"limited",)} <= listed


def test_file_source_has_an_endpoint_for_each_row_group(client: flight.FlightClient) -> None:
    info = client.get_flight_info(descriptor("one"), options())
    assert [get(client, each.ticket).num_rows for each in info.endpoints] == [500] * 4


def test_query_selects_columns_rows_and_files(client: flight.FlightClient) -> None:
    table = read(client, "rows", keep=["label", "x"], filter="x >= 10 and x < 4000 and half > 11")
    assert table.schema.names == ["label", "x", "y"]
    assert table["x"].to_pylist() == list(range(12, 4000))
    info = client.get_flight_info(descriptor("rows", filter="x > 1"), options())
    assert info.total_records == -1
    table = read(client, "rows", columns=["y", "half"], path="f2*")
    assert table.schema.names == ["y", "half"]
    assert table["y"].to_pylist() == [3 * x + 1 for x in range(4000, 6000)]
    assert read(client, "rows", keep=[]).schema.names == ["y"]
    assert read(client, "rows", filter="x < 0").num_rows == 0


def test_source_limits_columns_and_rows_of_all_queries(client: flight.FlightClient) -> None:
    assert read(client, "limited").schema.names == ["label", "y"]
    assert read(client, "limited").num_rows == 100
    assert read(client, "limited", filter="x > 89 or x > 5000").num_rows == 10
    assert "does not return column 'x'" in rejected(client, "limited", keep=["x"])
    assert "not valid" in rejected(client, "limited", filter="x > 1) or (x > 2")


def test_csv_files_have_types_of_the_model_and_columns_of_folders(
    client: flight.FlightClient,
) -> None:
    table = read(client, "days", unit_rows=1)
    assert table.to_pylist() == [
        {"x": 1, "name": "one", "day": 1, "y": 4},
        {"x": 2, "name": "two", "day": 1, "y": 7},
        {"x": 3, "name": "three", "day": 2, "y": 10},
    ]
    assert read(client, "days", filter="day == 2")["x"].to_pylist() == [3]


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ({"path": "../in/f0.parquet"}, "below the source's folder"),
        ({"path": "/etc/passwd"}, "below the source's folder"),
        ({"path": "none"}, "no such file or folder"),
        ({"filter": "none == 3"}, "the input has none"),
        ({"columns": ["none"]}, "no column 'none'"),
        ({"keep": ["none"]}, "no column 'none'"),
        ({"model": "none"}, "there is no model `none`"),
        ({"other": 1}, "unknown field `other`"),
    ],
)
def test_invalid_query_is_an_error(
    client: flight.FlightClient, query: dict[str, Any], text: str
) -> None:
    assert text in rejected(client, "rows", **query)
    assert "there is no source" in rejected(client, "none", keep=[])


def test_links_out_of_the_folder_are_not_followed(place: Path, client: flight.FlightClient) -> None:
    folder = place / "changing" / "links"
    folder.mkdir()
    shutil.copy(place / "in" / "f0.parquet", folder / "a.parquet")
    assert read(client, "changing", path="links").num_rows == ROWS // FILES
    info = client.get_flight_info(descriptor("changing", path="links"), options())
    (folder / "a.parquet").unlink()
    (folder / "a.parquet").symlink_to(place / "in" / "f0.parquet")
    assert "leaves the folder" in rejected(client, "changing", path="links")
    assert "leaves the folder" in rejected(client, "changing", path="links/a.parquet")
    with pytest.raises(FLIGHT_ERRORS, match="leaves the folder"):
        get(client, info.endpoints[0].ticket)
    shutil.rmtree(folder)


def test_file_that_changed_since_the_ticket_is_an_error(
    place: Path, client: flight.FlightClient
) -> None:
    path = place / "changing" / "f.parquet"
    write(path, 0, 100, 50)
    info = client.get_flight_info(descriptor("changing", path="f.parquet"), options())
    write(path, 1000, 100, 50)
    with pytest.raises(FLIGHT_ERRORS, match=r"f.parquet: the file changed"):
        get(client, info.endpoints[0].ticket)
    assert read(client, "changing", path="f.parquet")["x"].to_pylist() == list(range(1000, 1100))
    path.unlink()
    with pytest.raises(FLIGHT_ERRORS, match="the file is gone"):
        get(client, info.endpoints[0].ticket)


def test_damaged_file_fails_its_own_calls_only(place: Path, client: flight.FlightClient) -> None:
    path = place / "changing" / "damaged.parquet"
    write(path, 0, 5000, 5000)
    data = bytearray(path.read_bytes())
    data[4:2000] = b"\xff" * 1996
    path.write_bytes(data)
    assert "damaged.parquet: cannot read" in rejected(client, "changing", path="damaged.parquet")
    path.write_bytes(data[: len(data) // 2])
    assert "not a valid parquet file" in rejected(client, "changing", path="damaged.parquet")
    path.unlink()
    assert read(client, "rows").num_rows == ROWS


def test_endpoints_are_spread_and_redeemed_at_either_gateway(
    pair: tuple[Gateway, Gateway], client: flight.FlightClient
) -> None:
    before = [reads_of(each)["rows"] for each in pair]
    info = client.get_flight_info(descriptor("rows", unit_rows=1000), options())
    firsts = [each.locations[0].uri for each in info.endpoints]
    assert len(set(firsts)) == 2 and firsts.count(firsts[0]) == 3 == firsts.count(firsts[1])
    assert all(len(each.locations) == 2 for each in info.endpoints)
    rows: list[int] = []
    for each in info.endpoints:
        with flight.connect(each.locations[0]) as other:
            rows += get(other, each.ticket)["x"].to_pylist()
    assert rows == list(range(ROWS))
    got = [reads_of(each)["rows"] - count for each, count in zip(pair, before, strict=True)]
    assert got == [ROWS // 2, ROWS // 2]


def test_forged_ticket_is_rejected(
    strict: Gateway, client: flight.FlightClient, gateway: Gateway
) -> None:
    info = client.get_flight_info(descriptor("one"), options())
    ticket = info.endpoints[0].ticket.ticket
    with connect(strict) as other, pytest.raises(FLIGHT_ERRORS, match="signature"):
        get(other, flight.Ticket(ticket))
    altered = ticket.replace(b"one", b"two")
    assert altered != ticket
    for each, text in ((altered, "signature"), (ticket[:-1], "signature"), (b"", "none of this")):
        with pytest.raises(FLIGHT_ERRORS, match=text):
            get(client, flight.Ticket(each))


def test_answer_has_a_limited_number_of_endpoints(strict: Gateway) -> None:
    with connect(strict) as client:
        info = client.get_flight_info(descriptor("rows", unit_rows=1), options())
        assert len(info.endpoints) == 2
        assert read(client, "rows", unit_rows=1)["x"].to_pylist() == list(range(ROWS))


def blocked_read(client: flight.FlightClient) -> flight.FlightStreamReader:
    """A read of which the first batch was received, and no more."""
    info = client.get_flight_info(descriptor("wide"), options())
    stream = client.do_get(info.endpoints[0].ticket, options())
    assert stream.read_chunk().data.num_rows > 0
    return stream


def settled(gateway: Gateway) -> dict[str, Any]:
    """Counts once flow control has stopped all reads."""
    last: list[Any] = []

    def is_settled() -> bool:
        last.append(reads_of(gateway))
        return len(last) > 3 and last[-1]["bytes"] == last[-4]["bytes"] > 0

    eventually(is_settled, what="a blocked read")
    found: dict[str, Any] = last[-1]
    return found


def test_cancelled_read_ends_its_process(place: Path, tmp_path: Path) -> None:
    reads = {"idle_s": 600}
    with serve(place, tmp_path, source_reads=reads) as gateway, connect(gateway) as client:
        stream = blocked_read(client)
        assert settled(gateway)["open"] == 1
        (process,) = reads_of(gateway)["processes"]
        stream.cancel()
        eventually(lambda: reads_of(gateway)["open"] == 0, what="the end of the read")
        eventually(lambda: not psutil.pid_exists(process), what="no process")
        assert reads_of(gateway)["ended"] == {"cancelled": 1}
        assert gateway.wait_idle()["input_arena"]["leases"] == 0
        assert read(client, "one").num_rows == ROWS // FILES
        (process,) = reads_of(gateway)["processes"]
        assert read(client, "rows").num_rows == ROWS
        assert reads_of(gateway)["processes"] == [process], "it is used again"


def test_client_that_does_not_read_holds_little_memory(strict: Gateway) -> None:
    with connect(strict) as client:
        read(client, "one")
        before = strict.stats()["resident_bytes"]
        stream = blocked_read(client)
        sent = settled(strict)
        reader = psutil.Process(sent["processes"][0])
        after, held = strict.stats()["resident_bytes"], reader.memory_info().rss
        stream.cancel()
    assert after - before < 32 * MIB, "the answer has 80 MB"
    assert held < 400 * MIB
    eventually(lambda: reads_of(strict)["open"] == 0, what="the end of the read")


def test_reads_above_the_limit_wait_and_are_rejected(strict: Gateway) -> None:
    with connect(strict) as client, connect(strict) as other:
        stream = blocked_read(client)
        info = other.get_flight_info(descriptor("one"), options())
        with pytest.raises(FLIGHT_ERRORS, match=r"limit 1 reads .`source_reads.streams`"):
            get(other, info.endpoints[0].ticket)
        stream.cancel()
        eventually(lambda: reads_of(strict)["open"] == 0, what="the end of the read")
        assert get(other, info.endpoints[0].ticket).num_rows > 0


def test_killed_process_fails_one_read(gateway: Gateway, client: flight.FlightClient) -> None:
    stream = blocked_read(client)
    settled(gateway)
    for each in reads_of(gateway)["processes"]:
        os.kill(each, signal.SIGKILL)
    with pytest.raises(FLIGHT_ERRORS, match="ended by signal 9"):
        while True:
            stream.read_chunk()
    assert reads_of(gateway)["ended"]["reader_lost"] == 1
    assert read(client, "rows").num_rows == ROWS


@pytest.mark.slow
def test_processes_end_with_the_gateway(place: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit code"), serve(place, tmp_path) as gateway:
        with connect(gateway) as client:
            stream = blocked_read(client)
            processes = reads_of(gateway)["processes"]
            assert processes and stream is not None
            for each in processes:
                os.kill(each, signal.SIGSTOP)  # So that it does not see the end of its socket.
            gateway.signal(signal.SIGKILL)
            gateway.wait()
        eventually(lambda: not any(map(psutil.pid_exists, processes)), what="no process")


def test_drain_completes_open_reads(place: Path, tmp_path: Path) -> None:
    with serve(place, tmp_path) as gateway, connect(gateway) as client:
        stream = blocked_read(client)
        rows = settled(gateway)["rows"]
        other = client.get_flight_info(descriptor("one"), options()).endpoints[0].ticket
        gateway.signal(signal.SIGTERM)
        eventually(lambda: "draining 1 streams" in gateway.text(), what="the drain")
        with pytest.raises(FLIGHT_ERRORS, match="the server is stopping"):
            get(client, other)
        assert rows < WIDE_ROWS
        count = sum(1 for _ in stream)
        assert count > 0
        assert gateway.wait() == 0


@pytest.mark.slow
def test_drain_ends_reads_of_clients_that_do_not_read(place: Path, tmp_path: Path) -> None:
    reads = {"streams": 1, "wait_s": 60}
    with (
        serve(place, tmp_path, server={"drain_s": 0.5}, source_reads=reads) as gateway,
        connect(gateway) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        stream = blocked_read(client)
        settled(gateway)
        waiting = thread.submit(read, client, "one")
        eventually(lambda: reads_of(gateway)["waiting"] == 1, what="a read that waits")
        gateway.signal(signal.SIGTERM)
        with pytest.raises(FLIGHT_ERRORS, match="the server is stopping; repeat the read"):
            waiting.result(CALL_S)
        assert gateway.wait() == 0
        with pytest.raises(FLIGHT_ERRORS):
            while True:
                stream.read_chunk()


@pytest.mark.slow
def test_processes_of_a_gateway_share_the_key(place: Path, tmp_path: Path) -> None:
    with serve(place, tmp_path, server={"processes": 2}) as gateway:
        with connect(gateway) as client:
            info = client.get_flight_info(descriptor("one"), options())
        for _ in range(8):
            with connect(gateway) as client:
                assert get(client, info.endpoints[0].ticket).num_rows > 0
        assert (gateway.runtime / "tickets.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_replaced_process_completes_open_and_waiting_reads(place: Path, tmp_path: Path) -> None:
    """A read that waits has a new reader process, which connects during the drain."""
    reads = {"streams": 1, "wait_s": 60}
    with (
        serve(place, tmp_path, server={"processes": 2}, source_reads=reads) as gateway,
        connect(gateway) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        ticket = client.get_flight_info(descriptor("one"), options()).endpoints[0].ticket
        stream = blocked_read(client)
        waiting = thread.submit(get, client, ticket)

        def has_waiting_read() -> bool:
            # The statistics of the process that this connection belongs to.
            (stats,) = client.do_action("stats", options())
            return bool(json.loads(stats.body.to_pybytes())["sources"]["waiting"] == 1)

        eventually(has_waiting_read, what="a read that waits")
        gateway.signal(signal.SIGHUP)
        eventually(lambda: "draining 1 streams" in gateway.text(), what="the drain")
        stream.cancel()
        assert waiting.result(CALL_S).num_rows > 0
        eventually(lambda: gateway.text().count("is replaced") == 2, within_s=60, what="the roll")


def test_grants_limit_sources(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    tokens = {
        "model": add_token(file, "model", ("ids",)),
        "reader": add_token(file, "reader", ("ids",), sources=("r*", "wide")),
        "other": add_token(file, "other", ("ids",), sources=("*",)),
        "none": add_token(file, "none", ("else",), sources=("*",)),
    }
    access = {"tokens": str(file), "anonymous": ["ids"]}
    with serve(place, tmp_path, access=access, token=tokens["other"]) as gateway:
        clients = {name: connect(gateway, token) for name, token in tokens.items()}
        clients["anonymous"] = connect(gateway)
        for name, text in (
            ("model", "is not for source `rows`"),
            ("none", "is not for model `ids`"),
            ("anonymous", "source `rows` requires a token"),
        ):
            for call in (clients[name].get_flight_info, clients[name].get_schema):
                with pytest.raises(FLIGHT_ERRORS, match=text):
                    call(descriptor("rows"), options())
            listed = {each.descriptor.path[0] for each in clients[name].list_flights()}
            assert b"rows" not in listed
        assert "is not for source `one`" in rejected(clients["reader"], "one")
        assert "is not for model `x`" in rejected(clients["reader"], "rows", model="x")
        listed = {each.descriptor.path[0] for each in clients["reader"].list_flights()}
        assert listed == {b"ids", b"rows", b"wide"}
        assert read(clients["reader"], "rows").num_rows == ROWS
        info = clients["reader"].get_flight_info(descriptor("rows"), options())
        with pytest.raises(FLIGHT_ERRORS, match="is not the one that the ticket is for"):
            get(clients["other"], info.endpoints[0].ticket)
        stream = blocked_read(clients["reader"])
        settled(gateway)
        file.write_text(file.read_text().replace('"wide"', '"no"'))
        eventually(lambda: reads_of(gateway)["open"] == 0, what="the end of the read")
        assert reads_of(gateway)["ended"]["permission_denied"] == 1
        with pytest.raises(FLIGHT_ERRORS):
            while True:
                stream.read_chunk()
        for client in clients.values():
            client.close()


@pytest.mark.slow
def test_large_row_groups_need_no_more_memory_than_permitted(place: Path, tmp_path: Path) -> None:
    reads = {"memory_bytes": 300 * MIB}
    table = pa.table({"x": [1], "text": ["a" * (120 * MIB)]})
    pq.write_table(table, place / "changing" / "large.parquet", compression="zstd")
    with serve(place, tmp_path, source_reads=reads) as gateway, connect(gateway) as client:
        text = rejected(client, "changing", path="large.parquet")
        assert "needs more memory, limit 314,572,800 bytes" in text
        assert read(client, "rows").num_rows == ROWS
    os.unlink(place / "changing" / "large.parquet")


def test_unread_read_gives_its_process_to_another_client(place: Path, tmp_path: Path) -> None:
    """All processes are held by reads of several connections that are not read."""
    with (
        serve(place, tmp_path, source_reads={"streams": 2}) as gateway,
        connect(gateway) as first,
        connect(gateway) as second,
        connect(gateway) as other,
    ):
        unread = [blocked_read(first), blocked_read(second)]
        assert settled(gateway)["open"] == 2
        assert read(other, "one").num_rows > 0
        # No status can follow a part of a message, so the client gets a reset.
        with pytest.raises(FLIGHT_ERRORS):
            while unread[0].read_chunk():
                pass
        unread[1].cancel()
        eventually(lambda: reads_of(gateway)["open"] == 0, what="the end of the reads")
        ended = reads_of(gateway)["ended"]
        assert (ended["overloaded"], ended["cancelled"]) == (1, 1)
