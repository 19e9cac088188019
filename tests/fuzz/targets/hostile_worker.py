"""Messages of a faulty worker to a gateway, with the callers' requests as the reference.

Layout of an input: frames, each with its length (2 bytes). They arrive at a gateway with a batch of
the faulty worker in flight. No exception may leave the reader, and once the worker is lost, the
request has exactly one result or error, and another worker serves the model as before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from support.lanes import CONTRACT, lane_of, model_of
from support.simulation import SimulatedWorker, Simulation

from fuzz import mutation
from fuzz.targets.wire_messages import with_changed_value
from iskander.config.models import LaneConfig
from iskander.gateway.scheduling.dispatch import Dispatcher
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.supervision.lifecycle import Event, State
from iskander.gateway.supervision.loading.model_loader import ModelLoader
from iskander.gateway.supervision.outages import Outages
from iskander.gateway.supervision.supervisor import Supervisor
from iskander.gateway.supervision.worker_messages import WorkerMessageReader
from iskander.interprocess.control import messages as wire

ITERATIONS = 300
MS = 1_000_000
ARENA_BYTES = 1 << 16
NEW_MODEL = 1


def seeds() -> list[bytes]:
    loaded = wire.Loaded(NEW_MODEL, CONTRACT, ("cpu",), 1, 1.0)
    frames: list[list[wire.ToGateway]] = [
        [wire.Done(1, 1000)],
        [wire.Done(2, 1000), wire.Done(1, 1000), wire.Done(1, 1000)],
        [wire.Failed(1, "internal", "why", 5)],
        [wire.Failed(1, "remote_unavailable", "gone")] * 6,
        [loaded],
        [wire.Loaded(0, CONTRACT, ("cpu",), 1, float("nan")), wire.Unloaded(0)],
        [wire.LoadFailed(NEW_MODEL, "manifest", "no"), wire.Leaving(), wire.Notice("slow")],
        [wire.LoadStep(NEW_MODEL, "building", 20.0), wire.LoadStep(99, "", -1.0)],
        [wire.Stepped(0, (("a", 1), ("b", -1))), wire.Stepped(9, ()), wire.Probed(0, "no")],
    ]
    nested = b"\x91\x94\xa1d\x01\x01" + b"\x91" * 3000 + b"\xc0"
    return [
        *(join([wire.encode(frame)]) for frame in frames),
        join([wire.encode(frame) for frame in frames]),
        join([nested, wire.encode(frames[0])]),
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    def change(frame: bytes) -> bytes:
        return mutation.patch_document(frame, other, random, with_changed_value, wire.encode)

    return join(mutation.shuffle(split(raw), split(other), random, change))


def run(raw: bytes) -> None:
    served, new = lane_of(0, rows_max=8), Lane(model_of(NEW_MODEL, rows_max=8), LaneConfig())
    with Simulation(served, new, input_bytes=ARENA_BYTES) as simulation:
        faulty = simulation.start(0, output_bytes=ARENA_BYTES)
        honest = simulation.start(0, output_bytes=ARENA_BYTES)
        gateway = Gateway(simulation, faulty)
        gateway.loading.load_next(faulty)
        submitted = [simulation.submit_rows(rows=2, first=at) for at in (10, 20)]
        simulation.loop.turn()
        with mock.patch.object(asyncio, "get_running_loop", lambda: LaterTurns):
            gateway.receive(split(raw))
        simulation.lose(faulty)
        honest.play()
        submitted.append(simulation.submit_rows(rows=2, first=30))
        simulation.loop.run(1000 * MS)
        for _, caller in submitted:
            assert caller.outcome_count == 1, f"{caller.outcome_count} results and errors"
        assert submitted[-1][1].results, "another worker does not serve the model"
        assert simulation.is_clean()


class LaterTurns:
    """An event loop whose next turn the test runs itself."""

    @staticmethod
    def call_soon(*_: object) -> None:
        """Drop a call."""

    @staticmethod
    def call_later(*_: object) -> mock.Mock:
        """Return a timer that never fires."""
        return mock.Mock()


class Channel:
    """A channel with the frames of a test; messages to the worker are dropped."""

    has_ended = False

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def receive(self) -> Iterator[memoryview]:
        while self.frames:
            yield memoryview(self.frames.pop(0))

    def send(self, frame: bytes) -> None:
        wire.decode_to_worker(frame)

    def close(self) -> None:
        """There is no socket."""


class Gateway:
    """The supervisor's handlers of messages, on real parts."""

    def __init__(self, simulation: Simulation, worker: SimulatedWorker) -> None:
        self.worker = worker
        worker.state = State.READY
        self.channel = worker.channel = Channel()  # type: ignore[assignment]
        self.dispatcher: Dispatcher = simulation.dispatcher
        lanes = simulation.lanes
        self.models = SimpleNamespace(by_key=lanes)
        self.recycling = SimpleNamespace(check=lambda worker: None)
        send, reject = self.dispatcher.send, self.dispatcher.reject_queued
        self._outages = Outages(lanes, reject, self.notify_change, send)
        self.loading = ModelLoader(
            lanes, [worker], ARENA_BYTES, SimpleNamespace(check=self._check),  # type: ignore[arg-type]
            self._on_event, lambda worker, error: None, send,
        )  # fmt: skip
        self._reader = WorkerMessageReader(self.dispatcher, self)  # type: ignore[arg-type]

    on_message = Supervisor.on_message

    def receive(self, frames: list[bytes]) -> None:
        """Read frames until the worker is ended."""
        self.channel.frames = frames
        while self.channel.frames:
            self._reader.read(self.worker, self.channel)  # type: ignore[arg-type]

    def on_malformed(self, worker: Any, error: Exception) -> None:
        assert str(error) or type(error).__name__
        self.channel.frames.clear()

    def on_unprocessable(self, worker: Any, message: Any, error: Exception) -> None:
        assert not isinstance(error, AssertionError), error
        self.on_malformed(worker, error)

    def notify_change(self) -> None:
        """Readiness is not tested."""

    def _check(self, lane: Any, on_checked: Any) -> None:
        on_checked(True)

    def _on_event(self, worker: Any, event: Event) -> None:
        assert isinstance(event, Event)


def join(frames: list[bytes]) -> bytes:
    return b"".join((len(frame) & 0xFFFF).to_bytes(2) + frame for frame in frames)


def split(raw: bytes) -> list[bytes]:
    frames, at = [], 0
    while at + 2 <= len(raw):
        end = at + 2 + int.from_bytes(raw[at : at + 2])
        frames.append(raw[at + 2 : end])
        at = end
    return frames
