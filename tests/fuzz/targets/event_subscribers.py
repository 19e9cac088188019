"""Input of a subscriber of events, with libzmq's XPUB and other fragmentations as the references.

An input is the byte stream of a subscriber. A model of the rules has the subscriptions after it,
the answers, and whether it is rejected; libzmq, the messages that the subscriber receives.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import zlib
from random import Random
from typing import Any, NamedTuple, cast

import zmq

from fuzz import mutation
from fuzz.serving import LOOP
from fuzz.targets.zmtp_connection import framed, head_of, split
from iskander.config.schema import Config
from iskander.gateway.event_stream.broadcaster import READ_BYTES, Broadcaster, Connection
from iskander.gateway.event_stream.subscriptions import FRAME_BYTES_MAX, SUBSCRIPTIONS_MAX
from iskander.gateway.transport.zmtp import frames

ITERATIONS = 400
HANDSHAKE = frames.GREETING + frames.ready(Socket_Type=b"SUB")
BODY = b"body"
LAST = b"\xfflast"
"""Subscribed after the input, so that libzmq has processed it."""
FLAGS = (0, 1, 2, 3, 4, 6)
PROBES_MAX = 64
REFERENCE_S, REFERENCE_MS = 10.0, 10_000
TOPICS = (b"", b"c", b"completion/", b"completion/m/1", b"worker", b"work", b"\xff", b"\0")


class Outcome(NamedTuple):
    """Observed behavior: bytes of the answers, reason of the end, received topics."""

    answer: bytes
    reason: str
    received: list[bytes]


def seeds() -> list[bytes]:
    add, remove = b"SUBSCRIBE", b"CANCEL"
    return [
        HANDSHAKE + framed([b"\1completion/"]) + frames.command(add, b"worker"),
        HANDSHAKE + frames.command(add, b"c") * 2 + frames.command(remove, b"c"),
        HANDSHAKE + framed([b"\1a"]) + framed([b"\0a"]) * 2 + framed([b"\1"]) + framed([b"\0"]),
        HANDSHAKE + frames.command(frames.PING, b"\0\1context") + frames.command(frames.PONG, b""),
        *(
            HANDSHAKE + b"".join(framed([b"\1%d" % number]) for number in range(count))
            for count in (SUBSCRIPTIONS_MAX, SUBSCRIPTIONS_MAX + 1)
        ),
        HANDSHAKE + framed([b"\1" + bytes(FRAME_BYTES_MAX - 1)]) + framed([b"\1" + bytes(2000)]),
        frames.GREETING + frames.ready(Socket_Type=b"XSUB", Identity=b"me"),
        HANDSHAKE[:70],
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    greeting, rest = raw[: frames.GREETING_BYTES], raw[frames.GREETING_BYTES :]
    if not random.randrange(16) or len(greeting) < frames.GREETING_BYTES:
        return mutation.flip(greeting, other, random) + rest

    def change(each: tuple[int, bytes]) -> tuple[int, bytes]:
        flags, body = each
        if not random.randrange(4):
            return flags ^ random.choice((1, 2, 4, 8)), body
        return make() if random.randrange(2) else (flags, mutation.flip(body, other, random))

    def make() -> tuple[int, bytes]:
        topic = random.choice((*TOPICS, random.randbytes(random.choice((1, 3, 300)))))
        if random.randrange(2):
            return random.choice((0, 0, 0, frames.MORE)), random.choice((b"\0", b"\1")) + topic
        names = (b"SUBSCRIBE", b"CANCEL", b"PING", b"PONG", b"READY", b"subscribe", b"")
        name = random.choice(names)
        return frames.COMMAND, bytes((len(name),)) + name + topic

    items = mutation.shuffle(
        split(rest), split(other[frames.GREETING_BYTES :]), random, change, make
    )
    return greeting + b"".join(head_of(len(body), flags, random) + body for flags, body in items)


def run(raw: bytes) -> None:
    random = Random(zlib.crc32(raw))
    probes = topics_of(raw)
    whole = feed(raw, READ_BYTES, probes)
    for step in (1, random.randint(2, 99)):
        other = feed(raw, step, probes)
        if whole.reason:  # Answers of the read that failed are not sent.
            short, long = sorted((whole.answer, other.answer), key=len)
            assert long.startswith(short)
            other = other._replace(answer=whole.answer)
        assert other == whole, f"depends on the fragmentation\n{other}, expected {whole}"
    model = Model(raw)
    assert bool(whole.reason) == bool(model.fault), f"{whole.reason!r}, expected {model.fault!r}"
    expected = [topic for topic in probes if not model.fault and model.selects(topic)]
    assert whole.received == expected, "other topics are selected"
    if not whole.reason:
        assert whole.answer == model.answer
        if is_comparable(raw):
            assert whole.received == REFERENCE.received(raw, probes), "libzmq sends other messages"


class Model:
    """The rules, frame by frame.

    Attributes:
        answer: All that is sent to the subscriber, if there is no fault.
        fault: Reason to end the connection; empty for none.
    """

    def __init__(self, raw: bytes) -> None:
        self.answer, self.fault = frames.GREETING, greeting_fault(raw)
        self._begins: set[bytes] = set()
        if len(raw) >= frames.GREETING_BYTES:
            self.answer += frames.ready(Socket_Type=b"PUB")
        sent, rest = sent_frames(raw)
        for at, (flags, body) in enumerate(sent):
            self.fault = self.fault or self._fault_of(flags, body, is_first=not at)
        self.fault = self.fault or rest_fault(rest)

    def selects(self, topic: bytes) -> bool:
        """Whether the subscriber receives a topic."""
        return any(topic[: len(begin)] == begin for begin in self._begins)

    def _fault_of(self, flags: int, body: bytes, *, is_first: bool) -> str:
        if flags not in FLAGS or len(body) > FRAME_BYTES_MAX:
            return "flags or length"
        name, data = body[:1], body[1:]
        if flags & frames.COMMAND:
            if not body or not 0 < body[0] < len(body):
                return "no name"
            name, data = body[1 : 1 + body[0]], body[1 + body[0] :]
        if is_first:
            return "" if name == b"READY" and is_subscriber(data) else "no READY of a subscriber"
        if name in (b"\1", b"SUBSCRIBE"):
            self._begins |= {data}
        elif name in (b"\0", b"CANCEL"):
            self._begins -= {data}
        elif name == b"PING":
            self.answer += frames.command(b"PONG", data[2:18])
        elif name != b"PONG":
            return "another command or message"
        return "too many" if len(self._begins) > SUBSCRIPTIONS_MAX else ""


def greeting_fault(raw: bytes) -> str:
    """Reason to reject a greeting, complete or not."""
    begin = raw[: frames.GREETING_BYTES]
    if begin[:1] not in (b"", b"\xff") or not all(byte & 1 for byte in begin[9:10]):
        return "no greeting"
    if any(byte < 3 for byte in begin[10:11]):
        return "version"
    is_other = len(begin) == frames.GREETING_BYTES and begin[12:32].rstrip(b"\0") != b"NULL"
    return "mechanism" if is_other else ""


def rest_fault(rest: bytes) -> str:
    """Reason to reject an incomplete frame."""
    if len(rest) < 2:
        return ""
    is_long = bool(rest[0] & frames.LONG)
    length = int.from_bytes(rest[1:9]) if is_long else rest[1]
    is_known = not is_long or len(rest) >= frames.HEAD_BYTES_MAX
    return (
        "flags or length" if rest[0] not in FLAGS or (is_known and length > FRAME_BYTES_MAX) else ""
    )


def is_subscriber(data: bytes) -> bool:
    """Whether READY has the type of a subscriber."""
    kind, at = b"", 0
    while at < len(data):
        start = at + 1 + data[at]
        end = start + 4 + int.from_bytes(data[start : start + 4])
        if start + 4 > len(data) or end > len(data):
            return False
        if data[at + 1 : start].lower() == b"socket-type":
            kind = data[start + 4 : end]
        at = end
    return kind in (b"SUB", b"XSUB")


def is_comparable(raw: bytes) -> bool:
    """Whether it ends with a whole frame, and libzmq treats its frames alike.

    Pings are not compared: one with a time limit ends libzmq's connection.
    """
    sent, rest = sent_frames(raw)
    is_plain = b"PING" not in raw and not any(flags & frames.MORE for flags, _ in sent)
    return bool(sent) and not rest and is_plain


def sent_frames(raw: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """The whole frames after a greeting, and what follows them."""
    found, at = [], frames.GREETING_BYTES
    while at + 2 <= len(raw):
        begin = at + (9 if raw[at] & frames.LONG else 2)
        end = begin + int.from_bytes(raw[at + 1 : begin])
        if max(begin, end) > len(raw):
            break
        found.append((raw[at], raw[begin:end]))
        at = end
    return found, raw[at:]


def topics_of(raw: bytes) -> list[bytes]:
    """Topics near those of an input."""
    found = dict.fromkeys(TOPICS)
    for flags, body in split(raw[frames.GREETING_BYTES :]):
        topic = body[1 + body[0] :] if flags & frames.COMMAND and body else body[1:]
        found |= dict.fromkeys((topic, topic + b"x", topic[:-1]))
    return list(found)[:PROBES_MAX]


class Transport:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted

    def pause_reading(self) -> None:
        """The caller sends one read at a time."""

    def resume_reading(self) -> None:
        """The caller sends one read at a time."""

    def set_write_buffer_limits(self, high: int) -> None:
        """There is no buffer."""


class Host(Broadcaster):
    """A broadcaster that processes each read at once."""

    def process_later(self, connection: Connection) -> None:
        connection.process_read()


class Recorded(Connection):
    """A connection that keeps the reason of its end."""

    reason = ""

    def _fail(self, reason: str) -> None:
        self.reason = reason
        super()._fail(reason)


def feed(raw: bytes, step: int, probes: list[bytes]) -> Outcome:
    outcome: Outcome = LOOP.run_until_complete(_feed(raw, step, probes))
    return outcome


async def _feed(raw: bytes, step: int, probes: list[bytes]) -> Outcome:
    host, transport = Host(Config()), Transport()
    connection = Recorded(host)
    connection.connection_made(cast(asyncio.BaseTransport, transport))
    for at in range(0, len(raw), step):
        piece = raw[at : at + step]
        connection.get_buffer(-1)[: len(piece)] = piece
        connection.buffer_updated(len(piece))
        check_bounds(connection)
        if transport.is_aborted:
            break
    answer = b"".join(transport.written)
    transport.written.clear()
    if transport.is_aborted:
        connection.connection_lost(None)
    for topic in probes:
        host.publish(topic, BODY)
    await asyncio.sleep(0)  # Messages are sent together, in the next iteration.
    received = [topic for _, topic in split(b"".join(transport.written))[::2]]
    connection.connection_lost(None)
    assert not host._connections
    return Outcome(answer, connection.reason, received)


def check_bounds(connection: Recorded) -> None:
    subscriptions = connection.subscriptions
    assert len(subscriptions._rest) <= FRAME_BYTES_MAX + frames.HEAD_BYTES_MAX
    if not connection.reason:
        assert len(subscriptions._begins) <= SUBSCRIPTIONS_MAX
        assert all(len(begin) < FRAME_BYTES_MAX for begin in subscriptions._begins)


class ReferencePublisher:
    """A libzmq XPUB socket."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._publisher = self._context.socket(zmq.XPUB)
        self._publisher.setsockopt(zmq.XPUB_VERBOSER, 1)
        self._publisher.setsockopt(zmq.RCVHWM, 0)
        self._port = self._publisher.bind_to_random_port("tcp://127.0.0.1")

    def received(self, raw: bytes, probes: list[bytes]) -> list[bytes]:
        """Topics of `probes` that libzmq sends to a peer after `raw`."""
        with socket.create_connection(("127.0.0.1", self._port), REFERENCE_S) as peer:
            peer.settimeout(REFERENCE_S)
            peer.sendall(raw[: frames.GREETING_BYTES])
            read, topics = b"", []
            while len(read) < frames.GREETING_BYTES:
                read += (piece := peer.recv(frames.GREETING_BYTES))
                assert piece, "libzmq does not accept the greeting"
            peer.sendall(raw[frames.GREETING_BYTES :] + framed([b"\1" + LAST]))
            self._await(b"\1" + LAST)
            for topic in (*probes, LAST):
                self._publisher.send_multipart((topic, BODY))
            while LAST not in topics:
                read += (piece := peer.recv(1 << 16))
                assert piece, "libzmq closed the connection"
                sent = split(read[frames.GREETING_BYTES :])
                topics = [body for flags, body in sent if flags & frames.MORE]
            peer.sendall(framed([b"\0" + LAST]))
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_WR)
            self._await(b"\0" + LAST)
        return topics[: topics.index(LAST)]

    def _await(self, subscription: bytes) -> None:
        deadline = time.monotonic() + REFERENCE_S
        while time.monotonic() < deadline:
            if self._publisher.poll(REFERENCE_MS) and self._publisher.recv() == subscription:
                return
        raise AssertionError("libzmq does not accept it")


REFERENCE = ReferencePublisher()
