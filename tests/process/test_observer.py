"""The observer process: hand-over of leases, early release, overload, and restart."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.observing import Observing, observing
from support.processes import suspended

from iskander.gateway.observation import process as process_module
from iskander.gateway.scheduling.input_arena import InputArena

OLD, NEW = 7, 666


def run(folder: Path, scenario: Any, **observation: Any) -> Observing:
    """Run a scenario in an event loop without unhandled errors."""
    faults: list[dict[str, Any]] = []

    async def main() -> Observing:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        async with observing(folder, **observation) as made:
            await scenario(made)
        return made

    made = asyncio.run(main())
    assert not faults
    return made


def values_of(made: Observing) -> list[tuple[int, int]]:
    """Distinct inputs and outputs in the log."""
    return sorted(set(made.logged().select("x", "y").rows()))


def test_samples_are_copied_and_their_leases_given_back(tmp_path: Path) -> None:
    async def scenario(made: Observing) -> None:
        for value in range(50):
            made.finish(made.admit(value), value)
        await made.until(lambda: made.counts.get("handed_over") == 50, "50 samples")
        assert made.leased_bytes == 0

    made = run(tmp_path, scenario)
    assert values_of(made) == [(value, value) for value in range(50)]
    assert len(made.logged()) == 50 * 8


def test_results_of_several_batches_are_one_sample(tmp_path: Path) -> None:
    async def scenario(made: Observing) -> None:
        made.finish(made.admit(3, rows=10), 3, cut=(4, 1, 5))
        await made.until(lambda: made.counts.get("handed_over") == 1, "a sample")
        assert made.leased_bytes == 0

    made = run(tmp_path, scenario)
    assert made.logged()["trace_id"].n_unique() == 1
    assert made.logged().sort("row").select("row", "y").rows() == [(row, 3) for row in range(10)]


def test_memory_that_is_used_again_before_the_copy_is_never_logged(tmp_path: Path) -> None:
    """The process is stopped after the hand-over, and copies the next request in its place."""

    async def scenario(made: Observing) -> None:
        made.finish(made.admit(1), 1)
        await made.until(lambda: made.counts.get("handed_over") == 1, "a sample")
        with suspended(made.pid):
            made.finish(made.admit(OLD), OLD)
            assert made.sampler.flush()
            assert made.input_arena.reclaimers[-1]()
            assert made.counts["pressure"] == 1
            assert made.leased_bytes == 0
            made.finish(made.admit(NEW), NEW)
        await made.until(lambda: made.counts.get("handed_over") == 2, "another sample")

    made = run(tmp_path, scenario)
    assert values_of(made) == [(1, 1), (NEW, NEW)]
    # With the id of the old request, the values of the new one would be there twice.
    assert made.logged()["trace_id"].n_unique() == 2
    assert made.counts == {"handed_over": 2, "pressure": 1}


@pytest.mark.slow
def test_memory_that_is_used_again_between_copy_and_verdict_is_not_needed(tmp_path: Path) -> None:
    """The copy was made while the lease was held: after `Copied`, the memory is free."""

    async def scenario(made: Observing) -> None:
        made.finish(made.admit(OLD), OLD)
        await made.until(lambda: made.counts.get("handed_over") == 1, "a sample")
        made.overwrite(NEW)

    assert values_of(run(tmp_path, scenario)) == [(OLD, OLD)]


def test_copied_samples_are_taken_before_one_is_given_up(tmp_path: Path) -> None:
    """`Copied` is in the socket, and not read yet, when a request needs memory."""

    async def scenario(made: Observing) -> None:
        made.finish(made.admit(OLD), OLD)
        assert made.sampler.flush()
        deadline = asyncio.get_running_loop().time() + 20
        # The event loop does not run meanwhile, so only the reclaim reads the socket.
        while not made.process._link._channel._poll(0):  # type: ignore[union-attr]
            assert asyncio.get_running_loop().time() < deadline
        assert made.input_arena.reclaimers[-1]()
        assert made.counts == {"handed_over": 1}
        made.overwrite(NEW)

    assert values_of(run(tmp_path, scenario)) == [(OLD, OLD)]


@pytest.mark.slow
def test_held_leases_are_bounded_and_expire(tmp_path: Path) -> None:
    async def scenario(made: Observing) -> None:
        with suspended(made.pid):
            for value in range(6):
                made.finish(made.admit(value), value)
            assert made.counts == {"held_limit": 2}
            assert len(made.sampler.holds) == 4
            await made.until(lambda: made.counts.get("expired") == 4, "expiry")
            assert made.leased_bytes == 0
            made.overwrite(NEW)

    made = run(tmp_path, scenario, held_requests=4, held_s=0.3)
    assert values_of(made) == []


@pytest.mark.slow
def test_full_arena_takes_held_memory_first(tmp_path: Path) -> None:
    """Requests are admitted at once while a stopped process holds as much as it may."""

    async def scenario(made: Observing) -> None:
        with suspended(made.pid):
            for value in range(400):  # Each has a grain of 4 KiB, the arena 256.
                made.finish(made.admit(value), value)
            assert made.counts["pressure"] > 100
            assert made.leased_bytes <= 2 << 20
        await made.until(lambda: not len(made.sampler.holds), "copies")

    made = run(tmp_path, scenario, held_bytes=64 << 20)
    logged = values_of(made)
    assert all(x == y for x, y in logged)
    assert len(logged) == made.counts["handed_over"]


@pytest.mark.slow
def test_full_output_arena_takes_held_memory_first(tmp_path: Path) -> None:
    async def scenario(made: Observing) -> None:
        with suspended(made.pid):
            for value in range(100):
                made.finish(made.admit(value), value)
            held = made.worker.output_arena.leased_bytes
            assert made.sampler.reclaim_output(made.worker)
            assert made.worker.output_arena.leased_bytes < held
            while made.sampler.reclaim_output(made.worker):
                pass
            assert made.leased_bytes == 0

    run(tmp_path, scenario)


@pytest.mark.slow
def test_samples_are_refused_while_the_consumers_are_slow(tmp_path: Path) -> None:
    """Their leases are given back at once."""

    async def scenario(made: Observing) -> None:
        for value in range(20):
            made.finish(made.admit(value, rows=1000), value)
            assert made.sampler.flush()
        await made.until(lambda: not len(made.sampler.holds), "answers")
        assert made.counts["busy"] == 20

    run(tmp_path, scenario, buffer_bytes=1000)


@pytest.mark.slow
def test_killed_process_is_replaced_and_its_leases_are_given_back(tmp_path: Path) -> None:
    async def scenario(made: Observing) -> None:
        made.finish(made.admit(1), 1)
        await made.until(lambda: made.process.count("prediction_log", "logged") == 1, "a file")
        pid = made.pid
        with suspended(pid):
            made.finish(made.admit(2), 2)
            assert made.sampler.flush()
            os.kill(pid, signal.SIGKILL)
        await made.until(lambda: made.pid not in (0, pid), "another process")
        assert made.leased_bytes == 0
        assert made.counts["process_lost"] == 1
        await made.until(lambda: made.process.last_report, "its report")
        made.finish(made.admit(3), 3)
        await made.until(lambda: made.process.count("prediction_log", "logged") == 2, "its file")
        assert made.process.starts == 2

    assert values_of(run(tmp_path, scenario)) == [(1, 1), (3, 3)]


def test_model_is_unloaded_before_its_sample_is_sent(tmp_path: Path) -> None:
    """Its settings are those that the sample was selected by."""

    async def scenario(made: Observing) -> None:
        made.finish(made.admit(1), 1)
        made.sampler._settings_of = lambda name, version: None
        await made.until(lambda: made.counts.get("handed_over") == 1, "a sample")

    assert values_of(run(tmp_path, scenario)) == [(1, 1)]


def test_too_many_open_files_drop_a_sample(tmp_path: Path, monkeypatch: Any) -> None:
    """Its leases are given back at once, and the next sample is handed over."""

    async def scenario(made: Observing) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(os, "open", lambda *_, **__: os.close(-1))  # Raises OSError.
            made.finish(made.admit(1), 1)
            assert made.sampler.flush()
        assert made.counts == {"queue_full": 1} and made.leased_bytes == 0
        made.finish(made.admit(2), 2)
        await made.until(lambda: made.counts.get("handed_over") == 1, "a sample")

    assert values_of(run(tmp_path, scenario)) == [(2, 2)]


@pytest.mark.slow
def test_error_in_a_thread_of_a_consumer_restarts_the_process(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """The thread would be missing until the next start of the gateway."""
    patch = tmp_path / "patch"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(
        "from iskander.sampling.prediction_log import writer\n"
        "def fail(self, rows):\n"
        "    raise ZeroDivisionError('a bug')\n"
        "writer.Writer._write = fail\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(patch))

    async def scenario(made: Observing) -> None:
        made.finish(made.admit(1), 1)
        await made.until(lambda: made.process.starts == 2, "another process")

    run(tmp_path, scenario)


@pytest.mark.slow
def test_hung_process_is_killed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(process_module, "HANG_S", 2)

    async def scenario(made: Observing) -> None:
        pid = made.pid
        os.kill(pid, signal.SIGSTOP)
        await made.until(lambda: made.pid not in (0, pid), "another process")

    run(tmp_path, scenario)


def test_samples_of_a_lost_worker_are_dropped_and_its_arena_unmapped(tmp_path: Path) -> None:
    async def scenario(made: Observing) -> None:
        made.finish(made.admit(1), 1)
        await made.until(lambda: made.counts.get("handed_over") == 1, "a sample")
        maps = Path(f"/proc/{made.pid}/maps")
        assert "iskander-output-test" in maps.read_text()
        with suspended(made.pid):
            made.finish(made.admit(2), 2)
            made.sampler.on_worker_lost(made.worker)
            assert made.leased_bytes == 0
        await made.until(lambda: "iskander-output-test" not in maps.read_text(), "the unmapping")
        assert made.counts == {"handed_over": 1, "worker_lost": 1}

    assert values_of(run(tmp_path, scenario)) == [(1, 1)]


def test_process_cannot_write_the_arenas(tmp_path: Path) -> None:
    async def scenario(made: Observing) -> None:
        made.finish(made.admit(1), 1)
        await made.until(lambda: made.counts.get("handed_over") == 1, "a sample")
        lines = Path(f"/proc/{made.pid}/maps").read_text().splitlines()
        arenas = [line.split()[1] for line in lines if "memfd:iskander" in line]
        assert arenas and all("w" not in access for access in arenas)
        flags = [
            int(entry.read_text().split()[3], 8) & os.O_ACCMODE
            for entry in Path(f"/proc/{made.pid}/fdinfo").iterdir()
            if "memfd:iskander" in os.readlink(f"/proc/{made.pid}/fd/{entry.name}")
        ]
        assert flags and set(flags) == {os.O_RDONLY}

    run(tmp_path, scenario)


def test_no_lease_is_held_while_requests_wait(tmp_path: Path, monkeypatch: Any) -> None:
    async def scenario(made: Observing) -> None:
        request = made.admit(1)
        monkeypatch.setattr(InputArena, "has_waiting", True)
        made.finish(request, 1)
        assert made.counts == {"pressure": 1}
        assert made.leased_bytes == 0

    run(tmp_path, scenario)
