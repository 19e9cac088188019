"""Memory of received messages on one connection with a small receive budget.

An input is a list of steps of 3 bytes: kind, call, amount. Received messages must equal the sent
ones. The charge is never below zero, and at most one frame above the limit; other holders use up to
half of the limit. At the end, nothing is charged. Windows and limit are small, so inputs are short.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Final

from support import http2 as client
from support.http2 import END_STREAM, Peer

from fuzz import mutation
from fuzz.serving import LOOP, in_loop
from fuzz.targets import grpc_messages
from iskander.gateway.transport.http2 import call_receiver as call_input
from iskander.gateway.transport.http2.call import Call
from iskander.gateway.transport.http2.status import RpcError, Status

ITERATIONS = 500
OPEN, BEGIN, CONTINUE, END, RESET, READ, WAIT, FINISH, OTHERS = range(9)
WINDOW_BYTES: Final = 1 << 17
LIMIT_BYTES: Final = 1 << 19
SLACK_BYTES: Final = 1 << 17
"""Possible excess of the charge, because a frame is charged after it arrives."""
CALLS = 6
STEP_BYTES = 3
STEPS_MAX = 120
WAIT_NS = 100_000_000


class Sender:
    """The client's half of one call.

    Attributes:
        sent: Lengths of all messages, including the last, incomplete one.
        left: Unsent bytes of the last message.
        read: Number of messages read.
    """

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.sent: list[int] = []
        self.left = self.read = 0
        self.is_over = False


def seeds() -> list[bytes]:
    large = [(OPEN, 0, 0), (BEGIN, 0, 60), *[(CONTINUE, 0, 127)] * 5, (READ, 0, 0), (END, 0, 0)]
    many = [step for call in range(5) for step in ((OPEN, call, 0), (BEGIN, call, 12))]
    many += [(CONTINUE, call, 90) for call in (0, 1, 2, 3, 4, 0, 1, 2, 3, 4)]
    stalled = [*many, (WAIT, 0, 30), (WAIT, 0, 200), (READ, 0, 0), (READ, 3, 0)]
    others = [(OTHERS, 0, 100), *large, (OTHERS, 0, 0), (WAIT, 0, 1), *large]
    small = [(OPEN, 1, 0), *[(BEGIN, 1, 0)] * 20, (READ, 1, 0), (RESET, 1, 0), (OPEN, 2, 0)]
    ended = [*many, (FINISH, 0, 0), (RESET, 1, 0), (END, 2, 0), (READ, 2, 0), (READ, 4, 0)]
    return [bytes(n for step in steps for n in step)
            for steps in (large, many, stalled, others, small, ended)]  # fmt: skip


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    def make() -> bytes:
        return bytes((random.randrange(9), random.randrange(CALLS), random.randrange(256)))

    def change(step: bytes) -> bytes:
        at = random.randrange(STEP_BYTES)
        return step[:at] + bytes((random.choice((0, 1, 5, 60, 127, 255)),)) + step[at + 1 :]

    return b"".join(mutation.shuffle(split(raw), split(other), random, change, make))


def run(raw: bytes) -> None:
    before, call_input.WINDOW_BYTES = call_input.WINDOW_BYTES, WINDOW_BYTES  # type: ignore[misc]
    try:
        LOOP.run_until_complete(played(split(raw)[:STEPS_MAX]))
    finally:
        call_input.WINDOW_BYTES = before  # type: ignore[misc]


@in_loop
async def played(steps: list[bytes]) -> None:
    peer = Peer(message_bytes=4 * LIMIT_BYTES, receive_bytes=LIMIT_BYTES)
    budget = peer.host.budget
    calls: dict[int, Call] = {}
    peer.host.serve_inline = lambda call: calls.update({call.stream_id: call}) is None
    senders: dict[int, Sender] = {}
    charged, last_id = 0, -1
    for kind, number, amount in steps:
        if peer.transport.is_closed:
            break
        number %= CALLS
        sender = senders.get(number)
        if kind % 9 == OPEN:
            last_id += 2
            senders[number] = Sender(last_id)
            peer.open(last_id)
        elif kind % 9 == OTHERS:
            budget.release(charged)
            charged = min(4096 * amount, LIMIT_BYTES // 2)
            charged = charged if budget.try_charge(charged) else 0
        elif kind % 9 == WAIT:
            wait(peer, amount)
        elif sender is not None:
            step(peer, sender, calls.get(sender.stream_id), kind % 9, amount)
        assert 0 <= budget.used_bytes <= LIMIT_BYTES + SLACK_BYTES, budget.used_bytes
    budget.release(charged)
    for call in calls.values():
        call.on_input = None
    calls.clear()
    await grpc_messages.close(peer)
    assert not budget._waiting and not budget._reserved
    if budget._timer is not None:
        budget._timer.cancel()
    await asyncio.sleep(0)


def step(peer: Peer, sender: Sender, call: Call | None, kind: int, amount: int) -> None:
    stream_id = sender.stream_id
    if kind == READ and call is not None:
        read(call, sender)
    elif kind == FINISH and call is not None:
        call.end(Status.OK)
        sender.is_over = True
    elif sender.is_over or call is None:
        return
    elif kind == RESET:
        peer.feed(client.rst_stream(stream_id))
        sender.is_over = True
    elif kind == BEGIN and not sender.left:
        sender.left = 8192 * amount
        sender.sent.append(sender.left)
        peer.feed(client.data(stream_id, sender.left.to_bytes(5)))
    elif kind == CONTINUE and sender.left:
        size = min(1024 * amount, sender.left, WINDOW_BYTES - call._received)
        if size > 0:
            sender.left -= size
            peer.feed(client.data(stream_id, bytes((len(sender.sent) & 0xFF,)) * size))
    elif kind == END:
        peer.feed(client.data(stream_id, b"", END_STREAM))
        sender.is_over = True


def read(call: Call, sender: Sender) -> None:
    """Read complete messages, and check their order and content."""
    while call.has_input and not call.is_over:
        try:
            message = call.receive()
        except RpcError as error:
            assert error.status in (Status.UNAVAILABLE, Status.INTERNAL, Status.RESOURCE_EXHAUSTED)
            call.end(error.status)
            return
        if message is None:
            call.end(Status.OK)
            return
        number = sender.read
        assert len(message) == sender.sent[number]
        assert bytes(message) == bytes((number + 1 & 0xFF,)) * len(message)
        sender.read += 1


def wait(peer: Peer, amount: int) -> None:
    """Advance the time: stalled messages are rejected, and waiting ones may get memory."""
    now = peer.connection._read_ns + amount * WAIT_NS
    for call in list(peer.calls.values()):
        call.check_timeouts(now)
    if peer.host.budget._waiting:
        peer.host.budget._tick()


def split(raw: bytes) -> list[bytes]:
    return [raw[at : at + STEP_BYTES] for at in range(0, len(raw) - STEP_BYTES + 1, STEP_BYTES)]
