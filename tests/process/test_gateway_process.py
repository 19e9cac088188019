"""A real gateway process, and the worker's side played by the test."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support import models
from support.processes import Gateway, eventually, running
from support.scripted import ScriptedWorker

from iskander.contract.compile import compile_contract
from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.tensors import Contract
from iskander.control.channel import FRAME_BYTES_MAX
from iskander.control.messages import (
    PROTOCOL_VERSION,
    Done,
    Drain,
    Execute,
    Failed,
    Leaving,
    Load,
    Loaded,
    Refused,
    Welcome,
)
from iskander.errors import ExecutionFailed, IskanderError, ProtocolError
from iskander.memory.segment import Segment

MODEL = "ids"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    served = [{"name": MODEL, "path": str(models.row_ids(tmp_path / "ids")), "intra_threads": 1}]
    workers = {"groups": ["0", "1"], "spawn": False, "reattach_s": 5.0}
    with running(tmp_path, served, workers=workers) as gateway:
        yield gateway


def contract() -> Contract:
    tensor = [GraphTensor(name, "tensor(int64)", ("rows",)) for name in ("x", "y")]
    return compile_contract(None, Graph((tensor[0],), (tensor[1],)))


def attached(gateway: Gateway) -> ScriptedWorker:
    """A worker that has loaded the model and is open for work."""
    worker = ScriptedWorker(gateway.attach_socket)
    load = worker.receive()
    assert isinstance(load, Load) and load.model.name == MODEL
    worker.send(Loaded(load.model.key, contract(), ("CPU",), 1, 1.0))
    assert isinstance(worker.answer, Welcome)
    index = worker.answer.index
    eventually(lambda: gateway.stats()["workers"][index]["state"] == "ready", what="ready")
    return worker


class Call(threading.Thread):
    """A batch scored from another thread."""

    def __init__(self, gateway: Gateway, values: list[int]) -> None:
        super().__init__()
        self._gateway = gateway
        self._batch = pa.record_batch({"x": values})
        self.result: list[int] | None = None
        self.error: IskanderError | None = None
        self.start()

    def run(self) -> None:
        with self._gateway.client() as client:
            try:
                self.result = client.score(MODEL, self._batch)["y"].to_pylist()
            except IskanderError as error:
                self.error = error


def compute(worker: ScriptedWorker, execute: Execute) -> None:
    """What the model does, by the test, on the shared memory as a worker has it."""
    assert isinstance(worker.answer, Welcome)
    inputs = Segment.attach(
        os.dup(worker.descriptors[0]), worker.answer.input_bytes, is_writable=False
    )
    outputs = Segment.attach(
        os.dup(worker.descriptors[1]), worker.answer.output_bytes, is_writable=True
    )
    for each in execute.slices:
        at = each.input_offset + 8 * each.first
        result = (3 * np.frombuffer(inputs.view, np.int64, each.rows, at) + 1).tobytes()
        outputs.view[each.output_offset : each.output_offset + len(result)] = result
    inputs.close()
    outputs.close()


def test_the_arena_holds_an_arrow_message_that_any_reader_reads(gateway: Gateway) -> None:
    """What a lease holds is read by pyarrow as it lies there, its body on a 64-byte boundary."""
    worker = attached(gateway)
    call = Call(gateway, [5, 6, 7])
    execute = worker.receive()
    assert isinstance(execute, Execute) and execute.rows == 3
    (whole,) = execute.slices
    assert (whole.request_rows, whole.first, whole.rows) == (3, 0, 3)
    assert whole.input_offset % 64 == 0 and whole.output_offset % 64 == 0
    assert isinstance(worker.answer, Welcome)
    segment = Segment.attach(
        os.dup(worker.descriptors[0]), worker.answer.input_bytes, is_writable=False
    )
    start = bytes(segment.view[: whole.input_offset]).rfind(b"\xff\xff\xff\xff")
    schema = pa.schema([("x", pa.int64())])
    batch = pa.ipc.read_record_batch(pa.py_buffer(bytes(segment.view[start:])), schema)
    assert batch["x"].to_pylist() == [5, 6, 7]
    segment.close()
    compute(worker, execute)
    worker.send(Done(execute.batch_id, 1))
    call.join()
    assert call.result == [16, 19, 22]
    worker.close()


def test_a_worker_cannot_write_the_input_arena(gateway: Gateway) -> None:
    worker = attached(gateway)
    assert isinstance(worker.answer, Welcome)
    with pytest.raises(IskanderError):
        Segment.attach(os.dup(worker.descriptors[0]), worker.answer.input_bytes, is_writable=True)
    worker.close()


def test_credits_bound_what_a_worker_is_sent(gateway: Gateway) -> None:
    """Two batches; what comes meanwhile waits, and goes together with the next credit."""
    worker = attached(gateway)
    calls = []
    sent = []
    for n in range(2):
        calls.append(Call(gateway, [n]))
        sent.append(worker.receive())
    calls += [Call(gateway, [n]) for n in (2, 3, 4)]
    eventually(lambda: gateway.stats()["lanes"]["ids/1"]["queued"] == 3, what="three queued")
    with pytest.raises(AssertionError, match="said nothing"):
        worker.receive(within_s=0.3)
    compute(worker, sent[0])
    worker.send(Done(sent[0].batch_id, 1))
    together = worker.receive()
    assert together.rows == len(together.slices) == 3
    for execute in (together, sent[1]):
        compute(worker, execute)
        worker.send(Done(execute.batch_id, 1))
    for n, call in enumerate(calls):
        call.join()
        assert call.result == [3 * n + 1]
    worker.close()


def test_late_messages_are_dropped(gateway: Gateway) -> None:
    """Answers about unknown batches, and twice: counted, and nobody hurt."""
    worker = attached(gateway)
    call = Call(gateway, [1])
    execute = worker.receive()
    worker.send(Done(execute.batch_id + 100, 1))
    worker.send(Failed(execute.batch_id + 7, "execution_failed", "no"))
    eventually(lambda: gateway.stats()["late_messages"] == 2, what="two dropped")
    assert call.is_alive()
    compute(worker, execute)
    worker.send(Done(execute.batch_id, 1))
    worker.send(Done(execute.batch_id, 1))
    call.join()
    assert call.result == [4]
    eventually(lambda: gateway.stats()["late_messages"] == 3, what="three dropped")
    gateway.wait_idle()
    worker.close()


def test_a_failed_batch_is_told_by_name(gateway: Gateway) -> None:
    worker = attached(gateway)
    call = Call(gateway, [1])
    execute = worker.receive()
    worker.send(Failed(execute.batch_id, "execution_failed", "index beyond"))
    call.join()
    assert isinstance(call.error, ExecutionFailed) and call.error.fault == "model"
    assert call.error.message == "index beyond"
    worker.close()


def test_end_of_file_is_the_news_of_a_death(gateway: Gateway) -> None:
    """The connection's end sends what the worker had to the next one."""
    worker = attached(gateway)
    call = Call(gateway, [1])
    assert isinstance(worker.receive(), Execute)
    worker.close()
    eventually(lambda: not gateway.stats()["ready"], what="not ready")
    again = attached(gateway)
    assert again.incarnation > 1
    execute = again.receive()
    compute(again, execute)
    again.send(Done(execute.batch_id, 1))
    call.join()
    assert call.result == [4]
    gateway.wait_idle()
    again.close()


def test_what_a_worker_said_before_it_died_counts(gateway: Gateway) -> None:
    """Its answer and its end come together: the caller has its result, and nothing runs again."""
    worker = attached(gateway)
    call = Call(gateway, [1])
    execute = worker.receive()
    compute(worker, execute)
    worker.send(Done(execute.batch_id, 1))
    worker.close()
    call.join()
    assert call.result == [4]
    assert "retried" not in gateway.wait_idle()["lanes"]["ids/1"]


UNCLEAR = """
import sys, time
from support.scripted import ScriptedWorker
from iskander.contract.compile import compile_contract
from iskander.contract.graph import Graph, GraphTensor
from iskander.control.messages import Loaded
worker = ScriptedWorker(sys.argv[1])
load = worker.receive()
if sys.argv[2] == "ready":
    x, y = (GraphTensor(name, "tensor(int64)", ("rows",)) for name in ("x", "y"))
    contract = compile_contract(None, Graph((x,), (y,)))
    worker.send(Loaded(load.model.key, contract, ("CPU",), 1, 1.0))
    worker.receive()
getattr(worker.channel, "_push", worker.connection).send(b"?" * int(sys.argv[3]))
time.sleep(60)
"""


@pytest.mark.parametrize("state", ["ready", "loading"])
@pytest.mark.parametrize("length", [20, FRAME_BYTES_MAX + 1])
def test_a_worker_that_is_not_understood_is_ended_and_another_runs_its_batch(
    gateway: Gateway, state: str, length: int
) -> None:
    """A process of its own, since it is killed."""
    tests = str(Path(__file__).parents[1])
    words = [sys.executable, "-c", UNCLEAR, str(gateway.attach_socket), state, str(length)]
    process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": tests})
    try:
        if state == "ready":
            what = "a worker"
            eventually(lambda: gateway.stats()["workers"][0]["state"] == "ready", what=what)
            call = Call(gateway, [1])
        assert process.wait(20) < 0
    finally:
        process.kill()
    words = f"has {length} bytes" if length > FRAME_BYTES_MAX else "malformed frame"
    assert words in gateway.text()
    again = attached(gateway)
    if state == "ready":
        execute = again.receive()
        compute(again, execute)
        again.send(Done(execute.batch_id, 1))
        call.join()
        assert call.result == [4]
    again.close()


def test_a_leaving_worker_gets_nothing_but_drain(gateway: Gateway) -> None:
    worker = attached(gateway)
    worker.send(Leaving())
    assert isinstance(worker.receive(), Drain)
    eventually(lambda: not gateway.stats()["ready"], what="not ready")
    worker.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"protocol": PROTOCOL_VERSION + 1},
            f"version {PROTOCOL_VERSION + 1} of the control protocol",
        ),
        ({"group": 5}, "no worker slot is free in core group 5"),
    ],
)
def test_workers_that_are_not_taken_on(
    gateway: Gateway, changes: dict[str, int], words: str
) -> None:
    worker = ScriptedWorker(gateway.attach_socket, **changes)
    assert isinstance(worker.answer, Refused) and words in worker.answer.message
    worker.close()


def test_a_peer_that_says_nothing_or_nonsense_holds_nobody_up(gateway: Gateway) -> None:
    from iskander.control import attach

    silent = attach.connect(str(gateway.attach_socket), 5)
    nonsense = attach.connect(str(gateway.attach_socket), 5)
    nonsense.sendall(b"\xc1 not msgpack")
    answer, _ = attach.receive_answer(nonsense)
    assert isinstance(answer, Refused) and "malformed Hello" in answer.message
    worker = attached(gateway)
    # Not refused, which would end it: one that was only slow asks again.
    with pytest.raises(ProtocolError, match="the connection was closed"):
        attach.receive_answer(silent)
    for connection in (silent, nonsense):
        connection.close()
    worker.close()
