"""Status of a gateway of several processes, fetched from their admin ports.

Runs on: the parent's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from iskander import __version__
from iskander.foundation.build_info import BUILD
from iskander.foundation.clock import NS_PER_MS, NS_PER_S, now_ns
from iskander.gateway.telemetry.metrics.aggregate import fetch
from iskander.gateway.telemetry.status.document import ProcessStatus, Status
from iskander.gateway.telemetry.status.events import EventLog
from iskander.gateway.telemetry.status.history import INTERVAL_S
from iskander.gateway.telemetry.status.merge import merge

if TYPE_CHECKING:
    from iskander.gateway.child import ChildProcess


class MergedStatus:
    """Reads the status of all processes; `reasons` returns why the gateway is not ready."""

    def __init__(
        self,
        processes: Sequence[ChildProcess],
        reasons: Callable[[], list[str]],
        events: EventLog,
    ) -> None:
        self._processes = processes
        self._reasons = reasons
        self._events = events
        self._started_ns = now_ns()

    async def read(self) -> Status:
        """Return the merged status; a process without an answer in time is listed as such."""
        fetches = (asyncio.to_thread(_fetch, each.admin_address) for each in self._processes)
        documents = await asyncio.gather(*fetches)
        reasons = self._reasons()
        known = [
            ProcessStatus(
                process=process.index,
                state=_state(process, is_answering=document is not None),
                starts=process.starts,
            )
            for process, document in zip(self._processes, documents, strict=True)
        ]
        own = Status(
            version=__version__,
            build=BUILD,
            started_ms=self._started_ns // NS_PER_MS,
            uptime_s=round((now_ns() - self._started_ns) / NS_PER_S, 1),
            ready=not reasons,
            reasons=reasons,
            interval_s=INTERVAL_S,
            processes=known,
            models=[],
            workers=[],
            memory=[],
            events=list(self._events.events),
            left_out={},
        )
        return await asyncio.to_thread(merge, own, known, documents)


def _state(process: ChildProcess, *, is_answering: bool) -> str:
    if not is_answering:
        return "no answer"
    return "ready" if process.is_back(needs_models=True) else "not ready"


def _fetch(address: str) -> Status | None:
    """Fetch the status of a process; None on failure."""
    try:
        return msgspec.json.decode(fetch(address, "/status.json"), type=Status)
    except msgspec.DecodeError:
        return None
