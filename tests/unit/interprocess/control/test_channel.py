"""Channels between gateway and worker: frame order, limits, and end of file."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from iskander.errors import ProtocolError
from iskander.interprocess.control.attach import open_channel
from iskander.interprocess.control.channel import FRAME_BYTES_MAX, Channel, SeqpacketChannel
from iskander.interprocess.control.zmq_channel import (
    QUEUED_FRAMES_MAX,
    RECEIVED_BYTES_MAX,
    ZmqChannel,
)

Pair = tuple[Channel, Channel]
OpenPair = Callable[..., Pair]


@pytest.fixture(params=["seqpacket", "zmq"])
def open_pair(request: pytest.FixtureRequest) -> Iterator[OpenPair]:
    """Return a function that opens both ends; the worker's `receive` waits for `wait_s`."""
    with tempfile.TemporaryDirectory(prefix="isk-") as folder:

        def open_pair(wait_s: float | None = None) -> Pair:
            prefix = f"{folder}/a" if request.param == "zmq" else ""
            gateway_socket, worker_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            return (
                open_channel(gateway_socket, prefix, is_gateway=True),
                open_channel(worker_socket, prefix, is_gateway=False, wait_s=wait_s),
            )

        yield open_pair
        assert list(Path(folder).iterdir()) == []


@pytest.fixture
def pair(open_pair: OpenPair) -> Iterator[Pair]:
    pair = open_pair()
    yield pair
    # The gateway's end closes last because it removes the sockets of both ends.
    for channel in reversed(pair):
        channel.close()


def receive_frames(channel: Channel, count: int | None = None) -> list[bytes]:
    """Receive `count` frames, or all frames until the end of the channel."""
    received: list[bytes] = []
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        received += [bytes(frame) for frame in channel.receive()]
        if channel.has_ended or (count is not None and len(received) >= count):
            return received
        time.sleep(0.001)
    raise AssertionError(f"{received} and no end within 10 s")


def test_frames_arrive_whole_and_in_order(pair: Pair) -> None:
    """The lengths are such that a byte stream would split or join the frames."""
    sent = [bytes([index]) * length for index, length in enumerate((1, 5000, 3, 1, 65_000, 2))]
    for frame in sent:
        pair[0].send(frame)

    assert receive_frames(pair[1], 6) == sent
    assert not pair[1].has_ended


def test_empty_channel_yields_nothing(pair: Pair) -> None:
    assert receive_frames(pair[0], 0) == receive_frames(pair[1], 0) == []
    assert not pair[0].has_ended


def test_both_ends_send_and_receive(pair: Pair) -> None:
    pair[0].send(b"there")
    pair[1].send(b"and back")

    assert (receive_frames(pair[1], 1), receive_frames(pair[0], 1)) == ([b"there"], [b"and back"])


def test_descriptor_is_readable_when_a_frame_arrives(pair: Pair) -> None:
    import select

    poll = select.poll()
    poll.register(pair[0], select.POLLIN)
    for number in range(20):
        while poll.poll(0):
            assert receive_frames(pair[0], 0) == []
        pair[1].send(bytes([number]))
        assert poll.poll(10_000)
        assert receive_frames(pair[0], 1) == [bytes([number])]


@pytest.mark.parametrize("count", [2, 200])
def test_end_is_reported_after_the_last_frame(pair: Pair, count: int) -> None:
    for number in range(count):
        pair[1].send(b"%d" % number)
    pair[1].close()

    assert receive_frames(pair[0]) == [b"%d" % number for number in range(count)]
    assert pair[0].has_ended
    assert list(pair[0].receive()) == []


def test_frames_arrive_from_a_peer_that_closed_with_unread_frames(pair: Pair) -> None:
    """The kernel reports ECONNRESET once, before the frames of the peer."""
    pair[0].send(b"never read")
    pair[1].send(b"one")
    pair[1].send(b"two")
    pair[1].close()

    assert receive_frames(pair[0]) == [b"one", b"two"]
    assert pair[0].has_ended


def test_frames_after_a_reset_arrive_in_the_same_call() -> None:
    """The event loop signals a reset socket once, so nothing would call `receive` again."""
    ours, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = SeqpacketChannel(ours)
    channel.send(b"never read")
    peer.send(b"one")
    peer.send(b"two")
    peer.close()

    assert [bytes(frame) for frame in channel.receive()] == [b"one", b"two"]
    assert channel.has_ended
    channel.close()


def test_reset_between_two_frames_loses_no_frame(pair: Pair) -> None:
    pair[0].send(b"never read")
    pair[1].send(b"one")
    pair[1].send(b"two")
    received: Iterator[memoryview] = iter(())
    first = None
    while first is None:
        received = pair[0].receive()
        first = next((bytes(frame) for frame in received), None)
    pair[1].close()

    assert [first, *(bytes(frame) for frame in received), *receive_frames(pair[0])] == [
        b"one",
        b"two",
    ]
    assert pair[0].has_ended


def test_send_to_a_closed_peer_is_no_error(pair: Pair) -> None:
    """The sender has or has not received the end, and the peer left frames unread."""
    pair[0].send(b"never read")
    pair[1].close()

    for _ in range(3):
        pair[0].send(b"lost")
    assert receive_frames(pair[0]) == []
    assert pair[0].has_ended
    pair[0].send(b"lost")


def test_wait_for_the_first_frame_times_out(open_pair: OpenPair) -> None:
    gateway, worker = open_pair(wait_s=0.001)

    assert list(worker.receive()) == []
    assert not worker.has_ended
    gateway.send(b"now")
    assert receive_frames(worker, 1) == [b"now"]
    gateway.close()
    assert receive_frames(worker) == [] and worker.has_ended
    worker.close()


def test_receive_waits_only_for_the_first_frame(open_pair: OpenPair) -> None:
    """`receive` returns after the queued frames, although its wait is one hour."""
    gateway, worker = open_pair(wait_s=3600.0)
    gateway.send(b"one")
    gateway.send(b"two")

    assert receive_frames(worker, 2) == [b"one", b"two"]
    for channel in (worker, gateway):
        channel.close()


def test_large_frame_arrives_and_oversized_frame_is_an_error(pair: Pair) -> None:
    """A frame is never truncated: it arrives whole, or the sender gets an error."""
    long = bytes(FRAME_BYTES_MAX // 2)
    pair[0].send(long)
    assert receive_frames(pair[1], 1) == [long]

    with pytest.raises(OSError, match=f"frame has {FRAME_BYTES_MAX + 1} bytes"):
        pair[0].send(bytes(FRAME_BYTES_MAX + 1))
    assert receive_frames(pair[1], 0) == []


@pytest.mark.parametrize("kind", ["seqpacket", "zmq"])
def test_frames_of_an_exited_process_arrive_before_the_end(kind: str) -> None:
    """The process exits by SIGTERM or SIGKILL with its channel open."""
    with tempfile.TemporaryDirectory(prefix="isk-") as folder:
        for number, is_killed in enumerate((False, True)):
            prefix = f"{folder}/{number}" if kind == "zmq" else ""
            gateway_socket, worker_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if not pid:
                gateway_socket.close()
                worker = open_channel(worker_socket, prefix, is_gateway=False)
                for index in range(50):
                    worker.send(b"%d" % index)
                worker.leave_open()
                os.kill(os.getpid(), signal.SIGKILL if is_killed else signal.SIGTERM)
                os._exit(0)
            worker_socket.close()
            gateway = open_channel(gateway_socket, prefix, is_gateway=True)
            assert receive_frames(gateway) == [b"%d" % index for index in range(50)]
            gateway.close()
            os.waitpid(pid, 0)


def test_channel_left_open_ends_at_process_exit() -> None:
    """The peer receives the end only when the process exits."""
    gateway_socket, worker_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gateway, worker = SeqpacketChannel(gateway_socket), SeqpacketChannel(worker_socket)
    fd = worker.fileno()
    worker.leave_open()
    worker.close()

    assert receive_frames(gateway, 0) == [] and not gateway.has_ended
    socket.socket(fileno=fd).close()
    assert receive_frames(gateway) == [] and gateway.has_ended
    gateway.close()


def test_send_to_a_zmq_peer_that_does_not_read_is_an_error(tmp_path: Path) -> None:
    gateway_socket, worker_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gateway = open_channel(gateway_socket, f"{tmp_path}/a", is_gateway=True)
    with pytest.raises(BlockingIOError, match="does not read"):
        for _ in range(QUEUED_FRAMES_MAX + 1):
            gateway.send(b"work")
    gateway.close()
    worker_socket.close()


def test_missing_folder_of_a_zmq_prefix_is_an_error(tmp_path: Path) -> None:
    gateway_socket, worker_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with pytest.raises(OSError):
        open_channel(gateway_socket, f"{tmp_path}/missing/a", is_gateway=True)
    gateway_socket.close()
    worker_socket.close()


def test_frame_is_valid_until_the_next_frame() -> None:
    gateway_socket, worker_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender, receiver = SeqpacketChannel(gateway_socket), SeqpacketChannel(worker_socket)
    sender.send(b"aaaa")
    sender.send(b"bb")
    received = receiver.receive()

    first = next(received)
    assert bytes(first) == b"aaaa"
    assert bytes(next(received)) == b"bb"
    assert bytes(first) == b"bbaa"
    for channel in (sender, receiver):
        channel.close()


def test_received_oversized_frame_is_an_error() -> None:
    gateway_socket, worker_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel, sender = SeqpacketChannel(worker_socket), SeqpacketChannel(gateway_socket)
    gateway_socket.send(bytes(FRAME_BYTES_MAX + 1))
    sender.send(bytes(FRAME_BYTES_MAX // 2))
    with pytest.raises(ProtocolError, match=f"{FRAME_BYTES_MAX + 1} bytes"):
        receive_frames(channel)
    assert [len(frame) for frame in receive_frames(channel, 1)] == [FRAME_BYTES_MAX // 2]
    for each in (channel, sender):
        each.close()


def test_received_oversized_zmq_frame_is_an_error_or_closes_the_channel(tmp_path: Path) -> None:
    gateway_socket, worker_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gateway = open_channel(gateway_socket, f"{tmp_path}/a", is_gateway=True)
    worker = ZmqChannel(worker_socket, f"{tmp_path}/a", is_gateway=False)
    worker._push.send(bytes(FRAME_BYTES_MAX + 1))
    with pytest.raises(ProtocolError, match=f"{FRAME_BYTES_MAX + 1} bytes"):
        receive_frames(gateway)
    worker._push.send(bytes(RECEIVED_BYTES_MAX + 1))
    worker.close()
    assert receive_frames(gateway) == []
    gateway.close()


def test_zmq_frame_after_end_of_file_is_received(tmp_path: Path) -> None:
    """The ZeroMQ thread can deliver frames after the kernel closes the unix socket."""
    gateway_socket, worker_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gateway = ZmqChannel(gateway_socket, f"{tmp_path}/a", is_gateway=True)
    worker = ZmqChannel(worker_socket, f"{tmp_path}/a", is_gateway=False)
    worker.send(b"one")
    assert receive_frames(gateway, 1) == [b"one"]
    worker_socket.shutdown(socket.SHUT_RDWR)
    assert receive_frames(gateway, 0) == [] and not gateway.has_ended
    gateway._ends_ns += 60 * 10**9  # No timeout on a slow machine.
    worker.send(b"late")
    worker.close()
    assert receive_frames(gateway) == [b"late"]
    gateway.close()
