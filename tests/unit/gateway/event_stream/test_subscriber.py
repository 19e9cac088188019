"""Client of the event stream, against a scripted server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from iskander.errors import ConnectionFailed, MalformedInput, ProtocolError
from iskander.gateway.event_stream import messages
from iskander.gateway.event_stream import subscriber as module
from iskander.gateway.event_stream.subscriber import Subscriber

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
WITHIN_S = 10.0


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives each answer to one connection; yields its URL and the requests."""
    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(WITHIN_S)

        def serve() -> None:
            for answer in answers:
                connection, _ = listening.accept()
                with connection:
                    connection.settimeout(WITHIN_S)
                    request = b""
                    while not request.endswith(b"\r\n\r\n"):
                        request += connection.recv(4096)
                    requests.append(request)
                    connection.sendall(answer)
            listening.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", requests
        thread.join()


@pytest.fixture(autouse=True)
def retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_MS", 0)
    monkeypatch.setattr(module, "RETRIES_NS", 0)


def test_lost_connection_goes_on_after_the_last_position() -> None:
    """Also if the connection broke within an event, or the last position came in a heartbeat."""
    first = OK + b"retry: 1\n\nid: s-1\nevent: worker\ndata: {}\n\nid: s-2\nevent: wor"
    second = OK + b"id: s-2\nevent: worker\ndata: {}\n\n: heartbeat\nid: s-7\n\n"
    third = OK + b"id: s-8\nevent: model\ndata: {}\n\n"
    with answering(first, second, third) as (url, requests):
        subscriber = Subscriber(url, ["worker", "m&n"], token="secret")
        events = subscriber.events()
        found = [next(events) for _ in range(3)]
        subscriber.close()
    assert [event.position for event in found] == ["s-1", "s-2", "s-8"]
    assert [event.name for event in found] == ["worker", "worker", "model"]
    assert requests[0].startswith(b"GET /events?topic=worker&topic=m%26n HTTP/1.1\r\n")
    assert b"authorization: Bearer secret\r\n" in requests[0]
    assert b"last-event-id" not in requests[0]
    assert b"last-event-id: s-1\r\n" in requests[1] and b"last-event-id: s-7\r\n" in requests[2]


def test_server_that_is_gone() -> None:
    expected = pytest.raises(ConnectionFailed, match="no event stream at http://127")
    with answering(OK) as (url, _), expected, closing(Subscriber(url)) as subscriber:
        next(subscriber.events())


def test_rejection_is_the_error_of_the_server() -> None:
    body = b'{"error":"no such parameter","code":"malformed"}'
    answer = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with answering(answer) as (url, _), pytest.raises(MalformedInput, match="no such parameter"):
        next(Subscriber(url).events())


@pytest.mark.parametrize(("status", "body"), [(404, b"no stream"), (503, b'{"error":"full"}')])
def test_other_answer_is_a_failed_connection(status: int, body: bytes) -> None:
    answer = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)
    with answering(answer) as (url, _), pytest.raises(ConnectionFailed):
        next(Subscriber(url).events())


def test_endless_event_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "EVENT_BYTES_MAX", 100)
    for endless in (b"data: " + b"x" * 200, b"data: x\n" * 20):
        expected = pytest.raises(ProtocolError, match="event of more than 100 bytes")
        with answering(OK + endless) as (url, _), expected, closing(Subscriber(url)) as subscriber:
            next(subscriber.events())


def test_deeply_nested_answers_are_errors() -> None:
    nested = b'{"kind":"change","x":' + b"[" * 20_000
    answer = OK + b"event: worker\ndata: " + nested + b"\n\n"
    with answering(answer) as (url, _), closing(Subscriber(url)) as subscriber:
        event = next(subscriber.events())
    with pytest.raises(ProtocolError, match="no event of an event stream"):
        event.decode()
    head = b"HTTP/1.1 400 X\r\nContent-Length: %d\r\n\r\n" % len(nested)
    with answering(head + nested) as (url, _), pytest.raises(ConnectionFailed, match="status 400"):
        next(Subscriber(url).events())


@pytest.mark.parametrize("url", ["127.0.0.1:1", "tcp://127.0.0.1:1", "http://", "https:///events"])
def test_invalid_url(url: str) -> None:
    with pytest.raises(ProtocolError, match="expected http://HOST:PORT"):
        Subscriber(url)
