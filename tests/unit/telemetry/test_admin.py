"""The operator's HTTP port, on a loop of its own: what it answers, and what it puts up with."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from support.observed import make_lane, observe

from iskander.errors import ConfigError
from iskander.telemetry import admin
from iskander.telemetry.admin import AdminServer
from iskander.telemetry.metric_sources import MetricSources
from iskander.telemetry.metrics import Collector

WITHIN_S = 10.0


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: str


def admin_of(address: str, observed: MetricSources) -> AdminServer:
    return AdminServer(address, observed.models.reasons, Collector(observed).render)


def serve(observed: MetricSources, talk: Callable[[str], Awaitable[Any]]) -> Any:
    """Start a port, talk to it, stop it; nothing may hang."""

    async def run() -> Any:
        server = admin_of("127.0.0.1:0", observed)
        address = await server.start()
        try:
            return await talk(address)
        finally:
            await server.stop()

    return asyncio.run(asyncio.wait_for(run(), WITHIN_S))


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def ask(address: str, path: str, accept: str = "*/*", method: str = "GET") -> Answer:
    reader, writer = await connect(address)
    head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nAccept: {accept}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode())
    raw = await reader.read()
    writer.close()
    return parse(raw)


def parse(raw: bytes) -> Answer:
    head, _, body = raw.decode().partition("\r\n\r\n")
    status, *lines = head.split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return Answer(int(status.split()[1]), headers, body)


def get(observed: MetricSources, path: str, accept: str = "*/*", method: str = "GET") -> Answer:
    answer: Answer = serve(observed, lambda address: ask(address, path, accept, method))
    return answer


def test_it_says_that_it_is_alive_whatever_the_models_do() -> None:
    answer = get(observe([make_lane(is_ready=False)]), "/livez")

    assert (answer.status, answer.body) == (200, "ok\n")


def test_it_is_ready_when_every_model_is() -> None:
    answer = get(observe([make_lane("a"), make_lane("b")]), "/readyz")

    assert (answer.status, answer.body) == (200, "ready\n")


def test_when_it_is_not_ready_it_says_why_line_by_line() -> None:
    lanes = [make_lane("a"), make_lane("b", is_ready=False), make_lane("c", "3", is_ready=False)]

    answer = get(observe(lanes), "/readyz")

    assert answer.status == 503
    assert answer.headers["content-type"].startswith("text/plain")
    first, second = answer.body.splitlines()
    assert first.startswith("model `b/1`: ")
    assert second.startswith("model `c/3`: ")


def test_a_stopping_gateway_is_alive_and_not_ready() -> None:
    observed = observe([make_lane()], is_stopping=True)

    answer = get(observed, "/readyz")

    assert (answer.status, answer.body) == (503, "the server is stopping\n")
    assert get(observed, "/livez").status == 200


def test_programs_get_the_reasons_as_json() -> None:
    lane = make_lane("b", is_ready=False)

    not_ready = get(observe([lane]), "/readyz", "application/json")
    ready = get(observe([make_lane()]), "/readyz", "text/html, application/json;q=0.9")

    assert (not_ready.status, ready.status) == (503, 200)
    assert json.loads(ready.body) == {"ready": True, "reasons": []}
    body = json.loads(not_ready.body)
    assert body["ready"] is False
    assert len(body["reasons"]) == 1


def test_metrics_come_as_prometheus_text() -> None:
    answer = get(observe([make_lane(rows=5)]), "/metrics")

    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'iskander_rows_total{model="m",version="1"} 5.0' in answer.body
    assert len(list(parse_text(answer.body))) > 30


def test_metrics_come_as_openmetrics_to_those_who_take_it() -> None:
    accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"

    answer = get(observe([make_lane()]), "/metrics", accept)

    kind = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert answer.headers["content-type"] == kind
    assert answer.body.endswith("# EOF\n")
    assert len(list(parse_openmetrics(answer.body))) > 30


def test_anything_else_is_not_found_and_nothing_can_be_written() -> None:
    async def talk(address: str) -> list[int]:
        paths = ("/", "/metrics/", "/ready", "/livez/x", "/..%2f", "/docs")
        answers = [await ask(address, path) for path in paths]
        answers.append(await ask(address, "/livez", method="POST"))
        return [answer.status for answer in answers]

    assert serve(observe([]), talk) == [404] * 6 + [405]


def test_it_does_not_say_what_it_is_made_of() -> None:
    assert "server" not in get(observe([]), "/livez").headers


def test_a_page_is_given_again_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks in a loop must not take the loop's time from batches."""
    lane = make_lane(rows=1)

    async def talk(address: str) -> list[bool]:
        pages = []
        for rows, reuse_ns in ((1, 10**12), (2, 10**12), (3, -1)):
            lane.counts["rows"] = rows
            monkeypatch.setattr(admin, "REUSE_NS", reuse_ns)
            pages.append((await ask(address, "/metrics")).body)
        openmetrics = await ask(address, "/metrics", "application/openmetrics-text")
        assert openmetrics.body.endswith("# EOF\n"), "the other format's page"
        return [f'rows_total{{model="m",version="1"}} {n}.0' in pages[n - 1] for n in (1, 2, 3)]

    assert serve(observe([lane]), talk) == [True, False, True]


def test_many_may_ask_at_once() -> None:
    async def talk(address: str) -> list[Answer]:
        return await asyncio.gather(*(ask(address, "/metrics") for _ in range(20)))

    answers = serve(observe([make_lane(f"m{index}") for index in range(5)]), talk)

    assert {answer.status for answer in answers} == {200}


def test_a_failure_shows_nothing_of_the_inside(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traceback is in the log, and the port goes on."""

    def fail() -> list[str]:
        raise RuntimeError("secret")

    observed = observe([])
    monkeypatch.setattr(observed.models, "reasons", fail)

    async def talk(address: str) -> tuple[Answer, Answer]:
        return await ask(address, "/readyz"), await ask(address, "/livez")

    with caplog.at_level(logging.ERROR):
        failed, alive = serve(observed, talk)

    assert (failed.status, failed.body) == (500, "Internal Server Error")
    assert alive.status == 200
    assert "RuntimeError: secret" in caplog.text


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10_000,
        b"\x16\x03\x01\x00\xff\r\n",
    ],
    ids=["no HTTP", "endless head", "TLS"],
)
def test_what_is_no_request_is_refused(sent: bytes) -> None:
    async def talk(address: str) -> bytes:
        reader, writer = await connect(address)
        writer.write(sent)
        raw = await reader.read()
        writer.close()
        return raw

    assert parse(serve(observe([]), talk)).status == 400


def test_a_connection_does_not_live_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that says nothing, nor one that never finishes what it began to say."""
    monkeypatch.setattr(admin, "CONNECTION_S", 0.05)

    async def talk(address: str) -> None:
        for beginning in (b"", b"GET /livez HTTP/1.1\r\nHost:"):
            reader, writer = await connect(address)
            writer.write(beginning)
            with pytest.raises(ConnectionResetError):
                if await reader.read() == b"":
                    raise ConnectionResetError  # Which of both depends on what was sent.
            writer.close()

    serve(observe([]), talk)


def test_connections_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one too many the oldest that is idle is closed."""
    monkeypatch.setattr(admin, "CONNECTIONS_MAX", 3)

    async def talk(address: str) -> None:
        held = [await connect(address) for _ in range(3)]
        for reader, writer in held:
            writer.write(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"ok" in await reader.readuntil(b"ok\n")
        assert (await ask(address, "/livez")).status == 200
        assert await held[0][0].read() == b""
        for _, writer in held:
            writer.close()

    serve(observe([]), talk)


def test_signals_stay_with_the_gateway() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    async def talk(_: str) -> list[Any]:
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    with_port = serve(observe([]), talk)

    # asyncio.run has a handler of its own for SIGINT.
    assert with_port[1] is before[1]
    assert "uvicorn" not in repr(with_port)


def test_a_stopped_port_is_free_and_holds_no_connection() -> None:
    async def run() -> bytes:
        server = admin_of("127.0.0.1:0", observe([]))
        address = await server.start()
        reader, writer = await connect(address)
        await server.stop()
        left = await reader.read()
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await connect(address)
        again = admin_of(address, observe([]))
        assert await again.start() == address
        await again.stop()
        return left

    assert asyncio.run(asyncio.wait_for(run(), WITHIN_S)) == b""


def test_stopping_what_was_not_started_is_nothing() -> None:
    asyncio.run(admin_of("127.0.0.1:0", observe([])).stop())


def test_a_port_in_use_is_the_operators_mistake() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"admin\.address {address}: Address already in use"):
            asyncio.run(admin_of(address, observe([])).start())


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("nonsense", "wanted HOST:PORT"),
        (":80", "wanted HOST:PORT"),
        ("127.0.0.1:http", "wanted HOST:PORT"),
        ("127.0.0.1:65536", "wanted HOST:PORT"),
        ("a..b:0", "not a host name"),
        ("192.0.2.1:0", "Cannot assign"),
    ],
)
def test_an_address_that_nobody_can_have_is_refused_by_name(address: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        asyncio.run(admin_of(address, observe([])).start())


def test_an_ipv6_address_is_written_so_that_it_can_be_used() -> None:
    async def run() -> str:
        server = admin_of("[::1]:0", observe([]))
        address = await server.start()
        await server.stop()
        return address

    if not socket.has_ipv6 or not _has_ipv6_loopback():
        pytest.skip("this machine has no IPv6")
    assert asyncio.run(run()).startswith("[::1]:")


def _has_ipv6_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
