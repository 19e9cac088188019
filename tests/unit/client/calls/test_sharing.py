"""Use of shared memory: suitable batches, failures, deadlines, and the release of regions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from iskander.client.calls import shared_memory
from iskander.client.calls.cancellation import OpenCalls
from iskander.client.calls.connection import Connection
from iskander.client.calls.credentials import Credentials
from iskander.client.calls.retry import Deadline
from iskander.client.calls.shared_memory import RegionPool
from iskander.client.calls.sharing import RETRY_SHARED_S, WORTH_BYTES, Sharing
from iskander.client.calls.targets import Address
from iskander.errors import (
    ConfigError,
    ConnectionFailed,
    DeadlineExceeded,
    Draining,
    IskanderError,
    ModelNotFound,
    NotReady,
    Overloaded,
    PermissionDenied,
    ProtocolError,
    Unauthenticated,
    Unsupported,
)
from iskander.foundation.clock import NS_PER_S

LARGE = pa.record_batch({"x": np.arange(WORTH_BYTES // 8)})
SMALL = LARGE.slice(1)
CODED = pa.record_batch({"x": pa.array(np.arange(WORTH_BYTES)).dictionary_encode()})
LENGTH = 1 << 20


class FakeRegion:
    """A region, or the error of the gateway's socket."""

    made: list[FakeRegion]
    error: Exception | None

    def __init__(self, path: Path, length_bytes: int, timeout_s: float) -> None:
        if self.error is not None:
            raise self.error
        self.length_bytes, self.timeout_s = length_bytes, timeout_s
        self.name = str(len(self.made))
        self.is_attached = True
        self.is_closed = False
        self.made.append(self)

    def begin(self, schema: pa.Schema) -> None:
        self.schema = schema

    def close(self) -> None:
        self.is_closed = True


class World:
    """A gateway and a clock."""

    def __init__(self) -> None:
        self.ns = 0
        self.asked: list[float] = []
        self.answer: tuple[Path, int] | Exception = (Path("/run/memory"), LENGTH)

    def ask(self, timeout_s: float) -> tuple[Path, int]:
        self.asked.append(timeout_s)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def sharing(self, *, is_required: bool = False) -> Sharing:
        return Sharing(
            lambda: RegionPool(self.ask, LENGTH, is_reduced=not is_required),
            is_required=is_required,
            timeout_s=10.0,
            now_ns=lambda: self.ns,
        )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    FakeRegion.made, FakeRegion.error = [], None
    monkeypatch.setattr(shared_memory, "Region", FakeRegion)
    return World()


def acquire(sharing: Sharing, first: pa.RecordBatch = LARGE, timeout_s: float | None = None) -> Any:
    return sharing.acquire(first, Deadline(timeout_s))


@pytest.mark.parametrize("batch", [SMALL, CODED], ids=["small", "dictionary"])
def test_unsuitable_batch_does_not_ask_the_gateway(world: World, batch: pa.RecordBatch) -> None:
    sharing = world.sharing()
    assert not sharing.is_suitable(batch)
    assert acquire(sharing, batch) is None
    assert not world.asked


def test_no_pool_switches_shared_memory_off() -> None:
    sharing = Sharing(None, is_required=True, timeout_s=10.0)
    assert not sharing.is_suitable(LARGE)
    assert acquire(sharing) is None


def test_large_batch_gets_a_region_with_one_question(world: World) -> None:
    sharing = world.sharing()
    assert sharing.is_suitable(LARGE)
    assert not world.asked
    lease = acquire(sharing)
    assert lease.headers == [(b"iskander-region", b"0")]
    assert lease.region.schema == LARGE.schema
    assert world.asked == [10.0]


@pytest.mark.parametrize(
    ("is_required", "expected"), [(False, LENGTH // 2), (True, LENGTH)], ids=["reduced", "as-given"]
)
def test_limit_of_the_gateway(world: World, is_required: bool, expected: int) -> None:
    world.answer = (Path("/run/memory"), LENGTH // 2)
    lease = acquire(world.sharing(is_required=is_required))
    assert lease.region.length_bytes == expected


def test_next_stream_gets_the_released_region(world: World) -> None:
    sharing = world.sharing()
    with sharing.lease(LARGE, Deadline(None)) as first, sharing.lease(LARGE, Deadline(None)) as own:
        assert first is not None
        assert own is not None
        assert own.region is not first.region
    with sharing.lease(LARGE, Deadline(None)) as second:
        assert second is not None
        assert second.region is first.region
        second.is_usable = False
    assert first.region.is_closed  # type: ignore[attr-defined]
    assert acquire(sharing).region is own.region
    assert len(world.asked) == 2


def test_region_returns_to_its_own_pool(world: World) -> None:
    """A release asks no gateway, also if shared memory was switched off during the stream."""
    sharing = world.sharing()
    lease = acquire(sharing)
    sharing.close()
    lease.release()
    assert lease.region.is_closed
    assert len(world.asked) == 1


@pytest.mark.parametrize(
    "error",
    [
        Unsupported("x"), ModelNotFound("x"), ProtocolError("x"), PermissionDenied("x"),
        ConfigError("x"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_gateway_without_shared_memory_is_asked_once(world: World, error: Exception) -> None:
    sharing = world.sharing()
    world.answer = error
    assert acquire(sharing) is None
    world.ns += 10**6 * NS_PER_S
    assert not sharing.is_suitable(LARGE)
    assert acquire(sharing) is None
    assert len(world.asked) == 1


@pytest.mark.parametrize(
    "error",
    [
        ConnectionFailed("x"), Draining("x"), DeadlineExceeded("x"), Overloaded("x"), NotReady("x"),
        Unauthenticated("x"), IskanderError("x"), ConnectionRefusedError(), TimeoutError(),
        FileNotFoundError(),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_gateway_is_asked_again_some_time_after_a_failure(world: World, error: Exception) -> None:
    sharing = world.sharing()
    answer = world.answer
    if isinstance(error, OSError):
        FakeRegion.error = error
    else:
        world.answer = error
    assert acquire(sharing) is None
    world.answer, FakeRegion.error = answer, None
    assert acquire(sharing) is None
    assert len(world.asked) == 1
    world.ns += int(RETRY_SHARED_S * NS_PER_S)
    assert acquire(sharing) is not None


def test_failure_leaves_the_regions_of_other_streams(world: World) -> None:
    sharing = world.sharing()
    lease = acquire(sharing)
    world.answer = Overloaded("x")
    assert acquire(sharing) is None
    lease.release()
    world.ns += int(RETRY_SHARED_S * NS_PER_S)
    assert acquire(sharing).region is lease.region


@pytest.mark.parametrize("is_required", [False, True], ids=["automatic", "required"])
def test_region_that_the_server_does_not_have_is_discarded_with_the_idle_ones(
    world: World, is_required: bool
) -> None:
    sharing = world.sharing(is_required=is_required)
    lost, *others = [acquire(sharing) for _ in range(4)]
    for lease in others:
        lease.release()
    sharing.discard(lost)
    lost.release()
    assert all(region.is_closed for region in FakeRegion.made)
    assert sharing.is_suitable(LARGE) == is_required
    world.ns += int(RETRY_SHARED_S * NS_PER_S)
    assert not acquire(sharing).region.is_closed


@pytest.mark.parametrize("error", [Unsupported("x"), ConnectionFailed("x"), OSError("refused")])
def test_required_region_that_is_not_available_is_an_error(world: World, error: Exception) -> None:
    sharing = world.sharing(is_required=True)
    answer = world.answer
    if isinstance(error, OSError):
        FakeRegion.error = error
    else:
        world.answer = error
    with pytest.raises(NotReady if isinstance(error, OSError) else type(error)):
        acquire(sharing)
    world.answer, FakeRegion.error = answer, None
    assert acquire(sharing) is not None


def test_deadline_of_the_call_limits_the_time_for_a_region(world: World) -> None:
    lease = acquire(world.sharing(), timeout_s=5.0)
    assert 4.0 < lease.region.timeout_s <= world.asked[0] <= 5.0
    lease = acquire(world.sharing(), timeout_s=50.0)
    assert 9.0 < lease.region.timeout_s <= world.asked[1] == 10.0


def test_deadline_that_passes_is_an_error_and_switches_nothing_off(world: World) -> None:
    sharing = world.sharing()
    late = DeadlineExceeded("no answer")
    world.answer = late
    with pytest.raises(DeadlineExceeded) as caught:
        sharing.acquire(LARGE, Deadline(0.0, now_ns=iter([0, -1, 1]).__next__))
    assert caught.value is late
    assert sharing.is_suitable(LARGE)


def test_distribution_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "iskander.client.calls.shared_memory", None)
    for shared_bytes in (None, LENGTH):
        opened = Connection(
            Address("127.0.0.1:1"),
            timeout_s=1.0,
            credentials=Credentials(None),
            tls=None,
            shared_bytes=shared_bytes,
            calls=OpenCalls(),
        )
        if shared_bytes is None:
            assert acquire(opened._sharing) is None
        else:
            with pytest.raises(ConfigError, match="the distribution `iskander`"):
                acquire(opened._sharing)
        opened.close()
