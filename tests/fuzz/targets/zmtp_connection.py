"""ZMTP connections, with libzmq's ROUTER and other fragmentations as the references.

An input is the byte stream of a peer. libzmq reads it from a loopback socket. The gateway must
deliver the same messages, unless the peer exceeded a limit. The test waits until libzmq has
delivered as many messages as the gateway, and then briefly for more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import zlib
from collections.abc import Awaitable
from random import Random
from typing import Any, NamedTuple

import zmq
from support.zmtp import Peer

from fuzz import engine, mutation
from fuzz.serving import LOOP
from iskander.gateway.transport.zmtp import frames

ITERATIONS = 400
LIMITS = (" bytes, limit ", "message of more than")
"""Parts of reasons for limits that libzmq does not have."""
STRICTER = (
    "invalid frame flags",
    "command without a name",
    "truncated READY",
    "message before READY",  # A READY that is not a command.
    "unsupported socket type",  # READY without a type, or with a spelling that libzmq does not use.
    "unexpected command",
    "unsupported ZMTP version",
    "not a ZMTP greeting",  # Includes versions before 2.0, which have no greeting.
)
REFERENCE_S, REFERENCE_MS, MORE_MS = 1.0, 1000, 1
ATTEMPTS, DRAIN_MS = 3, 50
"""Late messages of the previous input can arrive in between."""
HELLO_BYTES = 107
"""Length of a ROUTER's greeting and READY."""

_hello = frames.GREETING + frames.ready(Socket_Type=b"DEALER", Identity=b"robot-7")


class Outcome(NamedTuple):
    """Observed behavior of a connection."""

    identity: bytes | None
    messages: list[list[bytes]]
    reasons: list[str]


def seeds() -> list[bytes]:
    vectors = json.loads((engine.ROOT / "tests/spec/vectors/inferential.json").read_text())
    raw = {name: bytes.fromhex(text) for name, text in vectors.items()}
    hello = raw["greeting of libzmq 4.3"] + raw["READY of robot-7"]
    message = framed([b"", b"envelope", b"payload" * 50])
    return [
        hello + raw["observation"] + raw["PING"] + raw["observation without tensors"],
        raw["greeting of a peer of ZMTP 3.0"] + raw["READY without a name"] + message * 3,
        _hello + framed([b"one"]) * 9 + framed([b""] * 16),
        _hello + framed([bytes(300), b"x" * 5000]) + frames.command(frames.PING, b"\0\1abcdefgh"),
        _hello + frames.command(frames.ERROR, b"\3bad"),
        _hello[:40],
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    greeting, rest = raw[: frames.GREETING_BYTES], raw[frames.GREETING_BYTES :]
    if not random.randrange(12) or len(greeting) < frames.GREETING_BYTES:
        return mutation.flip(greeting, other, random) + rest

    def change(each: tuple[int, bytes]) -> tuple[int, bytes]:
        flags, body = each
        kind = random.randrange(4)
        if kind == 0:
            return flags ^ random.choice((1, 2, 4, 8)), body
        if kind == 1 and flags & frames.COMMAND:
            return flags, command_body(random)
        return flags, mutation.flip(body, other, random)

    def make() -> tuple[int, bytes]:
        flags = random.choice((0, 0, 1, 1, 2, 3, 4))
        return flags, command_body(random) if flags & 4 else random.randbytes(random.randrange(9))

    items = mutation.shuffle(
        split(rest), split(other[frames.GREETING_BYTES :]), random, change, make
    )
    return greeting + b"".join(head_of(len(body), flags, random) + body for flags, body in items)


def run(raw: bytes) -> None:
    random = Random(zlib.crc32(raw))
    unsplit = feed(raw, random, step=len(raw) or 1)
    if b"SUBSCRIBE" not in raw and b"CANCEL" not in raw:  # libzmq turns these into messages.
        for left in reversed(range(ATTEMPTS)):
            try:
                check_against_reference(raw, REFERENCE.read(raw, unsplit), unsplit)
                break
            except AssertionError:
                REFERENCE.drain()
                if not left:
                    raise
    for step, space in ((1, 1 << 30), (random.randint(1, 99), random.choice((0, 1, 3)))):
        other = feed(raw, random, step, space)
        if unsplit.reasons and space < 1 << 30:
            count = len(other.messages)  # Undelivered messages are dropped with the peer.
            other = other._replace(messages=other.messages + unsplit.messages[count:])
        assert other == unsplit, f"depends on the fragmentation\n{other}, expected {unsplit}"


def check_against_reference(raw: bytes, expected: Outcome, outcome: Outcome) -> None:
    if outcome.reasons:
        count = len(outcome.messages)
        assert outcome.messages == expected.messages[:count], "messages differ from libzmq's"
        is_early = any(word in outcome.reasons[0] for word in (*LIMITS, *STRICTER))
        assert is_early or count == len(expected.messages), (
            f"libzmq accepts it\n{outcome.reasons[0]}"
        )
        return
    assert outcome.messages == expected.messages, "messages differ from libzmq's"
    sent_frames = split(raw[frames.GREETING_BYTES :])
    if outcome.messages and b"Identity" in sent_frames[0][1]:  # libzmq ignores other spellings.
        assert expected.identity == outcome.identity or (not outcome.identity and expected.identity)


def feed(raw: bytes, random: Random, step: int, space: int = 1 << 30) -> Outcome:
    result: Awaitable[Outcome] = _feed(raw, step, space)
    outcome: Outcome = LOOP.run_until_complete(result)  # type: ignore[arg-type]
    return outcome


async def _feed(raw: bytes, step: int, space: int) -> Outcome:
    failed: list[dict[str, Any]] = []
    LOOP.set_exception_handler(lambda _, context: failed.append(context))
    peer = Peer(LOOP, space)
    at = 0
    while at < len(raw) and not peer.transport.is_aborted:
        if peer.transport.reading:
            at += await peer.feed(raw[at : at + step], step)
            continue
        await asyncio.sleep(0)
        make_space(peer)
    for _ in range(3 + len(raw) // frames.GREETING_BYTES):
        await asyncio.sleep(0)
        make_space(peer)
    if peer.transport.reading:
        peer.connection.enforce_timeouts(peer.connection._read_ns)
    peer.connection.connection_lost(None)
    assert not peer.connections and not peer.connection._backlog
    for context in failed:
        raise context.get("exception") or AssertionError(context["message"])
    messages = [[bytes(part) for part in parts] for parts in peer.messages]
    return Outcome(peer.identity, messages, peer.reasons)


def make_space(peer: Peer) -> None:
    if peer.is_full:
        peer.room += 50
        peer.connection.resume()


class ReferenceRouter:
    """A libzmq ROUTER socket."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._router.setsockopt(zmq.RCVHWM, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, 1 << 20)
        self._port = self._router.bind_to_random_port("tcp://127.0.0.1")

    def read(self, raw: bytes, outcome: Outcome) -> Outcome:
        """The messages that the socket delivers from a peer that sends `raw`.

        Waits for at least as many as in `outcome`. Sends frames after the ROUTER's greeting, as
        libzmq peers do.
        """
        messages: list[list[bytes]] = []
        identity: bytes | None = None
        with socket.create_connection(("127.0.0.1", self._port), REFERENCE_S) as peer:
            with contextlib.suppress(OSError):
                peer.sendall(raw[: frames.GREETING_BYTES])
                greeting, left = b"", 1
                peer.settimeout(REFERENCE_S if outcome.messages else MORE_MS / 1000)
                while left and len(greeting) < HELLO_BYTES:
                    greeting += (piece := peer.recv(1000))
                    left = len(piece)
            with contextlib.suppress(OSError):
                peer.sendall(raw[frames.GREETING_BYTES :])
            while self._router.poll(
                REFERENCE_MS if len(messages) < len(outcome.messages) else MORE_MS
            ):
                identity, *parts = self._router.recv_multipart()
                messages.append(parts)
        return Outcome(identity, messages, [])

    def drain(self) -> None:
        """Drop late messages."""
        while self._router.poll(DRAIN_MS):
            self._router.recv_multipart()


def framed(parts: list[bytes]) -> bytes:
    last = len(parts) - 1
    return b"".join(
        frames.head(len(part), frames.MORE if index < last else 0) + part
        for index, part in enumerate(parts)
    )


def split(raw: bytes) -> list[tuple[int, bytes]]:
    """Flags and body of the complete frames."""
    items, at = [], 0
    while at + 2 <= len(raw):
        flags = raw[at]
        width = 8 if flags & frames.LONG else 1
        begin = at + 1 + width
        length = int.from_bytes(raw[at + 1 : begin])
        if length > len(raw):
            break
        items.append((flags, raw[begin : begin + length]))
        at = begin + length
    return items


def head_of(length: int, flags: int, random: Random) -> bytes:
    """Flags and length of a frame; some lengths are wrong."""
    if not random.randrange(30):
        length = mutation.number(random, length)
    if flags & frames.LONG or length > frames.SHORT_BYTES_MAX:
        return bytes((flags | frames.LONG,)) + (length & ((1 << 64) - 1)).to_bytes(8)
    return bytes((flags, length))


def command_body(random: Random) -> bytes:
    name = random.choice((b"READY", b"ERROR", b"PING", b"PONG", b"HELLO", b"SUBSCRIBE", b""))
    data = random.randbytes(random.choice((0, 2, 5, 18, 30)))
    if name == b"READY":
        kind = random.choice((b"DEALER", b"REQ", b"ROUTER", b"REP", b"PUB", b"", b"dealer"))
        property_name = random.choice((b"Socket-Type", b"socket-type", b"SOCKET-TYPE", b"X"))
        data = bytes((len(property_name),)) + property_name + len(kind).to_bytes(4) + kind
        if random.randrange(2):
            identity = random.randbytes(random.choice((0, 1, 5, 255)))
            data += b"\x08Identity" + len(identity).to_bytes(4) + identity
    return bytes((len(name),)) + name + data


REFERENCE = ReferenceRouter()
