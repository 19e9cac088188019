"""Frames of reader processes: headers and errors that a gateway accepts."""

from __future__ import annotations

import msgspec
import pytest

from iskander.errors import IskanderError, LimitExceeded, ReaderLost, SourceNotFound
from iskander.gateway.sources.messages import HEAD, METADATA_BYTES_MAX, Kind, read_error, read_head

FRAME_BYTES = 1000


def test_header_is_read() -> None:
    assert read_head(HEAD.pack(Kind.BATCH, 3, 40, 500), FRAME_BYTES) == (Kind.BATCH, 3, 40, 500)


@pytest.mark.parametrize("sizes", [(METADATA_BYTES_MAX + 1, 0), (0, FRAME_BYTES + 1)])
def test_size_above_its_limit_is_rejected(sizes: tuple[int, int]) -> None:
    with pytest.raises(LimitExceeded, match="limit 1,000"):
        read_head(HEAD.pack(Kind.BATCH, 1, *sizes), FRAME_BYTES)


def test_unknown_kind_is_a_lost_reader() -> None:
    with pytest.raises(ReaderLost, match="a frame of kind 9"):
        read_head(HEAD.pack(9, 0, 0, 0), FRAME_BYTES)


def test_error_of_a_reader_is_decoded() -> None:
    raw = msgspec.msgpack.encode(SourceNotFound("gone").to_wire())
    assert isinstance(read_error(memoryview(raw)), SourceNotFound)


@pytest.mark.parametrize("raw", [b"", b"\x05", b"\x81\x01\x02", b"\x81\xa1\xff\xc0"])
def test_unreadable_error_is_a_lost_reader(raw: bytes) -> None:
    error = read_error(memoryview(raw))
    assert isinstance(error, ReaderLost) and isinstance(error, IskanderError)
