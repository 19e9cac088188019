"""Events as a client reads them, positions, and topics, with the specification as the reference.

An input is a query, a line end, the value of `Last-Event-ID`, a line end, and a stream. The
reference is the parser of the specification. Deliberate differences: the last field of
a name counts, and a line ends with LF or CRLF, because this server sends no others.

Source: WHATWG HTML, section 9.2.6 "Interpreting an event stream"; URL, section 5.1.
"""

from __future__ import annotations

import io
from random import Random
from urllib.parse import unquote_to_bytes

from fuzz import mutation
from iskander.errors import MalformedInput, ProtocolError
from iskander.gateway.event_stream.buffer import EventBuffer
from iskander.gateway.event_stream.endpoint import TOPICS_MAX, read_topics
from iskander.gateway.event_stream.messages import (
    Change,
    Completion,
    Lost,
    SentEvent,
    encode,
    parse_position,
    read_events,
)

ITERATIONS = 3000
STREAM = "0123456789abcdef"
POSITION = f"{STREAM}-2"
EVENTS = (
    Completion(at_s=1.5, model="m", version="1", protocol="grpc", method="M"),
    Change(at_s=2.5, event="e", level="info", text="a\u2028b", fields={"n": 1}),
    Lost(lost=None, reason="restarted"),
)
WORDS = [
    "id: ", "event: ", "data: ", "data", "retry: 1", ":", "\n", "\n\n", "\r\n", "\r", "topic=", "&",
    "%ff", "%41", "+", ";", POSITION, f"{STREAM}-99", "-", "completion", "\u2028",
    '{"kind":"lost"}',
    "[" * 3000, "9" * 30, "topic=a&" * 300,
]  # fmt: skip


def seeds() -> list[bytes]:
    buffer = EventBuffer(STREAM, 1 << 20)
    reader = buffer.open(lambda _: True)
    for name, event in zip(("completion", "worker", "lost"), EVENTS, strict=True):
        buffer.add(name, name, encode(event))
    stream = b"retry: 1000\n\n: heartbeat\nid: s-1\n\n" + reader.take(1 << 20)
    return [
        b"\n\n" + stream,
        b"topic=completion/&topic=worker\n%b\n%b" % (POSITION.encode(), stream),
        b"topic=a%20b+c\n" + POSITION.encode() + b"\ndata: 1\r\n\r\n",
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    if not random.randrange(4):
        return mutation.flip(raw, other, random)
    text = raw.decode(errors="replace")
    at = random.randrange(len(text) + 1)
    end = min(at + random.choice((0, 0, 1, 2, 16)), len(text))
    return (text[:at] + random.choice(WORDS) + text[end:]).encode(errors="replace")


def run(raw: bytes) -> None:
    query, _, rest = raw.partition(b"\n")
    last_id, _, stream = rest.partition(b"\n")
    check_topics(query)
    check_position(last_id.decode("latin-1"))
    events = list(read_events(io.BytesIO(stream).readline))
    assert events == interpret(stream), f"{events}, expected {interpret(stream)}"
    for event in events:
        try:
            kind = event.decode()
        except ProtocolError:
            continue
        assert encode(kind) and event.topic.startswith(event.name)


def check_topics(query: bytes) -> None:
    pairs = [pair.partition(b"=") for pair in query.split(b"&") if pair]
    values = [(plain(name), plain(value)) for name, _, value in pairs]
    try:
        topics = read_topics(query)
    except MalformedInput:
        names = {name for name, _ in values}
        is_valid = query.isascii() and None not in {each for pair in values for each in pair}
        assert not (is_valid and names <= {"topic"} and query.count(b"&") < TOPICS_MAX), query
    else:
        assert topics == tuple(value for _, value in values) and len(topics) <= TOPICS_MAX


def plain(text: bytes) -> str | None:
    """A name or value of a query; None if it is not UTF-8."""
    try:
        return unquote_to_bytes(text.replace(b"+", b" ")).decode()
    except UnicodeDecodeError:
        return None


def check_position(text: str) -> None:
    """A reader starts where the client was, or says that something is missing."""
    buffer = EventBuffer(STREAM, 1 << 20)
    for _ in range(3):
        buffer.add("worker", "worker", b"{}")
    reader = buffer.open(lambda _: True, text)
    received = reader.take(1 << 20)
    found = parse_position(text)
    if not text:
        assert received == b""
    elif found is not None and found[0] == STREAM and found[1] <= 3:
        assert received.count(b"event: worker") == 3 - found[1] and b"lost" not in received
    else:
        assert received.count(b"event: ") == 1 and b'"restarted"' in received


def interpret(stream: bytes) -> list[SentEvent]:
    """The events of a stream, line by line as the specification has it."""
    events: list[SentEvent] = []
    fields: dict[str, str] | None = None
    for line in stream.split(b"\n")[:-1]:
        text = line.decode(errors="replace").rstrip("\r")
        if not text:
            if fields is not None:
                get = fields.get
                events.append(SentEvent(get("id", ""), get("event", ""), get("data", "")))
            fields = None
            continue
        fields = {} if fields is None else fields
        name, colon, value = text.partition(":")
        if name:
            fields[name] = value[1:] if colon and value[:1] == " " else value
    return events
