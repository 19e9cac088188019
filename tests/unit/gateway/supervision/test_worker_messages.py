"""Reading of worker messages: the budget of a turn, and the end of the channel."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.input_arena import in_loop, turn

from iskander.gateway.supervision.worker_messages import MESSAGES_PER_TURN, WorkerMessageReader
from iskander.interprocess.control.channel import Channel, SeqpacketChannel
from iskander.interprocess.control.messages import (
    RUN_NS_MAX,
    Done,
    Failed,
    Stepped,
    ToGateway,
    encode,
)
from iskander.interprocess.control.zmq_channel import ZmqChannel

NESTED = b"\x91\x94\xa1d\x01\x01" + b"\x91" * 5000 + b"\xc0"
FLOOD = 4 * MESSAGES_PER_TURN
Pair = tuple[Channel, Channel]


class Gateway:
    """Dispatcher and supervisor that record their calls."""

    def __init__(self, channel: Channel) -> None:
        self.failed: list[int] = []
        self.unprocessable: list[str] = []
        self.malformed = self.pumped = self.ended = 0
        self.recycling = SimpleNamespace(check=lambda worker: None)
        self.worker: Any = SimpleNamespace(channel=channel, batches=0, recycle_at=1)
        self.reader = WorkerMessageReader(self, self)  # type: ignore[arg-type]

    def on_failed(self, _: object, message: Failed) -> None:
        self.failed.append(message.batch_id)

    def on_message(self, _: object, message: ToGateway) -> None:
        raise KeyError(type(message).__name__)

    def on_unprocessable(self, _: object, message: ToGateway, error: Exception) -> None:
        assert repr(error) == f"KeyError({type(message).__name__!r})"
        self.unprocessable.append(type(message).__name__)

    def on_malformed(self, *_: object) -> None:
        self.malformed += 1

    def on_end(self, worker: Any, channel: Channel) -> None:
        assert worker.channel is channel
        self.ended += 1
        worker.channel = None

    def pump(self) -> None:
        self.pumped += 1


@pytest.fixture(params=["seqpacket", "zmq"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """Returns the gateway's end and the worker's end of a channel."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel: Channel = SeqpacketChannel(ours)
    worker: Channel = SeqpacketChannel(theirs, 1.0)
    if request.param == "zmq":
        prefix = str(tmp_path / "1")
        channel = ZmqChannel(ours, prefix, is_gateway=True)
        worker = ZmqChannel(theirs, prefix, is_gateway=False, wait_s=1.0)
    yield channel, worker
    worker.close()
    channel.close()


@in_loop
async def test_a_flood_is_read_in_several_turns_and_before_the_end(
    pair: Pair,
) -> None:
    channel, worker = pair
    gateway = Gateway(channel)
    for batch_id in range(FLOOD):
        worker.send(encode([Failed(batch_id, "model", "flood")]))
    worker.close()
    for _ in range(1000):  # ZeroMQ delivers from a thread.
        before = len(gateway.failed)
        gateway.reader.read(gateway.worker, channel)
        assert len(gateway.failed) - before <= MESSAGES_PER_TURN
        for _ in range(FLOOD):
            await turn()
        if gateway.ended:
            break
        await asyncio.sleep(0.002)
    assert gateway.failed == list(range(FLOOD))
    assert gateway.ended == 1


@in_loop
async def test_malformed_frames_count_against_the_turn(pair: Pair) -> None:
    channel, worker = pair
    gateway = Gateway(channel)
    worker.send(NESTED)
    for _ in range(2 * MESSAGES_PER_TURN - 1):
        worker.send(b"\xc1")
    for _ in range(1000):
        before = gateway.malformed
        gateway.reader.read(gateway.worker, channel)
        assert gateway.malformed - before <= MESSAGES_PER_TURN
        await asyncio.sleep(0.002)
        if gateway.malformed == 2 * MESSAGES_PER_TURN:
            break
    assert gateway.malformed == 2 * MESSAGES_PER_TURN


@in_loop
async def test_a_released_worker_is_not_read(pair: Pair) -> None:
    channel, worker = pair
    gateway = Gateway(channel)
    for batch_id in range(FLOOD):
        worker.send(encode([Failed(batch_id, "model", "flood")]))
    while not gateway.failed:
        gateway.reader.read(gateway.worker, channel)
        await asyncio.sleep(0)
    gateway.worker.channel = None
    count = len(gateway.failed)
    for _ in range(FLOOD):
        await turn()
    assert len(gateway.failed) == count < FLOOD


@in_loop
async def test_message_that_raises_ends_its_worker_and_not_the_turn(pair: Pair) -> None:
    channel, worker = pair
    gateway = Gateway(channel)
    worker.send(encode([Stepped(9, ()), Failed(1, "model", "after")]))
    for _ in range(1000):
        gateway.reader.read(gateway.worker, channel)
        await asyncio.sleep(0.002)
        if gateway.failed:
            break
    assert (gateway.unprocessable, gateway.failed) == (["Stepped"], [1])
    assert gateway.pumped


@in_loop
@pytest.mark.parametrize("run_ns", [-1, RUN_NS_MAX + 1])
async def test_impossible_run_time_is_malformed(pair: Pair, run_ns: int) -> None:
    """It would decide which model is served next."""
    channel, worker = pair
    gateway = Gateway(channel)
    worker.send(encode([Done(1, run_ns)]))
    for _ in range(1000):
        gateway.reader.read(gateway.worker, channel)
        await asyncio.sleep(0.002)
        if gateway.malformed:
            break
    assert gateway.malformed == 1
