"""A real worker process whose model computes on a fake device, with a scripted gateway."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
from support import models
from support.fake_device_worker import FAULT, SLOW
from support.processes import WorkerProcess, eventually
from support.scripted import ScriptedGateway, model_spec

from iskander.interprocess.control.messages import (
    Copied,
    Done,
    Drain,
    Execute,
    Failed,
    Load,
    Loaded,
    LoadFailed,
    LoadStep,
    Notice,
    Slice,
    Unload,
    Unloaded,
)

TESTS = Path(__file__).resolve().parent.parent


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ScriptedGateway]:
    gateway = ScriptedGateway(tmp_path)
    yield gateway
    gateway.close()


@pytest.fixture
def worker(gateway: ScriptedGateway) -> Iterator[WorkerProcess]:
    """A registered worker with the backend `fake`."""

    class Fake(WorkerProcess):
        def __init__(self) -> None:
            self.log = gateway.folder / "worker.log"
            command = [sys.executable, "-m", "support.fake_device_worker"]
            path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    [*command, "--attach", str(gateway.socket_path), "--group", "0"],
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "PYTHONPATH": path},
                )

    worker = Fake()
    try:
        gateway.accept()
        gateway.welcome()
        yield worker
    finally:
        worker.end()


def load(gateway: ScriptedGateway, key: int = 0, **options: str) -> list[Any]:
    """Load a model on the device; returns the answers."""
    folder = models.row_ids(gateway.folder / f"m{key}")
    spec = model_spec(
        folder, key, backend="fake", pool=f"m{key}/1", provider_options={"cuda": options}
    )
    gateway.send(Load(spec))
    answers = [gateway.receive()]
    while isinstance(answers[-1], Notice):
        answers.append(gateway.receive())
    return answers


def send(gateway: ScriptedGateway, batch_id: int, *values: int, model: int = 0) -> None:
    offset = batch_id * 4096
    raw = np.array(values, np.int64).tobytes()
    gateway.input.view[offset : offset + len(raw)] = raw
    part = Slice(offset, len(values), 0, len(values), offset)
    gateway.send(Execute(batch_id, model, len(values), (part,)))


def receive(gateway: ScriptedGateway) -> Any:
    """The next message but `Copied`."""
    while isinstance(message := gateway.receive(), Copied):
        pass
    return message


def result(gateway: ScriptedGateway, batch_id: int, count: int) -> list[int]:
    return np.frombuffer(gateway.output.view, np.int64, count, batch_id * 4096).tolist()


def test_batches_are_answered_in_order_with_their_own_times(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    """The time of a batch begins with the end of the one before it."""
    assert isinstance(load(gateway)[-1], Loaded)
    send(gateway, 1, SLOW)
    for batch_id in range(2, 8):
        send(gateway, batch_id, batch_id, 5)
    answers = []
    for _ in range(7):
        answers.append(gateway.receive())
        assert gateway.receive() == Copied(64, 8 * (1 if len(answers) == 1 else 2))
    assert [answer.batch_id for answer in answers] == list(range(1, 8))
    assert all(isinstance(answer, Done) for answer in answers)
    assert result(gateway, 1, 1) == [3 * SLOW + 1]
    for batch_id in range(2, 8):
        assert result(gateway, batch_id, 2) == [3 * batch_id + 1, 16]
    # The second one waited for the first, which is no time of its own.
    assert answers[1].run_ns < answers[0].run_ns / 2


def test_heartbeat_is_that_of_the_oldest_batch_in_flight(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    """The watchdog can see a device that hangs, though the worker's loop runs."""
    load(gateway)
    send(gateway, 1, SLOW)
    beat = eventually(lambda: gateway.last_beat().batch_id == 1 and gateway.last_beat())
    send(gateway, 2, SLOW)
    assert gateway.channel is not None
    beats = set()
    while True:
        seen = gateway.last_beat()
        if select.select([gateway.channel], [], [], 0.01)[0]:
            break
        beats.add(seen)
    assert beats == {beat}
    assert receive(gateway).batch_id == 1
    eventually(lambda: gateway.last_beat().batch_id == 2, what="the next batch's heartbeat")
    assert receive(gateway).batch_id == 2
    eventually(lambda: gateway.last_beat().batch_id == 0, what="the idle heartbeat")


def test_drain_and_unload_follow_the_batches_in_flight(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    load(gateway)
    load(gateway, key=1)
    send(gateway, 1, SLOW)
    send(gateway, 2, 4)
    gateway.send(Unload(1))
    gateway.send(Drain())
    answers = [receive(gateway) for _ in range(3)]
    assert {type(answer) for answer in answers} == {Done, Unloaded}
    assert worker.process.wait(20) == 0
    assert result(gateway, 2, 1) == [13]


def test_gateway_that_ends_during_a_batch_is_followed_by_another(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    """The arenas stay mapped until the copies of the batch have ended."""
    load(gateway)
    send(gateway, 1, SLOW)
    eventually(lambda: gateway.last_beat().batch_id == 1)
    gateway.hang_up()
    gateway.accept()
    gateway.welcome()
    assert isinstance(load(gateway)[-1], Loaded)
    send(gateway, 2, 7)
    done = receive(gateway)
    assert isinstance(done, Done) and done.batch_id == 2
    assert result(gateway, 2, 1) == [22]


def test_refused_page_locking_is_reported_and_the_worker_serves(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    *notices, loaded = load(gateway, refused="ro rw")
    assert isinstance(loaded, Loaded)
    assert [notice.text.partition(" (")[0] for notice in notices] == [
        "the input arena",
        "the output arena",
    ]
    assert "not page-locked for fake (0.0)" in notices[0].text
    for batch_id in (1, 2, 3):
        send(gateway, batch_id, batch_id)
    assert [receive(gateway).batch_id for _ in range(3)] == [1, 2, 3]
    assert [result(gateway, each, 1) for each in (1, 2, 3)] == [[4], [7], [10]]


def test_fault_of_the_device_ends_the_worker_without_answers(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    """The gateway retries the batches on another worker."""
    load(gateway)
    send(gateway, 1, FAULT)
    send(gateway, 2, 3)
    assert worker.process.wait(20) == 74
    assert "device lost: cuStreamQuery failed: illegal address" in worker.log.read_text()


def test_batch_that_is_cancelled_before_its_launch_is_not_computed(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    load(gateway)
    gateway.abort(3)
    send(gateway, 1, SLOW)
    send(gateway, 2, 2)
    send(gateway, 3, 3)
    answers = {}
    for _ in range(3):
        answer = receive(gateway)
        answers[answer.batch_id] = answer
    assert isinstance(answers[1], Done) and isinstance(answers[2], Done)
    assert isinstance(answers[3], Failed) and answers[3].code == "cancelled"


def test_build_is_reported_and_holds_up_no_batch(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    load(gateway)
    folder = models.row_ids(gateway.folder / "m1")
    options = {"cuda": {"build_s": "1.0"}}
    gateway.send(Load(model_spec(folder, 1, backend="fake", pool="m1/1", provider_options=options)))
    answers = []
    for batch_id in range(1, 60):
        send(gateway, batch_id, batch_id)
        while not isinstance(answer := receive(gateway), Done):
            answers.append(answer)
        assert answer.batch_id == batch_id
        time.sleep(0.05)
        if any(isinstance(each, Loaded) for each in answers):
            break
    assert batch_id > 2, "no batch was answered during the build"
    reports = [each for each in answers if isinstance(each, LoadStep)]
    assert {(each.model, each.step) for each in reports} == {(1, "building engines")}
    assert [each.seconds for each in reports] == sorted(each.seconds for each in reports)


def test_fault_while_the_arenas_are_locked_ends_the_worker(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    folder = models.row_ids(gateway.folder / "m0")
    options = {"cuda": {"refused": "all"}}
    gateway.send(Load(model_spec(folder, backend="fake", pool="m0/1", provider_options=options)))
    assert worker.process.wait(20) == 74
    assert "device lost: cuMemHostRegister_v2 failed" in worker.log.read_text()


def test_device_without_streams_for_batches_is_a_load_error(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    answer = load(gateway, streams_max="1")[-1]
    assert isinstance(answer, LoadFailed)
    assert answer.message.startswith("the device cannot run batches: cuStreamCreate failed")
    assert "closed m0" in worker.log.read_text()
    assert isinstance(load(gateway, key=1)[-1], Loaded)


@pytest.fixture
def brief_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next worker keeps unused models for a moment only."""
    monkeypatch.setenv("REUSE_S", "0.1")


def test_models_that_the_next_gateway_does_not_load_are_closed(
    brief_reuse: None, gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    load(gateway)
    gateway.hang_up()
    gateway.accept()
    gateway.welcome()
    assert isinstance(load(gateway, key=1)[-1], Loaded)
    eventually(lambda: "closed m0" in worker.log.read_text(), what="the end of the unused model")
    send(gateway, 1, 2, model=1)
    assert receive(gateway) == Done(1, ANY)
    assert result(gateway, 1, 1) == [7]
    assert "closed m1" not in worker.log.read_text()


def test_models_that_the_next_gateway_loads_are_reused(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    """Also after the unload of another model."""
    load(gateway)
    load(gateway, key=1)
    gateway.hang_up()
    gateway.accept()
    gateway.welcome()
    load(gateway, key=1)
    gateway.send(Unload(1))
    assert receive(gateway) == Unloaded(1)
    assert isinstance(load(gateway)[-1], Loaded)
    lines = worker.log.read_text().splitlines()
    steps = [line for line in lines if line.startswith(("opened", "closed"))]
    assert steps == ["opened m0", "opened m1", "closed m1"]


def test_models_on_two_devices_are_rejected(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    assert isinstance(load(gateway)[-1], Loaded)
    answer = load(gateway, key=1, device_id="1")[-1]
    assert isinstance(answer, LoadFailed)
    assert "device 0, and the model names device 1" in answer.message
    assert "closed m1" in worker.log.read_text()
    send(gateway, 1, 1)
    assert isinstance(receive(gateway), Done)
