"""Model loading: order and timeouts of loads, and changes of model files."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.lanes import model_of
from support.loads import Fleet, repository_of, settled, until
from support.repositories import Folder, scaled

from iskander.config.models import LaneConfig, ModelConfig
from iskander.config.repository import RepositoryConfig
from iskander.config.schema import Config, LimitsConfig, ServerConfig, WorkersConfig
from iskander.errors import IskanderError, ManifestError, ModelMoved, NotReady
from iskander.foundation.clock import NS_PER_S
from iskander.foundation.measurement.recent_values import RecentValues
from iskander.gateway.repository import generations as generations_module
from iskander.gateway.repository.generations import Generation, Generations
from iskander.gateway.repository.load_intents import LoadIntent
from iskander.gateway.repository.scan import SETTINGS
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.supervision.lifecycle import Event, State
from iskander.gateway.supervision.loading import file_freshness as freshness_module
from iskander.gateway.supervision.loading import model_loader as loading_module
from iskander.gateway.supervision.loading.file_freshness import FileFreshness
from iskander.gateway.supervision.loading.model_loader import CHANGED
from iskander.interprocess.control.messages import Unload

LOAD_S = 100.0


class Clock:
    """Replaces the clock of the modules under test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 10**15
        for module in (generations_module, loading_module):
            monkeypatch.setattr(module, "now_ns", lambda: self.now_ns)

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * NS_PER_S)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def generations_of(fleet: Fleet) -> Generations:
    return Generations(
        Config(workers=WorkersConfig(start_s=LOAD_S), server=ServerConfig(drain_s=1.0)),
        fleet.models,
        fleet.loading,
        lambda lane, error: None,
        RecentValues(),
        lambda: None,
    )


def begin(generations: Generations, name: str, quorum: int = 1) -> Generation:
    spec = msgspec.structs.replace(model_of(), name=name, fingerprint=f"of {name}")
    return generations.begin(spec, LaneConfig(), quorum, is_required=False)


def error_of(generation: Generation) -> BaseException | None:
    return generation.outcome.exception() if generation.outcome.done() else None


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(scenario())


def test_time_behind_other_loads_does_not_count(clock: Clock) -> None:
    """The timeout applies to each load, not to a queue of loads."""

    async def scenario() -> None:
        fleet = Fleet(1)
        generations = generations_of(fleet)
        started = [begin(generations, f"m{number}") for number in range(5)]
        for generation in started:
            for _ in range(3):
                clock.advance(LOAD_S / 4)
                generations.update()
            fleet.complete_load(0)
            generations.update()
            assert generation.outcome.done() and error_of(generation) is None
        generations.close()

    run(scenario)


def test_load_without_a_worker_times_out(clock: Clock) -> None:
    async def scenario() -> None:
        fleet = Fleet(1)
        generations = generations_of(fleet)
        fleet.workers[0].state = State.ABSENT
        generation = begin(generations, "m")
        clock.advance(LOAD_S + 1)
        generations.update()
        assert isinstance(error_of(generation), NotReady)
        generations.close()

    run(scenario)


def test_load_that_no_planned_worker_can_do_fails_at_once(clock: Clock) -> None:
    """A model of a repository that needs a GPU, on a server whose groups have none."""

    async def scenario() -> None:
        generations = generations_of(Fleet(1))
        spec = msgspec.structs.replace(model_of(), name="m", devices=("gpu",))
        generation = generations.begin(spec, LaneConfig(), 1, is_required=False)
        error = error_of(generation)
        assert isinstance(error, ManifestError)
        assert "it runs on gpu, and no group of that kind is in `workers.groups`" in str(error)
        generations.close()

    run(scenario)


def test_one_loaded_worker_is_enough_after_the_timeout(clock: Clock) -> None:
    async def scenario() -> None:
        fleet = Fleet(2)
        generations = generations_of(fleet)
        first, second = begin(generations, "m"), begin(generations, "n")
        assert (fleet.model_keys(0), fleet.model_keys(1)) == ([0], [1])
        fleet.complete_load(0)
        generations.update()
        assert not first.outcome.done()
        clock.advance(LOAD_S - 1)
        generations.update()
        assert not first.outcome.done()
        clock.advance(2)
        generations.update()
        assert first.outcome.done() and error_of(first) is None
        assert isinstance(error_of(second), ManifestError)
        generations.close()

    run(scenario)


def test_worker_with_an_overdue_load_is_recycled_and_named(clock: Clock) -> None:
    """Recycling alone would not fail the load."""

    async def scenario() -> None:
        fleet = Fleet(1)
        generations = generations_of(fleet)
        generation = begin(generations, "m")
        clock.advance(LOAD_S + 1)
        fleet.loading.replace_overdue(int(LOAD_S * NS_PER_S))
        assert fleet.events == [(0, Event.RECYCLE_DUE)]
        fleet.loading.on_leaving(fleet.workers[0], is_stopping=False)
        generations.update()
        error = error_of(generation)
        assert isinstance(error, ManifestError) and "worker 0 did not load it" in error.message
        generations.close()

    run(scenario)


def test_load_of_a_draining_worker_moves_to_another() -> None:
    async def scenario() -> None:
        fleet = Fleet(2)
        generations = generations_of(fleet)
        generation = begin(generations, "m")
        assert (fleet.model_keys(0), fleet.model_keys(1)) == ([0], [])
        leaving = fleet.workers[0]
        leaving.state = State.LEAVING
        fleet.loading.on_leaving(leaving, is_stopping=False)
        fleet.loading.on_lost(leaving)
        generations.update()
        assert not generation.outcome.done()
        assert fleet.model_keys(1) == [0]
        fleet.complete_load(1)
        generations.update()
        assert generation.outcome.done() and error_of(generation) is None
        generations.close()

    run(scenario)


def test_no_load_starts_when_all_workers_stop() -> None:
    async def scenario() -> None:
        fleet = Fleet(2)
        generations = generations_of(fleet)
        begin(generations, "m")
        fleet.workers[0].state = State.STOPPING
        fleet.loading.on_leaving(fleet.workers[0], is_stopping=True)
        assert fleet.model_keys(1) == []
        generations.close()

    run(scenario)


def test_worker_death_during_a_load_fails_the_load() -> None:
    async def scenario() -> None:
        fleet = Fleet(1)
        generations = generations_of(fleet)
        generation = begin(generations, "m")
        fleet.loading.on_lost(fleet.workers[0])
        generations.update()
        assert "worker 0 ended during the load" in str(error_of(generation))
        generations.close()

    run(scenario)


class ScriptedFreshness(FileFreshness):
    """File checks with scripted results; each check waits for `complete`."""

    def __init__(self) -> None:
        super().__init__()
        self.checks: list[tuple[Lane, Callable[[bool], None]]] = []

    def check(self, lane: Lane, then: Callable[[bool], None]) -> None:
        self.checks.append((lane, then))

    def complete(self, is_current: bool) -> None:
        self.checks.pop(0)[1](is_current)


def loaded_fleet(count: int) -> tuple[Fleet, ScriptedFreshness, Generations]:
    """Workers that serve one model, and the scripted checks of its files."""
    fleet = Fleet(count)
    generations = generations_of(fleet)
    begin(generations, "m")
    for index in range(count):
        fleet.complete_load(index)
    generations.update()
    fleet.models.freshness = files = ScriptedFreshness()
    fleet.loading.freshness = files
    return fleet, files, generations


def test_generation_takes_effect_only_if_its_files_are_unchanged() -> None:
    """The check follows the last load, so it covers the loads of all workers."""

    async def scenario() -> None:
        fleet, files, generations = loaded_fleet(2)
        same, changed = begin(generations, "n"), begin(generations, "o")
        for index in (0, 1, 0, 1):
            fleet.complete_load(index)
        generations.update()
        generations.update()
        assert not same.outcome.done() and len(files.checks) == 2, "one check each"
        files.complete(True)
        files.complete(False)
        generations.update()
        assert same.outcome.done() and error_of(same) is None
        assert "its files changed during the load" in str(error_of(changed))
        assert fleet.model_keys(0, Unload) == fleet.model_keys(1, Unload) == [2]
        generations.close()

    run(scenario)


def test_check_does_not_cover_workers_that_load_after_it() -> None:
    async def scenario() -> None:
        fleet, files, generations = loaded_fleet(2)
        generation = begin(generations, "n")
        fleet.workers[1].state = State.ABSENT
        fleet.complete_load(0)
        generations.update()
        fleet.workers[1].state = State.READY
        fleet.loading.load_missing()
        fleet.complete_load(1)
        generations.update()
        files.complete(True)
        generations.update()
        assert not generation.outcome.done()
        files.complete(True)
        generations.update()
        assert generation.outcome.done() and error_of(generation) is None
        generations.close()

    run(scenario)


def test_new_worker_loads_only_after_a_check_of_the_files() -> None:
    """The first check precedes the load, the second the acceptance of its result."""

    async def scenario() -> None:
        fleet, files, generations = loaded_fleet(2)
        fleet.restart(1)
        worker = fleet.workers[1]
        assert fleet.model_keys(1) == [0] and worker.loading_key == 0
        files.complete(True)
        assert fleet.model_keys(1) == [0, 0]
        fleet.complete_load(1)
        assert worker.models == set() and fleet.events == []
        files.complete(True)
        assert worker.models == {0} and fleet.events == [(1, Event.LOADED)]
        generations.close()

    run(scenario)


def test_new_worker_after_a_file_change_serves_without_the_model() -> None:
    async def scenario() -> None:
        fleet, files, generations = loaded_fleet(2)
        fleet.restart(1)
        files.complete(False)
        assert fleet.model_keys(1) == [0], "only its first process received a load"
        assert fleet.workers[1].load_errors == {0: CHANGED}
        assert fleet.models.by_key[0].is_stale
        assert fleet.events == [(1, Event.LOADED)]
        generations.close()

    run(scenario)


def test_load_of_changed_files_is_rejected() -> None:
    """The contract is equal; only the check of the files detects the change."""

    async def scenario() -> None:
        fleet, files, generations = loaded_fleet(2)
        fleet.restart(1)
        files.complete(True)
        fleet.complete_load(1)
        files.complete(False)
        worker = fleet.workers[1]
        assert worker.models == set() and worker.load_errors == {0: CHANGED}
        assert fleet.model_keys(1, Unload) == [0]
        assert fleet.models.by_key[0].is_stale
        generations.close()

    run(scenario)


def test_failed_load_is_retried_when_the_served_files_are_restored() -> None:
    """Otherwise the lane is marked as stale, so that all workers load the new files."""

    async def scenario() -> None:
        fleet, files, generations = loaded_fleet(2)
        worker, lane = fleet.workers[1], fleet.models.by_key[0]
        fleet.restart(1)
        files.complete(False)
        worker.state, lane.is_stale = State.READY, False
        fleet.loading.retry_failed()
        files.complete(False)
        assert lane.is_stale and worker.load_errors
        fleet.loading.retry_failed()
        files.complete(True)
        assert worker.load_errors == {} and worker.loading_key == 0
        files.complete(True)
        assert fleet.model_keys(1) == [0, 0]
        generations.close()

    run(scenario)


def test_check_result_for_a_replaced_worker_is_ignored() -> None:

    async def scenario() -> None:
        fleet, files, generations = loaded_fleet(2)
        fleet.restart(1)
        fleet.restart(1)
        files.complete(True)
        assert fleet.model_keys(1) == [0]
        files.complete(True)
        assert fleet.model_keys(1) == [0, 0]
        generations.close()

    run(scenario)


def test_checks_run_on_threads_with_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that times out counts as a change of the files."""
    release = threading.Event()

    def fingerprint_of(lane: Lane) -> str:
        assert threading.current_thread() is not threading.main_thread()
        if lane.model.name == "m0":
            release.wait(60)
        if lane.model.name == "m2":
            raise ValueError("unexpected")
        return lane.model.fingerprint

    async def scenario() -> None:
        monkeypatch.setattr(freshness_module, "CHECK_S", 0.05)
        freshness = FileFreshness()
        freshness.fingerprint_of = fingerprint_of
        results: dict[int, bool] = {}
        for key in range(3):
            spec = msgspec.structs.replace(model_of(key), fingerprint="unchanged")
            lane = Lane(spec, LaneConfig())
            freshness.check(lane, lambda is_current, key=key: results.update({key: is_current}))
        assert results == {}
        await until(lambda: len(results) == 3)
        assert results == {0: False, 1: True, 2: False}
        release.set()
        await until(lambda: not any(each.name == "isk-freshness" for each in threading.enumerate()))
        freshness.close()

    run(scenario)


def configuration(path: Path) -> Config:
    return Config(models=(ModelConfig(name="m", path=str(path), version="1"),))


def test_changed_configured_model_that_fails_to_load_is_tried_once(
    tmp_path: Path,
) -> None:
    """It is tried again after a load call or another change, not for a stale lane alone."""

    async def scenario() -> None:
        path = scaled(tmp_path / "m", 3)
        fleet, repository = repository_of(configuration(path), 1)
        lane = fleet.models.by_key[0]
        fleet.loading.load_missing()
        fleet.complete_load(0)
        await until(lambda: lane.workers)
        (path / "model.onnx").write_bytes(b"no model")
        for turn in range(3):
            for _ in range(3):
                lane.is_stale = True
                repository.update()
            assert len(repository._tasks) == 1, "further loads would queue up"
            await until(lambda: not repository._tasks or fleet.model_keys(0)[-1] == 1)
            if turn == 0:
                await until(lambda: fleet.model_keys(0) == [0, 1])
                fleet.fail_load(0)
                repository.update()
            await until(lambda: not repository._tasks)
        assert fleet.model_keys(0) == [0, 1]
        assert "not a model" in fleet.models.failures["m", "1"].reason

        load_task = asyncio.create_task(repository.load("m"))
        await until(lambda: fleet.model_keys(0) == [0, 1, 2])
        fleet.fail_load(0)
        repository.update()
        (error,) = await settled(load_task)
        assert isinstance(error, ManifestError)

        scaled(path, 5)
        lane.is_stale = True
        repository.update()
        await until(lambda: fleet.model_keys(0) == [0, 1, 2, 3])
        fleet.complete_load(0)
        repository.update()
        await until(lambda: fleet.models.find("m", None) is not lane)
        repository.close()

    run(scenario)


def test_files_changed_during_a_load_are_not_served(tmp_path: Path) -> None:
    """One worker loaded the old files and the other the new ones."""

    async def scenario() -> None:
        path = scaled(tmp_path / "m", 3)
        fleet, repository = repository_of(configuration(path), 2)
        fleet.loading.load_missing()
        for index in (0, 1):
            await until(lambda index=index: fleet.model_keys(index) == [0])
            fleet.complete_load(index)
        await until(lambda: len(fleet.models.by_key[0].workers) == 2)
        scaled(path, 5)
        load_task = asyncio.create_task(repository.load("m"))
        await until(lambda: fleet.model_keys(0) == [0, 1])
        fleet.complete_load(0)
        scaled(path, 12345)
        fleet.complete_load(1)
        repository.update()
        (error,) = await settled(load_task)
        assert isinstance(error, IskanderError)
        assert "changed during the load" in error.message
        assert fleet.models.find("m", None) is fleet.models.by_key[0]
        repository.close()

    run(scenario)


def test_routing_is_unchanged_until_its_targets_are_served(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = Folder(tmp_path / "models")
        folder.put("m", 3, 3)
        settings = RepositoryConfig(path=str(folder.root), control="explicit")
        fleet, repository = repository_of(Config(repository=settings), 1)

        async def load() -> None:
            load_task = asyncio.create_task(repository.load("m"))
            before = len(fleet.model_keys(0))
            await until(lambda: load_task.done() or len(fleet.model_keys(0)) > before)
            if not load_task.done():
                fleet.complete_load(0)
                repository.update()
            assert await settled(load_task) == [None]

        await load()
        folder.write_settings("m", 'default = "stable"\naliases = {stable = 4}')
        await load()
        assert fleet.models.find("m", None).model.version == "3"
        assert "4" in fleet.models.failures["m", SETTINGS].reason
        folder.put("m", 4, 5)
        await load()
        assert fleet.models.find("m", "stable").model.version == "4"
        assert not fleet.models.failures
        await until(lambda: [lane.model.version for lane in fleet.models] == ["4"])
        repository.close()

    run(scenario)


async def complete_loads(fleet: Fleet, condition: Callable[[], object]) -> None:
    """Complete each load of the only worker until the condition is true."""

    def complete_load() -> object:
        keys = fleet.model_keys(0)
        if keys and fleet.workers[0].loading_key == keys[-1]:
            fleet.complete_load(0)
        return condition()

    await until(complete_load)


def explicit_control(folder: Folder) -> Config:
    return Config(repository=RepositoryConfig(path=str(folder.root), control="explicit"))


def test_later_process_starts_without_the_versions_that_calls_have_unloaded(tmp_path: Path) -> None:
    """As in the other processes: the routing stays in effect, and no other version is loaded."""

    async def scenario() -> None:
        folder = Folder(tmp_path / "models")
        for version in (1, 2, 3):
            folder.put("m", version, version)
            folder.put("n", version, version)
        folder.write_settings("m", 'default = "stable"\naliases = {stable = 2, old = 1}')
        fleet, repository = repository_of(explicit_control(folder), 1)
        intents = [LoadIntent("m", excluded=("1",)), LoadIntent("n", excluded=("3",))]
        await repository.start(intents)
        await complete_loads(fleet, lambda: not repository._tasks)
        assert sorted(fleet.models.versions_of("m")) == ["2", "3"]
        assert fleet.models.find("m", None).model.version == "2"
        assert not fleet.models.versions_of("n")
        assert not fleet.models.failures
        repository.close()

    run(scenario)


def test_changed_files_are_loaded_only_of_versions_that_calls_have_loaded(tmp_path: Path) -> None:
    """The call has unloaded version 1, and no call has loaded version 3."""

    async def scenario() -> None:
        folder = Folder(tmp_path / "models")
        for version in (1, 2):
            folder.put("m", version, version)
        folder.write_settings("m", "aliases = {old = 1}")
        fleet, repository = repository_of(explicit_control(folder), 1)
        load_task = asyncio.create_task(repository.load("m"))
        await complete_loads(fleet, load_task.done)
        assert sorted(await load_task) == ["1", "2"]
        repository.unload("m", "1")
        folder.put("m", 3, 3)
        folder.put("m", 2, 5)
        lane = fleet.models.find("m", None)
        lane.is_stale = True
        repository.update()
        await complete_loads(fleet, lambda: not repository._tasks)
        assert list(fleet.models.versions_of("m")) == ["2"]
        assert fleet.models.find("m", None) is not lane
        assert fleet.model_keys(0) == [0, 1, 2]
        assert fleet.models.routings["m"].aliases == {"old": "1"}
        assert not fleet.models.failures
        repository.close()

    run(scenario)


def test_reload_after_an_unload_loads_nothing(tmp_path: Path) -> None:
    """The reload of the changed files waits for a load, which the unload ends."""

    async def scenario() -> None:
        folder = Folder(tmp_path / "models")
        folder.put("m", 1, 3)
        fleet, repository = repository_of(explicit_control(folder), 1)
        load_task = asyncio.create_task(repository.load("m"))
        await complete_loads(fleet, load_task.done)
        folder.put("m", 1, 5)
        load_task = asyncio.create_task(repository.load("m"))
        await until(lambda: fleet.model_keys(0) == [0, 1])
        fleet.models.find("m", None).is_stale = True
        repository.update()
        assert repository.unload("m") == ["1"]
        (error,) = await settled(load_task)
        assert isinstance(error, ModelMoved)
        await until(lambda: not repository._tasks)
        assert not list(fleet.models) and fleet.model_keys(0) == [0, 1]
        repository.close()

    run(scenario)


def test_load_uses_the_limits_of_the_last_reload(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = Folder(tmp_path / "models")
        folder.put("m", 1, 3)
        folder.write_settings("m", "max_batch_rows = 64")
        settings = RepositoryConfig(path=str(folder.root), control="explicit")
        config = Config(repository=settings, limits=LimitsConfig(rows=32))
        fleet, repository = repository_of(config, 1)
        (error,) = await settled(asyncio.create_task(repository.load("m")))
        assert error is not None and "limits.rows = 32" in error.message
        repository.configure(msgspec.structs.replace(config, limits=LimitsConfig(rows=64)))
        load_task = asyncio.create_task(repository.load("m"))
        await until(lambda: load_task.done() or fleet.model_keys(0))
        fleet.complete_load(0)
        repository.update()
        assert await settled(load_task) == [None]
        repository.close()

    run(scenario)


def test_unreadable_folder_unloads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        folder = Folder(tmp_path / "models")
        folder.put("m", 1, 3)
        settings = RepositoryConfig(path=str(folder.root), control="explicit")
        fleet, repository = repository_of(Config(repository=settings), 1)
        load_task = asyncio.create_task(repository.load("m"))
        await until(lambda: fleet.model_keys(0))
        fleet.complete_load(0)
        repository.update()
        assert await settled(load_task) == [None]

        def deny(*_: Any) -> Any:
            raise PermissionError(13, "Permission denied")

        with monkeypatch.context() as patched:
            patched.setattr("os.scandir", deny)
            (error,) = await settled(asyncio.create_task(repository.load("m")))
        assert error is not None and "Permission denied" in error.message
        assert fleet.models.find("m", None).model.version == "1"
        assert await repository.load("m") == ["1"]
        assert not fleet.models.failures
        repository.close()

    run(scenario)
