"""Client of servers that do not answer: deadlines, other gateways, and the end of calls and waits.

Flight servers of this process stand for gateways; a call hangs until the client ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight
from support.processes import eventually

from iskander.client import OFF, AsyncClient, Client, Retry
from iskander.client.calls import connection, stream_writer
from iskander.client.calls.sharing import WORTH_BYTES
from iskander.errors import Cancelled, ConfigError, ConnectionFailed, DeadlineExceeded

WITHIN_S = 30.0
BATCH = pa.record_batch({"x": [1, 2]})
LARGE = pa.record_batch({"x": np.arange(WORTH_BYTES)})
SLOW = Retry(first_wait_s=1000.0, wait_max_s=1000.0)
"""Every call waits for its first retry until the test ends it."""


class Server(flight.FlightServerBase):  # type: ignore[misc]
    """Returns the batches, or hangs after `answers` of a stream."""

    def __init__(self) -> None:
        self.answers: int | None = None
        self.hangs_in_actions = False
        self.calls: list[str] = []
        self.is_hanging = threading.Event()
        self.ended = 0
        self._is_over = threading.Event()
        super().__init__("grpc://127.0.0.1:0")
        self.address = f"127.0.0.1:{self.port}"

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        super().__exit__(*error)

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        self.calls.append("exchange")
        for number, chunk in enumerate(reader):
            if number == 0:
                writer.begin(chunk.data.schema)
            if number == self.answers:
                self._hang(context)
                return
            writer.write_batch(chunk.data)

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        self.calls.append(action.type)
        if self.hangs_in_actions:
            self._hang(context)
        yield json.dumps({"ready": True, "models": {}}).encode()

    def _hang(self, context: Any) -> None:
        self.is_hanging.set()
        while not context.is_cancelled() and not self._is_over.wait(0.005):
            pass
        self.ended += 1


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as ready:
        yield ready


def client_of(*servers: Server, **options: Any) -> Client:
    options = {"retry": OFF, "is_matched": False, "shared_bytes": 0, **options}
    return Client([server.address for server in servers], **options)


def left(client: Client) -> list[bool]:
    return [target.next_probe_ns is not None for target in client._targets._targets]


@contextlib.contextmanager
def closed_when(client: Client, is_time: Callable[[], Any]) -> Iterator[None]:
    """Close the client from another thread, once it is time."""

    def close() -> None:
        eventually(is_time, WITHIN_S)
        client.close()

    thread = threading.Thread(target=close)
    thread.start()
    try:
        yield
    finally:
        thread.join()


# ---- Gateways that hang


@pytest.mark.parametrize("kind", ["score", "stream", "action"])
def test_gateway_that_hangs_is_left_until_a_probe_finds_it_ready(server: Server, kind: str) -> None:
    def call(client: Client) -> None:
        if kind == "score":
            client.score("m", BATCH, timeout_s=0.2)
        elif kind == "stream":
            list(client.stream("m", [BATCH, BATCH], timeout_s=0.2))
        else:
            client.health()

    with Server() as hanging, client_of(server, hanging, timeout_s=0.2) as client:
        hanging.answers, hanging.hangs_in_actions = 0, True
        failures = 0
        for _ in range(30):
            try:
                call(client)
            except DeadlineExceeded:
                failures += 1
        assert failures == 1
        assert left(client) == [False, True]
        hanging.answers, hanging.hangs_in_actions = None, False
        eventually(lambda: left(client) == [False, False], WITHIN_S)


def test_gateway_that_hangs_is_left_by_the_client_for_asyncio(server: Server) -> None:
    """The timer of the loop and that of the call end at the same time."""

    async def check(hanging: Server) -> None:
        options: Any = {"retry": OFF, "is_matched": False, "shared_bytes": 0}
        addresses = [server.address, hanging.address]
        async with AsyncClient(addresses, **options) as client:
            failures = 0
            for _ in range(30):
                try:
                    await client.score("m", BATCH, timeout_s=0.2)
                except DeadlineExceeded:
                    failures += 1
                    await asyncio.to_thread(eventually, lambda: any(left(client._client)))
            assert failures == 1

    with Server() as hanging:
        hanging.answers, hanging.hangs_in_actions = 0, True
        asyncio.run(check(hanging))


def test_gateway_is_not_left_for_a_late_source_of_batches(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_writer, "JOIN_S", 0.05)
    over = threading.Event()

    def source() -> Iterator[pa.RecordBatch]:
        yield BATCH
        assert over.wait(WITHIN_S)

    with Server() as other, client_of(server, other) as client:
        results = client.stream("m", source(), timeout_s=0.2)
        next(results)
        with pytest.raises(DeadlineExceeded):
            list(results)
        over.set()
        assert left(client) == [False, False]


def test_time_for_shared_memory_is_within_the_timeout(server: Server) -> None:
    """The question of the client for shared memory hangs too."""
    server.answers, server.hangs_in_actions = 0, True
    for batch, calls in ((LARGE, {"shared-memory"}), (BATCH, {"exchange"})):
        with client_of(server, shared_bytes=None, timeout_s=WITHIN_S) as client:
            server.calls.clear()
            with pytest.raises(DeadlineExceeded):
                client.score("m", batch, timeout_s=0.2)
            assert set(server.calls) == calls


def test_small_batches_do_not_ask_for_shared_memory(server: Server) -> None:
    with client_of(server, shared_bytes=None) as client:
        client.score("m", BATCH)
        list(client.stream("m", [BATCH, LARGE]))
    assert server.calls == ["exchange", "exchange"]


@pytest.fixture
def silent() -> Iterator[tuple[str, list[socket.socket]]]:
    """Address of a peer that opens HTTP/2 connections, then sends nothing, as one that hangs."""
    settings = b"\0\0\0\4\0\0\0\0\0"
    acknowledged = b"\0\0\0\4\1\0\0\0\0"
    peers: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    peer.sendall(settings + acknowledged)
                    peers.append(peer)

        thread = threading.Thread(target=accept)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", peers
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for peer in peers:
        peer.close()


def test_call_without_a_timeout_to_a_silent_peer_fails(
    silent: tuple[str, list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "KEEPALIVE_MS", 200)
    monkeypatch.setattr(connection, "KEEPALIVE_ANSWER_MS", 200)
    address, _ = silent
    options: Any = {"retry": OFF, "is_matched": False, "shared_bytes": 0}
    with Client(address, **options) as client, pytest.raises(ConnectionFailed):
        client.score("m", BATCH)


# ---- Closing


def test_close_ends_an_open_stream(server: Server) -> None:
    server.answers = 1
    client = client_of(server)
    results = client.stream("m", (BATCH for _ in range(10**9)))
    next(results)
    hangs = server.is_hanging.is_set
    with closed_when(client, hangs), pytest.raises(Cancelled, match="the client is closed"):
        list(results)
    eventually(lambda: server.ended == 1, WITHIN_S)
    assert not client._calls._entered


def test_close_ends_a_call(server: Server) -> None:
    server.answers = 0
    client = client_of(server)
    hangs = server.is_hanging.is_set
    with closed_when(client, hangs), pytest.raises(Cancelled, match="the client is closed"):
        client.score("m", BATCH)
    eventually(lambda: server.ended == 1, WITHIN_S)


@pytest.mark.parametrize("kind", ["score", "stream"])
def test_close_ends_the_wait_before_a_retry(kind: str) -> None:
    client = Client("127.0.0.1:1", retry=SLOW, is_matched=False, shared_bytes=0)
    waits = lambda: client._calls._entered  # noqa: E731
    with closed_when(client, waits), pytest.raises(Cancelled, match="the client is closed"):
        if kind == "score":
            client.score("m", BATCH)
        else:
            list(client.stream("m", [BATCH]))


def test_closed_client_rejects_calls(server: Server) -> None:
    client = client_of(server)
    client.score("m", BATCH)
    client.close()
    client.close()
    for call in (
        lambda: client.score("m", BATCH),
        lambda: list(client.stream("m", [BATCH])),
        client.health,
    ):
        with pytest.raises(Cancelled, match="the client is closed"):
            call()
    assert server.calls == ["exchange"]


def test_cancelled_calls_that_wait_for_a_retry_free_their_threads(server: Server) -> None:
    async def check() -> None:
        options: Any = {"is_matched": False, "shared_bytes": 0, "calls_max": 2}
        async with AsyncClient("127.0.0.1:1", retry=SLOW, **options) as client:
            for _ in range(3):
                calls = [asyncio.create_task(client.score("m", BATCH)) for _ in range(2)]
                waits = client._client._calls._entered
                await asyncio.to_thread(eventually, lambda waits=waits: len(waits) == 2)
                for call in calls:
                    call.cancel()
                await asyncio.wait(calls)

    async def main() -> None:
        async with asyncio.timeout(WITHIN_S):
            await check()

    asyncio.run(main())


# ---- Arguments


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "3", None], ids=repr)
def test_invalid_timeout_is_a_config_error(server: Server, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"\(`timeout_s`\)"):
        client_of(server, timeout_s=value)
    if value is None or value == -1:
        return  # None is no timeout, and a negative one has passed.
    with client_of(server) as client:
        for call in (client.score, client.stream, client.outcomes):
            with pytest.raises(ConfigError, match=r"\(`timeout_s`\)"):
                call("m", [BATCH], timeout_s=value)


@pytest.mark.parametrize("terms", [{5: 6}, {"Priority": 1}, {"client": "é"}, 5], ids=repr)
def test_invalid_terms_are_config_errors(server: Server, terms: Any) -> None:
    with client_of(server) as client:
        for call in (client.score, client.stream):
            with pytest.raises(ConfigError, match="invalid term"):
                call("m", BATCH, terms=terms)


def test_terms_that_are_none_are_not_sent() -> None:
    terms = {"deadline_ms": None, "priority": 0, "newest_wins": False}
    assert connection.encode_terms(terms) == [
        (b"iskander-priority", b"0"),
        (b"iskander-newest-wins", b"false"),
    ]


@pytest.mark.parametrize("address", ["localhost", "http://h:1", 5, b"x"], ids=repr)
def test_invalid_address_is_a_config_error(address: Any) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT or unix:PATH"):
        Client(address)
