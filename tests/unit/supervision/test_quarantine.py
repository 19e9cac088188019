"""The rate of worker deaths that isolates a model, and which deaths count."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.lanes import lane_of
from support.simulation import Simulation

from iskander.config.schema import WorkersConfig
from iskander.supervision.quarantine import QUARANTINE_MAX_S, DeathRate, Quarantines
from iskander.supervision.worker import ProcessExit, Worker
from iskander.transport.machine_memory import oom_kills

WINDOW_NS = 100


def test_deaths_within_a_window_reach_the_limit_and_count_once() -> None:
    rate = DeathRate(3, WINDOW_NS)
    assert [rate.note(at_ns) for at_ns in (0, 50, 100, 110, 120, 130)] == [
        False, False, True, False, False, True,
    ]  # fmt: skip


def test_deaths_far_apart_never_reach_the_limit() -> None:
    rate = DeathRate(3, WINDOW_NS)
    assert not any(rate.note(51 * n) for n in range(100))


def test_one_death_is_enough_within_a_window_after_a_quarantine() -> None:
    rate = DeathRate(3, WINDOW_NS)
    assert [rate.note(at_ns) for at_ns in (0, 1, 2)] == [False, False, True]
    rate.begin_quarantine(60.0)
    rate.released_ns = 200
    assert rate.note(250)
    rate.begin_quarantine(60.0)
    rate.released_ns = 300
    assert not rate.note(300 + WINDOW_NS + 1)


def test_new_limit_counts_earlier_deaths() -> None:
    rate = DeathRate(3, WINDOW_NS)
    assert not rate.note(0)
    rate.set_limit(2, WINDOW_NS)
    assert rate.note(1)
    rate.set_limit(4, 10 * WINDOW_NS)
    assert [rate.note(at_ns) for at_ns in (2, 5 * WINDOW_NS, 6 * WINDOW_NS, 9 * WINDOW_NS)] == [
        False, False, False, True,
    ]  # fmt: skip


def test_quarantine_doubles_up_to_an_hour() -> None:
    rate = DeathRate(3, WINDOW_NS)
    assert [rate.begin_quarantine(60.0) for _ in range(3)] == [60.0, 120.0, 240.0]
    for _ in range(100):
        longest = rate.begin_quarantine(60.0)
    assert longest == QUARANTINE_MAX_S


@pytest.mark.parametrize(
    ("code", "was_killed", "was_hung", "was_out_of_memory", "is_fault"),
    [
        (-signal.SIGSEGV, False, False, False, True),
        (1, False, False, False, True),
        (0, False, False, False, True),
        (None, False, False, False, True),
        (-signal.SIGKILL, False, False, False, False),
        (-signal.SIGKILL, False, False, True, True),
        (-signal.SIGKILL, True, False, True, False),
        (-signal.SIGKILL, True, True, False, True),
        (-signal.SIGTERM, False, False, False, False),
        (-signal.SIGINT, False, False, False, False),
    ],
)
def test_exit_is_a_model_fault_or_not(
    code: int | None, was_killed: bool, was_hung: bool, was_out_of_memory: bool, is_fault: bool
) -> None:
    process_exit = ProcessExit(code, was_killed)
    assert (
        process_exit.is_model_fault(was_hung=was_hung, was_out_of_memory=was_out_of_memory)
        == is_fault
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [("nr_free_pages 1\noom_kill 7\n", 7), ("oom_kill", 0), ("oom_kill x", 0), ("", 0)],
)
def test_oom_kills_are_read_from_vmstat(tmp_path: Path, text: str, count: int) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text(text)
    assert oom_kills(counters) == count
    assert oom_kills(tmp_path / "missing") == 0


def test_request_whose_run_begins_a_quarantine_is_not_retried() -> None:
    """Without `workers.spawn`, the death counts before the requests of the worker come back."""
    with Simulation(lane_of(0, rows_max=8)) as gateway:
        lost, other = gateway.start(), gateway.start()
        _, caller = gateway.submit_rows(0, 8)
        gateway.loop.turn()
        lost.begin(lost.sent[0])

        async def lose() -> None:
            settings = WorkersConfig(spawn=False, model_deaths=1)
            workers: list[Worker] = [lost, other]
            reject, unused = gateway.dispatcher.reject_queued, Mock()
            quarantines = Quarantines(
                gateway.lanes, workers, settings, True, unused, reject, unused, unused
            )
            quarantines.record_running_model(lost)
            gateway.lose(lost)
            quarantines.close()

        asyncio.run(lose())

        assert caller.codes == ["model_quarantined"]
        assert other.sent == [] and gateway.is_clean()
