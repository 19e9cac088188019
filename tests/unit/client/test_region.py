"""A region's two ends: the client's ring of places, and the gateway that lends it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iskander.client.shared_memory import WORTH_BYTES, Region, _free_start, can_share
from iskander.config.schema import ServerConfig, SharedMemoryConfig
from iskander.control.shared_regions import (
    RegionGrant,
    RegionRequest,
    encode,
    read_body_location,
    read_region_request,
    request_region,
    send_region,
)
from iskander.errors import (
    ConfigError,
    IskanderError,
    LimitExceeded,
    Overloaded,
    RegionNotFound,
    SegmentError,
    Unsupported,
)
from iskander.memory.client_segment import ClientSegment, SegmentRange
from iskander.protocols.flight.regions import RegionServer

KIB = 1024
TIMEOUT_S = 5.0
GONE_S = 5.0


# ---- The ring


@given(
    st.lists(st.one_of(st.integers(1, 40), st.none()), max_size=200),
    st.integers(40, 100),
)
def test_places_never_overlap_and_are_freed_in_order(steps: list[int | None], size: int) -> None:
    places: deque[tuple[int, int]] = deque()
    for length in steps:
        if length is None:
            if places:
                places.popleft()
            continue
        start = _free_start(places, length, size)
        if start is None:
            # Then it is because of what is there: an empty ring has room for anything.
            assert places
            continue
        stop = start + length
        assert 0 <= start < stop <= size
        assert all(stop <= first or last <= start for first, last in places)
        places.append((start, stop))


def test_a_ring_has_room_behind_and_before() -> None:
    assert _free_start(deque(), 100, 100) == 0
    assert _free_start(deque([(0, 60)]), 40, 100) == 60
    assert _free_start(deque([(0, 60)]), 41, 100) is None
    assert _free_start(deque([(50, 60)]), 45, 100) == 0
    assert _free_start(deque([(50, 60), (0, 20)]), 30, 100) == 20
    assert _free_start(deque([(50, 60), (0, 20)]), 31, 100) is None
    assert _free_start(deque([(20, 100), (0, 20)]), 1, 100) is None


def test_what_can_be_shared() -> None:
    word = pa.dictionary(pa.int8(), pa.string())
    for kind in (pa.float32(), pa.list_(pa.float32(), 3), pa.struct([("a", pa.string())])):
        assert can_share(pa.schema([("x", kind)]))
    for kind in (word, pa.list_(word), pa.struct([("a", pa.list_(word))])):
        assert not can_share(pa.schema([("x", pa.int64()), ("y", kind)]))


# ---- Both ends


@contextlib.contextmanager
def lending(
    folder: Path, **settings: int
) -> Iterator[tuple[RegionServer, Path, Callable[..., object]]]:
    """A lender in a loop of its own; what asks it runs a call there."""
    path = folder / "memory"
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def ask(call: Callable[[], object]) -> object:
        async def asked() -> object:
            return call()

        return asyncio.run_coroutine_threadsafe(asked(), loop).result(TIMEOUT_S)

    config = SharedMemoryConfig(path=str(path), **settings)
    regions = ask(lambda: RegionServer(config, ServerConfig(), path))
    assert isinstance(regions, RegionServer)
    ask(regions.start)
    try:
        yield regions, path, ask
    finally:
        ask(regions.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def batch_of(rows: int, seed: int = 0) -> pa.RecordBatch:
    values = np.random.default_rng(seed).standard_normal(rows * 4, np.float32)
    features = pa.FixedSizeListArray.from_arrays(pa.array(values), 4)
    return pa.record_batch([features, pa.array(range(rows))], names=["features", "id"])


def read_at(loan: ClientSegment, message: bytes) -> pa.RecordBatch:
    """The batch that a `Located` says, as Arrow reads it."""
    located = read_body_location(message)
    start, length = located.body
    header = located.header
    prefix = b"\xff\xff\xff\xff" + len(header).to_bytes(4, "little")
    schema = batch_of(1).schema
    return pa.ipc.read_record_batch(
        pa.py_buffer(prefix + header + bytes(SegmentRange(loan, start, start + length).read())),
        schema,
    )


def until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GONE_S
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_batch_is_read_where_it_was_put(tmp_path: Path) -> None:
    with lending(tmp_path) as (regions, path, ask):
        region = Region(path, 512 * KIB, TIMEOUT_S)
        region.begin(batch_of(1).schema)
        assert ask(lambda: dict(regions.allocated)) == {region.name: 512 * KIB}
        assert len(region.name) == 32
        loan = ask(lambda: regions.find(region.name))
        assert isinstance(loan, ClientSegment)
        sent = [batch_of(6000, seed) for seed in range(3)]
        put = [region.put(batch, b"mine") for batch in sent]
        for batch, message in zip(sent, put, strict=True):
            assert message is not None
            assert read_body_location(message).app_metadata == b"mine"
            assert read_at(loan, message).equals(batch)
        # A slice is what it shows, no more.
        region.free()
        part = region.put(sent[0].slice(100, 5000))
        assert part is not None
        assert read_at(loan, part).equals(sent[0].slice(100, 5000))
        region.close()
        until(lambda: not regions.allocated)


def test_what_is_small_or_too_large_is_sent_otherwise(tmp_path: Path) -> None:
    with lending(tmp_path) as (_, path, _ask):
        region = Region(path, 128 * KIB, TIMEOUT_S)
        region.begin(batch_of(1).schema)
        assert batch_of(10).nbytes < WORTH_BYTES
        assert region.put(batch_of(10)) is None
        assert region.put(batch_of(10_000)) is None
        assert region.put(batch_of(4000)) is not None
        region.close()


def test_who_waits_for_a_place_goes_on_when_one_is_free_or_the_stream_ends(tmp_path: Path) -> None:
    with lending(tmp_path) as (_, path, _ask):
        region = Region(path, 160 * KIB, TIMEOUT_S)
        region.begin(batch_of(1).schema)
        assert region.put(batch_of(4000)) is not None
        got: list[bytes | None] = []
        waiting = threading.Thread(target=lambda: got.append(region.put(batch_of(4000, 1))))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        region.free()
        waiting.join(TIMEOUT_S)
        assert got[0] is not None
        ending = threading.Thread(target=lambda: got.append(region.put(batch_of(4000, 2))))
        ending.start()
        region.cancel_waits()
        ending.join(TIMEOUT_S)
        assert got[1] is None
        region.begin(batch_of(1).schema)
        assert region.put(batch_of(4000)) is not None
        region.close()


def test_the_memory_cannot_be_taken_away(tmp_path: Path) -> None:
    with lending(tmp_path) as (_, path, _ask):
        connection, lent, fd = request_region(path, 64 * KIB, TIMEOUT_S)
        assert os.fstat(fd).st_size == lent.bytes == 64 * KIB
        for length in (0, 128 * KIB):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, length)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, 1033, 0)  # F_ADD_SEALS: nobody can make it unwritable either.
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        os.close(fd)
        connection.close()


def test_a_region_ends_with_its_connection(tmp_path: Path) -> None:
    with lending(tmp_path) as (regions, path, ask):
        region = Region(path, 64 * KIB, TIMEOUT_S)
        assert region.is_attached
        kept = ask(lambda: SegmentRange(regions.find(region.name), 0, 10))
        region.close()
        until(lambda: not regions.allocated)
        with pytest.raises(RegionNotFound, match="ends with the connection"):
            ask(lambda: regions.find(region.name))
        assert isinstance(kept, SegmentRange)
        assert bytes(kept.read()) == bytes(10)  # What was on its way has its bytes still.


def test_a_client_sees_that_its_region_is_no_more(tmp_path: Path) -> None:
    with lending(tmp_path) as (_, path, _ask):
        region = Region(path, 64 * KIB, TIMEOUT_S)
    assert not region.is_attached
    region.close()


def test_bounds(tmp_path: Path) -> None:
    with lending(tmp_path, region_bytes=128 * KIB, total_bytes=192 * KIB, regions=2) as lender:
        regions, path, _ = lender
        for length in (128 * KIB + 1, 1 << 60):
            with pytest.raises(LimitExceeded, match="131072 bytes"):
                Region(path, length, TIMEOUT_S)
        for length in (0, -1):
            with pytest.raises(IskanderError, match="wanted a number of bytes"):
                Region(path, length, TIMEOUT_S)
        first = Region(path, 128 * KIB, TIMEOUT_S)
        with pytest.raises(Overloaded, match="1 regions with 131072 bytes"):
            Region(path, 65 * KIB, TIMEOUT_S)
        second = Region(path, 4 * KIB, TIMEOUT_S)
        with pytest.raises(Overloaded, match="2 regions") as caught:
            Region(path, 4 * KIB, TIMEOUT_S)
        assert caught.value.retry_after_ms
        second.close()
        until(lambda: len(regions.allocated) == 1)
        Region(path, 4 * KIB, TIMEOUT_S).close()
        first.close()


@pytest.mark.parametrize(
    "frame",
    [b"nonsense", b"\x80", encode({"bytes": "much"}), encode({"bytes": 1, "name": "/etc/passwd"})],
)
def test_nonsense_is_told_so_and_holds_nobody_up(tmp_path: Path, frame: bytes) -> None:
    with lending(tmp_path) as (regions, path, _ask):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
            silent.connect(str(path))
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                peer.settimeout(TIMEOUT_S)
                peer.connect(str(path))
                peer.sendall(frame)
                lent = msgspec.msgpack.decode(peer.recv(4096), type=RegionGrant)
                assert lent.error is not None
                assert lent.error["code"] == "malformed"
                assert peer.recv(1) == b""
            region = Region(path, 4 * KIB, TIMEOUT_S)
            silent.settimeout(TIMEOUT_S)
            silent.recv(4096)  # It is let go after a second.
        region.close()
        until(lambda: not regions.allocated)


def test_who_talks_on_loses_its_region(tmp_path: Path) -> None:
    with lending(tmp_path) as (regions, path, _ask):
        connection, _, fd = request_region(path, 4 * KIB, TIMEOUT_S)
        connection.sendall(encode(RegionRequest(4 * KIB)))
        until(lambda: not regions.allocated)
        os.close(fd)
        connection.close()


def test_nobody_lends_where_no_path_is_set(tmp_path: Path) -> None:
    async def refused() -> None:
        regions = RegionServer(SharedMemoryConfig(), ServerConfig(), tmp_path)
        regions.start()
        with pytest.raises(Unsupported, match=r"shared_memory\.path"):
            regions.describe()
        regions.close()

    asyncio.run(refused())


def test_a_path_that_another_process_has(tmp_path: Path) -> None:
    with lending(tmp_path) as (_, path, _ask), pytest.raises(ConfigError, match="another process"):

        async def second() -> None:
            RegionServer(SharedMemoryConfig(path=str(path)), ServerConfig(), path).start()

        asyncio.run(second())


def test_an_answer_that_is_none() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        send_region(here, RegionGrant("name", 5))
        frame, descriptors, _, _ = socket.recv_fds(there, 4096, 1)
        assert not descriptors
        assert msgspec.msgpack.decode(frame, type=RegionGrant) == RegionGrant("name", 5)


def test_a_loan_is_read_and_takes_no_memory_for_what_was_never_written() -> None:
    loan = ClientSegment("iskander-test", 10 * KIB)
    fd = os.dup(loan.fd)
    assert bytes(SegmentRange(loan, 0, len(loan)).read()) == bytes(10 * KIB)
    assert os.fstat(fd).st_blocks == 0
    os.pwrite(fd, b"here", 5000)
    part = SegmentRange(loan, 4000, 6000)[1000:1004]
    assert (len(part), bytes(part.read())) == (4, b"here")
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.pwrite(fd, bytes(range(256)) * 40, 0)
    assert bytes(SegmentRange(loan, 255, 258).read()) == bytes([255, 0, 1])
    assert bytes(part.read()) == bytes(SegmentRange(loan, 0, len(loan)).read()[5000:5004])
    where = Path(f"/proc/self/fd/{loan.fd}")
    del loan
    assert where.exists()
    assert bytes(part.read()) == bytes([136, 137, 138, 139])
    del part
    assert not where.exists()
    assert os.fstat(fd).st_blocks == 0  # Whoever has the descriptor still has no memory by it.
    os.close(fd)


def test_nothing_is_read_of_an_empty_range() -> None:
    loan = ClientSegment("iskander-test", 8 * KIB)
    for at in (0, 1, 4 * KIB, 8 * KIB):
        assert bytes(SegmentRange(loan, at, at).read()) == b""


def test_a_read_that_the_system_refuses_is_an_error() -> None:
    loan = ClientSegment("iskander-test", KIB)
    with pytest.raises(SegmentError, match="shorter"):
        loan.read_into(memoryview(bytearray(2)), KIB - 1)
    fd, loan.fd = loan.fd, -1
    with pytest.raises(SegmentError, match="reading a client segment failed"):
        SegmentRange(loan, 0, 1).read()
    loan.fd = fd


def test_frames_are_read_back() -> None:
    assert read_region_request(encode(RegionRequest(5))) == RegionRequest(5)
