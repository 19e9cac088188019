"""What Inferential's clients and the server send, byte by byte, whatever language they are in.

`vectors/inferential.json` has each message as it is on the socket, in hexadecimal: ZMTP's frames
(flags, length, body) one after the other. The greeting, the READY of robot-7 and the first two
observations were recorded from the package `inferential` 1.4.0 with libzmq 4.3.5; the rest is
written by RFC 37 and the protocol's fields. To add one, write its bytes there, and what they mean
here.
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

from iskander.clock import NS_PER_S, now_ns
from iskander.config.schema import TimeoutsConfig
from iskander.contract.column_types import ColumnType
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.errors import IskanderError, MalformedInput, Overloaded, Unsupported
from iskander.protocols.inferential.terms import read_terms
from iskander.protocols.inferential.wire import (
    ReplyAddress,
    read_observation,
    read_tensors,
    render_error,
    render_results,
)
from iskander.scheduling.request import Terms
from iskander.transport import cpu_allowance
from iskander.transport import turn_scheduler as turns
from iskander.transport.turn_scheduler import QUANTUM_NS
from iskander.transport.zmtp import connection as zmtp
from iskander.transport.zmtp.connection import Connection
from iskander.transport.zmtp.frames import Part, ProtocolViolation, command, read_properties
from iskander.transport.zmtp.received import BACKLOG_BYTES, BACKLOG_MESSAGES

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


def run(raw: bytes, step: int = 1 << 20, **peer: Any) -> Peer:
    async def fed() -> Peer:
        made = Peer(asyncio.get_running_loop(), **peer)
        await made.feed(raw, step)
        for _ in range(100):
            await asyncio.sleep(0)
        return made

    return asyncio.run(fed())


def parts_of(name: str) -> list[Part]:
    hello = VECTORS["greeting of libzmq 4.3"] + VECTORS["READY of robot-7"]
    (parts,) = run(hello + VECTORS[name]).messages
    return parts


@pytest.mark.parametrize("greeting", ["libzmq 4.3", "a peer of ZMTP 3.0"])
@pytest.mark.parametrize(
    "ready, identity",
    [("of robot-7", b"robot-7"), ("with five random bytes", b"k\0\xffEg"), ("without a name", b"")],
)
@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_a_peer_is_greeted_and_understood(
    greeting: str, ready: str, identity: bytes, step: int
) -> None:
    """However its bytes are cut."""
    sent = [VECTORS[f"greeting of {greeting}"], VECTORS[f"READY {ready}"], VECTORS["observation"]]
    sent += [VECTORS["PING"], VECTORS["observation without tensors"]]
    peer = run(b"".join(sent), step)
    assert peer.identity == identity
    assert [len(parts) for parts in peer.messages] == [3, 3]
    assert peer.transport.written == b"".join(
        VECTORS[name] for name in ("greeting of the server", "READY of the server", "PONG")
    )


def test_observations_mean_what_the_client_meant() -> None:
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
    question = read_tensors(CONTRACT, observation)
    assert question.is_single
    assert [(t.name, t.datatype, t.shape, bytes(t.data).hex()) for t in question.tensors] == [
        ("joints", "FP32", (1, 3), np.arange(3, dtype=np.float32).tobytes().hex()),
        ("flags", "BOOL", (1, 2), "0100"),
    ]
    nothing = read_observation(parts_of("observation without tensors"))
    assert nothing.envelope.model_id == "ids"
    assert not read_tensors(CONTRACT, nothing).tensors


@pytest.mark.parametrize("name", ["without a payload", "in long frames"])
def test_a_payload_that_is_not_there_is_empty(name: str) -> None:
    """And what is not said is 0, which is the highest priority."""
    parts = parts_of(f"observation {name}")
    assert len(parts) == 2
    observation = read_observation(parts)
    assert len(observation.payload) == 0
    terms = read_terms(observation.envelope, "a", newest_wins=False, wall_ns=MOMENT_NS)
    assert terms == Terms(client="a", is_named=True, priority=0, urgency=1.0)


def test_replies_are_what_the_client_reads() -> None:
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


def test_an_error_is_in_the_metadata() -> None:
    reply = render_error(ADDRESS, Overloaded("busy", retry_after_ms=9), 5)
    assert [len(part) for part in (reply[0], reply[2])] == [0, 0]
    read = proto.ModelResponse.FromString(bytes(reply[1]))
    golden = proto.ModelResponse.FromString(bytes(parts_of("reply with an error")[1]))
    assert read == golden  # By value: a map's order is not said.
    assert dict(read.metadata) == {
        "error": "busy",
        "error_code": "overloaded",
        "error_fault": "nobody",
        "error_retryable": "true",
        "error_retry_after_ms": "9",
    }


def test_bfloat16_is_its_bits_there_and_back() -> None:
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


def test_a_type_that_the_protocol_has_not() -> None:
    contract = Contract((), (TensorSpec("n", "n", ColumnType("uint64"), ()),))
    with pytest.raises(Unsupported, match="`n` is UINT64"):
        render_results(
            ADDRESS, contract, 1, bytes(64), is_single=True, latency_ms=0.0, wall_ns=MOMENT_NS
        )


@pytest.mark.parametrize(
    "metadata, wanted",
    [
        ({"ttl_ms": "12.5"}, {"ttl_ms": 12.5}),
        ({"newest_wins": "true"}, {"is_newest_wins": True}),
        ({"newest_wins": "0"}, {}),
        ({"instruction": "deadline_ms"}, {}),
    ],
)
def test_metadata_that_is_ours(metadata: dict[str, str], wanted: dict[str, Any]) -> None:
    envelope = proto.Observation(metadata=metadata)
    terms = read_terms(envelope, "a", newest_wins=False, wall_ns=MOMENT_NS)
    assert terms == replace(Terms(client="a", is_named=True, priority=0), **wanted)


@pytest.mark.parametrize(
    "metadata", [{"ttl_ms": "nan"}, {"deadline_ms": ""}, {"newest_wins": "never"}]
)
def test_metadata_that_means_nothing(metadata: dict[str, str]) -> None:
    with pytest.raises(MalformedInput, match="metadata"):
        read_terms(proto.Observation(metadata=metadata), "a", newest_wins=False, wall_ns=0)


@pytest.mark.parametrize(
    "said, priority, urgency",
    [(99, 9, 1.0), (9, 9, 0.0), (3, 3, 0.5)],
)
def test_terms_beyond_what_there_is(said: int, priority: int, urgency: float) -> None:
    wild = {1.0: 17.0, 0.0: float("nan"), 0.5: 0.5}[urgency]
    envelope = proto.Observation(priority=said, urgency=wild, timestamp_ns=MOMENT_NS)
    terms = read_terms(envelope, "a", newest_wins=False, wall_ns=MOMENT_NS - 1)
    assert (terms.priority, terms.urgency, terms.age_ms) == (priority, urgency, 0.0)


def test_a_session_that_is_full_is_given_no_more() -> None:
    """What came meanwhile waits, in order, and with the time at which it came."""
    hello = VECTORS["greeting of libzmq 4.3"] + VECTORS["READY of robot-7"]
    large = b"\1\0\2" + (100_000).to_bytes(8, "big") + bytes(100_000)

    async def reference() -> None:
        peer = Peer(asyncio.get_running_loop(), room=2)
        await peer.feed(hello + VECTORS["observation"] * 2, 1 << 20)
        await peer.feed((VECTORS["observation"] + large) * 3, 1 << 20)
        came_ns = now_ns()
        for count in (2, 3, 5):
            assert len(peer.messages) == count
            assert peer.transport.reading
            peer.room = {2: 3, 3: 5, 5: 1 << 30}[count]
            peer.connection.resume()
        assert [len(parts) for parts in peer.messages[2:]] == [3, 2] * 3
        assert peer.arrivals == sorted(peer.arrivals) and peer.arrivals[-1] <= came_ns

    asyncio.run(reference())


@pytest.mark.parametrize("size", [1, 300_000])
def test_what_is_kept_for_a_session_that_is_full_is_bounded(size: int) -> None:
    """Beyond it the socket is not read, until there is room; nothing is lost."""
    hello = VECTORS["greeting of libzmq 4.3"] + VECTORS["READY of robot-7"]
    raw = b"\2" + size.to_bytes(8, "big") + bytes(size)
    kept = min(BACKLOG_MESSAGES, -(-BACKLOG_BYTES // size))

    async def reference() -> None:
        peer = Peer(asyncio.get_running_loop(), room=0)
        await peer.feed(hello + raw * kept, 1 << 20)
        for _ in range(kept):
            await asyncio.sleep(0)
        assert not peer.transport.reading and not peer.messages
        peer.room = 1 << 30
        peer.connection.resume()
        for _ in range(kept):
            await asyncio.sleep(0)
        assert peer.transport.reading and len(peer.messages) == kept

    asyncio.run(reference())


def test_a_peer_whose_messages_wait_is_answered_when_it_asks() -> None:
    hello = VECTORS["greeting of libzmq 4.3"] + VECTORS["READY of robot-7"]
    ping = command(b"PING", b"\0\0abc")

    async def reference() -> None:
        peer = Peer(asyncio.get_running_loop(), room=0)
        await peer.feed(hello + VECTORS["observation"] + ping, 1 << 20)
        assert peer.transport.written.endswith(command(b"PONG", b"abc"))

    asyncio.run(reference())


def test_a_ping_before_ready_ends_the_connection() -> None:
    peer = run(VECTORS["greeting of libzmq 4.3"] + command(b"PING", b"\0\0abc"))
    assert peer.reasons and peer.transport.is_aborted
    assert not peer.transport.written.endswith(command(b"PONG", b"abc"))


def test_a_peer_that_stops_in_the_midst_of_a_message_goes() -> None:
    """And one that has said all it wanted to may be silent."""
    hello = VECTORS["greeting of libzmq 4.3"] + VECTORS["READY of robot-7"]

    async def reference(more: bytes, reasons: list[str]) -> None:
        peer = Peer(asyncio.get_running_loop())
        await peer.feed(hello + VECTORS["observation"] + more, 1 << 20)
        later = now_ns() + int(TimeoutsConfig().message_s * NS_PER_S)
        peer.connection.enforce_timeouts(later - NS_PER_S)
        assert not peer.transport.is_aborted
        peer.connection.enforce_timeouts(later + NS_PER_S)
        assert peer.reasons == reasons
        assert peer.ended == ["message_timeout"] * len(reasons)

    stopped = ["message slower than 500 bytes/s"]
    asyncio.run(reference(b"", []))
    for more in (b"\2\0", b"\2" + (1 << 19).to_bytes(8, "big"), b"\1\0"):
        asyncio.run(reference(more, stopped))


def test_a_message_that_trickles_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte every 20 s; what comes at 500 bytes/s, or in whole messages, does not."""
    clock = now_ns()
    monkeypatch.setattr(zmtp, "now_ns", lambda: clock)
    hello = VECTORS["greeting of libzmq 4.3"] + VECTORS["READY of robot-7"]
    begun = b"\2" + (1 << 19).to_bytes(8, "big")

    async def reference(begun: bytes, piece: bytes) -> list[str]:
        nonlocal clock
        peer = Peer(asyncio.get_running_loop())
        await peer.feed(hello + begun, 1 << 20)
        for _ in range(5):
            clock += 20 * NS_PER_S
            await peer.feed(piece, 1 << 20)
            peer.connection.enforce_timeouts(clock)
        return peer.ended

    whole = VECTORS["observation"]
    assert asyncio.run(reference(begun, b"a")) == ["message_timeout"]
    assert asyncio.run(reference(begun, bytes(10_000))) == []
    assert asyncio.run(reference(whole[:10], whole[10:] + whole[:10])) == []


def test_a_greeting_that_comes_slowly_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each piece takes longer than a turn may."""
    monkeypatch.setattr(zmtp, "QUANTUM_NS", -1)
    peer = run(HELLO + VECTORS["observation"], step=10)
    assert len(peer.messages) == 1


class Clock:
    """A clock by which each look takes a part of a quantum, and no work any time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 10**18
        monkeypatch.setattr(zmtp, "now_ns", self)
        monkeypatch.setattr(turns, "now_ns", self)

    def __call__(self) -> int:
        self.ns += QUANTUM_NS // 20
        return self.ns


@pytest.mark.parametrize("raw", [b"\0\0", command(b"PING", b"\0\0abc")])
def test_small_frames_leave_others_their_turn(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hello = VECTORS["greeting of libzmq 4.3"] + VECTORS["READY of robot-7"]
    Clock(monkeypatch)

    async def reference() -> None:
        peer = Peer(asyncio.get_running_loop())
        peer.scratch = memoryview(bytearray(1 << 16))

        def done() -> int:
            return len(peer.messages) + peer.transport.written.count(b"PONG")

        await peer.feed(hello + raw * 1000, 1 << 20, is_whole=False)
        counts = [done()]
        assert 0 < counts[0] <= 20 and not peer.transport.reading
        while not peer.transport.reading:
            await asyncio.sleep(0)
            counts.append(done())
        assert counts[-1] == 1000
        assert max(after - before for before, after in pairwise(counts)) <= 40

    asyncio.run(reference())


def test_frames_that_bring_no_message_end_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_allowance, "BURST_NS", 60_000_000)
    hello = VECTORS["greeting of libzmq 4.3"] + VECTORS["READY of robot-7"]

    async def reference() -> None:
        peer = Peer(asyncio.get_running_loop())
        await peer.feed(hello + VECTORS["observation"] * 1000, 1 << 20)
        assert not peer.ended
        await peer.feed(command(b"PING", b"\0\0abc") * 300_000, 1 << 20)
        assert peer.ended == ["cpu_time"] and peer.transport.is_aborted

    asyncio.run(reference())


# Memory.

MIB = 1 << 20


def frame_of(size: int, *, is_last: bool = True) -> bytes:
    return bytes((2 if is_last else 3,)) + size.to_bytes(8, "big") + bytes(size)


def used(peer: Peer) -> int:
    gc.collect()
    return peer.budget.used_bytes


def test_what_has_come_of_a_message_is_charged_until_it_is_taken() -> None:
    async def reference() -> None:
        peer = Peer(asyncio.get_running_loop())
        await peer.feed(HELLO, 1 << 20)
        for part, more in ((frame_of(1000, is_last=False), 1000), (frame_of(100_000)[:-1], 99_999)):
            before = used(peer)
            await peer.feed(part, 1 << 20)
            assert used(peer) == before + more
        await peer.feed(b"\0", 1)
        # The large part is kept, and charged until it is freed.
        assert len(peer.messages) == 1 and used(peer) == 100_000
        peer.messages.clear()
        assert used(peer) == 0
        peer.connection.connection_lost(None)
        assert used(peer) == 0

    asyncio.run(reference())


def test_messages_that_wait_are_charged_and_refused_where_memory_is_out() -> None:
    async def reference() -> None:
        peer = Peer(asyncio.get_running_loop(), room=0, receive_bytes=250_000)
        await peer.feed(HELLO + frame_of(1000) * 200, 1 << 20)
        assert used(peer) == 200_000
        await peer.feed(frame_of(100_000), 1 << 20)
        assert used(peer) <= 250_000 and len(peer.refused) == 200
        peer.room = 1 << 30
        peer.connection.resume()
        assert len(peer.messages) == 1 and not peer.ended
        peer.messages.clear()
        peer.refused.clear()
        assert used(peer) == 0

    asyncio.run(reference())


def test_the_message_that_took_most_for_longest_ends_where_memory_is_out() -> None:
    async def reference() -> None:
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

    asyncio.run(reference())


def test_a_large_frame_has_its_memory_before_it_comes() -> None:
    size = 10 * MIB

    async def reference() -> None:
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

    asyncio.run(reference())


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_peer_that_goes_within_a_large_frame_holds_nothing(is_waiting: bool) -> None:
    size = 10 * MIB

    async def reference() -> None:
        peer = Peer(asyncio.get_running_loop(), receive_bytes=16 * MIB, message_bytes=size)
        if is_waiting:
            peer.budget.charge(8 * MIB)
        await peer.feed(HELLO + frame_of(size)[:1000], 1 << 20)
        assert peer.transport.reading != is_waiting
        peer.connection.connection_lost(None)
        if is_waiting:
            peer.budget.release(8 * MIB)
        assert used(peer) == 0 and not peer.budget._reserved and not peer.budget._waiting

    asyncio.run(reference())


# Timeouts.


def test_a_peer_that_reads_nothing_goes() -> None:
    async def reference() -> None:
        peer = Peer(asyncio.get_running_loop())
        await peer.feed(HELLO, 1 << 20)
        peer.connection.pause_writing()
        later = now_ns() + int(TimeoutsConfig().response_s * NS_PER_S)
        peer.connection.enforce_timeouts(later - NS_PER_S)
        assert not peer.transport.is_aborted
        peer.connection.enforce_timeouts(later + NS_PER_S)
        assert peer.transport.is_aborted and peer.ended == ["response_timeout"]

    asyncio.run(reference())


@pytest.mark.parametrize("is_new", [True, False])
def test_a_silent_peer_is_asked_whether_it_is_there(is_new: bool) -> None:
    """Not one of ZMTP 3.0, which has no PING."""
    hello = bytearray(HELLO)
    hello[11] = int(is_new)

    async def reference() -> None:
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

    asyncio.run(reference())


def test_a_silent_peer_that_answers_stays() -> None:
    async def reference() -> None:
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

    asyncio.run(reference())


def test_a_peer_that_does_not_say_who_it_is_goes() -> None:
    async def reference() -> None:
        peer = Peer(asyncio.get_running_loop())
        peer.connection.enforce_timeouts(0)
        assert not peer.transport.is_aborted
        peer.connection.enforce_timeouts(1 << 62)
        assert peer.transport.is_aborted
        assert peer.reasons == ["no READY within `timeouts.preface_s`"]
        assert peer.ended == ["preface_timeout"]

    asyncio.run(reference())


@pytest.mark.parametrize("name", sorted(VECTORS))
def test_bytes_that_are_changed_break_nothing_but_their_connection(name: str) -> None:
    """Each byte of each message turned over, in its place in the conversation."""
    hello = VECTORS["greeting of libzmq 4.3"] + VECTORS["READY of robot-7"]
    raw = VECTORS[name]
    before = b"" if "greeting" in name else hello[:64] if "READY" in name else hello
    for at in range(len(raw)):
        for flip in (1, 0x80, 0xFF):
            changed = raw[:at] + bytes((raw[at] ^ flip,)) + raw[at + 1 :]
            for parts in run(before + changed).messages:
                try:
                    observation = read_observation(parts)
                    read_terms(observation.envelope, "a", newest_wins=False, wall_ns=0)
                    read_tensors(CONTRACT, observation)
                except IskanderError:
                    pass


def test_properties_that_lead_beyond_the_end() -> None:
    for data in (b"\x04Na", b"\x01a\0\0", b"\x01a\0\0\0\x09b", b"\xff"):
        with pytest.raises(ProtocolViolation):
            read_properties(data)


def frames_of(parts: list[Any]) -> bytes:
    """A message as the connection sends it."""

    async def sent() -> bytes:
        peer = Peer(asyncio.get_running_loop())
        peer.transport.written = b""
        peer.connection.send(parts)
        return peer.transport.written

    return asyncio.run(sent())
