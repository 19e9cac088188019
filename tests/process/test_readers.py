"""Reader processes of sources: which ones are used again."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from typing import Any

import psutil
import pytest

from iskander.config.sources import SourceReadsConfig
from iskander.errors import IskanderError, LimitExceeded, ReaderLost
from iskander.gateway.auth.source import UNKNOWN_SOURCE
from iskander.gateway.sources import messages as reader_messages
from iskander.gateway.sources.messages import PlanRequest
from iskander.gateway.sources.readers import Reader, Readers

WAIT_S = 60.0
REJECTED = PlanRequest(source="s", root="/none", contract=[], filters=[], parts_max=1)


async def planned(readers: Readers) -> Reader:
    """Process of a plan that failed."""
    with pytest.raises(IskanderError):
        async for _ in readers.answers(REJECTED, UNKNOWN_SOURCE):
            pass
    (reader,) = readers.processes
    return reader


def test_idle_process_that_ends_is_forgotten() -> None:
    async def run() -> None:
        faults: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        readers = Readers(SourceReadsConfig(idle_s=600), 1 << 20)
        reader = await planned(readers)
        assert await planned(readers) is reader, "it is used again"
        os.kill(reader.pid, signal.SIGKILL)
        async with asyncio.timeout(WAIT_S):
            await reader.ended
            while readers.processes:
                await asyncio.sleep(0)
        assert reader.idle_timer is not None and reader.idle_timer.cancelled()
        assert await planned(readers) is not reader
        await readers.stop()
        assert not faults

    asyncio.run(run())


def test_new_limits_end_idle_processes() -> None:
    """The next one has the new limit of memory."""

    async def run() -> None:
        readers = Readers(SourceReadsConfig(idle_s=600), 1 << 20)
        reader = await planned(readers)
        readers.configure(SourceReadsConfig(idle_s=600, memory_bytes=1 << 30), 1 << 20)
        async with asyncio.timeout(WAIT_S):
            await reader.ended
            while readers.processes:
                await asyncio.sleep(0)
        changed = await planned(readers)
        assert str(1 << 30) in psutil.Process(changed.pid).cmdline()
        await readers.stop()

    asyncio.run(run())


def test_new_limits_end_a_busy_process_after_its_request() -> None:
    async def run() -> None:
        readers = Readers(SourceReadsConfig(idle_s=600), 1 << 20)
        async with asyncio.timeout(WAIT_S):
            request = asyncio.create_task(planned(readers))
            while not readers.processes:
                await asyncio.sleep(0)
            readers.configure(SourceReadsConfig(idle_s=600, memory_bytes=1 << 30), 1 << 20)
            reader = await request
            assert reader.has_answered
            await reader.ended
            while readers.processes:
                await asyncio.sleep(0)
        changed = await planned(readers)
        assert str(1 << 30) in psutil.Process(changed.pid).cmdline()
        await readers.stop()

    asyncio.run(run())


def test_process_without_a_pidfd_is_an_error_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def run() -> None:
        readers = Readers(SourceReadsConfig(), 1 << 20)
        before = psutil.Process().num_fds()
        monkeypatch.setattr(os, "pidfd_open", fail)
        with pytest.raises(ReaderLost, match="does not start: Too many open files"):
            async for _ in readers.answers(REJECTED, UNKNOWN_SOURCE):
                pass
        monkeypatch.undo()
        assert psutil.Process().num_fds() == before
        assert not psutil.Process().children()
        await planned(readers)
        await readers.stop()

    asyncio.run(run())


def test_process_with_unread_frames_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rest of a rejected answer would be read as that of the next request."""

    async def run() -> None:
        readers = Readers(SourceReadsConfig(idle_s=600), 1 << 20)
        monkeypatch.setattr(reader_messages, "METADATA_BYTES_MAX", 1)
        with pytest.raises(LimitExceeded):
            async for _ in readers.answers(REJECTED, UNKNOWN_SOURCE):
                pass
        (reader,) = readers.processes
        async with asyncio.timeout(WAIT_S):
            await reader.ended
        await readers.stop()

    asyncio.run(run())
