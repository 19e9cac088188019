"""Owner of the observer process, without a process: the kept reports."""

from __future__ import annotations

import asyncio
from unittest import mock

from iskander.config.schema import Config
from iskander.gateway.observation.process import CONSUMERS_MAX, ObserverProcess


def test_reports_of_few_consumers_are_kept() -> None:
    """A report may have those of some consumers only."""

    async def run() -> None:
        process = ObserverProcess(Config(), mock.Mock(), lambda name, version: None)
        process._on_report({"drift": {"failure": "a"}})
        process._on_report({"prediction_log": {"failure": ""}})
        assert process.last_report == {"drift": {"failure": "a"}, "prediction_log": {"failure": ""}}
        for number in range(2 * CONSUMERS_MAX):
            process._on_report({f"unknown-{number}": {}})
        assert len(process.last_report) == CONSUMERS_MAX
        assert "drift" in process.last_report
        await process.stop()

    asyncio.run(run())
