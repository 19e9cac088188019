"""A real gateway process with scripted workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support import models
from support.processes import Gateway, eventually, running
from support.scripted import ScriptedWorker

from iskander.contract.compile import compile_contract
from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.processing.row_relation import INDEPENDENT
from iskander.contract.tensors import Contract
from iskander.errors import ExecutionFailed, IskanderError, ProtocolError
from iskander.interprocess.control.channel import FRAME_BYTES_MAX
from iskander.interprocess.control.messages import (
    PROTOCOL_VERSION,
    Done,
    Drain,
    Execute,
    Failed,
    Leaving,
    Load,
    Loaded,
    LoadStep,
    Refused,
    Welcome,
)
from iskander.interprocess.memory.segment import Segment

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


def registered_worker(gateway: Gateway) -> ScriptedWorker:
    """Returns a scripted worker that is ready with the model loaded."""
    worker = ScriptedWorker(gateway.attach_socket)
    load = worker.receive()
    assert isinstance(load, Load) and load.model.name == MODEL
    worker.send(Loaded(load.model.key, contract(), ("CPU",), 1, 1.0, rows=INDEPENDENT))
    assert isinstance(worker.answer, Welcome)
    index = worker.answer.index
    eventually(lambda: gateway.stats()["workers"][index]["state"] == "ready", what="a ready worker")
    return worker


class Call(threading.Thread):
    """Scores a batch in a thread."""

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
    """Computes the model's results in the shared memory of the worker."""
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


def test_input_arena_contains_an_arrow_message(gateway: Gateway) -> None:
    """pyarrow reads the message in a lease, whose body is on a 64-byte boundary."""
    worker = registered_worker(gateway)
    call = Call(gateway, [5, 6, 7])
    execute = worker.receive()
    assert isinstance(execute, Execute) and execute.rows == 3
    (part,) = execute.slices
    assert (part.request_rows, part.first, part.rows) == (3, 0, 3)
    assert part.input_offset % 64 == 0 and part.output_offset % 64 == 0
    assert isinstance(worker.answer, Welcome)
    segment = Segment.attach(
        os.dup(worker.descriptors[0]), worker.answer.input_bytes, is_writable=False
    )
    start = bytes(segment.view[: part.input_offset]).rfind(b"\xff\xff\xff\xff")
    schema = pa.schema([("x", pa.int64())])
    batch = pa.ipc.read_record_batch(pa.py_buffer(bytes(segment.view[start:])), schema)
    assert batch["x"].to_pylist() == [5, 6, 7]
    segment.close()
    compute(worker, execute)
    worker.send(Done(execute.batch_id, 1))
    call.join()
    assert call.result == [16, 19, 22]
    worker.close()


def test_worker_cannot_write_the_input_arena(gateway: Gateway) -> None:
    worker = registered_worker(gateway)
    assert isinstance(worker.answer, Welcome)
    with pytest.raises(IskanderError):
        Segment.attach(os.dup(worker.descriptors[0]), worker.answer.input_bytes, is_writable=True)
    worker.close()


@pytest.mark.over_zmq
def test_worker_receives_as_many_batches_as_credits(gateway: Gateway) -> None:
    """Two batches are sent; later requests wait and share the batch of the next credit."""
    worker = registered_worker(gateway)
    calls = []
    sent = []
    for n in range(2):
        calls.append(Call(gateway, [n]))
        sent.append(worker.receive())
    calls += [Call(gateway, [n]) for n in (2, 3, 4)]
    eventually(
        lambda: gateway.stats()["lanes"]["ids/1"]["queued"] == 3, what="three queued requests"
    )
    with pytest.raises(AssertionError, match="said nothing"):
        worker.receive(within_s=0.3)
    compute(worker, sent[0])
    worker.send(Done(sent[0].batch_id, 1))
    batch = worker.receive()
    assert batch.rows == len(batch.slices) == 3
    for execute in (batch, sent[1]):
        compute(worker, execute)
        worker.send(Done(execute.batch_id, 1))
    for n, call in enumerate(calls):
        call.join()
        assert call.result == [3 * n + 1]
    worker.close()


def test_step_of_a_load_is_in_stats_and_log_until_its_end(gateway: Gateway) -> None:
    worker = ScriptedWorker(gateway.attach_socket)
    load = worker.receive()
    assert isinstance(load, Load)
    worker.send(LoadStep(load.model.key, "building TensorRT engines", 20.3))
    step = "ids/1: building TensorRT engines, 20 s"

    def load_steps() -> list[str]:
        return [each["load_step"] for each in gateway.stats()["workers"]]

    eventually(lambda: step in load_steps(), what="the step")
    assert all(step not in each["notices"] for each in gateway.stats()["workers"])
    assert step in gateway.text()
    address = f"http://{gateway.stats()['admin_address']}/status.json"
    with urllib.request.urlopen(address, timeout=10) as response:
        assert step in [each["load_step"] for each in json.load(response)["workers"]]
    worker.send(Loaded(load.model.key, contract(), ("CPU",), 1, 1.0, rows=INDEPENDENT))
    eventually(lambda: not any(load_steps()), what="its end")
    worker.close()


@pytest.mark.over_zmq
def test_late_messages_are_dropped(gateway: Gateway) -> None:
    """Responses for unknown batches and repeated responses are counted."""
    worker = registered_worker(gateway)
    call = Call(gateway, [1])
    execute = worker.receive()
    worker.send(Done(execute.batch_id + 100, 1))
    worker.send(Failed(execute.batch_id + 7, "execution_failed", "no"))
    eventually(lambda: gateway.stats()["late_messages"] == 2, what="two late messages")
    assert call.is_alive()
    compute(worker, execute)
    worker.send(Done(execute.batch_id, 1))
    worker.send(Done(execute.batch_id, 1))
    call.join()
    assert call.result == [4]
    eventually(lambda: gateway.stats()["late_messages"] == 3, what="three late messages")
    gateway.wait_idle()
    worker.close()


@pytest.mark.over_zmq
def test_failed_batch_returns_its_error(gateway: Gateway) -> None:
    worker = registered_worker(gateway)
    call = Call(gateway, [1])
    execute = worker.receive()
    worker.send(Failed(execute.batch_id, "execution_failed", "index beyond"))
    call.join()
    assert isinstance(call.error, ExecutionFailed) and call.error.fault == "model"
    assert call.error.message == "index beyond"
    worker.close()


@pytest.mark.over_zmq(is_slow=False)
def test_batch_is_retried_after_the_worker_disconnects(gateway: Gateway) -> None:
    worker = registered_worker(gateway)
    call = Call(gateway, [1])
    assert isinstance(worker.receive(), Execute)
    worker.close()
    eventually(lambda: not gateway.stats()["ready"], what="a gateway that is not ready")
    replacement = registered_worker(gateway)
    assert replacement.incarnation > 1
    execute = replacement.receive()
    compute(replacement, execute)
    replacement.send(Done(execute.batch_id, 1))
    call.join()
    assert call.result == [4]
    gateway.wait_idle()
    replacement.close()


@pytest.mark.over_zmq(is_slow=False)
def test_response_before_a_disconnect_is_delivered(gateway: Gateway) -> None:
    """The response and the end of the connection arrive together; nothing is retried."""
    worker = registered_worker(gateway)
    call = Call(gateway, [1])
    execute = worker.receive()
    compute(worker, execute)
    worker.send(Done(execute.batch_id, 1))
    worker.close()
    call.join()
    assert call.result == [4]
    assert not gateway.wait_idle()["lanes"]["ids/1"]["retried"]


MALFORMED_WORKER = """
import sys, time
from support.scripted import ScriptedWorker
from iskander.contract.compile import compile_contract
from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.processing.row_relation import INDEPENDENT
from iskander.interprocess.control.messages import Loaded
worker = ScriptedWorker(sys.argv[1])
load = worker.receive()
if sys.argv[2] == "ready":
    x, y = (GraphTensor(name, "tensor(int64)", ("rows",)) for name in ("x", "y"))
    contract = compile_contract(None, Graph((x,), (y,)))
    worker.send(Loaded(load.model.key, contract, ("CPU",), 1, 1.0, rows=INDEPENDENT))
    worker.receive()
getattr(worker.channel, "_push", worker.connection).send(b"?" * int(sys.argv[3]))
time.sleep(60)
"""


@pytest.mark.over_zmq
@pytest.mark.parametrize("state", ["ready", "loading"])
@pytest.mark.parametrize("length", [20, FRAME_BYTES_MAX + 1])
def test_worker_with_malformed_messages_is_killed_and_its_batch_retried(
    gateway: Gateway, state: str, length: int
) -> None:
    """The worker is a separate process because the gateway kills it."""
    tests = str(Path(__file__).parents[1])
    arguments = [str(gateway.attach_socket), state, str(length)]
    command = [sys.executable, "-c", MALFORMED_WORKER, *arguments]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": tests})
    try:
        if state == "ready":
            what = "a ready worker"
            eventually(lambda: gateway.stats()["workers"][0]["state"] == "ready", what=what)
            call = Call(gateway, [1])
        assert process.wait(20) < 0
    finally:
        process.kill()
    reason = f"has {length} bytes" if length > FRAME_BYTES_MAX else "malformed frame"
    assert reason in gateway.text()
    replacement = registered_worker(gateway)
    if state == "ready":
        execute = replacement.receive()
        compute(replacement, execute)
        replacement.send(Done(execute.batch_id, 1))
        call.join()
        assert call.result == [4]
    replacement.close()


@pytest.mark.over_zmq
def test_leaving_worker_receives_only_a_drain(gateway: Gateway) -> None:
    worker = registered_worker(gateway)
    worker.send(Leaving())
    assert isinstance(worker.receive(), Drain)
    eventually(lambda: not gateway.stats()["ready"], what="a gateway that is not ready")
    worker.close()


@pytest.mark.over_zmq
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"protocol": PROTOCOL_VERSION + 1},
            f"version {PROTOCOL_VERSION + 1} of the control protocol",
        ),
        ({"version": "0.0.1"}, "the worker is of release 0.0.1"),
        ({"group": 5}, "no worker slot is free in core group 5"),
    ],
)
def test_worker_registration_is_rejected(
    gateway: Gateway, changes: dict[str, Any], reason: str
) -> None:
    worker = ScriptedWorker(gateway.attach_socket, **changes)
    assert isinstance(worker.answer, Refused) and reason in worker.answer.message
    worker.close()


@pytest.mark.over_zmq
def test_silent_and_malformed_peers_do_not_delay_registration(gateway: Gateway) -> None:
    from iskander.interprocess.control import attach

    silent = attach.connect(str(gateway.attach_socket), 5)
    malformed = attach.connect(str(gateway.attach_socket), 5)
    malformed.sendall(b"\xc1 not msgpack")
    response, _ = attach.receive_answer(malformed)
    assert isinstance(response, Refused) and "malformed Hello" in response.message
    worker = registered_worker(gateway)
    # A slow worker may retry; a rejection would end it.
    with pytest.raises(ProtocolError, match="the connection was closed"):
        attach.receive_answer(silent)
    for connection in (silent, malformed):
        connection.close()
    worker.close()
