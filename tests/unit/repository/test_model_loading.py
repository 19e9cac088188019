"""Which worker loads what and when, and what is held against whom."""

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

from iskander.clock import NS_PER_S
from iskander.config.models import LaneConfig, ModelConfig
from iskander.config.repository import RepositoryConfig
from iskander.config.schema import Config, ServerConfig, WorkersConfig
from iskander.control.messages import Unload
from iskander.errors import IskanderError, ManifestError, NotReady
from iskander.measurement.recent_values import RecentValues
from iskander.repository import generations as generations_module
from iskander.repository.generations import Generation, Generations
from iskander.repository.scan import SETTINGS
from iskander.scheduling.lane import Lane
from iskander.supervision import file_freshness as freshness_module
from iskander.supervision import model_loader as loading_module
from iskander.supervision.file_freshness import FileFreshness
from iskander.supervision.lifecycle import Event, State
from iskander.supervision.model_loader import CHANGED

LOAD_S = 100.0


class Clock:
    """Of the parts that keep time here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 10**15
        for module in (generations_module, loading_module):
            monkeypatch.setattr(module, "now_ns", lambda: self.now_ns)

    def passes(self, seconds: float) -> None:
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


def test_time_behind_other_loads_is_none_of_a_load(clock: Clock) -> None:
    """Each may take its time; a row of them takes that many times as long."""

    async def scenario() -> None:
        fleet = Fleet(1)
        generations = generations_of(fleet)
        begun = [begin(generations, f"m{number}") for number in range(5)]
        for generation in begun:
            for _ in range(3):
                clock.passes(LOAD_S / 4)
                generations.update()
            fleet.has_loaded(0)
            generations.update()
            assert generation.outcome.done() and error_of(generation) is None
        generations.close()

    run(scenario)


def test_a_load_that_nobody_comes_to_is_overdue(clock: Clock) -> None:
    async def scenario() -> None:
        fleet = Fleet(1)
        generations = generations_of(fleet)
        fleet.workers[0].state = State.ABSENT
        generation = begin(generations, "m")
        clock.passes(LOAD_S + 1)
        generations.update()
        assert isinstance(error_of(generation), NotReady)
        generations.close()

    run(scenario)


def test_who_has_it_is_enough_where_the_last_is_behind_for_too_long(clock: Clock) -> None:
    async def scenario() -> None:
        fleet = Fleet(2)
        generations = generations_of(fleet)
        first, second = begin(generations, "m"), begin(generations, "n")
        assert (fleet.told(0), fleet.told(1)) == ([0], [1])
        fleet.has_loaded(0)
        generations.update()
        assert not first.outcome.done()
        clock.passes(LOAD_S - 1)
        generations.update()
        assert not first.outcome.done()
        clock.passes(2)
        generations.update()
        assert first.outcome.done() and error_of(first) is None
        assert isinstance(error_of(second), ManifestError)
        generations.close()

    run(scenario)


def test_one_that_does_not_come_to_an_end_of_a_load_is_replaced_and_named(clock: Clock) -> None:
    """The worker leaves in order then, which alone would be held against nothing."""

    async def scenario() -> None:
        fleet = Fleet(1)
        generations = generations_of(fleet)
        generation = begin(generations, "m")
        clock.passes(LOAD_S + 1)
        fleet.loading.replace_overdue(int(LOAD_S * NS_PER_S))
        assert fleet.happened == [(0, Event.RECYCLE_DUE)]
        fleet.loading.on_leaving(fleet.workers[0], is_stopping=False)
        generations.update()
        error = error_of(generation)
        assert isinstance(error, ManifestError) and "worker 0 had not loaded it" in error.message
        generations.close()

    run(scenario)


def test_a_worker_that_leaves_in_order_leaves_its_load_to_another() -> None:
    async def scenario() -> None:
        fleet = Fleet(2)
        generations = generations_of(fleet)
        generation = begin(generations, "m")
        assert (fleet.told(0), fleet.told(1)) == ([0], [])
        leaving = fleet.workers[0]
        leaving.state = State.LEAVING
        fleet.loading.on_leaving(leaving, is_stopping=False)
        fleet.loading.on_lost(leaving)
        generations.update()
        assert not generation.outcome.done()
        assert fleet.told(1) == [0]
        fleet.has_loaded(1)
        generations.update()
        assert generation.outcome.done() and error_of(generation) is None
        generations.close()

    run(scenario)


def test_nothing_is_begun_when_all_of_them_leave() -> None:
    async def scenario() -> None:
        fleet = Fleet(2)
        generations = generations_of(fleet)
        begin(generations, "m")
        fleet.workers[0].state = State.STOPPING
        fleet.loading.on_leaving(fleet.workers[0], is_stopping=True)
        assert fleet.told(1) == []
        generations.close()

    run(scenario)


def test_a_worker_that_dies_over_a_load_is_held_against_it() -> None:
    async def scenario() -> None:
        fleet = Fleet(1)
        generations = generations_of(fleet)
        generation = begin(generations, "m")
        fleet.loading.on_lost(fleet.workers[0])
        generations.update()
        assert "worker 0 ended while it loaded it" in str(error_of(generation))
        generations.close()

    run(scenario)


class Files(FileFreshness):
    """Files of which a test says whether they are as they were; each look waits for `answer`."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[tuple[Lane, Callable[[bool], None]]] = []

    def check(self, lane: Lane, then: Callable[[bool], None]) -> None:
        self.looks.append((lane, then))

    def answer(self, is_current: bool) -> None:
        self.looks.pop(0)[1](is_current)


def watched(count: int) -> tuple[Fleet, Files, Generations]:
    """Workers that serve one model, and the files that all is loaded from."""
    fleet = Fleet(count)
    generations = generations_of(fleet)
    begin(generations, "m")
    for index in range(count):
        fleet.has_loaded(index)
    generations.update()
    fleet.models.freshness = files = Files()
    fleet.loading.freshness = files
    return fleet, files, generations


def test_a_generation_takes_effect_when_its_files_are_still_the_same() -> None:
    """They are looked at when the last worker has it: then all of them have the same."""

    async def scenario() -> None:
        fleet, files, generations = watched(2)
        same, changed = begin(generations, "n"), begin(generations, "o")
        for index in (0, 1, 0, 1):
            fleet.has_loaded(index)
        generations.update()
        generations.update()
        assert not same.outcome.done() and len(files.looks) == 2, "one look each"
        files.answer(True)
        files.answer(False)
        generations.update()
        assert same.outcome.done() and error_of(same) is None
        assert "its files changed during the load" in str(error_of(changed))
        assert fleet.told(0, Unload) == fleet.told(1, Unload) == [2]
        generations.close()

    run(scenario)


def test_a_look_says_nothing_of_workers_that_came_after_it() -> None:
    async def scenario() -> None:
        fleet, files, generations = watched(2)
        generation = begin(generations, "n")
        fleet.workers[1].state = State.ABSENT
        fleet.has_loaded(0)
        generations.update()
        fleet.workers[1].state = State.READY
        fleet.loading.load_missing()
        fleet.has_loaded(1)
        generations.update()
        files.answer(True)
        generations.update()
        assert not generation.outcome.done()
        files.answer(True)
        generations.update()
        assert generation.outcome.done() and error_of(generation) is None
        generations.close()

    run(scenario)


def test_a_worker_that_comes_later_is_asked_when_the_files_are_known_to_be_the_same() -> None:
    """The loop goes on meanwhile; nothing is sent before, and nothing taken before the second."""

    async def scenario() -> None:
        fleet, files, generations = watched(2)
        fleet.restarts(1)
        worker = fleet.workers[1]
        assert fleet.told(1) == [0] and worker.loading_key == 0
        files.answer(True)
        assert fleet.told(1) == [0, 0]
        fleet.has_loaded(1)
        assert worker.models == set() and fleet.happened == []
        files.answer(True)
        assert worker.models == {0} and fleet.happened == [(1, Event.LOADED)]
        generations.close()

    run(scenario)


def test_a_worker_that_comes_after_a_change_goes_on_without_the_model() -> None:
    async def scenario() -> None:
        fleet, files, generations = watched(2)
        fleet.restarts(1)
        files.answer(False)
        assert fleet.told(1) == [0], "only its first process was asked"
        assert fleet.workers[1].load_errors == {0: CHANGED}
        assert fleet.models.by_key[0].is_stale
        assert fleet.happened == [(1, Event.LOADED)]
        generations.close()

    run(scenario)


def test_what_a_worker_loaded_of_changed_files_is_not_taken_for_the_same() -> None:
    """Its contract is equal: only the files tell."""

    async def scenario() -> None:
        fleet, files, generations = watched(2)
        fleet.restarts(1)
        files.answer(True)
        fleet.has_loaded(1)
        files.answer(False)
        worker = fleet.workers[1]
        assert worker.models == set() and worker.load_errors == {0: CHANGED}
        assert fleet.told(1, Unload) == [0]
        assert fleet.models.by_key[0].is_stale
        generations.close()

    run(scenario)


def test_a_worker_is_asked_again_where_the_files_are_what_is_served_again() -> None:
    """Where they are not, all are to load what is there."""

    async def scenario() -> None:
        fleet, files, generations = watched(2)
        worker, lane = fleet.workers[1], fleet.models.by_key[0]
        fleet.restarts(1)
        files.answer(False)
        worker.state, lane.is_stale = State.READY, False
        fleet.loading.retry_failed()
        files.answer(False)
        assert lane.is_stale and worker.load_errors
        fleet.loading.retry_failed()
        files.answer(True)
        assert worker.load_errors == {} and worker.loading_key == 0
        files.answer(True)
        assert fleet.told(1) == [0, 0]
        generations.close()

    run(scenario)


def test_what_is_known_too_late_is_for_nobody() -> None:
    """A worker that left, or was replaced, meanwhile is told nothing."""

    async def scenario() -> None:
        fleet, files, generations = watched(2)
        fleet.restarts(1)
        fleet.restarts(1)
        files.answer(True)
        assert fleet.told(1) == [0]
        files.answer(True)
        assert fleet.told(1) == [0, 0]
        generations.close()

    run(scenario)


def test_looks_do_not_hold_the_loop_up_and_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that does not answer is one whose files are not those."""
    hangs = threading.Event()

    def fingerprint_of(lane: Lane) -> str:
        assert threading.current_thread() is not threading.main_thread()
        if lane.model.name == "m0":
            hangs.wait(60)
        if lane.model.name == "m2":
            raise ValueError("what is this")
        return lane.model.fingerprint

    async def scenario() -> None:
        monkeypatch.setattr(freshness_module, "CHECK_S", 0.05)
        freshness = FileFreshness()
        freshness.fingerprint_of = fingerprint_of
        found: dict[int, bool] = {}
        for key in range(3):
            spec = msgspec.structs.replace(model_of(key), fingerprint="as it was")
            lane = Lane(spec, LaneConfig())
            freshness.check(lane, lambda is_current, key=key: found.update({key: is_current}))
        assert found == {}
        await until(lambda: len(found) == 3)
        assert found == {0: False, 1: True, 2: False}
        hangs.set()
        await until(lambda: not any(each.name == "isk-freshness" for each in threading.enumerate()))
        freshness.close()

    run(scenario)


def configuration(path: Path) -> Config:
    return Config(models=(ModelConfig(name="m", path=str(path), version="1"),))


def test_a_changed_model_of_the_configuration_that_does_not_load_is_tried_once(
    tmp_path: Path,
) -> None:
    """Again by a call, or when it changes; not because a worker asks for it again and again."""

    async def scenario() -> None:
        path = scaled(tmp_path / "m", 3)
        fleet, repository = repository_of(configuration(path), 1)
        lane = fleet.models.by_key[0]
        fleet.loading.load_missing()
        fleet.has_loaded(0)
        await until(lambda: lane.workers)
        (path / "model.onnx").write_bytes(b"no model")
        for turn in range(3):
            for _ in range(3):
                lane.is_stale = True
                repository.update()
            assert len(repository._tasks) == 1, "they would wait in a row"
            await until(lambda: not repository._tasks or fleet.told(0)[-1] == 1)
            if turn == 0:
                await until(lambda: fleet.told(0) == [0, 1])
                fleet.has_failed(0)
                repository.update()
            await until(lambda: not repository._tasks)
        assert fleet.told(0) == [0, 1]
        assert "it is no model" in fleet.models.failures["m", "1"].reason

        asked = asyncio.create_task(repository.load("m"))
        await until(lambda: fleet.told(0) == [0, 1, 2])
        fleet.has_failed(0)
        repository.update()
        (error,) = await settled(asked)
        assert isinstance(error, ManifestError)

        scaled(path, 5)
        lane.is_stale = True
        repository.update()
        await until(lambda: fleet.told(0) == [0, 1, 2, 3])
        fleet.has_loaded(0)
        repository.update()
        await until(lambda: fleet.models.find("m", None) is not lane)
        repository.close()

    run(scenario)


def test_files_that_change_while_workers_load_them_are_not_served(tmp_path: Path) -> None:
    """One worker has the old bytes and the other the new: neither is put in place."""

    async def scenario() -> None:
        path = scaled(tmp_path / "m", 3)
        fleet, repository = repository_of(configuration(path), 2)
        fleet.loading.load_missing()
        for index in (0, 1):
            await until(lambda index=index: fleet.told(index) == [0])
            fleet.has_loaded(index)
        await until(lambda: len(fleet.models.by_key[0].workers) == 2)
        scaled(path, 5)
        asked = asyncio.create_task(repository.load("m"))
        await until(lambda: fleet.told(0) == [0, 1])
        fleet.has_loaded(0)
        scaled(path, 12345)
        fleet.has_loaded(1)
        repository.update()
        (error,) = await settled(asked)
        assert isinstance(error, IskanderError)
        assert "changed during the load" in error.message
        assert fleet.models.find("m", None) is fleet.models.by_key[0]
        repository.close()

    run(scenario)


def test_names_lead_on_as_before_until_what_they_lead_to_is_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = Folder(tmp_path / "models")
        folder.put("m", 3, 3)
        settings = RepositoryConfig(path=str(folder.root), control="explicit")
        fleet, repository = repository_of(Config(repository=settings), 1)

        async def load() -> None:
            asked = asyncio.create_task(repository.load("m"))
            before = len(fleet.told(0))
            await until(lambda: asked.done() or len(fleet.told(0)) > before)
            if not asked.done():
                fleet.has_loaded(0)
                repository.update()
            assert await settled(asked) == [None]

        await load()
        folder.say("m", 'default = "stable"\naliases = {stable = 4}')
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


def test_a_folder_that_cannot_be_read_takes_nothing_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        folder = Folder(tmp_path / "models")
        folder.put("m", 1, 3)
        settings = RepositoryConfig(path=str(folder.root), control="explicit")
        fleet, repository = repository_of(Config(repository=settings), 1)
        asked = asyncio.create_task(repository.load("m"))
        await until(lambda: fleet.told(0))
        fleet.has_loaded(0)
        repository.update()
        assert await settled(asked) == [None]

        def refused(*_: Any) -> Any:
            raise PermissionError(13, "Permission denied")

        with monkeypatch.context() as patched:
            patched.setattr("os.scandir", refused)
            (error,) = await settled(asyncio.create_task(repository.load("m")))
        assert error is not None and "Permission denied" in error.message
        assert fleet.models.find("m", None).model.version == "1"
        assert await repository.load("m") == ["1"]
        assert not fleet.models.failures
        repository.close()

    run(scenario)
