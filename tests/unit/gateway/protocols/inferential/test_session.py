"""Order of replies and outcomes of a session while an observation waits for the input arena."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.input_arena import FOR_EVER, GRAINS, EntryArena, in_loop, open_lane, request_of, turns
from support.robots import observation, response

from iskander.config.schema import LimitsConfig
from iskander.errors import (
    ContractError,
    ExecutionFailed,
    IskanderError,
    ModelNotFound,
    NotReady,
    Overloaded,
)
from iskander.foundation.clock import now_ns
from iskander.foundation.measurement.recent_values import RecentValues
from iskander.gateway.protocols.inferential.metrics import InferentialMetrics
from iskander.gateway.protocols.inferential.session import Session
from iskander.gateway.protocols.traced_call import GONE
from iskander.gateway.scheduling.entry import Entry
from iskander.gateway.scheduling.request import Request
from iskander.interprocess.memory.arena import GRAIN_BYTES

WAIT_S = 10.0


class Gateway:
    """A full arena, and both sides of a session: its service and its connection.

    Attributes:
        filler: The request that fills the arena.
        submitted: Observations that entered the queue.
        traced: Errors of the recorded observations.
        sent: Error codes of the replies.
    """

    def __init__(self, limits: LimitsConfig) -> None:
        lane = open_lane()
        self.input_arena = EntryArena(GRAINS * GRAIN_BYTES, limits)
        self.filler = request_of(lane, GRAINS)
        assert self.input_arena.admit(self.filler)
        self.submitted: list[Request] = []
        self.traced: list[IskanderError | None] = []
        self.sent: list[str] = []
        self.is_blocked = self.has_unsent = False
        self.metrics = InferentialMetrics(RecentValues())
        self.limits = limits
        self.is_silent = self.is_draining = False
        self.budget = SimpleNamespace(release=lambda _: None)
        self.config = SimpleNamespace(newest_wins=False)
        self.grant = SimpleNamespace(name="", require_model=lambda _: None)
        self.models = SimpleNamespace(find_loaded=lambda *_: lane)
        self.dispatcher = SimpleNamespace(
            tracer=SimpleNamespace(on_end=lambda _, __, error: self.traced.append(error)),
            uses_contexts=False,
            withdraw=lambda _: None,
        )
        self.entry = Entry(
            self.input_arena, lambda request, victims: self.submitted.append(request), limits
        )
        self.session = Session(self, self, b"")  # type: ignore[arg-type]

    def register(self, session: Session, name: str) -> str:
        return name

    def unregister(self, session: Session) -> None:
        pass

    def next_response(self) -> str:
        return "r"

    def resume(self) -> None:
        pass

    def send(self, parts: list[bytes]) -> None:
        self.sent.append(response(parts).metadata["error_code"])

    def receive_two(self) -> None:
        """Receive an observation that waits, and one for which there is no memory."""
        tensors = {"id": np.zeros(1, np.int64), "flag": np.zeros(1, np.bool_)}
        parts: list[Any] = [b"", *observation("m", tensors)]
        self.session.on_message(parts, now_ns())
        assert self.session.is_full
        self.session.reject(parts)


@pytest.fixture
def gateway(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    gateway = Gateway(getattr(request, "param", FOR_EVER))
    yield gateway
    gateway.input_arena.close()


@in_loop
async def test_only_valid_observations_are_granted_processor_time(gateway: Gateway) -> None:
    """A flood for unknown models would otherwise cost others more than its own connection."""
    tensors = {"id": np.zeros(1, np.int64), "flag": np.zeros(1, np.bool_)}
    parts: list[Any] = [b"", *observation("m", tensors)]
    assert gateway.session.on_message(parts, now_ns())  # It waits for the arena.
    for error in (ModelNotFound("no model"), ContractError("no input")):
        gateway.models.find_loaded = raising(error)
        assert not gateway.session.on_message(parts, now_ns())
    for error in (NotReady("loading"), Overloaded("full"), ValueError("bug")):
        gateway.models.find_loaded = raising(error)
        assert gateway.session.on_message(parts, now_ns())
    for malformed in ([b"", b"\xff"], [b"x"], [b""]):
        assert not gateway.session.on_message(malformed, now_ns())


def raising(error: Exception) -> Any:
    def find(*_: Any) -> Any:
        raise error

    return find


@in_loop
async def test_rejected_observation_is_answered_after_the_waiting_one(gateway: Gateway) -> None:
    """Clients match replies with observations by their order."""
    gateway.receive_two()
    await turns()
    assert not gateway.sent
    gateway.input_arena.give_back(gateway.filler)
    await turns()
    (submitted,) = gateway.submitted
    assert not gateway.sent
    gateway.session.fail(submitted, ExecutionFailed("x"))
    await turns()
    assert gateway.sent == ["execution_failed", "overloaded"]
    assert not gateway.session.has_work


@pytest.mark.parametrize("gateway", [LimitsConfig(arena_wait_ms=1)], indirect=True)
@in_loop
async def test_waiting_observation_that_is_rejected_is_answered_first(gateway: Gateway) -> None:
    gateway.receive_two()
    async with asyncio.timeout(WAIT_S):
        while gateway.session.has_work:
            await asyncio.sleep(0.001)
    assert gateway.sent == ["arena_full", "overloaded"]


@in_loop
async def test_disconnect_counts_and_traces_the_waiting_observation(gateway: Gateway) -> None:
    gateway.receive_two()
    await turns()
    gateway.session.on_lost()
    await turns()
    assert gateway.metrics.outcomes == {"unsent": 2}
    assert gateway.traced == [GONE]
    assert not gateway.sent
