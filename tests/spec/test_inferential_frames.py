"""Golden ZMTP frames of the Inferential protocol, and limits of its connections.

`vectors/inferential.json` contains the bytes of each message in hexadecimal: ZMTP frames (flags,
length, body). The greeting, the READY of robot-7 and the first two observations were recorded from
the package `inferential` 1.4.0 with libzmq 4.3.5. The others follow RFC 37 and the protocol's
fields. To add a message, write its bytes to the file and its meaning to a test.
"""

from __future__ import annotations

import asyncio
import gc
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inferential import proto
from msgspec.structs import replace
from support.zmtp import Peer

from iskander.config.schema import TimeoutsConfig
from iskander.contract.column_types import ColumnType
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.errors import IskanderError, MalformedInput, Overloaded, Unsupported
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.gateway.protocols.inferential.terms import read_terms
from iskander.gateway.protocols.inferential.wire import (
    ReplyAddress,
    read_observation,
    read_tensors,
    render_error,
    render_results,
)
from iskander.gateway.scheduling.request import Terms
from iskander.gateway.transport.limits import cpu_allowance, turn_scheduler
from iskander.gateway.transport.limits.turn_scheduler import QUANTUM_NS
from iskander.gateway.transport.zmtp import connection as zmtp
from iskander.gateway.transport.zmtp.connection import Connection
from iskander.gateway.transport.zmtp.frames import Part, ProtocolViolation, command, read_properties
from iskander.gateway.transport.zmtp.received import BACKLOG_BYTES, BACKLOG_MESSAGES

VECTORS = {
    name: bytes.fromhex(raw)
    for name, raw in json.loads(
        (Path(__file__).parent / "vectors" / "inferential.json").read_text()
    ).items()
}
HELLO = VECTORS["greeting of libzmq 4.3"] + VECTORS["READY of robot-7"]
MOMENT_NS = 1_700_000_000_000_000_000
ADDRESS = ReplyAddress("robot-7", "policy", f"{7:032x}")
CONTRACT = Contract(
    (
        TensorSpec("joint_positions", "joints", ColumnType("float32", (3,)), (3,)),
        TensorSpec("flags", "flags", ColumnType("bool", (2,)), (2,)),
    ),
    (
        TensorSpec("actions", "moves", ColumnType("float32", (3,)), (3,)),
        TensorSpec("done", "is_done", ColumnType("bool"), ()),
    ),
)


def connected_peer(raw: bytes, step: int = 1 << 20, **peer: Any) -> Peer:
    """Returns a peer that received bytes, in reads of `step` bytes."""

    async def feed() -> Peer:
        fed = Peer(asyncio.get_running_loop(), **peer)
        await fed.feed(raw, step)
        for _ in range(100):
            await asyncio.sleep(0)
        return fed

    return asyncio.run(feed())


def parts_of(name: str) -> list[Part]:
    hello = VECTORS["greeting of libzmq 4.3"] + VECTORS["READY of robot-7"]
    (parts,) = connected_peer(hello + VECTORS[name]).messages
    return parts


@pytest.mark.parametrize("greeting", ["libzmq 4.3", "a peer of ZMTP 3.0"])
@pytest.mark.parametrize(
    "ready, identity",
    [("of robot-7", b"robot-7"), ("with five random bytes", b"k\0\xffEg"), ("without a name", b"")],
)
@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_handshake_and_messages_in_reads_of_any_size(
    greeting: str, ready: str, identity: bytes, step: int
) -> None:
    sent = [VECTORS[f"greeting of {greeting}"], VECTORS[f"READY {ready}"], VECTORS["observation"]]
    sent += [VECTORS["PING"], VECTORS["observation without tensors"]]
    peer = connected_peer(b"".join(sent), step)
    assert peer.identity == identity
    assert [len(parts) for parts in peer.messages] == [3, 3]
    assert peer.transport.written == b"".join(
        VECTORS[name] for name in ("greeting of the server", "READY of the server", "PONG")
    )


def test_observation_becomes_terms_and_tensors() -> None:
    observation = read_observation(parts_of("observation"))
    assert read_terms(
        observation.envelope, "robot-7", newest_wins=True, wall_ns=MOMENT_NS + 5_000_000
    ) == Terms(
        client="robot-7",
        is_named=True,
        priority=1,
        urgency=0.5,
        budget_ms=30.0,
        steps_remaining=3,
        age_ms=5.0,
        is_newest_wins=True,
    )
    tensors = read_tensors(CONTRACT, observation)
    assert tensors.is_single
    assert [(t.name, t.datatype, t.shape, bytes(t.data).hex()) for t in tensors.tensors] == [
        ("joints", "FP32", (1, 3), np.arange(3, dtype=np.float32).tobytes().hex()),
        ("flags", "BOOL", (1, 2), "0100"),
    ]
    empty = read_observation(parts_of("observation without tensors"))
    assert empty.envelope.model_id == "ids"
    assert not read_tensors(CONTRACT, empty).tensors


@pytest.mark.parametrize("name", ["without a payload", "in long frames"])
def test_missing_payload_is_empty(name: str) -> None:
    """A missing priority is 0, the highest."""
    parts = parts_of(f"observation {name}")
    assert len(parts) == 2
    observation = read_observation(parts)
    assert len(observation.payload) == 0
    terms = read_terms(observation.envelope, "a", newest_wins=False, wall_ns=MOMENT_NS)
    assert terms == Terms(client="a", is_named=True, priority=0, urgency=1.0)


def test_reply_is_decoded_by_the_client() -> None:
    offsets, size = body_layout(CONTRACT.outputs, 1)
    body = bytearray(size)
    body[:12] = np.array([1, 2, 3], np.float32).tobytes()
    body[offsets[1]] = 1  # Arrow packs booleans.
    reply = render_results(
        ADDRESS, CONTRACT, 1, body, is_single=True, latency_ms=2.5, wall_ns=MOMENT_NS + 1
    )
    assert frames_of(reply) == VECTORS["reply"]
    read = proto.ModelResponse.FromString(bytes(reply[1]))
    assert (read.client.id, read.model_id, read.response_id) == tuple(ADDRESS)
    assert (read.inference_latency_ms, read.timestamp_ns) == (2.5, MOMENT_NS + 1)
    assert [
        (t.key, t.dtype, list(t.shape), t.byte_offset, t.byte_length, t.encoding)
        for t in read.tensors
    ] == [
        ("actions", proto.FLOAT32, [3], 0, 12, proto.RAW),
        ("done", proto.BOOL, [], 12, 1, proto.RAW),
    ]
    assert bytes(reply[2]) == bytes(body[:12]) + b"\1"


def test_error_is_sent_in_the_metadata() -> None:
    reply = render_error(ADDRESS, Overloaded("busy", retry_after_ms=9), 5)
    assert [len(part) for part in (reply[0], reply[2])] == [0, 0]
    read = proto.ModelResponse.FromString(bytes(reply[1]))
    golden = proto.ModelResponse.FromString(bytes(parts_of("reply with an error")[1]))
    assert read == golden  # By value: the order of a map is undefined.
    assert dict(read.metadata) == {
        "error": "busy",
        "error_code": "overloaded",
        "error_fault": "nobody",
        "error_retryable": "true",
        "error_retry_after_ms": "9",
    }


def test_bfloat16_round_trip() -> None:
    spec = TensorSpec("b", "b", ColumnType("bfloat16"), ())
    contract = Contract((spec,), (spec,))
    sent = proto.Tensor(key="b", dtype=proto.BFLOAT16, byte_length=2)
    envelope = proto.Observation(
        client=proto.Client(id="a"), model_id="b", tensors=[sent]
    ).SerializeToString()
    (tensor,) = read_tensors(contract, read_observation([b"", envelope, b"\x80\x3f"])).tensors
    assert (tensor.datatype, tensor.shape) == ("BF16", (1,))
    reply = render_results(
        ADDRESS, contract, 1, tensor.data, is_single=True, latency_ms=0.0, wall_ns=MOMENT_NS
    )
    (read,) = proto.ModelResponse.FromString(bytes(reply[1])).tensors
    assert (read.dtype, bytes(reply[2])) == (proto.BFLOAT16, b"\x80\x3f")


def test_unsupported_output_type_is_rejected() -> None:
    contract = Contract((), (TensorSpec("n", "n", ColumnType("uint64"), ()),))
    with pytest.raises(Unsupported, match="`n` is UINT64"):
        render_results(
            ADDRESS, contract, 1, bytes(64), is_single=True, latency_ms=0.0, wall_ns=MOMENT_NS
        )


@pytest.mark.parametrize(
    "metadata, expected",
    [
        ({"ttl_ms": "12.5"}, {"ttl_ms": 12.5}),
        ({"newest_wins": "true"}, {"is_newest_wins": True}),
        ({"newest_wins": "0"}, {}),
        ({"instruction": "deadline_ms"}, {}),
    ],
)
def test_metadata_fields_become_terms(metadata: dict[str, str], expected: dict[str, Any]) -> None:
    envelope = proto.Observation(metadata=metadata)
    terms = read_terms(envelope, "a", newest_wins=False, wall_ns=MOMENT_NS)
    assert terms == replace(Terms(client="a", is_named=True, priority=0), **expected)


@pytest.mark.parametrize(
    "metadata", [{"ttl_ms": "nan"}, {"deadline_ms": ""}, {"newest_wins": "never"}]
)
def test_invalid_metadata_is_rejected(metadata: dict[str, str]) -> None:
    with pytest.raises(MalformedInput, match="metadata"):
        read_terms(proto.Observation(metadata=metadata), "a", newest_wins=False, wall_ns=0)


@pytest.mark.parametrize(
    "sent, priority, urgency",
    [(99, 9, 1.0), (9, 9, 0.0), (3, 3, 0.5)],
)
def test_terms_out_of_range_are_clamped(sent: int, priority: int, urgency: float) -> None:
    sent_urgency = {1.0: 17.0, 0.0: float("nan"), 0.5: 0.5}[urgency]
    envelope = proto.Observation(priority=sent, urgency=sent_urgency, timestamp_ns=MOMENT_NS)
    terms = read_terms(envelope, "a", newest_wins=False, wall_ns=MOMENT_NS - 1)
    assert (terms.priority, terms.urgency, terms.age_ms) == (priority, urgency, 0.0)


def test_messages_wait_while_the_session_is_full() -> None:
    """Waiting messages keep their order and their time of arrival."""
    hello = VECTORS["greeting of libzmq 4.3"] + VECTORS["READY of robot-7"]
    large = b"\1\0\2" + (100_000).to_bytes(8, "big") + bytes(100_000)

    async def scenario() -> None:
        peer = Peer(asyncio.get_running_loop(), room=2)
        await peer.feed(hello + VECTORS["observation"] * 2, 1 << 20)
        await peer.feed((VECTORS["observation"] + large) * 3, 1 << 20)
        received_ns = now_ns()
        for count in (2, 3, 5):
            assert len(peer.messages) == count
            assert peer.transport.reading
            peer.room = {2: 3, 3: 5, 5: 1 << 30}[count]
            peer.connection.resume()
        assert [len(parts) for parts in peer.messages[2:]] == [3, 2] * 3
        assert peer.arrivals == sorted(peer.arrivals) and peer.arrivals[-1] <= received_ns

    asyncio.run(scenario())


def test_new_limit_of_bytes_applies_to_the_next_message() -> None:
    async def scenario() -> None:
        peer = Peer(asyncio.get_running_loop(), message_bytes=200)
        await peer.feed(HELLO + b"\1\x64" + bytes(100), 1 << 20)
        peer.message_bytes = 50
        await peer.feed(b"\0\x64" + bytes(100), 1 << 20)
        assert [list(map(len, parts)) for parts in peer.messages] == [[100, 100]]
        await peer.feed(b"\0\x64" + bytes(100), 1 << 20)
        assert peer.reasons == ["frame of 100 bytes, limit 50 (`limits.message_bytes`)"]

    asyncio.run(scenario())


@pytest.mark.parametrize("size", [1, 300_000])
def test_backlog_of_a_full_session_is_limited(size: int) -> None:
    """At the limit, the connection stops reading; no message is lost."""
    hello = VECTORS["greeting of libzmq 4.3"] + VECTORS["READY of robot-7"]
    raw = b"\2" + size.to_bytes(8, "big") + bytes(size)
    backlog = min(BACKLOG_MESSAGES, -(-BACKLOG_BYTES // size))

    async def scenario() -> None:
        peer = Peer(asyncio.get_running_loop(), room=0)
        await peer.feed(hello + raw * backlog, 1 << 20)
        for _ in range(backlog):
            await asyncio.sleep(0)
        assert not peer.transport.reading and not peer.messages
        peer.room = 1 << 30
        peer.connection.resume()
        for _ in range(backlog):
            await asyncio.sleep(0)
        assert peer.transport.reading and len(peer.messages) == backlog

    asyncio.run(scenario())


def test_ping_is_answered_while_messages_wait() -> None:
    hello = VECTORS["greeting of libzmq 4.3"] + VECTORS["READY of robot-7"]
    ping = command(b"PING", b"\0\0abc")

    async def scenario() -> None:
        peer = Peer(asyncio.get_running_loop(), room=0)
        await peer.feed(hello + VECTORS["observation"] + ping, 1 << 20)
        assert peer.transport.written.endswith(command(b"PONG", b"abc"))

    asyncio.run(scenario())


def test_ping_before_ready_closes_the_connection() -> None:
    peer = connected_peer(VECTORS["greeting of libzmq 4.3"] + command(b"PING", b"\0\0abc"))
    assert peer.reasons and peer.transport.is_aborted
    assert not peer.transport.written.endswith(command(b"PONG", b"abc"))


def test_stalled_message_closes_the_connection() -> None:
    """Silence between messages is allowed."""
    hello = VECTORS["greeting of libzmq 4.3"] + VECTORS["READY of robot-7"]

    async def scenario(more: bytes, reasons: list[str]) -> None:
        peer = Peer(asyncio.get_running_loop())
        await peer.feed(hello + VECTORS["observation"] + more, 1 << 20)
        later = now_ns() + int(TimeoutsConfig().message_s * NS_PER_S)
        peer.connection.enforce_timeouts(later - NS_PER_S)
        assert not peer.transport.is_aborted
        peer.connection.enforce_timeouts(later + NS_PER_S)
        assert peer.reasons == reasons
        assert peer.ended == ["message_timeout"] * len(reasons)

    stalled = ["message slower than 500 bytes/s"]
    asyncio.run(scenario(b"", []))
    for more in (b"\2\0", b"\2" + (1 << 19).to_bytes(8, "big"), b"\1\0"):
        asyncio.run(scenario(more, stalled))


def test_slow_message_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte per 20 s is too slow; 500 bytes/s or complete messages are allowed."""
    clock = now_ns()
    monkeypatch.setattr(zmtp, "now_ns", lambda: clock)
    hello = VECTORS["greeting of libzmq 4.3"] + VECTORS["READY of robot-7"]
    start = b"\2" + (1 << 19).to_bytes(8, "big")

    async def scenario(start: bytes, part: bytes) -> list[str]:
        nonlocal clock
        peer = Peer(asyncio.get_running_loop())
        await peer.feed(hello + start, 1 << 20)
        for _ in range(5):
            clock += 20 * NS_PER_S
            await peer.feed(part, 1 << 20)
            peer.connection.enforce_timeouts(clock)
        return peer.ended

    observation = VECTORS["observation"]
    assert asyncio.run(scenario(start, b"a")) == ["message_timeout"]
    assert asyncio.run(scenario(start, bytes(10_000))) == []
    assert asyncio.run(scenario(observation[:10], observation[10:] + observation[:10])) == []


def test_slow_greeting_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read takes longer than a quantum."""
    monkeypatch.setattr(zmtp, "QUANTUM_NS", -1)
    peer = connected_peer(HELLO + VECTORS["observation"], step=10)
    assert len(peer.messages) == 1


class Clock:
    """A clock that advances by 1/20 of a quantum at each call only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 10**18
        monkeypatch.setattr(zmtp, "now_ns", self)
        monkeypatch.setattr(turn_scheduler, "now_ns", self)

    def __call__(self) -> int:
        self.ns += QUANTUM_NS // 20
        return self.ns


@pytest.mark.parametrize("raw", [b"\0\0", command(b"PING", b"\0\0abc")])
def test_small_frames_are_processed_in_turns(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hello = VECTORS["greeting of libzmq 4.3"] + VECTORS["READY of robot-7"]
    Clock(monkeypatch)

    async def scenario() -> None:
        peer = Peer(asyncio.get_running_loop())
        peer.scratch = memoryview(bytearray(1 << 16))

        def processed() -> int:
            return len(peer.messages) + peer.transport.written.count(b"PONG")

        await peer.feed(hello + raw * 1000, 1 << 20, is_whole=False)
        counts = [processed()]
        assert 0 < counts[0] <= 20 and not peer.transport.reading
        while not peer.transport.reading:
            await asyncio.sleep(0)
            counts.append(processed())
        assert counts[-1] == 1000
        assert max(after - before for before, after in pairwise(counts)) <= 40

    asyncio.run(scenario())


def test_frames_without_messages_above_the_cpu_limit_close_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_allowance, "BURST_NS", 60_000_000)
    hello = VECTORS["greeting of libzmq 4.3"] + VECTORS["READY of robot-7"]

    async def scenario() -> None:
        peer = Peer(asyncio.get_running_loop())
        await peer.feed(hello + VECTORS["observation"] * 1000, 1 << 20)
        assert not peer.ended
        await peer.feed(command(b"PING", b"\0\0abc") * 300_000, 1 << 20)
        assert peer.ended == ["cpu_time"] and peer.transport.is_aborted

    asyncio.run(scenario())


def test_invalid_messages_above_the_cpu_limit_close_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as observations for unknown models: no processor time is granted for them."""
    monkeypatch.setattr(cpu_allowance, "BURST_NS", 60_000_000)
    hello = VECTORS["greeting of libzmq 4.3"] + VECTORS["READY of robot-7"]

    async def scenario() -> None:
        peer = Peer(asyncio.get_running_loop())
        peer.is_valid = False
        await peer.feed(hello + VECTORS["observation"] * 30_000, 1 << 20)
        assert peer.ended == ["cpu_time"] and peer.transport.is_aborted

    asyncio.run(scenario())


MIB = 1 << 20


def frame_of(size: int, *, is_last: bool = True) -> bytes:
    return bytes((2 if is_last else 3,)) + size.to_bytes(8, "big") + bytes(size)


def used(peer: Peer) -> int:
    gc.collect()
    return peer.budget.used_bytes


def test_partial_message_is_charged_until_it_is_delivered() -> None:
    async def scenario() -> None:
        peer = Peer(asyncio.get_running_loop())
        await peer.feed(HELLO, 1 << 20)
        for part, more in ((frame_of(1000, is_last=False), 1000), (frame_of(100_000)[:-1], 99_999)):
            before = used(peer)
            await peer.feed(part, 1 << 20)
            assert used(peer) == before + more
        await peer.feed(b"\0", 1)
        # A large part stays charged until it is freed.
        assert len(peer.messages) == 1 and used(peer) == 100_000
        peer.messages.clear()
        assert used(peer) == 0
        peer.connection.connection_lost(None)
        assert used(peer) == 0

    asyncio.run(scenario())


def test_queued_messages_are_charged_and_rejected_above_the_limit() -> None:
    async def scenario() -> None:
        peer = Peer(asyncio.get_running_loop(), room=0, receive_bytes=250_000)
        await peer.feed(HELLO + frame_of(1000) * 200, 1 << 20)
        assert used(peer) == 200_000
        await peer.feed(frame_of(100_000), 1 << 20)
        assert used(peer) <= 250_000 and len(peer.rejected) == 200
        peer.room = 1 << 30
        peer.connection.resume()
        assert len(peer.messages) == 1 and not peer.ended
        peer.messages.clear()
        peer.rejected.clear()
        assert used(peer) == 0

    asyncio.run(scenario())


def test_connection_with_most_bytes_times_age_is_closed_above_the_limit() -> None:
    async def scenario() -> None:
        first = Peer(asyncio.get_running_loop(), receive_bytes=1_000_000)
        second = Peer(asyncio.get_running_loop())
        second.budget = first.budget
        second.connection = Connection(second)
        second.connection.connection_made(second.transport)  # type: ignore[arg-type]
        await first.feed(HELLO + frame_of(900_000)[:-1], 1 << 20)
        await asyncio.sleep(0.05)
        await second.feed(HELLO + frame_of(300_000)[:-1], 1 << 20)
        assert first.ended == ["receive_memory"] and first.transport.is_aborted
        assert not second.ended and used(second) == 299_999
        await second.feed(b"\0", 1)
        assert len(second.messages) == 1

    asyncio.run(scenario())


def test_large_frame_is_read_after_its_memory_is_reserved() -> None:
    size = 10 * MIB

    async def scenario() -> None:
        peer = Peer(asyncio.get_running_loop(), receive_bytes=16 * MIB, message_bytes=size)
        other = Peer(asyncio.get_running_loop(), message_bytes=size)
        other.budget = peer.budget
        other.connection = Connection(other)
        other.connection.connection_made(other.transport)  # type: ignore[arg-type]
        await peer.feed(HELLO + frame_of(size)[:1000], 1 << 20)
        await other.feed(HELLO + frame_of(size)[:1000], 1 << 20)
        assert used(peer) == size and peer.transport.reading and not other.transport.reading
        await peer.feed(frame_of(size)[1000:], 1 << 20)
        assert len(peer.messages) == 1 and used(peer) == size
        peer.messages.clear()
        gc.collect()
        while not other.transport.reading:
            await asyncio.sleep(0.01)
        await other.feed(frame_of(size)[1000:], 1 << 20)
        assert len(other.messages) == 1
        other.messages.clear()
        assert used(peer) == 0 and not peer.budget._reserved and not peer.budget._waiting

    asyncio.run(scenario())


@pytest.mark.parametrize("is_waiting", [False, True])
def test_disconnect_during_a_large_frame_frees_its_memory(is_waiting: bool) -> None:
    size = 10 * MIB

    async def scenario() -> None:
        peer = Peer(asyncio.get_running_loop(), receive_bytes=16 * MIB, message_bytes=size)
        if is_waiting:
            peer.budget.charge(8 * MIB)
        await peer.feed(HELLO + frame_of(size)[:1000], 1 << 20)
        assert peer.transport.reading != is_waiting
        peer.connection.connection_lost(None)
        if is_waiting:
            peer.budget.release(8 * MIB)
        assert used(peer) == 0 and not peer.budget._reserved and not peer.budget._waiting

    asyncio.run(scenario())


def test_connection_is_closed_if_the_peer_does_not_read() -> None:
    async def scenario() -> None:
        peer = Peer(asyncio.get_running_loop())
        await peer.feed(HELLO, 1 << 20)
        peer.connection.pause_writing()
        later = now_ns() + int(TimeoutsConfig().response_s * NS_PER_S)
        peer.connection.enforce_timeouts(later - NS_PER_S)
        assert not peer.transport.is_aborted
        peer.connection.enforce_timeouts(later + NS_PER_S)
        assert peer.transport.is_aborted and peer.ended == ["response_timeout"]

    asyncio.run(scenario())


@pytest.mark.parametrize("is_new", [True, False])
def test_idle_peer_is_pinged_and_closed_without_a_pong(is_new: bool) -> None:
    """ZMTP 3.0 has no PING."""
    hello = bytearray(HELLO)
    hello[11] = int(is_new)

    async def scenario() -> None:
        peer = Peer(asyncio.get_running_loop())
        await peer.feed(bytes(hello), 1 << 20)
        idle = int(TimeoutsConfig().idle_s * NS_PER_S)
        keepalive = int(TimeoutsConfig().keepalive_s * NS_PER_S)
        now = now_ns()
        peer.connection.enforce_timeouts(now + idle - NS_PER_S)
        assert b"PING" not in peer.transport.written
        peer.connection.enforce_timeouts(now + idle + NS_PER_S)
        assert (b"PING" in peer.transport.written) == is_new
        peer.connection.enforce_timeouts(now + idle + keepalive + 3 * NS_PER_S)
        assert peer.ended == ["keepalive_timeout"] * is_new

    asyncio.run(scenario())


def test_idle_peer_that_answers_the_ping_stays_connected() -> None:
    async def scenario() -> None:
        hello = bytearray(HELLO)
        hello[11] = 1
        peer = Peer(asyncio.get_running_loop())
        await peer.feed(bytes(hello), 1 << 20)
        now = now_ns() + int(TimeoutsConfig().idle_s * NS_PER_S) + NS_PER_S
        peer.connection.enforce_timeouts(now)
        await peer.feed(command(b"PONG", b""), 1 << 20)
        peer.connection.enforce_timeouts(
            now + int(TimeoutsConfig().keepalive_s * NS_PER_S) + NS_PER_S
        )
        assert not peer.ended

    asyncio.run(scenario())


def test_peer_without_ready_is_closed_after_a_timeout() -> None:
    async def scenario() -> None:
        peer = Peer(asyncio.get_running_loop())
        peer.connection.enforce_timeouts(0)
        assert not peer.transport.is_aborted
        peer.connection.enforce_timeouts(1 << 62)
        assert peer.transport.is_aborted
        assert peer.reasons == ["no READY within `timeouts.preface_s`"]
        assert peer.ended == ["preface_timeout"]

    asyncio.run(scenario())


@pytest.mark.parametrize("name", sorted(VECTORS))
def test_corrupted_bytes_cause_only_expected_errors(name: str) -> None:
    """Bits of each byte of each message are flipped."""
    hello = VECTORS["greeting of libzmq 4.3"] + VECTORS["READY of robot-7"]
    raw = VECTORS[name]
    before = b"" if "greeting" in name else hello[:64] if "READY" in name else hello
    for at in range(len(raw)):
        for flip in (1, 0x80, 0xFF):
            changed = raw[:at] + bytes((raw[at] ^ flip,)) + raw[at + 1 :]
            for parts in connected_peer(before + changed).messages:
                try:
                    observation = read_observation(parts)
                    read_terms(observation.envelope, "a", newest_wins=False, wall_ns=0)
                    read_tensors(CONTRACT, observation)
                except IskanderError:
                    pass


def test_properties_beyond_the_end_are_rejected() -> None:
    for data in (b"\x04Na", b"\x01a\0\0", b"\x01a\0\0\0\x09b", b"\xff"):
        with pytest.raises(ProtocolViolation):
            read_properties(data)


def frames_of(parts: list[Any]) -> bytes:
    """Returns the bytes of a sent message."""

    async def send() -> bytes:
        peer = Peer(asyncio.get_running_loop())
        peer.transport.written = b""
        peer.connection.send(parts)
        return peer.transport.written

    return asyncio.run(send())
