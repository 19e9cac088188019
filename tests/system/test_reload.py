"""Reload of a running server: each connection lives on, with the limits of the new file."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import struct
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight
import pytest
from support import http2
from support.dealt import client_of
from support.http2 import Wire
from support.models import row_ids
from support.processes import Gateway, eventually, processes_of, render_config, running
from support.robots import Peer, address_of

from iskander.config.reference import TABLES, Setting, settings
from iskander.errors import ConfigError, LimitExceeded
from iskander.gateway.auth.tokens import add_token
from iskander.interprocess.control.shared_regions import request_region

MIB = 1 << 20
ROWS = pa.record_batch({"x": pa.array([1, 2, 3], pa.int64())})
EXCHANGE = "/arrow.flight.protocol.FlightService/DoExchange"
SLACK_BYTES = MIB
"""Bytes that the transport accepts above `limits.message_bytes`."""
FOREVER_S = 3600.0
ONE_WORKER = {"groups": ["0"], "count": 1}


class Server:
    """A gateway, and changes of its file."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.file = gateway.config.read_text()

    def write(self, **changes: dict[str, Any]) -> None:
        """Change settings in the file; all others are those of the start."""
        sections = tomllib.loads(self.file)
        for section, values in changes.items():
            sections[section] = sections.get(section, {}) | values
        self.gateway.config.write_text(render_config(**sections))

    def reload(self, **changes: dict[str, Any]) -> list[str]:
        """Change settings; returns the changed ones."""
        self.write(**changes)
        with self.gateway.client() as client:
            names: list[str] = client.reload()["changed"]
        return names

    def score(self) -> int:
        with self.gateway.client() as client:
            return client.score("ids", ROWS).num_rows

    def page(self) -> str:
        address = self.gateway.stats()["admin_address"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as response:
            text: str = response.read().decode()
            return text

    def authorization(self) -> tuple[str, str]:
        return "authorization", f"Bearer {self.gateway.token}"


def served(folder: Path) -> list[dict[str, Any]]:
    path = str(row_ids(folder / "ids"))
    return [{"name": "ids", "path": path, "intra_threads": 1, "max_batch_rows": 2}]


def with_token(folder: Path, **access: Any) -> dict[str, Any]:
    token = add_token(folder / "tokens.toml", "operator", ("*",), manage=True, sources=("*",))
    return {"token": token, "access": {"tokens": "tokens.toml"} | access}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("reload")
    (folder / "rows.csv").write_text("x\n1\n2\n")
    with running(
        folder,
        served(folder),
        **with_token(folder, anonymous=["ids"]),
        inferential={"address": "tcp://127.0.0.1:0"},
        sources=[{"name": "rows", "path": "rows.csv", "model": "ids"}],
        http={"address": "127.0.0.1:0"},
        shared_memory={"path": str(folder / "regions.sock")},
        workers=dict(ONE_WORKER),
    ) as gateway:
        yield Server(gateway)


@pytest.fixture
def server(started: Server) -> Iterator[Server]:
    """The server with its first settings."""
    yield started
    started.reload()


@pytest.fixture
def wire(server: Server) -> Iterator[Wire]:
    with Wire(server.gateway.address) as each:
        yield each


def open_call(
    server: Server, wire: Wire, stream_id: int, path: str = EXCHANGE, payload: bytes = b""
) -> None:
    fields = http2.request_fields(path, [server.authorization()])
    wire.feed(http2.headers(stream_id, fields), http2.data(stream_id, payload))
    wire.feed(http2.ping())
    count = len(wire.frames_of(http2.PING))
    wire.until(lambda: len(wire.frames_of(http2.PING)) > count)


def prefix(size: int) -> bytes:
    """The start of a gRPC message with `size` bytes."""
    return struct.pack("!BI", 0, size)


def has_ended(wire: Wire, stream_id: int) -> bool:
    answer = http2.answer_in(wire.frames, stream_id)
    return answer.is_over or answer.reset is not None


def test_message_limit_applies_to_the_next_calls_of_an_open_connection(
    server: Server, wire: Wire
) -> None:
    """An open call keeps its limit."""
    lower = 17 * MIB + SLACK_BYTES
    open_call(server, wire, 1)
    open_call(server, wire, 3, payload=prefix(lower + 1))
    assert server.reload(limits={"message_bytes": 17 * MIB}) == ["limits.message_bytes"]
    open_call(server, wire, 5, payload=prefix(lower + 1))
    trailers = wire.answer(5).blocks[-1]
    assert f"message too large: {lower + 1:,} bytes, limit {lower:,}" in trailers["grpc-message"]
    open_call(server, wire, 7, payload=prefix(lower))
    wire.feed(http2.data(1, prefix(lower + 1)), http2.ping(b"once more"[:8]))
    wire.until(lambda: wire.frames_of(http2.PING)[-1].payload == b"once mor")
    assert not any(has_ended(wire, stream_id) for stream_id in (1, 3, 7))


def is_accepted(server: Server) -> bool:
    with Wire(server.gateway.address) as wire:
        return wire.read()


def test_connection_limit_applies_to_the_next_connection(server: Server, wire: Wire) -> None:
    """A lower limit closes no connection with an open call."""
    open_call(server, wire, 1)
    with Wire(server.gateway.address) as second:
        open_call(server, second, 1)
        assert is_accepted(server)
        assert server.reload(limits={"connections": 1}) == ["limits.connections"]
        # Idle connections are replaced before.
        eventually(lambda: not is_accepted(server), what="the lower limit")
        for each in (wire, second):
            open_call(server, each, 3)
            assert not has_ended(each, 1)
        server.write(limits={"connections": 3})
        server.gateway.signal(signal.SIGHUP)
        eventually(lambda: is_accepted(server), what="the higher limit")
        assert not has_ended(wire, 1) and not has_ended(second, 1)


def test_json_limit_applies_to_an_open_http_connection(server: Server) -> None:
    host, _, port = server.gateway.stats()["http_address"].rpartition(":")
    client = http.client.HTTPConnection(host, int(port), timeout=20)
    tensor = {"name": "x", "datatype": "INT64", "shape": [2], "data": [1, 2]}
    body = json.dumps({"inputs": [tensor]}).encode()
    headers = dict([("Inference-Header-Content-Length", str(len(body))), server.authorization()])

    def infer() -> tuple[int, str]:
        client.request("POST", "/v2/models/ids/infer", body, headers)
        response = client.getresponse()
        return response.status, response.read().decode()

    assert infer()[0] == 200
    connected = client.sock
    server.reload(http={"json_bytes": len(body) - 1})
    status, text = infer()
    assert status == 413 and f"limit {len(body) - 1} (`http.json_bytes`)" in text
    server.reload()
    assert infer()[0] == 200 and client.sock is connected
    client.close()


def test_limits_of_inferential_apply_to_its_open_connections(server: Server) -> None:
    """At the limit, a new connection replaces the idle one."""
    address = address_of(server.gateway)

    def clients() -> int:
        count: int = server.gateway.stats()["inferential"]["clients"]
        return count

    frame = struct.pack(">BQ", 2, 18 * MIB)
    with Peer(address, b"one") as one, Peer(address, b"two") as two:
        one.socket.sendall(frame)
        server.reload(limits={"message_bytes": 17 * MIB}, inferential={"connections": 1})
        two.socket.sendall(frame)
        assert two.is_closed()
        eventually(lambda: clients() == 1, what="the end of one")
        with Peer(address, b"three"):
            eventually(lambda: clients() == 1, what="the end of the idle one")
            server.reload()
            with Peer(address, b"four"):
                assert clients() == 2


def test_region_limit_applies_to_the_next_region(server: Server) -> None:
    name, value = server.authorization()
    options = pyarrow.flight.FlightCallOptions(headers=[(name.encode(), value.encode())])
    path, regions = str(server.gateway.folder / "regions.sock"), []
    with pyarrow.flight.FlightClient(f"grpc://{server.gateway.address}") as client:
        for region_bytes in (8 * MIB, 4 * MIB):
            server.reload(shared_memory={"region_bytes": region_bytes})
            (answer,) = client.do_action("shared-memory", options)
            assert json.loads(answer.body.to_pybytes())["region_bytes"] == region_bytes
            regions.append(request_region(path, region_bytes, 20.0))
            with pytest.raises(LimitExceeded, match=rf"limit {region_bytes} bytes"):
                request_region(path, region_bytes + 1, 20.0)
    assert server.gateway.stats()["shared_memory"]["regions"] == 2
    for connection, _, descriptor in regions:
        connection.close()
        os.close(descriptor)


def test_receive_limit(server: Server) -> None:
    for receive_bytes in (512 * MIB, 256 * MIB):
        server.reload(limits={"receive_bytes": receive_bytes})
        line = f"iskander_receive_limit_bytes {receive_bytes:.8e}"
        # A page may be the one of up to a tenth of a second before.
        eventually(lambda line=line: line in server.page(), what="the limit")


@pytest.mark.slow
def test_worker_limit_applies_to_a_running_worker(tmp_path: Path) -> None:
    """An open stream continues with the next worker."""
    with running(
        tmp_path, served(tmp_path), **with_token(tmp_path), workers=dict(ONE_WORKER)
    ) as gateway:
        server, before = Server(gateway), gateway.worker_pids()

        def batches() -> Iterator[pa.RecordBatch]:
            yield ROWS
            assert gateway.worker_pids() == before
            server.reload(workers={"recycle_batches": 1})
            eventually(lambda: gateway.worker_pids() not in ([], before), what="the next worker")
            server.reload()
            yield ROWS

        with gateway.client() as client:
            assert sum(result.num_rows for result in client.stream("ids", batches())) == 6
        assert "limit 1 (`workers.recycle_batches`)" in gateway.text()


@pytest.mark.slow
def test_hang_limit_applies_to_a_running_batch(tmp_path: Path) -> None:
    """Its stream gets the result from the next worker."""
    workers = ONE_WORKER | {"hang_s": 600.0, "hang_factor": 0.0}
    with running(tmp_path, served(tmp_path), **with_token(tmp_path), workers=workers) as gateway:
        server, (hung,) = Server(gateway), gateway.worker_pids()

        def batches() -> Iterator[pa.RecordBatch]:
            yield ROWS
            os.kill(hung, signal.SIGSTOP)
            yield ROWS
            eventually(lambda: gateway.stats()["workers"][0]["in_flight"], what="the batch")
            server.reload(workers={"hang_s": 0.5})

        with gateway.client() as client:
            results = client.stream("ids", batches(), timeout_s=60.0)
            assert sum(result.num_rows for result in results) == 6
        assert gateway.worker_pids() != [hung]


@pytest.mark.slow
def test_timeout_applies_to_an_open_connection(server: Server, wire: Wire) -> None:
    """The idle connection is pinged, and stays open if it answers."""
    open_call(server, wire, 1)
    seen = len(wire.frames_of(http2.PING))
    server.reload(timeouts={"idle_s": 0.05, "keepalive_s": 60.0})
    sent = wire.until(lambda: wire.frames_of(http2.PING)[seen:])[0]
    wire.feed(http2.ping(sent.payload, http2.ACK))
    server.reload()
    open_call(server, wire, 3)
    assert not has_ended(wire, 1)
    server.reload(timeouts={"idle_s": 0.05, "keepalive_s": 0.05})
    wire.until_over()  # Without an answer to the next ping.


def test_file_with_one_change_for_a_restart_changes_nothing(server: Server, wire: Wire) -> None:
    open_call(server, wire, 1)
    server.write(limits={"rows": 2}, arena={"input_bytes": 32 * MIB})
    refused = (
        r"cannot change in a running server: arena\.input_bytes \(shared memory is allocated at "
        r"the start\)\. No change of the file is applied"
    )
    with server.gateway.client() as client:
        for _ in range(2):
            with pytest.raises(ConfigError, match=refused):
                client.reload()
            assert server.score() == 3
    invalid = 'iskander_reload_valid{file="configuration"} 0.0'
    eventually(lambda: invalid in server.page(), what="the metric")
    assert server.reload(limits={"rows": 2}) == ["limits.rows"]
    with pytest.raises(LimitExceeded, match=r"`limits\.rows`"):
        server.score()
    assert not has_ended(wire, 1)


def changed(setting: Setting, value: Any) -> Any:
    """Another valid value of a live setting."""
    if setting.path in ("limits.receive_bytes", "workers.recycle_rss_bytes"):
        return 1 << 40
    if setting.path == "workers.recycle_batches":
        return 1 << 40
    named = {"lanes.overflow": "drop_oldest", "admin.log_level": "debug", "tracing.ratio": 0.5}
    if setting.path in named:
        return named[setting.path]
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value + 1 if value else FOREVER_S
    return value + 1 if isinstance(value, int) else [2]


def test_all_live_settings_at_once(server: Server, wire: Wire) -> None:
    """Forwards and back, while a stream continues."""
    wanted: dict[str, dict[str, Any]] = {}
    file = tomllib.loads(server.file)
    for setting in settings():
        section, _, key = setting.path.partition(".")
        if setting.is_live and section not in TABLES:
            value = file.get(section, {}).get(key, setting.default)
            wanted.setdefault(section, {})[key] = changed(setting, value)
    names = {f"{section}.{key}" for section, values in wanted.items() for key in values}

    def batches() -> Iterator[pa.RecordBatch]:
        yield ROWS
        found = server.reload(**wanted)
        assert {name for name in found if not name.startswith("models[")} == names
        assert server.score() == 3
        yield ROWS
        server.reload()
        yield ROWS

    open_call(server, wire, 1)
    pids = server.gateway.worker_pids()
    with server.gateway.client() as client:
        assert sum(result.num_rows for result in client.stream("ids", batches())) == 9
    open_call(server, wire, 3)
    assert not has_ended(wire, 1)
    assert server.gateway.worker_pids() == pids


@pytest.mark.slow
def test_all_processes_apply_live_settings_without_a_replacement(tmp_path: Path) -> None:
    with running(
        tmp_path, served(tmp_path), server={"processes": 2}, workers=dict(ONE_WORKER)
    ) as gateway:
        server = Server(gateway)
        before = {process.pid for process in processes_of(gateway.runtime)}
        clients = [client_of(gateway, number) for number in (0, 1)]
        streams = [client.stream("ids", endless(gateway)) for client in clients]
        try:
            assert [next(stream).num_rows for stream in streams] == [3, 3]
            server.write(limits={"rows": 2})
            gateway.signal(signal.SIGHUP)
            applied = "iskander.gateway: reloaded: limits.rows changed"
            eventually(lambda: gateway.text().count(applied) == 3, what="all processes")
            for client, stream in zip(clients, streams, strict=True):
                assert next(stream).num_rows == 3  # An open stream keeps its limit.
                with pytest.raises(LimitExceeded, match=r"`limits\.rows`"):
                    client.score("ids", ROWS)
            server.write(limits={"rows": 9}, server={"cores": "0"})
            gateway.signal(signal.SIGHUP)
            rejected = "reload rejected: server.cores changed, which all processes"
            eventually(lambda: rejected in gateway.text(), what="the refusal")
            for client, stream in zip(clients, streams, strict=True):
                assert next(stream).num_rows == 3
                with pytest.raises(LimitExceeded, match=r"`limits\.rows`"):
                    client.score("ids", ROWS)
        finally:
            for client, stream in zip(clients, streams, strict=True):
                stream.close()
                client.close()
        assert {process.pid for process in processes_of(gateway.runtime)} == before


def endless(gateway: Gateway) -> Iterator[pa.RecordBatch]:
    while gateway.process is not None:
        yield ROWS


@pytest.mark.parametrize("processes", [1, 2])
def test_memory_of_the_server_is_divided_at_the_start_and_again_at_a_reload(
    tmp_path: Path, processes: int
) -> None:
    models = [{"name": "ids", "path": str(row_ids(tmp_path / "ids"))}]
    memory = {"memory": "2 GiB", "processes": processes}
    gateway = Gateway(tmp_path, models, server=memory, workers=ONE_WORKER)
    sections = tomllib.loads(gateway.config.read_text())
    sections["arena"] = {"output_bytes": 48 * MIB}
    gateway.config.write_text(render_config(**sections))
    server = Server(gateway)
    try:
        gateway.start()
        lines = [line for line in gateway.log.read_text().splitlines() if "MiB left" in line]
        assert len(lines) == 1, "a child process must not divide the memory again"
        assert "memory 2048 MiB: arena.input_bytes 256 MiB" in lines[0]
        arenas = [size for each in processes_of(gateway.runtime) for size in arenas_of(each.pid)]
        assert set(arenas) == {256 * MIB // processes, 48 * MIB}
        server.write(limits={"rows": 500_000})
        gateway.signal(signal.SIGHUP)
        eventually(
            lambda: "limits.rows changed" in gateway.log.read_text(), what="a reload of one setting"
        )
    finally:
        gateway.end()


def arenas_of(pid: int) -> list[int]:
    """Sizes of the arenas that a process has open."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            name = os.readlink(entry)
            if "memfd:iskander-input" in name or "memfd:iskander-output" in name:
                found.append(entry.stat().st_size)
    return found
