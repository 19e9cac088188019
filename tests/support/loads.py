"""Workers with scripted model loads, for the tests of model loading."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from iskander.config.schema import Config
from iskander.errors import IskanderError
from iskander.foundation.measurement.recent_values import RecentValues
from iskander.gateway.repository.models import Models, configured
from iskander.gateway.repository.repository import Repository
from iskander.gateway.supervision.lifecycle import Event, State
from iskander.gateway.supervision.loading.model_loader import ModelLoader
from iskander.gateway.supervision.worker import SlotPlan, Worker
from iskander.interprocess.control.messages import (
    Load,
    Loaded,
    LoadFailed,
    ToWorker,
    decode_to_worker,
    encode,
)
from support.lanes import CONTRACT


class RecordingChannel:
    """A channel that records the messages to a worker."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, frame: bytes) -> None:
        self.messages += decode_to_worker(frame)

    def close(self) -> None:
        """There is no socket."""


class Fleet:
    """Serving workers and their model loader.

    Attributes:
        events: Events that the supervisor received.
    """

    def __init__(self, count: int, models: Models | None = None) -> None:
        self.models = models or Models()
        self.workers = [Worker(SlotPlan(index, 0, (0,), None)) for index in range(count)]
        for worker in self.workers:
            worker.state, worker.incarnation = State.READY, worker.index + 1
            worker.channel = RecordingChannel()  # type: ignore[assignment]
        self.models.workers = self.workers
        self.events: list[tuple[int, Event]] = []
        self.loading = ModelLoader(
            self.models.by_key,
            self.workers,
            1 << 20,
            freshness=self.models.freshness,
            on_event=lambda worker, event: self.events.append((worker.index, event)),
            on_load_error=lambda worker, error: None,
            send=self._send,
        )

    def _send(self, worker: Worker, messages: Sequence[ToWorker]) -> None:
        assert worker.channel is not None
        worker.channel.send(encode(messages))

    def model_keys(self, index: int, kind: type = Load) -> list[int]:
        """Keys of the models in a worker's messages of a kind."""
        channel: Any = self.workers[index].channel
        messages = [each for each in channel.messages if type(each) is kind]
        return [each.model.key if kind is Load else each.model for each in messages]

    def complete_load(self, index: int) -> None:
        """Complete a worker's last load."""
        key = self.model_keys(index)[-1]
        answer = Loaded(key, CONTRACT, ("cpu",), 1, 1.0)
        self.loading.on_answer(self.workers[index], answer)

    def fail_load(self, index: int) -> None:
        """Fail a worker's last load."""
        answer = LoadFailed(self.model_keys(index)[-1], "manifest", "not a model")
        self.loading.on_answer(self.workers[index], answer)

    def restart(self, index: int) -> None:
        """Replace a worker's process; the new one has no models."""
        worker = self.workers[index]
        for lane in self.models.by_key.values():
            lane.workers.pop(worker.incarnation, None)
        worker.models, worker.load_errors, worker.loading_key = set(), {}, None
        worker.incarnation += 100
        worker.state = State.LOADING
        self.loading.load_next(worker)


def repository_of(config: Config, workers: int) -> tuple[Fleet, Repository]:
    """A repository on such workers; each change triggers another check, as in the server."""

    def update() -> None:
        repository.update()

    fleet = Fleet(workers, configured(config, RecentValues()))
    repository = Repository(
        config,
        fleet.models,
        fleet.loading,
        lambda lane, error: None,
        recent=RecentValues(),
        on_change=update,
    )
    return fleet, repository


async def until(condition: Callable[[], object], within_s: float = 20.0) -> None:
    """Run the loop and its threads until the condition is true."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.001)


async def settled(*tasks: asyncio.Task[Any]) -> list[IskanderError | None]:
    """The errors of calls."""
    found = await asyncio.gather(*tasks, return_exceptions=True)
    return [each if isinstance(each, IskanderError) else None for each in found]
