"""The socket between gateway and worker: frames whole and in order, and the end after the last."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from iskander.control.channel import FRAME_BYTES_MAX, Channel
from iskander.errors import ProtocolError

Pair = tuple[Channel, Channel]


def pair_of(wait_s: float | None = None) -> Pair:
    """A gateway's end, and one whose `receive` waits that long."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(ours), Channel(theirs, wait_s)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = pair_of()
    yield pair
    for channel in pair:
        channel.close()


def frames(channel: Channel) -> list[bytes]:
    return [bytes(frame) for frame in channel.receive()]


def test_frames_come_whole_and_in_order(pair: Pair) -> None:
    """Sent in one go, of lengths that a stream would cut or join."""
    sent = [bytes([index]) * length for index, length in enumerate((1, 5000, 3, 1, 65_000, 2))]
    for frame in sent:
        pair[0].send(frame)

    assert frames(pair[1]) == sent
    assert not pair[1].has_ended


def test_where_nothing_has_come_there_is_nothing(pair: Pair) -> None:
    assert frames(pair[0]) == frames(pair[1]) == []
    assert not pair[0].has_ended


def test_both_ends_say_and_hear(pair: Pair) -> None:
    pair[0].send(b"there")
    pair[1].send(b"and back")

    assert (frames(pair[1]), frames(pair[0])) == ([b"there"], [b"and back"])


def test_the_end_comes_after_the_last_frame(pair: Pair) -> None:
    pair[1].send(b"one")
    pair[1].send(b"two")
    pair[1].close()

    assert frames(pair[0]) == [b"one", b"two"]
    assert pair[0].has_ended
    assert frames(pair[0]) == []


def test_what_was_sent_is_there_though_its_sender_ended_with_frames_unread(pair: Pair) -> None:
    """The kernel says ECONNRESET once, before it gives what the other side sent before."""
    pair[0].send(b"never read")
    pair[1].send(b"one")
    pair[1].send(b"two")
    pair[1].close()

    assert frames(pair[0]) == [b"one", b"two"]
    assert pair[0].has_ended


def test_a_reset_that_comes_between_two_frames_loses_none(pair: Pair) -> None:
    pair[0].send(b"never read")
    pair[1].send(b"one")
    pair[1].send(b"two")
    received = pair[0].receive()
    first = bytes(next(received))
    pair[1].close()

    assert [first, *(bytes(frame) for frame in received)] == [b"one", b"two"]
    assert pair[0].has_ended


def test_sending_to_one_who_is_gone_is_no_error(pair: Pair) -> None:
    """Whether its end was heard of already or not, and with frames of ours unread or not."""
    pair[0].send(b"never read")
    pair[1].close()

    for _ in range(3):
        pair[0].send(b"nobody hears")
    assert frames(pair[0]) == []
    assert pair[0].has_ended
    pair[0].send(b"nobody hears")


def test_a_wait_for_a_first_frame_ends() -> None:
    """The kernel's timeout: shorter than any test's patience, and nothing was said."""
    gateway, worker = pair_of(wait_s=0.001)

    assert frames(worker) == []
    assert not worker.has_ended
    gateway.send(b"now")
    assert frames(worker) == [b"now"]
    gateway.close()
    assert frames(worker) == [] and worker.has_ended
    worker.close()


def test_only_the_first_frame_is_waited_for() -> None:
    """With an hour to wait: what is there is given, and then the call returns."""
    gateway, worker = pair_of(wait_s=3600.0)
    gateway.send(b"one")
    gateway.send(b"two")

    assert frames(worker) == [b"one", b"two"]
    for channel in (gateway, worker):
        channel.close()


def test_a_frame_lies_in_the_buffer_until_the_next_is_asked_for(pair: Pair) -> None:
    pair[0].send(b"aaaa")
    pair[0].send(b"bb")
    received = pair[1].receive()

    first = next(received)
    assert bytes(first) == b"aaaa"
    assert bytes(next(received)) == b"bb"
    assert bytes(first) == b"bbaa"


def test_the_longest_usual_frame_passes_and_one_too_long_is_an_error(pair: Pair) -> None:
    """A frame is never cut: either all of it arrives or its sender is told."""
    long = bytes(FRAME_BYTES_MAX // 2)
    pair[0].send(long)
    assert frames(pair[1]) == [long]

    with pytest.raises(OSError):
        pair[0].send(bytes(4 * FRAME_BYTES_MAX))
    assert frames(pair[1]) == []


def test_the_socket_can_be_left_open(pair: Pair) -> None:
    """The other side hears of the end when the process ends, and not before."""
    fd = pair[1].fileno()
    pair[1].leave_open()
    pair[1].close()

    assert frames(pair[0]) == [] and not pair[0].has_ended
    socket.socket(fileno=fd).close()
    assert frames(pair[0]) == [] and pair[0].has_ended


def test_a_frame_that_is_too_long_is_not_sent_and_one_that_came_is_named() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel, other = Channel(theirs), Channel(ours)
    with pytest.raises(OSError, match="a frame of"):
        other.send(bytes(FRAME_BYTES_MAX + 1))
    ours.send(bytes(FRAME_BYTES_MAX + 1))
    other.send(bytes(FRAME_BYTES_MAX // 2))
    with pytest.raises(ProtocolError, match=f"{FRAME_BYTES_MAX + 1} bytes"):
        frames(channel)
    assert [len(frame) for frame in frames(channel)] == [FRAME_BYTES_MAX // 2]
    for each in (channel, other):
        each.close()
