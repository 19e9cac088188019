"""Workers that load what a test says they do, for the parts that give them their models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from iskander.config.schema import Config
from iskander.control.messages import Load, Loaded, LoadFailed, decode_to_worker
from iskander.errors import IskanderError
from iskander.measurement.recent_values import RecentValues
from iskander.repository.models import Models, configured
from iskander.repository.repository import Repository
from iskander.supervision.lifecycle import Event, State
from iskander.supervision.model_loader import ModelLoader
from iskander.supervision.worker import SlotPlan, Worker
from support.lanes import CONTRACT


class Heard:
    """A channel that keeps what a worker is told."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, frame: bytes) -> None:
        self.messages += decode_to_worker(frame)

    def close(self) -> None:
        """Nothing to close."""


class Fleet:
    """Workers that serve, and what gives them their models.

    Attributes:
        asked: Keys that each worker was told to load and has not answered for.
        happened: What the supervisor was told.
    """

    def __init__(self, count: int, models: Models | None = None) -> None:
        self.models = models or Models()
        self.workers = [Worker(SlotPlan(index, 0, (0,), None)) for index in range(count)]
        for worker in self.workers:
            worker.state, worker.incarnation = State.READY, worker.index + 1
            worker.channel = Heard()  # type: ignore[assignment]
        self.models.workers = self.workers
        self.happened: list[tuple[int, Event]] = []
        self.loading = ModelLoader(
            self.models.by_key,
            self.workers,
            1 << 20,
            freshness=self.models.freshness,
            happened=lambda worker, event: self.happened.append((worker.index, event)),
            on_refused=lambda worker, error: None,
        )

    def told(self, index: int, kind: type = Load) -> list[int]:
        """Keys of the models that a worker was told to load, or to give up."""
        heard: Any = self.workers[index].channel
        messages = [each for each in heard.messages if type(each) is kind]
        return [each.model.key if kind is Load else each.model for each in messages]

    def has_loaded(self, index: int) -> None:
        """Answer what a worker was asked for last."""
        key = self.told(index)[-1]
        answer = Loaded(key, CONTRACT, ("cpu",), 1, 1.0)
        self.loading.on_answer(self.workers[index], answer)

    def has_failed(self, index: int) -> None:
        """Refuse it."""
        answer = LoadFailed(self.told(index)[-1], "manifest", "it is no model")
        self.loading.on_answer(self.workers[index], answer)

    def comes_anew(self, index: int) -> None:
        """Let another process take a worker's place, with nothing loaded."""
        worker = self.workers[index]
        for lane in self.models.by_key.values():
            lane.workers.pop(worker.incarnation, None)
        worker.models, worker.refused, worker.asked = set(), {}, None
        worker.incarnation += 100
        worker.state = State.LOADING
        self.loading.ask_next(worker)


def repository_of(config: Config, workers: int) -> tuple[Fleet, Repository]:
    """A repository on such workers; whatever changes makes it look again, as in the server."""

    def look() -> None:
        repository.look()

    fleet = Fleet(workers, configured(config, RecentValues()))
    repository = Repository(
        config,
        fleet.models,
        fleet.loading,
        lambda lane, error: None,
        recent=RecentValues(),
        on_change=look,
    )
    return fleet, repository


async def until(condition: Callable[[], object], within_s: float = 20.0) -> None:
    """Let the loop and its threads run until something is so."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.001)


async def settled(*tasks: asyncio.Task[Any]) -> list[IskanderError | None]:
    """What came of calls."""
    found = await asyncio.gather(*tasks, return_exceptions=True)
    return [each if isinstance(each, IskanderError) else None for each in found]
