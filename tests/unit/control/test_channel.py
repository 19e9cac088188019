"""Channels between gateway and worker: whole frames in order, and the end after the last one."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from iskander.control.attach import open_channel
from iskander.control.channel import FRAME_BYTES_MAX, Channel, SeqpacketChannel
from iskander.control.zmq_channel import QUEUED_FRAMES_MAX, RECEIVED_BYTES_MAX, ZmqChannel
from iskander.errors import ProtocolError

Pair = tuple[Channel, Channel]
Make = Callable[..., Pair]


@pytest.fixture(params=["seqpacket", "zmq"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes the gateway's end, and a worker's end whose `receive` waits `wait_s`."""
    with tempfile.TemporaryDirectory(prefix="isk-") as folder:

        def make(wait_s: float | None = None) -> Pair:
            prefix = f"{folder}/a" if request.param == "zmq" else ""
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            return (
                open_channel(ours, prefix, is_gateway=True),
                open_channel(theirs, prefix, is_gateway=False, wait_s=wait_s),
            )

        yield make
        assert list(Path(folder).iterdir()) == []


@pytest.fixture
def pair(make: Make) -> Iterator[Pair]:
    pair = make()
    yield pair
    # The gateway's end last: it removes the sockets of both.
    for channel in reversed(pair):
        channel.close()


def frames(channel: Channel, count: int | None = None) -> list[bytes]:
    """The frames that arrive until there are `count`, or until the end."""
    found: list[bytes] = []
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found += [bytes(frame) for frame in channel.receive()]
        if channel.has_ended or (count is not None and len(found) >= count):
            return found
        time.sleep(0.001)
    raise AssertionError(f"{found} and no end within 10 s")


def test_frames_come_whole_and_in_order(pair: Pair) -> None:
    """Sent in one go, of lengths that a stream would cut or join."""
    sent = [bytes([index]) * length for index, length in enumerate((1, 5000, 3, 1, 65_000, 2))]
    for frame in sent:
        pair[0].send(frame)

    assert frames(pair[1], 6) == sent
    assert not pair[1].has_ended


def test_an_empty_channel_yields_nothing(pair: Pair) -> None:
    assert frames(pair[0], 0) == frames(pair[1], 0) == []
    assert not pair[0].has_ended


def test_both_ends_send_and_receive(pair: Pair) -> None:
    pair[0].send(b"there")
    pair[1].send(b"and back")

    assert (frames(pair[1], 1), frames(pair[0], 1)) == ([b"there"], [b"and back"])


def test_the_descriptor_is_readable_when_a_frame_arrives(pair: Pair) -> None:
    import select

    poll = select.poll()
    poll.register(pair[0], select.POLLIN)
    for number in range(20):
        while poll.poll(0):
            assert frames(pair[0], 0) == []
        pair[1].send(bytes([number]))
        assert poll.poll(10_000)
        assert frames(pair[0], 1) == [bytes([number])]


@pytest.mark.parametrize("count", [2, 200])
def test_the_end_comes_after_the_last_frame(pair: Pair, count: int) -> None:
    for number in range(count):
        pair[1].send(b"%d" % number)
    pair[1].close()

    assert frames(pair[0]) == [b"%d" % number for number in range(count)]
    assert pair[0].has_ended
    assert list(pair[0].receive()) == []


def test_frames_arrive_though_their_sender_ended_with_frames_unread(pair: Pair) -> None:
    """The kernel reports ECONNRESET once, before it yields what the other side had sent."""
    pair[0].send(b"never read")
    pair[1].send(b"one")
    pair[1].send(b"two")
    pair[1].close()

    assert frames(pair[0]) == [b"one", b"two"]
    assert pair[0].has_ended


def test_a_reset_between_two_frames_loses_none(pair: Pair) -> None:
    pair[0].send(b"never read")
    pair[1].send(b"one")
    pair[1].send(b"two")
    received: Iterator[memoryview] = iter(())
    first = None
    while first is None:
        received = pair[0].receive()
        first = next((bytes(frame) for frame in received), None)
    pair[1].close()

    assert [first, *(bytes(frame) for frame in received), *frames(pair[0])] == [b"one", b"two"]
    assert pair[0].has_ended


def test_sending_to_a_closed_peer_is_no_error(pair: Pair) -> None:
    """Before and after its end was received, and with frames of ours unread."""
    pair[0].send(b"never read")
    pair[1].close()

    for _ in range(3):
        pair[0].send(b"lost")
    assert frames(pair[0]) == []
    assert pair[0].has_ended
    pair[0].send(b"lost")


def test_the_wait_for_a_first_frame_ends(make: Make) -> None:
    gateway, worker = make(wait_s=0.001)

    assert list(worker.receive()) == []
    assert not worker.has_ended
    gateway.send(b"now")
    assert frames(worker, 1) == [b"now"]
    gateway.close()
    assert frames(worker) == [] and worker.has_ended
    worker.close()


def test_only_the_first_frame_is_waited_for(make: Make) -> None:
    """With an hour to wait: what is there is yielded, and then the call returns."""
    gateway, worker = make(wait_s=3600.0)
    gateway.send(b"one")
    gateway.send(b"two")

    assert frames(worker, 2) == [b"one", b"two"]
    for channel in (worker, gateway):
        channel.close()


def test_the_longest_usual_frame_passes_and_one_too_long_is_an_error(pair: Pair) -> None:
    """A frame is never cut: either all of it arrives or its sender gets an error."""
    long = bytes(FRAME_BYTES_MAX // 2)
    pair[0].send(long)
    assert frames(pair[1], 1) == [long]

    with pytest.raises(OSError, match=f"frame has {FRAME_BYTES_MAX + 1} bytes"):
        pair[0].send(bytes(FRAME_BYTES_MAX + 1))
    assert frames(pair[1], 0) == []


@pytest.mark.parametrize("kind", ["seqpacket", "zmq"])
def test_the_frames_of_a_process_that_exits_arrive_before_its_end(kind: str) -> None:
    """A worker that leaves its channel open and exits, and one that is killed after its frames."""
    with tempfile.TemporaryDirectory(prefix="isk-") as folder:
        for number, is_killed in enumerate((False, True)):
            prefix = f"{folder}/{number}" if kind == "zmq" else ""
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if not pid:
                ours.close()
                worker = open_channel(theirs, prefix, is_gateway=False)
                for index in range(50):
                    worker.send(b"%d" % index)
                worker.leave_open()
                os.kill(os.getpid(), signal.SIGKILL if is_killed else signal.SIGTERM)
                os._exit(0)
            theirs.close()
            gateway = open_channel(ours, prefix, is_gateway=True)
            assert frames(gateway) == [b"%d" % index for index in range(50)]
            gateway.close()
            os.waitpid(pid, 0)


def test_a_channel_can_be_left_open() -> None:
    """The peer sees the end when the process exits, and not before."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gateway, worker = SeqpacketChannel(ours), SeqpacketChannel(theirs)
    fd = worker.fileno()
    worker.leave_open()
    worker.close()

    assert frames(gateway, 0) == [] and not gateway.has_ended
    socket.socket(fileno=fd).close()
    assert frames(gateway) == [] and gateway.has_ended
    gateway.close()


def test_a_zmq_peer_that_does_not_read_is_reported(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gateway = open_channel(ours, f"{tmp_path}/a", is_gateway=True)
    with pytest.raises(BlockingIOError, match="does not read"):
        for _ in range(QUEUED_FRAMES_MAX + 1):
            gateway.send(b"work")
    gateway.close()
    theirs.close()


def test_a_zmq_prefix_that_is_in_use_is_an_error(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with pytest.raises(OSError):
        open_channel(ours, f"{tmp_path}/missing/a", is_gateway=True)
    ours.close()
    theirs.close()


def test_a_frame_lies_in_the_buffer_until_the_next_is_asked_for() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender, receiver = SeqpacketChannel(ours), SeqpacketChannel(theirs)
    sender.send(b"aaaa")
    sender.send(b"bb")
    received = receiver.receive()

    first = next(received)
    assert bytes(first) == b"aaaa"
    assert bytes(next(received)) == b"bb"
    assert bytes(first) == b"bbaa"
    for channel in (sender, receiver):
        channel.close()


def test_a_received_frame_that_is_too_long_is_named() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel, other = SeqpacketChannel(theirs), SeqpacketChannel(ours)
    ours.send(bytes(FRAME_BYTES_MAX + 1))
    other.send(bytes(FRAME_BYTES_MAX // 2))
    with pytest.raises(ProtocolError, match=f"{FRAME_BYTES_MAX + 1} bytes"):
        frames(channel)
    assert [len(frame) for frame in frames(channel, 1)] == [FRAME_BYTES_MAX // 2]
    for each in (channel, other):
        each.close()


def test_a_received_zmq_frame_that_is_too_long_is_named_or_never_allocated(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gateway = open_channel(ours, f"{tmp_path}/a", is_gateway=True)
    worker = ZmqChannel(theirs, f"{tmp_path}/a", is_gateway=False)
    worker._push.send(bytes(FRAME_BYTES_MAX + 1))
    with pytest.raises(ProtocolError, match=f"{FRAME_BYTES_MAX + 1} bytes"):
        frames(gateway)
    worker._push.send(bytes(RECEIVED_BYTES_MAX + 1))
    worker.close()
    assert frames(gateway) == []
    gateway.close()


def test_a_zmq_frame_that_arrives_after_the_end_of_file_is_received(tmp_path: Path) -> None:
    """ZeroMQ's thread may deliver the last frames later than the kernel closes the unix socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gateway = ZmqChannel(ours, f"{tmp_path}/a", is_gateway=True)
    worker = ZmqChannel(theirs, f"{tmp_path}/a", is_gateway=False)
    worker.send(b"one")
    assert frames(gateway, 1) == [b"one"]
    theirs.shutdown(socket.SHUT_RDWR)
    assert frames(gateway, 0) == [] and not gateway.has_ended
    gateway._ends_ns += 60 * 10**9  # On a slow machine too.
    worker.send(b"late")
    worker.close()
    assert frames(gateway) == [b"late"]
    gateway.close()
