"""Input of subscribers: handshake, subscriptions of both ZMTP versions, limits, invalid input."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iskander.gateway.event_stream.subscriptions import (
    FRAME_BYTES_MAX,
    MATCHES_MAX,
    SUBSCRIPTIONS_MAX,
    Subscriptions,
)
from iskander.gateway.transport.zmtp import frames
from iskander.gateway.transport.zmtp.frames import ProtocolViolation

READY = frames.ready(Socket_Type=b"SUB")
HANDSHAKE = frames.GREETING + READY


def message(body: bytes) -> bytes:
    return b"".join(frames.message((body,)))


def ready() -> Subscriptions:
    subscriptions = Subscriptions()
    assert subscriptions.feed(HANDSHAKE) == frames.ready(Socket_Type=b"PUB")
    return subscriptions


def numbered(count: int) -> bytes:
    return b"".join(message(b"\x01%d" % number) for number in range(count))


@pytest.mark.parametrize("kind", [b"SUB", b"XSUB"])
def test_topics_are_selected_by_their_begin(kind: bytes) -> None:
    subscriptions = Subscriptions()
    subscriptions.feed(frames.GREETING)
    assert not subscriptions.is_ready
    subscriptions.feed(frames.ready(Socket_Type=kind))
    assert subscriptions.is_ready and not subscriptions.select(b"worker")
    subscriptions.feed(message(b"\x01completion/") + frames.command(b"SUBSCRIBE", b"worker"))
    assert subscriptions.select(b"completion/ids/1") and subscriptions.select(b"worker")
    assert not subscriptions.select(b"completion") and not subscriptions.select(b"heartbeat")
    subscriptions.feed(message(b"\x00completion/") + frames.command(b"CANCEL", b"worker"))
    assert not subscriptions.select(b"completion/ids/1") and not subscriptions.select(b"worker")
    subscriptions.feed(message(b"\x01"))
    assert subscriptions.select(b"heartbeat")


def test_any_number_of_topics_is_selected_with_a_bounded_cache() -> None:
    subscriptions = ready()
    subscriptions.feed(message(b"\x01even"))
    for number in range(2 * MATCHES_MAX + 1):
        assert subscriptions.select(b"even/%d" % number)
        assert not subscriptions.select(b"odd/%d" % number)
        assert len(subscriptions._matches) <= MATCHES_MAX


@given(st.lists(st.integers(1, 40), max_size=30))
def test_input_may_arrive_in_any_pieces(sizes: list[int]) -> None:
    whole = HANDSHAKE + message(b"\x01a") + frames.command(b"PING", b"\0\0x") + message(b"\x01bc")
    subscriptions, at, answer = Subscriptions(), 0, b""
    for size in [*sizes, len(whole)]:
        answer += subscriptions.feed(whole[at : at + size])
        at += size
    assert subscriptions.select(b"a") and subscriptions.select(b"bcd")
    assert not subscriptions.select(b"b")
    assert answer == frames.ready(Socket_Type=b"PUB") + frames.command(b"PONG", b"x")


def test_number_of_subscriptions_is_limited() -> None:
    subscriptions = ready()
    subscriptions.feed(numbered(SUBSCRIPTIONS_MAX) * 2)
    assert subscriptions.select(b"%d" % (SUBSCRIPTIONS_MAX - 1))
    with pytest.raises(ProtocolViolation, match="more than 256 subscriptions"):
        subscriptions.feed(message(b"\x01other"))


def test_canceled_subscriptions_are_not_counted() -> None:
    subscriptions = ready()
    for number in range(3 * SUBSCRIPTIONS_MAX):
        subscriptions.feed(message(b"\x01%d" % number) + message(b"\x00%d" % number))


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n",
        frames.GREETING + message(b"\x01early"),
        frames.GREETING + frames.command(b"SUBSCRIBE", b"early"),
        frames.GREETING + frames.ready(Socket_Type=b"DEALER"),
        frames.GREETING + frames.ready(Identity=b"x"),
        HANDSHAKE + READY,
        HANDSHAKE + message(b"\x02"),
        HANDSHAKE + message(b""),
        HANDSHAKE + frames.head(FRAME_BYTES_MAX + 1, 0),
        HANDSHAKE + frames.head(1 << 40, frames.COMMAND),
        HANDSHAKE + b"\xff\x01",
    ],
)
def test_invalid_input_is_rejected(sent: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        Subscriptions().feed(sent)


@given(st.binary(max_size=300))
def test_any_input_is_accepted_or_rejected(sent: bytes) -> None:
    for subscriptions in (Subscriptions(), ready()):
        with contextlib.suppress(ProtocolViolation):
            subscriptions.feed(sent)
        subscriptions.select(b"topic")
