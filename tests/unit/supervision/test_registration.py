"""Which place a worker gets that has come in."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any, NamedTuple

import pytest

from iskander.config.schema import ArenaConfig
from iskander.control.messages import Hello
from iskander.errors import ProtocolError
from iskander.memory.segment import Segment
from iskander.supervision.lifecycle import State
from iskander.supervision.registration import create_memory, slot_for
from iskander.supervision.worker import SlotPlan, Worker


class Started(NamedTuple):
    """A process that this gateway started."""

    pid: int


def worker(index: int, group: int = 0, *, pid: int | None = None, pool: str = "") -> Worker:
    made = Worker(SlotPlan(index, group, (0,), None, pool=pool))
    if pid is not None:
        child: Any = Started(pid)
        made.child = child
    return made


def hello(*, group: int | None = None, index: int | None = None, pool: str = "") -> Hello:
    return Hello(1, "", group, index, (), pool)


def place_of(workers: list[Worker], said: Hello, pid: int = 7) -> int:
    return slot_for(workers, pid, said).index


def test_a_child_gets_the_place_that_it_was_started_for() -> None:
    assert place_of([worker(0), worker(1, pid=7)], hello(index=0)) == 1


def test_one_that_comes_back_gets_its_old_place_and_else_any_of_its_group() -> None:
    workers = [worker(0), worker(1), worker(2, group=1)]
    assert place_of(workers, hello(index=1)) == 1
    assert place_of(workers, hello(group=1, index=5)) == 2
    assert place_of(workers, hello()) == 0


def test_nobody_gets_a_place_that_is_another_childs_or_taken() -> None:
    taken = worker(0)
    taken.state = State.READY
    with pytest.raises(ProtocolError, match="no worker slot is free"):
        place_of([taken, worker(1, pid=8)], hello(index=1))
    with pytest.raises(ProtocolError, match="no worker slot is free in core group 3"):
        place_of([worker(0)], hello(group=3))


def test_a_models_own_places_are_for_its_own_workers() -> None:
    workers = [worker(0, pool="m/1"), worker(1)]
    assert place_of(workers, hello()) == 1
    assert place_of(workers, hello(pool="m/1")) == 0
    with pytest.raises(ProtocolError, match="of model `m/2`"):
        place_of(workers, hello(pool="m/2"))


def test_a_place_is_nobody_elses_while_its_memory_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that has other things to do goes on meanwhile."""
    go_on = threading.Event()
    create = Segment.create

    def slowly(label: str, *rest: Any) -> Segment:
        if "output" in label:
            assert go_on.wait(10)
        return create(label, *rest)

    monkeypatch.setattr(Segment, "create", slowly)
    arena = ArenaConfig(output_bytes=1 << 20)

    async def run() -> None:
        only = worker(0)
        making = asyncio.create_task(create_memory(only, 1, os.getpid(), arena))
        await asyncio.sleep(0.01)
        with pytest.raises(ProtocolError, match="no worker slot is free"):
            slot_for([only], 8, hello())
        go_on.set()
        await making
        assert only.incarnation == 1 and only.output is not None
        only.detach()

        stopped = worker(0)
        making = asyncio.create_task(create_memory(stopped, 2, os.getpid(), arena))
        await asyncio.sleep(0)
        stopped.state = State.STOPPED
        with pytest.raises(ProtocolError, match="worker slot 0 is stopped"):
            await making
        assert stopped.output is None

    asyncio.run(run())
