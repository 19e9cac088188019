"""Events of the event stream, as server-sent events.

    id: 5f3a9c01d2e4b687-1043            position in the stream after this event
    event: completion                    `completion`, `worker`, `model`, `gateway` or `lost`
    data: {"kind":"completion",...}      a structure below, as JSON on one line

A new stream, such as that of a restarted server, has another identifier before the `-`. New fields
may be added.

Pure. Source: WHATWG HTML, section 9.2 "Server-sent events".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final, Literal, NamedTuple

import msgspec

from iskander.errors import ProtocolError
from iskander.foundation.decoders import DECODE_ERRORS

COMPLETION: Final = "completion"
LOST: Final = "lost"
HEARTBEAT_S: Final = 10.0
"""Longest time without a byte from the server."""
RETRY_MS: Final = 1000
"""Time after which a browser connects again."""
OPENING: Final = b"retry: %d\n\n" % RETRY_MS
EVENT_BYTES_MAX: Final = 1 << 20
"""A reader's limit; fields and texts of log events are much shorter."""
END: Final = b"\n\n"
"""After each event; JSON has no line end."""
_POSITION: Final = re.compile(r"([0-9a-f]{16})-([0-9]{1,18})")


class Completion(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="completion"
):
    """A request whose response is written, or that failed, or whose caller is gone.

    Attributes:
        at_s: Unix time of its end.
        process: Gateway process, of several; null for a single one.
        model: Empty if the call failed before its model was known; so is `version`.
        protocol: `grpc`, `http` or `zmq`.
        method: Method of the protocol.
        rows: Rows of the request; 0 if unknown.
        outcome: `ok`, or the code of the error.
        queue_ns: Nanoseconds from its arrival until its last rows were sent to a worker; until its
            end if they never were.
        run_ns: Nanoseconds that the model ran for its last batch; 0 without results.
        total_ns: Nanoseconds from its arrival to its end.
        trace_id: Trace of the caller, 32 hexadecimal digits; empty without one.
    """

    at_s: float
    process: int | None = None
    model: str = ""
    version: str = ""
    protocol: str
    method: str
    rows: int = 0
    outcome: str = "ok"
    queue_ns: int = 0
    run_ns: int = 0
    total_ns: int = 0
    trace_id: str = ""


class Change(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="change"):
    """A change of a worker, a model or the gateway: a log event.

    Attributes:
        at_s: Unix time.
        process: Gateway process, of several; null for a single one, and for the parent.
        event: Name of the log event.
        level: `info`, `warning` or `error`.
        text: Text of the log line.
        fields: Fields of the log event.
    """

    at_s: float
    process: int | None = None
    event: str
    level: str
    text: str
    fields: dict[str, int | float | str]


class Lost(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="lost"):
    """Events that are missing at this place of the stream.

    Attributes:
        process: Gateway process, of several, whose events did not reach its parent; else null.
        lost: Number of the events; null if it is unknown.
        reason: `slow`: the subscriber did not read in time, and `lost` counts the events that it
            selected. `expired`: the event after `Last-Event-ID` is no longer kept, and `lost`
            counts the events of all topics. `restarted`: `Last-Event-ID` is of another stream, or
            the process was killed.
    """

    process: int | None = None
    lost: int | None
    reason: Literal["slow", "expired", "restarted"]


Event = Completion | Change | Lost

encode = msgspec.json.Encoder().encode
_decode: Callable[[str], Event] = msgspec.json.Decoder(Event).decode


class SentEvent(NamedTuple):
    """An event as it is sent.

    Attributes:
        position: Value of `id`; empty without one.
        name: Value of `event`; empty for a comment or a position alone.
        data: JSON.
    """

    position: str
    name: str
    data: str

    @property
    def topic(self) -> str:
        """Topic of the event. Raises ProtocolError if the data are invalid."""
        event = self.decode() if self.name == COMPLETION else None
        if isinstance(event, Completion):
            return completion_topic(event.model, event.version)
        return self.name

    def decode(self) -> Event:
        """Decode the data; raises ProtocolError."""
        try:
            return _decode(self.data)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"this is no event of an event stream: {error}") from None


def completion_topic(model: str, version: str) -> str:
    """Return the topic of the completions of a model version."""
    return f"{COMPLETION}/{model}/{version}"


def format_event(position: bytes, name: str, data: bytes) -> bytes:
    """Return an event as it is sent."""
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (position, name.encode(), data)


def format_heartbeat(position: bytes) -> bytes:
    """Return a comment, and the position for a client that received no event since."""
    return b": heartbeat\nid: %b\n\n" % position


def format_position(stream: str, number: int) -> bytes:
    """Return the value of `id`."""
    return b"%b-%d" % (stream.encode(), number)


def parse_position(text: str) -> tuple[str, int] | None:
    """Return the stream and the number of a value of `id`; None if it is invalid."""
    match = _POSITION.fullmatch(text)
    return None if match is None else (match[1], int(match[2]))


def parse_event(lines: str) -> SentEvent:
    """Parse the lines of an event, up to its empty line, as this server sends them."""
    fields = {"id": "", "event": "", "data": ""}
    for line in lines.split("\n"):
        name, _, value = line.partition(":")
        if name in fields:
            fields[name] = value.removeprefix(" ")
    return SentEvent(fields["id"], fields["event"], fields["data"])


def read_events(readline: Callable[[int], bytes]) -> Iterator[SentEvent]:
    """Yield the complete events of a stream, of which `readline` returns a line with its end.

    Raises:
        ProtocolError: An event has more than `EVENT_BYTES_MAX` bytes.
    """
    lines: list[str] = []
    left = EVENT_BYTES_MAX
    while line := readline(left + 1):
        left -= len(line)
        if left < 0:
            raise ProtocolError(f"event of more than {EVENT_BYTES_MAX} bytes in an event stream")
        if not line.endswith(b"\n"):
            return  # The connection was lost in the line.
        if text := line.decode("utf-8", "replace").rstrip("\r\n"):
            lines.append(text)
            continue
        if lines:
            yield parse_event("\n".join(lines))
        lines.clear()
        left = EVENT_BYTES_MAX
