"""Admin HTTP server: pages, errors, and limits of connections."""

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
from iskander.gateway.telemetry import admin
from iskander.gateway.telemetry.admin import AdminServer
from iskander.gateway.telemetry.metrics.exposition import Collector
from iskander.gateway.telemetry.metrics.sources import MetricSources
from iskander.gateway.telemetry.status.events import EventLog
from iskander.gateway.telemetry.status.history import History
from iskander.gateway.telemetry.status.reader import StatusReader

TIMEOUT_S = 10.0


class Response(NamedTuple):
    status: int
    headers: dict[str, str]
    body: str


def admin_server(address: str, observed: MetricSources, *, has_page: bool = False) -> AdminServer:
    read_status = StatusReader(observed, History(), EventLog()).read if has_page else None
    render = Collector(observed).render
    return AdminServer(address, observed.models.reasons, render, read_status=read_status)


def serve(
    observed: MetricSources, client: Callable[[str], Awaitable[Any]], *, has_page: bool = False
) -> Any:
    """Starts a server, runs a client against it, and stops it, within a timeout."""

    async def run() -> Any:
        server = admin_server("127.0.0.1:0", observed, has_page=has_page)
        address = await server.start()
        try:
            return await client(address)
        finally:
            await server.stop()

    return asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def request(
    address: str, path: str, accept: str = "*/*", method: str = "GET", host: str = "localhost"
) -> Response:
    reader, writer = await connect(address)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nAccept: {accept}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode())
    raw = await reader.read()
    writer.close()
    return parse(raw)


def parse(raw: bytes) -> Response:
    head, _, body = raw.decode().partition("\r\n\r\n")
    status, *lines = head.split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return Response(int(status.split()[1]), headers, body)


def get(
    observed: MetricSources,
    path: str,
    accept: str = "*/*",
    method: str = "GET",
    host: str = "localhost",
) -> Response:
    response: Response = serve(
        observed, lambda address: request(address, path, accept, method, host)
    )
    return response


def test_livez_is_ok_without_ready_models() -> None:
    response = get(observe([make_lane(is_ready=False)]), "/livez")

    assert (response.status, response.body) == (200, "ok\n")


def test_readyz_is_ready_when_every_model_is() -> None:
    response = get(observe([make_lane("a"), make_lane("b")]), "/readyz")

    assert (response.status, response.body) == (200, "ready\n")


def test_readyz_lists_one_reason_per_line() -> None:
    lanes = [make_lane("a"), make_lane("b", is_ready=False), make_lane("c", "3", is_ready=False)]

    response = get(observe(lanes), "/readyz")

    assert response.status == 503
    assert response.headers["content-type"].startswith("text/plain")
    first, second = response.body.splitlines()
    assert first.startswith("model `b/1`: ")
    assert second.startswith("model `c/3`: ")


def test_stopping_gateway_is_alive_and_not_ready() -> None:
    observed = observe([make_lane()], is_stopping=True)

    response = get(observed, "/readyz")

    assert (response.status, response.body) == (503, "the server is stopping\n")
    assert get(observed, "/livez").status == 200


def test_readyz_reasons_as_json() -> None:
    lane = make_lane("b", is_ready=False)

    not_ready = get(observe([lane]), "/readyz", "application/json")
    ready = get(observe([make_lane()]), "/readyz", "text/html, application/json;q=0.9")

    assert (not_ready.status, ready.status) == (503, 200)
    assert json.loads(ready.body) == {"ready": True, "reasons": []}
    body = json.loads(not_ready.body)
    assert body["ready"] is False
    assert len(body["reasons"]) == 1


def test_metrics_are_prometheus_text_by_default() -> None:
    response = get(observe([make_lane(rows=5)]), "/metrics")

    assert response.status == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'iskander_rows_total{model="m",version="1"} 5.0' in response.body
    assert len(list(parse_text(response.body))) > 30


def test_metrics_are_openmetrics_on_request() -> None:
    accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"

    response = get(observe([make_lane()]), "/metrics", accept)

    kind = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert response.headers["content-type"] == kind
    assert response.body.endswith("# EOF\n")
    assert len(list(parse_openmetrics(response.body))) > 30


def test_other_paths_are_404_and_writes_are_405() -> None:
    async def client(address: str) -> list[int]:
        paths = ("/", "/metrics/", "/ready", "/livez/x", "/..%2f", "/docs")
        responses = [await request(address, path) for path in paths]
        responses.append(await request(address, "/livez", method="POST"))
        return [response.status for response in responses]

    assert serve(observe([]), client) == [404] * 6 + [405]


def test_responses_have_no_server_header() -> None:
    assert "server" not in get(observe([]), "/livez").headers


def test_metrics_page_is_cached_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequent scrapes must not take event loop time from batches."""
    lane = make_lane(rows=1)

    async def client(address: str) -> list[bool]:
        pages = []
        for rows, reuse_ns in ((1, 10**12), (2, 10**12), (3, -1)):
            lane.counts["rows"] = rows
            monkeypatch.setattr(admin, "REUSE_NS", reuse_ns)
            pages.append((await request(address, "/metrics")).body)
        openmetrics = await request(address, "/metrics", "application/openmetrics-text")
        assert openmetrics.body.endswith("# EOF\n"), "the page of the other format"
        return [f'rows_total{{model="m",version="1"}} {n}.0' in pages[n - 1] for n in (1, 2, 3)]

    assert serve(observe([lane]), client) == [True, False, True]


def test_concurrent_scrapes() -> None:
    async def client(address: str) -> list[Response]:
        return await asyncio.gather(*(request(address, "/metrics") for _ in range(20)))

    responses = serve(observe([make_lane(f"m{index}") for index in range(5)]), client)

    assert {response.status for response in responses} == {200}


def test_internal_error_discloses_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traceback is logged, and the server continues."""

    def fail() -> list[str]:
        raise RuntimeError("secret")

    observed = observe([])
    monkeypatch.setattr(observed.models, "reasons", fail)

    async def client(address: str) -> tuple[Response, Response]:
        return await request(address, "/readyz"), await request(address, "/livez")

    with caplog.at_level(logging.ERROR):
        failed, alive = serve(observed, client)

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
    ids=["no HTTP", "oversized head", "TLS"],
)
def test_invalid_request_is_rejected(sent: bytes) -> None:
    async def client(address: str) -> bytes:
        reader, writer = await connect(address)
        writer.write(sent)
        raw = await reader.read()
        writer.close()
        return raw

    assert parse(serve(observe([]), client)).status == 400


def test_idle_and_slow_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "CONNECTION_S", 0.05)

    async def client(address: str) -> None:
        for beginning in (b"", b"GET /livez HTTP/1.1\r\nHost:"):
            reader, writer = await connect(address)
            writer.write(beginning)
            with pytest.raises(ConnectionResetError):
                if await reader.read() == b"":
                    raise ConnectionResetError  # Some connections end with EOF instead.
            writer.close()

    serve(observe([]), client)


def test_oldest_idle_connection_is_closed_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "CONNECTIONS_MAX", 3)

    async def client(address: str) -> None:
        connections = [await connect(address) for _ in range(3)]
        for reader, writer in connections:
            writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"ok" in await reader.readuntil(b"ok\n")
        assert (await request(address, "/livez")).status == 200
        assert await connections[0][0].read() == b""
        for _, writer in connections:
            writer.close()

    serve(observe([]), client)


def test_signal_handlers_are_unchanged() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    async def client(_: str) -> list[Any]:
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    during = serve(observe([]), client)

    # asyncio.run installs its own SIGINT handler.
    assert during[1] is before[1]
    assert "uvicorn" not in repr(during)


def test_stop_closes_the_port_and_all_connections() -> None:
    async def run() -> bytes:
        server = admin_server("127.0.0.1:0", observe([]))
        address = await server.start()
        reader, writer = await connect(address)
        await server.stop()
        remaining = await reader.read()
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await connect(address)
        restarted = admin_server(address, observe([]))
        assert await restarted.start() == address
        await restarted.stop()
        return remaining

    assert asyncio.run(asyncio.wait_for(run(), TIMEOUT_S)) == b""


def test_stop_before_start_has_no_effect() -> None:
    asyncio.run(admin_server("127.0.0.1:0", observe([])).stop())


def get_page(observed: MetricSources, path: str, **options: str) -> Response:
    def client(address: str) -> Awaitable[Response]:
        return request(address, path, **{"host": "localhost:80", **options})

    response: Response = serve(observed, client, has_page=True)
    return response


def test_page_and_status_are_private_and_not_stored() -> None:
    observed = observe([make_lane("one")])

    page, status = get_page(observed, "/"), get_page(observed, "/status.json")

    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert ">one</th>" in page.body
    assert json.loads(status.body)["models"][0]["name"] == "one"
    for response in (page, status):
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["x-frame-options"] == "deny"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
        assert not any(name.startswith("access-control") for name in response.headers)


def test_server_without_page_has_no_status() -> None:
    assert get(observe([]), "/status.json").status == 404


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", 200),
        ("LOCALHOST:50052", 200),
        ("page.localhost:1", 200),
        ("127.0.0.1:50052", 200),
        ("[::1]:50052", 200),
        ("rebound.example:50052", 421),
        ("192.0.2.1", 421),
        ("localhost.example", 421),
        ("[::1", 421),
        ("localhost@rebound.example", 421),
    ],
)
def test_loopback_port_is_for_loopback_hosts_only(host: str, expected: int) -> None:
    """A web site whose name is rebound to 127.0.0.1 has its own host in the request."""
    for path in ("/status.json", "/metrics"):
        response = get_page(observe([make_lane("secret-model")]), path, host=host)

        assert response.status == expected
        assert ("secret-model" in response.body) == (expected == 200)
        assert ("`access.allowed_hosts`" in response.body) == (expected == 421)


def test_probes_answer_other_hosts_without_reasons() -> None:
    observed = observe([make_lane("secret-model", is_ready=False)])
    response = get(observed, "/readyz", host="gateway")
    assert (response.status, response.body) == (503, "not ready\n")
    assert "secret-model" in get(observed, "/readyz").body
    assert get(observed, "/livez", host="gateway").status == 200


def test_page_is_omitted_without_jinja(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "find_spec", lambda name: None)

    assert get_page(observe([]), "/").status == 404
    assert get_page(observe([]), "/status.json").status == 200
    assert "no page at admin.address: jinja2 is not installed" in caplog.text


def test_status_is_cached_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = make_lane()
    monkeypatch.setattr(admin, "REUSE_NS", 10**12)

    async def client(address: str) -> list[str]:
        bodies = []
        for count in (1, 2):
            lane.counts["refused.queue_full"] = count
            bodies.append((await request(address, "/status.json", host="localhost")).body)
        return bodies

    first, second = serve(observe([lane]), client, has_page=True)

    assert '"queue_full":1' in first
    assert first == second


def test_port_in_use_is_a_config_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"admin\.address {address}: Address already in use"):
            asyncio.run(admin_server(address, observe([])).start())


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("nonsense", "expected HOST:PORT"),
        (":80", "expected HOST:PORT"),
        ("127.0.0.1:http", "expected HOST:PORT"),
        ("127.0.0.1:65536", "expected HOST:PORT"),
        ("a..b:0", "not a host name"),
        ("192.0.2.1:0", "Cannot assign"),
    ],
)
def test_invalid_address_is_rejected_with_the_reason(address: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        asyncio.run(admin_server(address, observe([])).start())


def test_ipv6_address_has_brackets() -> None:
    async def run() -> str:
        server = admin_server("[::1]:0", observe([]))
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
