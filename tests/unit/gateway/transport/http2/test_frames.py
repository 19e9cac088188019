"""HTTP/2 frames compared with `hyperframe`, and rate limits on control frames."""

from __future__ import annotations

import hyperframe.frame as reference
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iskander.foundation.clock import NS_PER_S
from iskander.gateway.transport.http2 import frames
from iskander.gateway.transport.http2.frames import ConnectionBroken, ErrorCode
from iskander.gateway.transport.http2.rate_limit import BURST, PER_S, RateLimiter

stream_ids = st.integers(1, frames.WINDOW_MAX)


def parse_with_hyperframe(raw: bytes) -> reference.Frame:
    frame, length = reference.Frame.parse_frame_header(memoryview(raw[:9]))
    assert length == len(raw) - 9
    frame.parse_body(memoryview(raw[9:]))
    return frame


@given(st.integers(0, frames.FRAME_BYTES_MAX), st.integers(0, 9), st.integers(0, 255), stream_ids)
def test_frame_head_round_trip(length: int, kind: int, flags: int, stream_id: int) -> None:
    raw = frames.head(length, kind, flags, stream_id)
    high, low, *rest = frames.read_head(raw)

    assert len(raw) == frames.HEAD_BYTES
    assert (high << 16 | low, *rest) == (length, kind, flags, stream_id)
    assert int.from_bytes(raw[:3]) == length


def test_settings_frame_matches_hyperframe() -> None:
    values = {frames.MAX_CONCURRENT_STREAMS: 7, frames.INITIAL_WINDOW_SIZE: frames.WINDOW_MAX}

    frame = parse_with_hyperframe(frames.settings(values))
    assert isinstance(frame, reference.SettingsFrame) and frame.settings == values


@given(stream_ids, st.integers(1, frames.WINDOW_MAX), st.sampled_from(ErrorCode))
def test_window_update_rst_stream_and_goaway_match_hyperframe(
    stream_id: int, increment: int, code: ErrorCode
) -> None:
    update = parse_with_hyperframe(frames.window_update(stream_id, increment))
    reset = parse_with_hyperframe(frames.rst_stream(stream_id, code))
    goaway = parse_with_hyperframe(frames.goaway(stream_id, code, "why"))

    assert isinstance(update, reference.WindowUpdateFrame) and update.window_increment == increment
    assert isinstance(reset, reference.RstStreamFrame) and reset.error_code == code
    assert update.stream_id == reset.stream_id == stream_id
    assert isinstance(goaway, reference.GoAwayFrame) and goaway.additional_data == b"why"
    assert (goaway.last_stream_id, goaway.error_code) == (stream_id, code)


def test_settings_keep_their_order() -> None:
    pairs = [(4, 1), (99, 5), (4, 2), (5, 16_384)]
    raw = b"".join(name.to_bytes(2) + value.to_bytes(4) for name, value in pairs)

    assert frames.read_settings(memoryview(raw)) == pairs


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"\0\4\0\0\0", ErrorCode.FRAME_SIZE_ERROR),
        (b"\0\4\x80\0\0\0", ErrorCode.FLOW_CONTROL_ERROR),
        (b"\0\5\0\0\x3f\xff", ErrorCode.PROTOCOL_ERROR),
        (b"\0\5\1\0\0\0", ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_invalid_settings_are_rejected(raw: bytes, code: ErrorCode) -> None:
    with pytest.raises(ConnectionBroken) as caught:
        frames.read_settings(memoryview(raw))
    assert caught.value.code is code


def test_numbers_have_31_bits() -> None:
    assert frames.read_number(memoryview(b"\xff\xff\xff\xff")) == frames.WINDOW_MAX
    with pytest.raises(ConnectionBroken) as caught:
        frames.read_number(memoryview(b"\0\0\0"))
    assert caught.value.code is ErrorCode.FRAME_SIZE_ERROR


@given(st.binary(max_size=50), st.none() | st.integers(0, 255), st.booleans())
def test_padding_and_priority_are_removed(
    payload: bytes, padding: int | None, has_priority: bool
) -> None:
    raw = b"p" * 5 * has_priority + payload
    flags = frames.HAS_PRIORITY * has_priority
    if padding is not None:
        raw = bytes([padding]) + raw + bytes(padding)
        flags |= frames.PADDED

    assert frames.unpadded(memoryview(raw), flags) == payload


@pytest.mark.parametrize(
    ("raw", "flags"),
    [
        (b"", frames.PADDED),
        (b"\1", frames.PADDED),
        (b"\5abcd", frames.PADDED),
        (b"abcd", frames.HAS_PRIORITY),
        (b"\2ppppp.", frames.PADDED | frames.HAS_PRIORITY),
    ],
)
def test_padding_longer_than_the_payload_is_rejected(raw: bytes, flags: int) -> None:
    with pytest.raises(ConnectionBroken) as caught:
        frames.unpadded(memoryview(raw), flags)
    assert caught.value.code is ErrorCode.PROTOCOL_ERROR


def test_rate_limit_allows_a_burst_and_refills_with_time() -> None:
    limiter = RateLimiter(0)
    for _ in range(BURST):
        limiter.charge(0)
    for second in (1, 2):
        for _ in range(PER_S):
            limiter.charge(second * NS_PER_S)
    with pytest.raises(ConnectionBroken) as caught:
        limiter.charge(2 * NS_PER_S)
    assert caught.value.code is ErrorCode.ENHANCE_YOUR_CALM


def test_rate_limit_does_not_accumulate_above_the_burst() -> None:
    limiter = RateLimiter(0)
    for _ in range(BURST):
        limiter.charge(1000 * NS_PER_S)
    with pytest.raises(ConnectionBroken):
        limiter.charge(1000 * NS_PER_S)
