"""Event stream of real gateways, as programs of others receive it."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pyarrow as pa
import pytest
import trustme
from pyarrow import flight
from support import models
from support.processes import BIN, Gateway, eventually, running
from support.proxies import free_ports

from iskander.client import Tls
from iskander.errors import IskanderError
from iskander.gateway.auth.tokens import add_token

ROOT = Path(__file__).resolve().parent.parent.parent
BATCH = pa.record_batch({"x": pa.array([1, 2, 3], pa.int64())})
TRACE = "0af7651916cd43dd8448eb211c80319c"
TOPIC = "completion/ids/1"
WITHIN_S = 20.0
ENABLED: dict[str, Any] = {"enabled": True}

Event = dict[str, Any]


def served(folder: Path) -> list[dict[str, Any]]:
    return [{"name": "ids", "path": str(models.row_ids(folder / "ids"))}]


class Stream:
    """A response, read line by line as a plain HTTP client does."""

    def __init__(self, url: str, query: str = "", **headers: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, WITHIN_S)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request("GET", parts.path + query, headers=sent)
        self.response = self._connection.getresponse()
        self.last_id = ""
        if self.response.status == http.client.OK:
            self.fields()  # `retry`.
            self.last_id = self.fields()["id"]

    def fields(self) -> dict[str, str]:
        """The fields of the next block; empty at the end."""
        found: dict[str, str] = {}
        while line := self.response.readline().decode().rstrip("\n"):
            name, _, value = line.partition(":")
            found[name] = value.strip()
        return found

    def events(self) -> Iterator[Event]:
        """Events with their `name`, until the end."""
        while fields := self.fields():
            self.last_id = fields.get("id", self.last_id)
            if "data" in fields:
                yield {"name": fields["event"], **json.loads(fields["data"])}

    def until(self, is_last: Callable[[Event], bool]) -> list[Event]:
        """Events up to one that meets a condition."""
        found = []
        for event in self.events():
            found.append(event)
            if is_last(event):
                return found
        raise AssertionError(f"the stream ended after {found}")

    def close(self) -> None:
        self.response.close()
        self._connection.close()


@contextmanager
def subscribed(gateway: Gateway, query: str = "", **headers: str) -> Iterator[Stream]:
    stream = Stream(url_of(gateway), query, **headers)
    try:
        yield stream
    finally:
        stream.close()


def url_of(gateway: Gateway) -> str:
    address: str = gateway.stats()["events"]["address"]
    return address


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("events")
    with running(folder, served(folder), events=ENABLED) as gateway:
        yield gateway


def test_requests_are_published(gateway: Gateway) -> None:
    with subscribed(gateway, "?topic=completion/") as stream:
        headers = ((b"traceparent", f"00-{TRACE}-b7ad6b7169203331-01".encode()),)
        options = flight.FlightCallOptions(headers=list(headers))
        with flight.connect(f"grpc://{gateway.address}") as client:
            path = flight.FlightDescriptor.for_path("ids")
            writer, reader = client.do_exchange(path, options)
            writer.begin(BATCH.schema)
            writer.write_batch(BATCH)
            reader.read_chunk()
            writer.close()
        with gateway.client() as client, pytest.raises(IskanderError):
            client.score("unknown", BATCH)
        completed, refused = stream.until(lambda event: event["outcome"] != "ok")

    assert completed["name"] == completed["kind"] == "completion" and completed["process"] is None
    assert (completed["model"], completed["version"], completed["rows"]) == ("ids", "1", 3)
    assert (completed["protocol"], completed["trace_id"]) == ("grpc", TRACE)
    assert 0 < completed["run_ns"] < completed["total_ns"] and completed["queue_ns"] > 0
    assert abs(completed["at_s"] - time.time()) < 600
    assert (refused["outcome"], refused["rows"], refused["model"]) == ("model_not_found", 0, "")


def test_curl(gateway: Gateway) -> None:
    curl = start("curl", "-sN", url_of(gateway))
    try:
        eventually(lambda: gateway.stats()["events"]["readers"])
        with gateway.client() as client:
            client.score("ids", BATCH)
        assert curl.stdout is not None
        lines = [curl.stdout.readline() for _ in range(8)]
    finally:
        curl.kill()
        curl.communicate()
    assert lines[:2] == ["retry: 1000\n", "\n"] and lines[2] == ": heartbeat\n"
    assert re.fullmatch(r"id: [0-9a-f]{16}-\d+\n", lines[5])
    assert lines[6] == "event: completion\n" and lines[7].startswith('data: {"kind":"completion"')


def test_browser_reads_on_the_page_of_the_server_only(gateway: Gateway) -> None:
    """With the headers that Chromium and Firefox add to the requests of EventSource."""
    own = {"sec_fetch_site": "same-origin", "sec_fetch_mode": "cors", "sec_fetch_dest": "empty"}
    with subscribed(gateway, accept="text/event-stream", **own) as stream:
        assert stream.response.status == http.client.OK
        assert stream.response.headers["content-type"] == "text/event-stream"
    other = own | {"sec_fetch_site": "cross-site", "origin": "https://evil.example"}
    with subscribed(gateway, **other) as stream:
        assert stream.response.status == http.client.FORBIDDEN
    parts = urlsplit(url_of(gateway))
    assert parts.hostname is not None
    page = http.client.HTTPConnection(parts.hostname, parts.port, WITHIN_S)
    page.request("GET", "/")
    assert "connect-src 'self'" in page.getresponse().headers["content-security-policy"]
    page.close()


def test_stream_goes_on_after_the_last_event(gateway: Gateway) -> None:
    with gateway.client() as client:
        with subscribed(gateway) as stream:
            client.score("ids", BATCH)
            stream.until(lambda event: event["name"] == "completion")
        for _ in range(3):
            client.score("ids", BATCH)
        with subscribed(gateway, last_event_id=stream.last_id) as again:
            client.score("ids", BATCH)
            events = [next(again.events()) for _ in range(4)]
    assert {event["name"] for event in events} == {"completion"}
    assert again.last_id.split("-")[0] == stream.last_id.split("-")[0]
    assert int(again.last_id.split("-")[1]) == int(stream.last_id.split("-")[1]) + 4


def test_last_event_of_another_server_is_a_gap(gateway: Gateway) -> None:
    with subscribed(gateway, last_event_id=f"{'0' * 16}-5") as stream:
        lost = next(stream.events())
    assert (lost["name"], lost["lost"], lost["reason"]) == ("lost", None, "restarted")


def test_command_prints_events(gateway: Gateway) -> None:
    words = ["--topic", "completion/ids/", "--count", "3"]
    asking = start("iskander", "events", "--address", gateway.address, "--json", *words)
    direct = start("iskander", "events", "--address", url_of(gateway), *words)
    with gateway.client() as client:
        eventually(
            lambda: client.score("ids", BATCH) and {asking.poll(), direct.poll()} == {0},
            what="the end of both",
        )
    (out, errors), (text, _) = asking.communicate(), direct.communicate()
    events = [json.loads(line) for line in out.splitlines()]
    expected = [(TOPIC, "ok", 3)] * 3
    assert [(event["topic"], event["outcome"], event["rows"]) for event in events] == expected
    assert "iskander: 0 events lost\n" in errors
    assert re.match(r"\d\d:\d\d:\d\d completion/ids/1 ok: 3 rows, queue \d+\.\d\d ms, run ", text)


def test_example_of_the_documentation(gateway: Gateway) -> None:
    page = (ROOT / "docs" / "events.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    program = subprocess.Popen(
        [sys.executable, "-c", example, url_of(gateway)], stdout=subprocess.PIPE, text=True
    )
    try:
        eventually(lambda: gateway.stats()["events"]["readers"])
        with gateway.client() as client:
            client.score("ids", BATCH)
        assert program.stdout is not None
        assert re.match(r"ids ok 3 \d+\n", program.stdout.readline())
    finally:
        program.kill()
        program.communicate()


def test_drain_sends_the_last_events_and_ends_the_streams(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path), events=ENABLED) as gateway:
        with subscribed(gateway) as stream, subscribed(gateway, "?topic=worker") as workers:
            gateway.signal(signal.SIGTERM)
            # The last chunk of the response came, otherwise http.client raises IncompleteRead.
            events, changes = list(stream.events()), list(workers.events())
        assert gateway.wait() == 0
    assert [event["event"] for event in events][-1] == "stopped"
    assert "drain_started" in [event["event"] for event in events]
    assert {event["name"] for event in changes} == {"worker"}


def test_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    team = add_token(file, "team", ("ids",))
    operator = add_token(file, "operator", ("*",), manage=True)
    access = {"tokens": str(file)}
    gateway = Gateway(tmp_path, served(tmp_path), events=ENABLED, access=access)
    gateway.token = operator
    try:
        gateway.start()
        for header in ({}, {"authorization": "Bearer no-token"}):
            with subscribed(gateway, **header) as stream:
                assert stream.response.status == http.client.UNAUTHORIZED
                assert "Basic" in stream.response.headers["www-authenticate"]
        url = url_of(gateway)
        done = start("iskander", "events", "--address", url)
        _, errors = done.communicate(timeout=60)
        assert done.returncode == 77 and "this server requires a token" in errors
        browser = subprocess.run(  # It sends user name and password, as a browser does.
            ["curl", "-s", "-m", "1", "-u", f"any:{team}", "-o", "/dev/null", "-w", "%{http_code}",
             url], stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        assert browser.stdout == "200"
        with subscribed(gateway, authorization=f"Bearer {team}") as stream:
            gateway.kill_worker()
            gateway.wait_ready()
            with gateway.client() as client:
                client.score("ids", BATCH)
            assert next(stream.events())["name"] == "completion"
    finally:
        gateway.stop()


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tls_of_the_admin_port(tmp_path: Path, processes: int) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "roots.pem"))
    sections = {
        "events": ENABLED,
        "admin": {"tls": True, "address": "127.0.0.1:0"},
        "tls": {"certificate": str(tmp_path / "server.pem")},
        "server": {"processes": processes},
    }
    secrecy = Tls(tmp_path / "roots.pem")
    with running(tmp_path, served(tmp_path), secrecy=secrecy, **sections) as gateway:
        roots = ["--tls-roots", str(tmp_path / "roots.pem")]
        asking = start("iskander", "events", "--address", gateway.address, *roots, "--count", "1")
        with gateway.client() as client:
            eventually(lambda: client.score("ids", BATCH) and asking.poll() is not None)
        out, errors = asking.communicate()
        assert asking.returncode == 0 and "completion/ids/1 ok: 3 rows" in out, errors
        url = urlsplit(url_of(gateway))
        assert url.scheme == "https" and url.hostname and url.port
        tls = ssl.create_default_context(cafile=tmp_path / "roots.pem")
        page = http.client.HTTPSConnection(url.hostname, url.port, context=tls, timeout=WITHIN_S)
        page.request("GET", "/readyz")
        assert page.getresponse().status == http.client.OK
        page.close()
        plain = http.client.HTTPConnection(url.hostname, url.port, timeout=WITHIN_S)
        plain.request("GET", "/readyz")
        with pytest.raises((http.client.HTTPException, OSError)):
            plain.getresponse()
        plain.close()


@pytest.mark.slow
def test_changes_are_published(tmp_path: Path) -> None:
    with (
        running(tmp_path, served(tmp_path), events=ENABLED) as gateway,
        subscribed(gateway, "?topic=worker") as stream,
    ):
        gateway.kill_worker()
        found = stream.until(lambda event: event["fields"].get("change") == "loaded")
        gateway.wait_ready()

    assert {event["name"] for event in found} == {"worker"}
    changes = [event["fields"].get("change", event["event"]) for event in found]
    for name in ("worker_process_exited", "worker_loaded_model"):
        changes.remove(name)
    assert changes == ["lost", "spawn due", "attached", "loaded"]


@pytest.mark.slow
def test_slow_reader_is_told_its_losses_and_delays_nobody(tmp_path: Path) -> None:
    """More events than the buffer and the kernel's buffers of both sockets hold."""
    sent = 25_000
    options = ENABLED | {"buffer_bytes": 65_536}
    with running(tmp_path, served(tmp_path), events=options) as gateway:
        parts = urlsplit(url_of(gateway))
        with socket.socket() as slow, subscribed(gateway, "?topic=completion/") as quick:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.settimeout(WITHIN_S)
            slow.connect((parts.hostname, parts.port))
            slow.sendall(b"GET /events?topic=completion/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
            eventually(lambda: gateway.stats()["events"]["readers"] == 2)
            with gateway.client() as client:
                results = client.stream("ids", (BATCH for _ in range(sent)))
                for number, _ in enumerate(results):
                    if number % 1000 == 0:
                        next(quick.events())
            gateway.signal(signal.SIGTERM)
            text = b""
            while chunk := slow.recv(1 << 20):
                text += chunk
        assert gateway.wait() == 0
    found = [json.loads(data) for data in re.findall(rb"^data: (.*)$", text, re.MULTILINE)]
    lost = sum(event["lost"] for event in found if event["kind"] == "lost")
    received = sum(event["kind"] == "completion" for event in found)
    assert lost and received and lost + received == sent


@pytest.mark.slow
def test_command_goes_on_after_a_restart_and_says_what_is_missing(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    admin = {"address": f"127.0.0.1:{port}"}
    command = None
    for _ in range(2):
        with running(tmp_path, served(tmp_path), events=ENABLED, admin=admin) as gateway:
            if command is None:
                address = f"http://127.0.0.1:{port}"
                command = start("iskander", "events", "--address", address, "--topic", "gateway")
            eventually(lambda: gateway.stats()["events"]["readers"], what="the subscription")
    assert command is not None and command.stdout is not None
    ends = 0
    while ends < 2:
        ends += "info: stopped" in command.stdout.readline()
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate(timeout=60)
    assert "an unknown number of events lost before this line: the server was restarted" in errors
    assert "iskander: 0 events lost, an unknown number at 1 places" in errors


@pytest.mark.slow
def test_several_processes_have_one_stream(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path), events=ENABLED, server={"processes": 2}) as gateway:
        stream = Stream(url_of(gateway))
        with gateway.client() as client:
            for _ in range(5):
                client.score("ids", BATCH)
        found = [next(stream.events()) for _ in range(5)]
        assert {event["name"] for event in found} == {"completion"}
        assert {event["process"] for event in found} <= {0, 1}
        gateway.signal(signal.SIGTERM)
        last = list(stream.events())
        stream.close()
        assert gateway.wait() == 0
    assert "lost" not in {event["name"] for event in last}
    ends = {event["process"] for event in last if event.get("event") == "stopped"}
    assert ends == {0, 1}


@pytest.mark.slow
def test_killed_process_is_a_loss(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path), events=ENABLED, server={"processes": 2}) as gateway:
        with subscribed(gateway, "?topic=gateway") as stream:
            children = psutil.Process(gateway.pid).children()
            (second,) = [each for each in children if "--process 1" in " ".join(each.cmdline())]
            second.kill()
            found = stream.until(lambda event: event.get("event") == "ready")
        lost = [event for event in found if event["name"] == "lost"]
        assert [(event["process"], event["lost"], event["reason"]) for event in lost] == [
            (1, None, "restarted")
        ]
        assert (found[-1]["event"], found[-1]["process"]) == ("ready", 1)


@pytest.mark.slow
def test_command_explains_a_server_without_a_stream(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path)) as gateway:
        assert gateway.stats()["events"] == {}
        done = start("iskander", "events", "--address", gateway.address)
        _, errors = done.communicate(timeout=60)
    assert done.returncode == 2 and "has no event stream (`events.enabled`)" in errors


def start(command: str, *words: str) -> subprocess.Popen[str]:
    program = str(BIN / command) if command == "iskander" else command
    return subprocess.Popen(
        [program, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
