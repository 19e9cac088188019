"""Messages of the event stream.

A message has two frames: the topic, and a msgpack map. Subscribers select topics by their begin.
Topics are `completion/MODEL/VERSION`, `worker`, `model`, `gateway` and `heartbeat`. A subscriber
counts its losses by the numbers of the events of each topic and stream (`losses`).
"""

from __future__ import annotations

import msgspec

SCHEMA = 1
HEARTBEAT = "heartbeat"
COMPLETION = "completion"
ENCODING = "utf-8"
BATCH_EVENTS_MAX = 256
"""Events of one message."""


class Completion(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="completion"
):
    """A request whose response is written, or that failed, or whose caller is gone.

    Attributes:
        at_s: Unix time of its end.
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
        event: Name of the log event.
        level: `info`, `warning` or `error`.
        text: Text of the log line.
        fields: Fields of the log event.
    """

    at_s: float
    event: str
    level: str
    text: str
    fields: dict[str, int | float | str]


Event = Completion | Change


class Batch(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="batch"):
    """Events of one topic.

    Attributes:
        version: Version of these messages; new fields do not change it.
        stream: Identity of the publisher; another one starts its numbers again.
        process: Gateway process, of several; null for a single one, and for the parent.
        first: Number of the first event in its topic and stream, from 0.
        dropped: Events that the publisher dropped since its start, without numbers: its queue was
            full (`events.queue`).
        events: At least one.
    """

    version: int = SCHEMA
    stream: str
    process: int | None
    first: int
    dropped: int
    events: list[Event]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="heartbeat"):
    """State of a publisher, each second, so that a subscriber notices that it lost the last events.

    Attributes:
        version: As in `Batch`, and so are `stream`, `process` and `dropped`.
        next: Number of the next event of each topic.
    """

    version: int = SCHEMA
    stream: str
    process: int | None
    dropped: int
    next: dict[str, int]


Message = Batch | Heartbeat

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Batch | Heartbeat).decode


def completion_topic(completion: Completion) -> str:
    """Return the topic of a completion."""
    return f"{COMPLETION}/{completion.model}/{completion.version}"
