"""Unsent response data of a call: its timeout, and a call that ends while data is charged."""

from __future__ import annotations

from support.http2 import DATA, RST_STREAM, Peer, data, message, window_update
from support.input_arena import in_loop

from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.gateway.transport.http2.frames import PREFIX_BYTES, ErrorCode
from iskander.gateway.transport.http2.status import Status

WINDOW = 65_535
HOUR_NS = 3600 * NS_PER_S


@in_loop
async def test_response_timeout_begins_when_data_is_blocked_again() -> None:
    """The idle time between two blocked responses does not count."""
    peer = Peer()
    peer.open()
    (call,) = peer.calls.values()
    call.send(bytes(WINDOW))
    assert call.is_blocked
    peer.feed(window_update(0, 1 << 20), window_update(1, PREFIX_BYTES))
    assert not call.is_blocked
    call._sent_ns -= HOUR_NS
    call.send(bytes(WINDOW))
    assert call.is_blocked
    call.check_timeouts(now_ns())
    assert not call.is_over and not peer.host.ended
    call.check_timeouts(now_ns() + HOUR_NS)
    assert call.is_over and peer.host.ended == ["response_timeout"]
    (reset,) = peer.frames_of(RST_STREAM)
    assert int.from_bytes(reset.payload) == ErrorCode.CANCEL


@in_loop
async def test_call_that_ends_while_its_response_is_charged_sends_no_data() -> None:
    """The response exceeds the budget; the handler ends the call when its input is evicted."""
    peer = Peer(receive_bytes=1 << 18)
    peer.open()
    (call,) = peer.calls.values()
    peer.feed(data(1, message(bytes(60_000))))
    assert call.unread_bytes

    def on_input() -> None:
        call.end(Status.UNAVAILABLE, "evicted")

    call.on_input = on_input
    call.send(bytes(1 << 18))
    assert call.is_over
    peer.feed(window_update(0, 1 << 20))
    assert peer.frames_of(DATA) == []
    assert peer.answer().status == Status.UNAVAILABLE
    assert peer.host.budget.used_bytes == 0
