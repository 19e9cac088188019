"""A ZMTP connection: libzmq's own ROUTER as the reference, and the same stream cut at other places.

An input is what a peer sends. libzmq reads it from a socket of the loopback; what it delivers has
to be delivered here, unless the peer went over a limit. It is waited for as many messages as were
delivered here, and then a moment for more.
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
from iskander.transport.zmtp import frames

ITERATIONS = 400
LIMITS = (" bytes, limit ", "message of more than")
"""Of reasons: libzmq has no such limits, or other ones."""
STRICTER = (
    "invalid frame flags",
    "command without a name",
    "truncated READY",
    "message before READY",  # A READY that is not a command.
    "unsupported socket type",  # READY without a type, or with another spelling than libzmq's.
    "unexpected command",
    "unsupported ZMTP version",
    "not a ZMTP greeting",  # Or a version before 2.0, which has no greeting.
)
JUDGE_S, JUDGE_MS, MORE_MS = 1.0, 1000, 1
ATTEMPTS, DRAIN_MS = 3, 50
"""Messages of the input before may come late."""
HELLO_BYTES = 107
"""Of a ROUTER: its greeting, and READY."""

_hello = frames.GREETING + frames.ready(Socket_Type=b"DEALER", Identity=b"robot-7")


class Outcome(NamedTuple):
    """What came of a peer."""

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
    whole = fed(raw, random, step=len(raw) or 1)
    if b"SUBSCRIBE" not in raw and b"CANCEL" not in raw:  # Which it makes messages of.
        for left in reversed(range(ATTEMPTS)):
            try:
                check_against_judge(raw, JUDGE.read(raw, whole), whole)
                break
            except AssertionError:
                JUDGE.drain()
                if not left:
                    raise
    for step, room in ((1, 1 << 30), (random.randint(1, 99), random.choice((0, 1, 3)))):
        other = fed(raw, random, step, room)
        if whole.reasons and room < 1 << 30:
            count = len(other.messages)  # What a full session has not taken goes with its peer.
            other = other._replace(messages=other.messages + whole.messages[count:])
        assert other == whole, f"depends on the cut\n{other} where {whole} was"


def check_against_judge(raw: bytes, judged: Outcome, ours: Outcome) -> None:
    if ours.reasons:
        count = len(ours.messages)
        assert ours.messages == judged.messages[:count], "other messages than libzmq's"
        is_early = any(word in ours.reasons[0] for word in (*LIMITS, *STRICTER))
        assert is_early or count == len(judged.messages), f"libzmq goes on\n{ours.reasons[0]}"
        return
    assert ours.messages == judged.messages, "other messages than libzmq's"
    said = split(raw[frames.GREETING_BYTES :])
    if ours.messages and b"Identity" in said[0][1]:  # Spelled otherwise, libzmq does not know it.
        assert judged.identity == ours.identity or (not ours.identity and judged.identity)


def fed(raw: bytes, random: Random, step: int, room: int = 1 << 30) -> Outcome:
    made: Awaitable[Outcome] = _fed(raw, step, room)
    outcome: Outcome = LOOP.run_until_complete(made)  # type: ignore[arg-type]
    return outcome


async def _fed(raw: bytes, step: int, room: int) -> Outcome:
    failed: list[dict[str, Any]] = []
    LOOP.set_exception_handler(lambda _, context: failed.append(context))
    peer = Peer(LOOP, room)
    at = 0
    while at < len(raw) and not peer.transport.is_aborted:
        if peer.transport.reading:
            await peer.feed(raw[at : at + step], step)
            at += step
            continue
        await asyncio.sleep(0)
        make_room(peer)
    for _ in range(3 + len(raw) // frames.GREETING_BYTES):
        await asyncio.sleep(0)
        make_room(peer)
    if peer.transport.reading:
        peer.connection.enforce_timeouts(peer.connection._read_ns)
    peer.connection.connection_lost(None)
    assert not peer.connections and not peer.connection._backlog
    for context in failed:
        raise context.get("exception") or AssertionError(context["message"])
    messages = [[bytes(part) for part in parts] for parts in peer.messages]
    return Outcome(peer.identity, messages, peer.reasons)


def make_room(peer: Peer) -> None:
    if peer.is_full:
        peer.room += 50
        peer.connection.resume()


class ReferenceClient:
    """A ROUTER socket of libzmq."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._router.setsockopt(zmq.RCVHWM, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, 1 << 20)
        self._port = self._router.bind_to_random_port("tcp://127.0.0.1")

    def read(self, raw: bytes, ours: Outcome) -> Outcome:
        """What the socket delivers of a peer that sends that: as much as came here, or more.

        Frames are sent once it has greeted, as its own peers do.
        """
        messages: list[list[bytes]] = []
        identity: bytes | None = None
        with socket.create_connection(("127.0.0.1", self._port), JUDGE_S) as peer:
            with contextlib.suppress(OSError):
                peer.sendall(raw[: frames.GREETING_BYTES])
                greeted, left = b"", 1
                peer.settimeout(JUDGE_S if ours.messages else MORE_MS / 1000)
                while left and len(greeted) < HELLO_BYTES:
                    greeted += (piece := peer.recv(1000))
                    left = len(piece)
            with contextlib.suppress(OSError):
                peer.sendall(raw[frames.GREETING_BYTES :])
            while self._router.poll(JUDGE_MS if len(messages) < len(ours.messages) else MORE_MS):
                identity, *parts = self._router.recv_multipart()
                messages.append(parts)
        return Outcome(identity, messages, [])

    def drain(self) -> None:
        """Drop what comes late."""
        while self._router.poll(DRAIN_MS):
            self._router.recv_multipart()


def framed(parts: list[bytes]) -> bytes:
    last = len(parts) - 1
    return b"".join(
        frames.head(len(part), frames.MORE if place < last else 0) + part
        for place, part in enumerate(parts)
    )


def split(raw: bytes) -> list[tuple[int, bytes]]:
    """Flags and body of the frames at the beginning."""
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
    """The beginning of a frame; at times a false one."""
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
        named = random.choice((b"Socket-Type", b"socket-type", b"SOCKET-TYPE", b"X"))
        data = bytes((len(named),)) + named + len(kind).to_bytes(4) + kind
        if random.randrange(2):
            who = random.randbytes(random.choice((0, 1, 5, 255)))
            data += b"\x08Identity" + len(who).to_bytes(4) + who
    return bytes((len(name),)) + name + data


JUDGE = ReferenceClient()
