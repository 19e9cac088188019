"""Slot assignment at worker registration."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any, NamedTuple

import pytest

from iskander.config.schema import ArenaConfig
from iskander.errors import ProtocolError
from iskander.gateway.supervision.lifecycle import State
from iskander.gateway.supervision.registration import create_memory, slot_for
from iskander.gateway.supervision.worker import SlotPlan, Worker
from iskander.interprocess.control.messages import Hello
from iskander.interprocess.memory.segment import Segment


class Child(NamedTuple):
    """A child process of this gateway."""

    pid: int


def worker(index: int, group: int = 0, *, pid: int | None = None, pool: str = "") -> Worker:
    created = Worker(SlotPlan(index, group, (0,), None, pool=pool))
    if pid is not None:
        child: Any = Child(pid)
        created.child = child
    return created


def hello(*, group: int | None = None, index: int | None = None, pool: str = "") -> Hello:
    return Hello(1, "", group, index, (), pool)


def slot_index(workers: list[Worker], message: Hello, pid: int = 7) -> int:
    return slot_for(workers, pid, message).index


def test_child_gets_its_spawn_slot() -> None:
    assert slot_index([worker(0), worker(1, pid=7)], hello(index=0)) == 1


def test_worker_gets_its_previous_slot_or_any_of_its_group() -> None:
    workers = [worker(0), worker(1), worker(2, group=1)]
    assert slot_index(workers, hello(index=1)) == 1
    assert slot_index(workers, hello(group=1, index=5)) == 2
    assert slot_index(workers, hello()) == 0


def test_occupied_slots_and_slots_of_other_children_are_not_assigned() -> None:
    occupied = worker(0)
    occupied.state = State.READY
    with pytest.raises(ProtocolError, match="no worker slot is free"):
        slot_index([occupied, worker(1, pid=8)], hello(index=1))
    with pytest.raises(ProtocolError, match="no worker slot is free in core group 3"):
        slot_index([worker(0)], hello(group=3))


def test_slots_of_a_model_are_for_its_own_workers() -> None:
    workers = [worker(0, pool="m/1"), worker(1)]
    assert slot_index(workers, hello()) == 1
    assert slot_index(workers, hello(pool="m/1")) == 0
    with pytest.raises(ProtocolError, match="of model `m/2`"):
        slot_index(workers, hello(pool="m/2"))


def test_slot_is_reserved_during_memory_creation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop continues while a thread creates the memory."""
    proceed = threading.Event()
    create = Segment.create

    def create_slowly(label: str, *rest: Any) -> Segment:
        if "output" in label:
            assert proceed.wait(10)
        return create(label, *rest)

    monkeypatch.setattr(Segment, "create", create_slowly)
    arena = ArenaConfig(output_bytes=1 << 20)

    async def run() -> None:
        target = worker(0)
        creation = asyncio.create_task(create_memory(target, 1, os.getpid(), arena))
        await asyncio.sleep(0.01)
        with pytest.raises(ProtocolError, match="no worker slot is free"):
            slot_for([target], 8, hello())
        proceed.set()
        await creation
        assert target.incarnation == 1 and target.output is not None
        target.detach()

        stopped = worker(0)
        creation = asyncio.create_task(create_memory(stopped, 2, os.getpid(), arena))
        await asyncio.sleep(0)
        stopped.state = State.STOPPED
        with pytest.raises(ProtocolError, match="worker slot 0 is stopped"):
            await creation
        assert stopped.output is None

    asyncio.run(run())
