"""Reload of a running gateway: callers that leave, and drains that begin meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from iskander.config.models import ModelConfig
from iskander.config.schema import Config, LimitsConfig, ServerConfig
from iskander.errors import ConfigError, Draining, Overloaded
from iskander.foundation.file_watcher import ReloadStatus
from iskander.gateway import operation
from iskander.gateway.operation import Operation

WAIT_S = 30.0
CONFIG = Config(
    server=ServerConfig(address=("127.0.0.1:1",)),
    limits=LimitsConfig(rows=7000),
    models=(ModelConfig(name="m", path="/models/m", max_batch_rows=100),),
)
CHANGED = replace(CONFIG, limits=LimitsConfig(rows=8000))


class Reload:
    """A reload that waits in its read of the file until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = CHANGED
        self.applied: list[Config] = []
        self.notices: list[dict[str, str]] = []
        self.go = threading.Event()
        self.server: Any = SimpleNamespace(
            is_serving=True,
            addresses=["127.0.0.1:1"],
            configure=self.applied.append,
            reloads=ReloadStatus(),
        )
        self.operation = Operation(self.server, CONFIG, self._read, lambda: None)
        monkeypatch.setattr(operation, "notify", lambda **fields: self.notices.append(fields))

    def _read(self) -> Config:
        assert self.go.wait(WAIT_S)
        return self.file

    async def until(self, is_so: Callable[[], Any]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_so():
                await asyncio.sleep(0.001)


def test_reload_finishes_although_its_caller_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        reload = Reload(monkeypatch)
        call = asyncio.create_task(reload.operation.operate("reload"))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(Overloaded):
            await reload.operation.operate("reload")
        reload.go.set()
        await reload.until(lambda: reload.notices)
        assert [each.limits.rows for each in reload.applied] == [8000]
        assert reload.server.reloads.is_valid
        assert "limits.rows changed" in reload.notices[0]["STATUS"]

    asyncio.run(run())


def test_reload_with_one_change_for_a_restart_applies_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        reload = Reload(monkeypatch)
        reload.go.set()
        reload.file = replace(CHANGED, server=replace(CHANGED.server, cores="0"))
        for _ in range(2):  # It is named each time.
            with pytest.raises(ConfigError, match=r"cannot change .*: server\.cores \("):
                await reload.operation.operate("reload")
            assert not reload.applied and not reload.server.reloads.is_valid
            assert reload.notices[-1]["X_ISKANDER_RELOADED"] == "0"
        reload.file = CHANGED
        assert await reload.operation.operate("reload") == {"changed": ("limits.rows",)}
        assert reload.applied == [CHANGED]
        assert reload.notices[-1]["X_ISKANDER_RELOADED"] == "1"

    asyncio.run(run())


def test_drain_during_a_reload_is_not_reported_as_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        reload = Reload(monkeypatch)
        call = asyncio.create_task(reload.operation.operate("reload"))
        await asyncio.sleep(0)
        reload.server.is_serving = False
        reload.go.set()
        assert await call == {"changed": ("limits.rows",)}
        assert not reload.notices
        with pytest.raises(Draining):
            await reload.operation.operate("reload")

    asyncio.run(run())


def test_fault_of_a_reload_by_signal_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        reload = Reload(monkeypatch)
        reload.go.set()
        reload.server.configure = None
        reload.operation.on_signal()
        await reload.until(lambda: "reload failed" in caplog.text)
        assert "reload did not finish" in reload.notices[0]["STATUS"]

    asyncio.run(run())
