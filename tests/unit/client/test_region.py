"""Shared-memory regions: the client's ring of ranges, and the gateway's region server."""

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

from iskander.client.calls.shared_memory import Region, _free_start
from iskander.client.calls.sharing import WORTH_BYTES, can_share
from iskander.config.schema import ServerConfig, SharedMemoryConfig
from iskander.errors import (
    ConfigError,
    IskanderError,
    LimitExceeded,
    Overloaded,
    RegionNotFound,
    SegmentError,
    Unsupported,
)
from iskander.gateway.auth.shares import IDLE_NS
from iskander.gateway.protocols.flight import regions as server_regions
from iskander.gateway.protocols.flight.regions import RegionServer
from iskander.gateway.transport.local_listener import GREETINGS_MAX
from iskander.interprocess.control.shared_regions import (
    RegionGrant,
    RegionRequest,
    encode,
    read_body_location,
    read_region_request,
    request_region,
    send_region,
)
from iskander.interprocess.memory.client_segment import ClientSegment, SegmentRange

KIB = 1024
TIMEOUT_S = 5.0
WAIT_S = 5.0


# ---- The ring


@given(
    st.lists(st.one_of(st.integers(1, 40), st.none()), max_size=200),
    st.integers(40, 100),
)
def test_ring_ranges_never_overlap_and_are_freed_in_order(
    steps: list[int | None], size: int
) -> None:
    ranges: deque[tuple[int, int]] = deque()
    for length in steps:
        if length is None:
            if ranges:
                ranges.popleft()
            continue
        start = _free_start(ranges, length, size)
        if start is None:
            # An empty ring has space for any range up to its size.
            assert ranges
            continue
        stop = start + length
        assert 0 <= start < stop <= size
        assert all(stop <= first or last <= start for first, last in ranges)
        ranges.append((start, stop))


def test_ring_uses_free_space_after_and_before_its_ranges() -> None:
    assert _free_start(deque(), 100, 100) == 0
    assert _free_start(deque([(0, 60)]), 40, 100) == 60
    assert _free_start(deque([(0, 60)]), 41, 100) is None
    assert _free_start(deque([(50, 60)]), 45, 100) == 0
    assert _free_start(deque([(50, 60), (0, 20)]), 30, 100) == 20
    assert _free_start(deque([(50, 60), (0, 20)]), 31, 100) is None
    assert _free_start(deque([(20, 100), (0, 20)]), 1, 100) is None


def test_schemas_with_dictionaries_cannot_be_shared() -> None:
    word = pa.dictionary(pa.int8(), pa.string())
    for kind in (pa.float32(), pa.list_(pa.float32(), 3), pa.struct([("a", pa.string())])):
        assert can_share(pa.schema([("x", kind)]))
    for kind in (word, pa.list_(word), pa.struct([("a", pa.list_(word))])):
        assert not can_share(pa.schema([("x", pa.int64()), ("y", kind)]))


# ---- Client and server


@contextlib.contextmanager
def region_server(
    folder: Path, **settings: int
) -> Iterator[tuple[RegionServer, Path, Callable[..., object]]]:
    """Run a region server in its own event loop; yields it, its path and `run_in_loop`."""
    path = folder / "memory"
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run_in_loop(call: Callable[[], object]) -> object:
        async def run() -> object:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), loop).result(TIMEOUT_S)

    config = SharedMemoryConfig(path=str(path), **settings)
    regions = run_in_loop(lambda: RegionServer(config, ServerConfig(), path))
    assert isinstance(regions, RegionServer)
    run_in_loop(regions.start)
    try:
        yield regions, path, run_in_loop
    finally:
        run_in_loop(regions.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def batch_of(rows: int, seed: int = 0) -> pa.RecordBatch:
    values = np.random.default_rng(seed).standard_normal(rows * 4, np.float32)
    features = pa.FixedSizeListArray.from_arrays(pa.array(values), 4)
    return pa.record_batch([features, pa.array(range(rows))], names=["features", "id"])


def read_at(segment: ClientSegment, message: bytes) -> pa.RecordBatch:
    """Read the batch at a body location with Arrow."""
    location = read_body_location(message)
    start, length = location.body
    header = location.header
    prefix = b"\xff\xff\xff\xff" + len(header).to_bytes(4, "little")
    schema = batch_of(1).schema
    return pa.ipc.read_record_batch(
        pa.py_buffer(prefix + header + bytes(SegmentRange(segment, start, start + length).read())),
        schema,
    )


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_put_batch_is_read_from_the_segment(tmp_path: Path) -> None:
    with region_server(tmp_path) as (regions, path, run_in_loop):
        region = Region(path, 512 * KIB, TIMEOUT_S)
        region.begin(batch_of(1).schema)
        assert run_in_loop(lambda: dict(regions.allocated)) == {region.name: 512 * KIB}
        assert len(region.name) == 32
        segment = run_in_loop(lambda: regions.find(region.name))
        assert isinstance(segment, ClientSegment)
        sent = [batch_of(6000, seed) for seed in range(3)]
        put = [region.put(batch, b"mine") for batch in sent]
        for batch, message in zip(sent, put, strict=True):
            assert message is not None
            assert read_body_location(message).app_metadata == b"mine"
            assert read_at(segment, message).equals(batch)
        # Only the rows of a slice are put.
        region.free()
        sliced = region.put(sent[0].slice(100, 5000))
        assert sliced is not None
        assert read_at(segment, sliced).equals(sent[0].slice(100, 5000))
        region.close()
        wait_until(lambda: not regions.allocated)


def test_small_and_too_large_batches_are_not_put(tmp_path: Path) -> None:
    with region_server(tmp_path) as (_, path, _ask):
        region = Region(path, 128 * KIB, TIMEOUT_S)
        region.begin(batch_of(1).schema)
        assert batch_of(10).nbytes < WORTH_BYTES
        assert region.put(batch_of(10)) is None
        assert region.put(batch_of(10_000)) is None
        assert region.put(batch_of(4000)) is not None
        region.close()


def test_put_waits_until_space_is_free_or_waits_are_cancelled(tmp_path: Path) -> None:
    with region_server(tmp_path) as (_, path, _ask):
        region = Region(path, 160 * KIB, TIMEOUT_S)
        region.begin(batch_of(1).schema)
        assert region.put(batch_of(4000)) is not None
        results: list[bytes | None] = []
        waiting_thread = threading.Thread(
            target=lambda: results.append(region.put(batch_of(4000, 1)))
        )
        waiting_thread.start()
        waiting_thread.join(0.1)
        assert waiting_thread.is_alive()
        region.free()
        waiting_thread.join(TIMEOUT_S)
        assert results[0] is not None
        cancelled_thread = threading.Thread(
            target=lambda: results.append(region.put(batch_of(4000, 2)))
        )
        cancelled_thread.start()
        region.cancel_waits()
        cancelled_thread.join(TIMEOUT_S)
        assert results[1] is None
        region.begin(batch_of(1).schema)
        assert region.put(batch_of(4000)) is not None
        region.close()


def test_client_cannot_resize_or_seal_the_memory(tmp_path: Path) -> None:
    with region_server(tmp_path) as (_, path, _ask):
        connection, grant, fd = request_region(path, 64 * KIB, TIMEOUT_S)
        assert os.fstat(fd).st_size == grant.bytes == 64 * KIB
        for length in (0, 128 * KIB):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, length)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, 1033, 0)  # F_ADD_SEALS: clients cannot add a write seal.
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        os.close(fd)
        connection.close()


def test_region_is_removed_when_its_connection_closes(tmp_path: Path) -> None:
    with region_server(tmp_path) as (regions, path, run_in_loop):
        region = Region(path, 64 * KIB, TIMEOUT_S)
        assert region.is_attached
        kept = run_in_loop(lambda: SegmentRange(regions.find(region.name), 0, 10))
        region.close()
        wait_until(lambda: not regions.allocated)
        with pytest.raises(RegionNotFound, match="ends with the connection"):
            run_in_loop(lambda: regions.find(region.name))
        assert isinstance(kept, SegmentRange)
        assert bytes(kept.read()) == bytes(10)  # A range in flight keeps its bytes.


def test_client_detects_a_closed_server(tmp_path: Path) -> None:
    with region_server(tmp_path) as (_, path, _ask):
        region = Region(path, 64 * KIB, TIMEOUT_S)
    assert not region.is_attached
    region.close()


def test_region_limits(tmp_path: Path) -> None:
    with region_server(
        tmp_path, region_bytes=128 * KIB, total_bytes=192 * KIB, regions=2
    ) as server:
        regions, path, _ = server
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
        wait_until(lambda: len(regions.allocated) == 1)
        Region(path, 4 * KIB, TIMEOUT_S).close()
        first.close()


def test_unused_region_is_released_for_a_process_with_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process with all regions, and another one; a used region stays."""
    process = [1]
    monkeypatch.setattr(server_regions, "process_of", lambda _: (0, process[0]))
    with region_server(tmp_path, regions=3) as (regions, path, run_in_loop):
        unused, used, latest = (Region(path, KIB, TIMEOUT_S) for _ in range(3))
        process[0] = 2
        with pytest.raises(Overloaded, match="3 regions"):
            Region(path, KIB, TIMEOUT_S)
        for region in regions._regions.values():
            region.used_ns -= IDLE_NS
        run_in_loop(lambda: regions.find(used.name))
        other = Region(path, KIB, TIMEOUT_S)
        wait_until(lambda: not unused.is_attached)
        assert used.is_attached and latest.is_attached and other.is_attached
        with pytest.raises(RegionNotFound):
            run_in_loop(lambda: regions.find(unused.name))
        for each in (unused, used, latest, other):
            each.close()


def test_region_waits_for_a_full_backlog(tmp_path: Path) -> None:
    """A gateway that is busy for a moment accepts later; one that never accepts is an error."""
    path = tmp_path / "memory"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(str(path))
        listener.listen(0)
        waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        waiting.connect(str(path))
        with pytest.raises(BlockingIOError):
            Region(path, KIB, 0.05)

        def accept() -> None:
            for _ in range(2):
                stack.enter_context(listener.accept()[0]).sendall(encode({"error": {}}))

        thread = threading.Timer(0.1, accept)
        thread.start()
        with pytest.raises(IskanderError):
            Region(path, KIB, TIMEOUT_S)
        thread.join()


def test_connections_without_a_greeting_do_not_lock_out_others(tmp_path: Path) -> None:
    with region_server(tmp_path) as (_, path, _), contextlib.ExitStack() as stack:
        for _ in range(2 * GREETINGS_MAX):
            silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(silent)
            silent.connect(str(path))
        Region(path, KIB, TIMEOUT_S).close()


@pytest.mark.long
@pytest.mark.parametrize(
    "frame",
    [b"nonsense", b"\x80", encode({"bytes": "much"}), encode({"bytes": 1, "name": "/etc/passwd"})],
)
def test_malformed_requests_get_an_error_and_do_not_block_others(
    tmp_path: Path, frame: bytes
) -> None:
    with region_server(tmp_path) as (regions, path, _ask):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
            silent.connect(str(path))
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                peer.settimeout(TIMEOUT_S)
                peer.connect(str(path))
                peer.sendall(frame)
                grant = msgspec.msgpack.decode(peer.recv(4096), type=RegionGrant)
                assert grant.error is not None
                assert grant.error["code"] == "malformed"
                assert peer.recv(1) == b""
            region = Region(path, 4 * KIB, TIMEOUT_S)
            silent.settimeout(TIMEOUT_S)
            silent.recv(4096)  # The server closes it after one second.
        region.close()
        wait_until(lambda: not regions.allocated)


def test_second_request_on_a_connection_removes_its_region(tmp_path: Path) -> None:
    with region_server(tmp_path) as (regions, path, _ask):
        connection, _, fd = request_region(path, 4 * KIB, TIMEOUT_S)
        connection.sendall(encode(RegionRequest(4 * KIB)))
        wait_until(lambda: not regions.allocated)
        os.close(fd)
        connection.close()


def test_regions_are_unsupported_without_a_path(tmp_path: Path) -> None:
    async def check() -> None:
        regions = RegionServer(SharedMemoryConfig(), ServerConfig(), tmp_path)
        regions.start()
        with pytest.raises(Unsupported, match=r"shared_memory\.path"):
            regions.describe()
        regions.close()

    asyncio.run(check())


def test_path_used_by_another_process_is_an_error(tmp_path: Path) -> None:
    with (
        region_server(tmp_path) as (_, path, _ask),
        pytest.raises(ConfigError, match="another process"),
    ):

        async def second() -> None:
            RegionServer(SharedMemoryConfig(path=str(path)), ServerConfig(), path).start()

        asyncio.run(second())


def test_grant_without_a_segment_has_no_descriptor() -> None:
    local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with local, remote:
        send_region(local, RegionGrant("name", 5))
        frame, descriptors, _, _ = socket.recv_fds(remote, 4096, 1)
        assert not descriptors
        assert msgspec.msgpack.decode(frame, type=RegionGrant) == RegionGrant("name", 5)


def test_segment_reads_allocate_no_memory() -> None:
    segment = ClientSegment("iskander-test", 10 * KIB)
    fd = os.dup(segment.fd)
    assert bytes(SegmentRange(segment, 0, len(segment)).read()) == bytes(10 * KIB)
    assert os.fstat(fd).st_blocks == 0
    os.pwrite(fd, b"here", 5000)
    part = SegmentRange(segment, 4000, 6000)[1000:1004]
    assert (len(part), bytes(part.read())) == (4, b"here")
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.pwrite(fd, bytes(range(256)) * 40, 0)
    assert bytes(SegmentRange(segment, 255, 258).read()) == bytes([255, 0, 1])
    assert bytes(part.read()) == bytes(SegmentRange(segment, 0, len(segment)).read()[5000:5004])
    link = Path(f"/proc/self/fd/{segment.fd}")
    del segment
    assert link.exists()
    assert bytes(part.read()) == bytes([136, 137, 138, 139])
    del part
    assert not link.exists()
    assert os.fstat(fd).st_blocks == 0  # The remaining descriptor keeps no memory allocated.
    os.close(fd)


def test_empty_range_reads_no_bytes() -> None:
    segment = ClientSegment("iskander-test", 8 * KIB)
    for offset in (0, 1, 4 * KIB, 8 * KIB):
        assert bytes(SegmentRange(segment, offset, offset).read()) == b""


def test_failed_read_is_a_segment_error() -> None:
    segment = ClientSegment("iskander-test", KIB)
    with pytest.raises(SegmentError, match="shorter"):
        segment.read_into(memoryview(bytearray(2)), KIB - 1)
    fd, segment.fd = segment.fd, -1
    with pytest.raises(SegmentError, match="reading a client segment failed"):
        SegmentRange(segment, 0, 1).read()
    segment.fd = fd


def test_region_request_round_trips() -> None:
    assert read_region_request(encode(RegionRequest(5))) == RegionRequest(5)
