"""What a taken-over worker can and cannot do: `docs/security.md` refers to these tests.

Other tests of the same page: `test_gateway_process.py` (malformed frames, late messages).
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from onnx import TensorProto
from support import models
from support.processes import MIB, Gateway, eventually, running
from support.scripted import ScriptedWorker

from iskander.contract.compile import compile_contract
from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.processing.row_relation import INDEPENDENT
from iskander.contract.tensors import Contract
from iskander.errors import IskanderError
from iskander.interprocess.control.messages import (
    Copied,
    Done,
    Execute,
    Failed,
    Load,
    Loaded,
    Stepped,
    Unloaded,
    Welcome,
)
from iskander.interprocess.memory.segment import Segment

MODELS = {"ids": "tensor(int64)", "words": "tensor(string)"}
TESTS = str(Path(__file__).parents[1])
SECRET = 0x5EC2E7_0FA_C11E27


def contract_of(model: str) -> Contract:
    x, y = (GraphTensor(name, MODELS[model], ("rows",)) for name in ("x", "y"))
    return compile_contract(None, Graph((x,), (y,)))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("taken-over")
    served = [
        {"name": "ids", "path": str(models.row_ids(folder / "ids"))},
        {
            "name": "words",
            "path": str(models.identity(folder / "words", TensorProto.STRING, ["rows"])),
            "result_string_bytes": 64,
            "max_batch_rows": 1000,
        },
    ]
    workers = {"groups": ["0", "1"], "spawn": False, "reattach_s": 5.0}
    with running(folder, served, workers=workers) as gateway:
        yield gateway


class TakenOver(ScriptedWorker):
    """A worker that does what it wants with its descriptors and its channel."""

    def __init__(self, socket_path: Path) -> None:
        super().__init__(socket_path)
        assert isinstance(self.answer, Welcome)
        for _ in MODELS:
            load = self.receive()
            assert isinstance(load, Load)
            contract = contract_of(load.model.name)
            self.send(Loaded(load.model.key, contract, ("CPU",), 1, 1.0, rows=INDEPENDENT))
        self.index = self.answer.index

    def input(self) -> Segment:
        assert isinstance(self.answer, Welcome)
        descriptor = os.dup(self.descriptors[0])
        return Segment.attach(descriptor, self.answer.input_bytes, is_writable=False)

    def output(self) -> Segment:
        assert isinstance(self.answer, Welcome)
        descriptor = os.dup(self.descriptors[1])
        return Segment.attach(descriptor, self.answer.output_bytes, is_writable=True)

    def write(self, offset: int, raw: bytes) -> None:
        segment = self.output()
        segment.view[offset : offset + len(raw)] = raw
        segment.close()

    def compute(self, execute: Execute) -> None:
        """Answer honestly, for the model `ids`."""
        segment = self.input()
        for each in execute.slices:
            at = each.input_offset + 8 * each.first
            values = np.frombuffer(segment.view, np.int64, each.rows, at)
            self.write(each.output_offset, (3 * values + 1).tobytes())
            del values
        segment.close()
        self.send(Done(execute.batch_id, 1))


def _attached(gateway: Gateway) -> TakenOver | None:
    """A registered worker, once the gateway has noticed the end of earlier ones."""
    worker = ScriptedWorker.__new__(TakenOver)
    try:
        TakenOver.__init__(worker, gateway.attach_socket)
    except AssertionError:
        worker.close()
        return None
    return worker


def taken_over(gateway: Gateway) -> TakenOver:
    worker = eventually(lambda: _attached(gateway), what="a free slot")
    eventually(
        lambda: gateway.stats()["workers"][worker.index]["state"] == "ready", what="a ready worker"
    )
    return worker


class Call(threading.Thread):
    """Scores a batch in a thread; `outcome` is the result or the code of the error."""

    def __init__(self, gateway: Gateway, model: str, values: list[Any]) -> None:
        super().__init__()
        self._gateway, self._model = gateway, model
        self._batch = pa.record_batch({"x": values})
        self._outcome: list[Any] | str = ""
        self.start()

    def run(self) -> None:
        with self._gateway.client() as client:
            try:
                self._outcome = client.score(self._model, self._batch)["y"].to_pylist()
            except IskanderError as error:
                self._outcome = error.code

    @property
    def outcome(self) -> list[Any] | str:
        self.join(60)
        return self._outcome


def test_it_can_read_the_inputs_of_all_requests(gateway: Gateway) -> None:
    """All workers map the one input arena, so its confidentiality between them is not defended."""
    honest, spy = taken_over(gateway), taken_over(gateway)
    call = Call(gateway, "ids", [SECRET])
    execute = eventually(
        lambda: next(
            (m for w in (honest, spy) for m in [_received(w)] if isinstance(m, Execute)), None
        ),
        what="a batch",
    )
    segment = spy.input()
    assert struct.pack("<q", SECRET) in bytes(segment.view)
    segment.close()
    owner = honest if _owns(gateway, honest) else spy
    owner.compute(execute)
    assert call.outcome == [3 * SECRET + 1]
    for worker in (honest, spy):
        worker.close()


def _received(worker: ScriptedWorker) -> object:
    try:
        return worker.receive(within_s=0.01)
    except AssertionError:
        return None


def _owns(gateway: Gateway, worker: TakenOver) -> bool:
    return bool(gateway.stats()["workers"][worker.index]["in_flight"])


def test_it_cannot_change_inputs_or_any_arena_but_its_own(gateway: Gateway) -> None:
    """Seals of the kernel: no writable mapping, also through /proc, and no truncation."""
    first, second = taken_over(gateway), taken_over(gateway)
    inputs, outputs = first.descriptors[:2]
    for path in (f"/proc/self/fd/{inputs}", f"/proc/{gateway.pid}/fd/{_fd_of(gateway, inputs)}"):
        descriptor = os.open(path, os.O_RDWR)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        os.close(descriptor)
    for descriptor in (inputs, outputs):
        for size in (0, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
    nodes = [[os.fstat(fd).st_ino for fd in worker.descriptors] for worker in (first, second)]
    assert set(nodes[0]) & set(nodes[1]) == {os.fstat(inputs).st_ino}, "only the inputs are common"
    for worker in (first, second):
        worker.close()


def _fd_of(gateway: Gateway, descriptor: int) -> int:
    """The gateway's descriptor of the same file."""
    wanted = os.fstat(descriptor).st_ino
    folder = Path(f"/proc/{gateway.pid}/fd")
    return next(int(each.name) for each in folder.iterdir() if os.stat(each).st_ino == wanted)


def test_it_cannot_answer_for_another_worker(gateway: Gateway) -> None:
    """Numbers of another worker's batches are ignored, and its results stay what they are."""
    honest = taken_over(gateway)
    call = Call(gateway, "ids", [1, 2])
    execute = honest.receive()
    forger = taken_over(gateway)
    for number in range(execute.batch_id + 3):
        forger.send(Failed(number, "contract", "forged"))
        forger.send(Done(number, 1))
    eventually(lambda: gateway.stats()["late_messages"] >= execute.batch_id, what="late messages")
    honest.compute(execute)
    assert call.outcome == [4, 7]
    for worker in (honest, forger):
        worker.close()


def test_it_can_return_wrong_results_of_its_own_batches(gateway: Gateway) -> None:
    worker = taken_over(gateway)
    call = Call(gateway, "ids", [1, 2])
    execute = worker.receive()
    worker.write(execute.slices[0].output_offset, struct.pack("<2q", 666, 667))
    worker.send(Done(execute.batch_id, 1))
    assert call.outcome == [666, 667]
    worker.close()


FORGED_ENDS = [
    (0, 2**31 - 1, 2**31 - 1),
    (0, -1, -1),
    (-4096, 0, 4),
    (0, 3, 1),
    (4096, 4097, 4098),
    (0, 1 << 20, 1 << 21),
]


def test_forged_strings_fail_their_request_and_read_nothing_else(gateway: Gateway) -> None:
    """Offsets and UTF-8 are checked in the gateway; the caller gets an error."""
    worker = taken_over(gateway)
    forgeries = [(struct.pack("<3i", *ends), b"") for ends in FORGED_ENDS]
    forgeries.append((struct.pack("<3i", 0, 1, 2), b"\xff\xfe"))
    for ends, text in forgeries:
        call = Call(gateway, "words", ["a", "b"])
        while call.is_alive():
            execute = _received(worker)
            if isinstance(execute, Execute):  # Also retries.
                worker.write(execute.slices[0].output_offset, ends)
                worker.write(execute.slices[0].output_offset + 64, text)
                worker.send(Done(execute.batch_id, 1))
        assert call.outcome in ("execution_failed", "internal"), (ends, call.outcome)
    call = Call(gateway, "ids", [5])
    worker.compute(worker.receive())
    assert call.outcome == [16]
    worker.close()


FLOOD = """
import os, sys
from support.scripted import ScriptedWorker
from iskander.interprocess.control.messages import Copied, Done, Notice, encode
worker = ScriptedWorker(sys.argv[1])
frame = encode([Notice(f"{number}" + "x" * 1000) for number in range(200)])
done = encode([Done(number, 1) for number in range(1 << 32, (1 << 32) + 4000)])
print("attached", flush=True)
while True:
    worker.channel.send(frame)
    worker.channel.send(done)
"""


@pytest.mark.slow
def test_flood_of_messages_is_bounded_and_others_are_served(gateway: Gateway) -> None:
    """A worker that only sends; the gateway keeps a few notices and answers its clients."""
    honest = taken_over(gateway)
    command = [sys.executable, "-c", FLOOD, str(gateway.attach_socket)]
    environment = {**os.environ, "PYTHONPATH": TESTS}
    flood = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert flood.stdout is not None and flood.stdout.readline() == "attached\n"
        before = psutil.Process(gateway.pid).memory_info().rss
        for number in range(10):
            call = Call(gateway, "ids", [number])
            honest.compute(honest.receive(within_s=60))
            assert call.outcome == [3 * number + 1]
        assert psutil.Process(gateway.pid).memory_info().rss - before < 64 * MIB
    finally:
        flood.send_signal(signal.SIGKILL)
        flood.wait()
        if flood.stdout is not None:
            flood.stdout.close()
    honest.close()


UNKNOWN: list[Callable[[], object]] = [
    lambda: Stepped(1 << 40, (("x", 1),)),
    lambda: Unloaded(1 << 40),
    lambda: Loaded(1 << 40, contract_of("ids"), ("CPU",), 1, 1.0, rows=INDEPENDENT),
    lambda: Copied(-(1 << 62), 1 << 62),
]
MESSAGE = """
import sys, time
from support.scripted import ScriptedWorker
sys.path.insert(0, sys.argv[2])
from test_taken_over_worker import UNKNOWN, TakenOver
worker = TakenOver(sys.argv[1])
worker.send(UNKNOWN[int(sys.argv[3])]())
print("sent", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(UNKNOWN)))
def test_messages_about_unknown_models_affect_at_most_their_sender(
    gateway: Gateway, number: int
) -> None:
    """The sender is a separate process because the gateway may kill it."""
    honest = taken_over(gateway)
    folder = str(Path(__file__).parent)
    command = [sys.executable, "-c", MESSAGE, str(gateway.attach_socket), folder, str(number)]
    environment = {**os.environ, "PYTHONPATH": TESTS}
    sender = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert sender.stdout is not None and sender.stdout.readline() == "sent\n"
        call = Call(gateway, "ids", [7])
        honest.compute(honest.receive())
        assert call.outcome == [22]
    finally:
        sender.kill()
        sender.communicate()
    honest.close()


def test_contract_that_differs_from_the_first_is_rejected(gateway: Gateway) -> None:
    """A second worker cannot change what the first one has loaded; the first one decides."""
    honest = taken_over(gateway)
    forger = ScriptedWorker(gateway.attach_socket)
    load = forger.receive()
    other = "words" if load.model.name == "ids" else "ids"
    forger.send(Loaded(load.model.key, contract_of(other), ("CPU",), 1, 1.0, rows=INDEPENDENT))
    call = Call(gateway, "ids", [1])
    honest.compute(honest.receive())
    assert call.outcome == [4]
    with gateway.client() as client, pytest.raises(IskanderError):
        client.score("ids", pa.record_batch({"x": ["a string"]}))
    forger.close()
    honest.close()
