"""A real worker process with a scripted gateway."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from onnx import TensorProto, helper
from support import models
from support.processes import WorkerProcess, eventually, shared_mappings
from support.scripted import ScriptedGateway, model_spec

from iskander.contract.tensors import body_layout
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
    LoadFailed,
    Notice,
    Slice,
)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ScriptedGateway]:
    gateway = ScriptedGateway(tmp_path)
    yield gateway
    gateway.close()


@pytest.fixture
def worker(gateway: ScriptedGateway) -> Iterator[WorkerProcess]:
    """A registered worker on core 0."""
    worker = WorkerProcess(gateway.socket_path, gateway.folder, "--group", "0")
    try:
        hello = gateway.accept()
        assert (hello.protocol, hello.group, hello.index) == (PROTOCOL_VERSION, 0, None)
        gateway.welcome()
        yield worker
    finally:
        worker.end()


def write_input(gateway: ScriptedGateway, offset: int, values: np.ndarray) -> None:
    raw = values.tobytes()
    gateway.input.view[offset : offset + len(raw)] = raw


def single_request(batch_id: int, model: int, rows: int, source: int, target: int) -> Execute:
    """Returns a batch of one request."""
    return Execute(batch_id, model, rows, (Slice(source, rows, 0, rows, target),))


def read_output(gateway: ScriptedGateway, offset: int, dtype: str, count: int) -> list[object]:
    return np.frombuffer(gateway.output.view, dtype, count, offset).tolist()


@pytest.mark.over_zmq(is_slow=False)
def test_worker_loads_computes_and_drains(gateway: ScriptedGateway, worker: WorkerProcess) -> None:
    """Batches repeat and change their input and output offsets."""
    gateway.send(Load(model_spec(models.row_ids(gateway.folder / "ids"))))
    loaded = gateway.receive()
    assert isinstance(loaded, Loaded)
    assert (loaded.model, loaded.threads) == (0, 1)
    assert loaded.providers == ("CPUExecutionProvider",)
    for batch_id, (rows, at, to) in enumerate([(3, 0, 0), (3, 0, 0), (2, 64, 128)], start=1):
        write_input(gateway, at, np.arange(batch_id, batch_id + rows))
        gateway.send(single_request(batch_id, 0, rows, at, to))
        done = gateway.receive()
        assert isinstance(done, Done) and done.batch_id == batch_id
        expected = [3 * value + 1 for value in range(batch_id, batch_id + rows)]
        assert read_output(gateway, to, "int64", rows) == expected
    gateway.send(Drain())
    assert worker.process.wait(20) == 0


def test_worker_is_pinned_and_maps_only_its_memory_and_libraries(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    gateway.send(Load(model_spec(models.row_ids(gateway.folder / "ids"))))
    assert isinstance(gateway.receive(), Loaded)
    process = psutil.Process(worker.pid)
    assert process.cpu_affinity() == [0]
    for thread in process.threads():
        assert os.sched_getaffinity(thread.id) == {0}
    assert process.name() == "isk-worker-0"
    assert any("iskander-worker" in part for part in process.cmdline())
    maps = Path(f"/proc/{worker.pid}/maps").read_text()
    for library in ("libarrow", "cygrpc", "prometheus"):
        assert library not in maps, library
    assert len(shared_mappings(worker.pid)) == 3
    input_lines = [line for line in maps.splitlines() if "memfd:iskander-input" in line]
    assert all(line.split()[1].startswith("r--") for line in input_lines)


@pytest.mark.parametrize(
    ("placement", "texts"),
    [
        ({"cpus": (0, 4000)}, ["not pinned to the cpus [4000]: they are not in its cpuset"]),
        ({"cpus": (4000,)}, ["not pinned to the cpus [4000]: Invalid argument"]),
        ({"node": 1000}, ["no memory policy for node 1000: set_mempolicy was refused with E"]),
        (
            {"cpus": (4001,), "node": 1000},
            ["not pinned to the cpus [4001]: ", "no memory policy for node 1000: "],
        ),
    ],
)
def test_denied_placement_is_reported_to_each_gateway_and_worker_serves(
    gateway: ScriptedGateway, placement: dict[str, Any], texts: list[str]
) -> None:
    worker = WorkerProcess(gateway.socket_path, gateway.folder, "--group", "0")
    try:
        for _ in range(2):
            gateway.accept()
            gateway.welcome(**placement)
            for start in texts:
                notice = gateway.receive()
                assert isinstance(notice, Notice) and notice.text.startswith(start)
            gateway.send(Load(model_spec(models.row_ids(gateway.folder / "ids"))))
            assert isinstance(gateway.receive(), Loaded)
            gateway.hang_up()
    finally:
        worker.end()


def test_worker_prefers_the_memory_of_its_node(gateway: ScriptedGateway) -> None:
    """The policy is read from the kernel; without a node there is none."""
    maps = Path("/proc/self/numa_maps")
    if not maps.exists():
        pytest.skip("kernel without NUMA")
    for node, policy in ((0, "prefer:0"), (None, "default")):
        worker = WorkerProcess(gateway.socket_path, gateway.folder, "--group", "0")
        try:
            gateway.accept()
            gateway.welcome(node=node)
            gateway.send(Load(model_spec(models.row_ids(gateway.folder / "ids"))))
            assert isinstance(gateway.receive(), Loaded)
            lines = Path(f"/proc/{worker.pid}/numa_maps").read_text().splitlines()
            (heap,) = (line for line in lines if " heap" in line)
            assert heap.split()[1] == policy
        finally:
            worker.end()


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (3, 2)])
def test_default_threads_are_the_planned_cores(
    gateway: ScriptedGateway, cores: int, threads: int
) -> None:
    """They are limited by the number of pinned cpus."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))[:2]
    worker = WorkerProcess(gateway.socket_path, gateway.folder, "--group", "0")
    try:
        gateway.accept()
        gateway.welcome(cpus=cpus, cores=cores)
        gateway.send(Load(model_spec(models.row_ids(gateway.folder / "ids"), threads_intra=0)))
        loaded = gateway.receive()
        assert isinstance(loaded, Loaded)
        assert loaded.threads == min(threads, len(cpus))
    finally:
        worker.end()


@pytest.mark.over_zmq
def test_heartbeat_while_idle_and_while_running(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    first = gateway.last_beat()
    eventually(lambda: gateway.last_beat().at_ns > first.at_ns, what="another heartbeat")
    gateway.send(Load(model_spec(models.slow(gateway.folder / "slow", 100))))
    assert isinstance(gateway.receive(), Loaded)
    write_input(gateway, 0, np.array([3000]))
    gateway.send(single_request(77, 0, 1, 0, 0))
    eventually(lambda: gateway.last_beat().batch_id == 77, what="the heartbeat of batch 77")
    assert isinstance(gateway.receive(), Done)
    eventually(lambda: gateway.last_beat().batch_id == 0, what="an idle heartbeat")


@pytest.mark.over_zmq
def test_failed_batch_does_not_affect_the_next_one(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    """The error names the index beyond the table, without source paths of ONNX Runtime."""
    folder = models.save(
        gateway.folder / "gather",
        [helper.make_node("Gather", ["table", "x"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["rows"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows"])],
        [helper.make_tensor("table", TensorProto.FLOAT, [3], [0.5, 1.5, 2.5])],
    )
    gateway.send(Load(model_spec(folder)))
    assert isinstance(gateway.receive(), Loaded)
    write_input(gateway, 0, np.array([99]))
    gateway.send(single_request(1, 0, 1, 0, 0))
    failed = gateway.receive()
    assert isinstance(failed, Failed) and failed.code == "execution_failed"
    assert "idx=99" in failed.message and "/onnxruntime" not in failed.message
    write_input(gateway, 0, np.array([2]))
    gateway.send(single_request(2, 0, 1, 0, 0))
    assert isinstance(gateway.receive(), Done)
    assert read_output(gateway, 0, "float32", 1) == [2.5]


def test_requests_share_a_batch_and_get_their_own_rows(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    """One request is a slice; the batch is padded to eight rows."""
    gateway.send(Load(model_spec(models.row_ids(gateway.folder / "ids"))))
    assert isinstance(gateway.receive(), Loaded)
    for offset, values in ((0, [1, 2]), (64, [10, 11, 12, 13]), (128, [100])):
        write_input(gateway, offset, np.array(values))
    slices = (Slice(0, 2, 0, 2, 512), Slice(64, 4, 1, 2, 640), Slice(128, 1, 0, 1, 768))
    gateway.send(Execute(1, 0, 8, slices))
    assert isinstance(gateway.receive(), Done)
    for offset, values in ((512, [1, 2]), (640, [11, 12]), (768, [100])):
        expected = [3 * value + 1 for value in values]
        assert read_output(gateway, offset, "int64", len(values)) == expected
    gateway.send(Execute(2, 0, 40, (Slice(64, 4, 3, 1, 0),)))
    assert isinstance(gateway.receive(), Done)
    assert read_output(gateway, 0, "int64", 1) == [40], "a larger batch needs a larger buffer"


@pytest.mark.over_zmq
def test_running_batch_is_cancelled(gateway: ScriptedGateway, worker: WorkerProcess) -> None:
    """The run ends between two nodes; the next batch uses the same bindings."""
    gateway.send(Load(model_spec(models.slow(gateway.folder / "slow", 100))))
    assert isinstance(gateway.receive(), Loaded)
    write_input(gateway, 0, np.array([1_000_000]))
    gateway.send(single_request(5, 0, 1, 0, 0))
    eventually(lambda: gateway.last_beat().batch_id == 5, what="a running batch")
    gateway.abort(4)
    gateway.abort(5)
    failed = gateway.receive()
    assert isinstance(failed, Failed) and (failed.batch_id, failed.code) == (5, "cancelled")
    write_input(gateway, 0, np.array([1]))
    gateway.send(single_request(6, 0, 1, 0, 0))
    assert isinstance(gateway.receive(), Done)


@pytest.mark.over_zmq
def test_queued_batch_is_cancelled_without_running(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    gateway.send(Load(model_spec(models.slow(gateway.folder / "slow", 100))))
    assert isinstance(gateway.receive(), Loaded)
    write_input(gateway, 0, np.array([2000]))
    write_input(gateway, 64, np.array([1_000_000]))
    gateway.send(single_request(5, 0, 1, 0, 0))
    gateway.send(single_request(6, 0, 1, 64, 64))
    eventually(lambda: gateway.last_beat().batch_id == 5, what="a running batch")
    gateway.abort(6)
    assert isinstance(gateway.receive(), Done)
    failed = gateway.receive()
    assert isinstance(failed, Failed) and (failed.batch_id, failed.code) == (6, "cancelled")


def test_outputs_with_a_shape_known_after_the_run(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    """Outputs with an unnamed leading axis are copied; a wrong number of rows fails the batch."""
    folder = models.save(
        gateway.folder / "unique",
        [
            helper.make_node("Identity", ["x"], ["same"]),
            helper.make_node("Unique", ["x"], ["y"], sorted=1),
            helper.make_node("Neg", ["x"], ["minus"]),
        ],
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["rows"])],
        [
            helper.make_tensor_value_info("same", TensorProto.INT64, ["rows"]),
            helper.make_tensor_value_info("y", TensorProto.INT64, [None]),
            helper.make_tensor_value_info("minus", TensorProto.INT64, ["rows"]),
        ],
    )
    # Without it, the load fails, because most generated rows are equal.
    columns = "".join(
        f'[[outputs]]\ntensor = "{name}"\ncolumn = "{name}"\ntype = "int64"\n'
        for name in ("same", "y", "minus")
    )
    (folder / "manifest.toml").write_text(
        "format = 1\ncombine = false\n"
        f'[[inputs]]\ntensor = "x"\ncolumn = "x"\ntype = "int64"\n{columns}'
    )
    gateway.send(Load(model_spec(folder)))
    loaded = gateway.receive()
    assert isinstance(loaded, Loaded)
    assert [spec.is_bound for spec in loaded.contract.outputs] == [True, False, True]
    write_input(gateway, 0, np.array([3, 1, 2]))
    gateway.send(single_request(1, 0, 3, 0, 256))
    assert isinstance(gateway.receive(), Done)
    for column, expected in enumerate([[3, 1, 2], [1, 2, 3], [-3, -1, -2]]):
        assert read_output(gateway, 256 + 64 * column, "int64", 3) == expected
    write_input(gateway, 0, np.array([5, 5, 5]))
    gateway.send(single_request(2, 0, 3, 0, 256))
    failed = gateway.receive()
    assert isinstance(failed, Failed) and "has shape [1]" in failed.message


def test_booleans_are_bits_in_the_arena_and_bytes_in_the_model(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    folder = models.save(
        gateway.folder / "not",
        [helper.make_node("Not", ["x"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.BOOL, ["rows"])],
        [helper.make_tensor_value_info("y", TensorProto.BOOL, ["rows"])],
    )
    gateway.send(Load(model_spec(folder)))
    loaded = gateway.receive()
    assert isinstance(loaded, Loaded)
    assert body_layout(loaded.contract.inputs, 11)[1] == 64
    values = np.arange(11) % 3 == 0
    write_input(gateway, 0, np.packbits(values, bitorder="little"))
    gateway.send(single_request(1, 0, 11, 0, 0))
    assert isinstance(gateway.receive(), Done)
    bits = np.frombuffer(gateway.output.view, np.uint8, 2, 0)
    assert np.unpackbits(bits, count=11, bitorder="little").tolist() == (~values).tolist()


def sequence_model(folder: Path) -> Path:
    """Saves a model that returns a sequence, which is no column type."""
    return models.save(
        folder,
        [helper.make_node("SplitToSequence", ["x"], ["y"], keepdims=0)],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows"])],
        [helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)],
    )


def wide_model(folder: Path) -> Path:
    """Saves a model whose input names exceed the limit of a control frame."""
    names = [f"{number:03d}".ljust(1000, "x") for number in range(300)]
    return models.save(
        folder,
        [helper.make_node("Sum", names, ["y"])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows"]) for name in names],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows"])],
    )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: folder, "not found at the configured path"),
        (wide_model, f"limit {FRAME_BYTES_MAX}"),
        (sequence_model, "seq(tensor(float))"),
        (lambda folder: models.identity(folder, TensorProto.FLOAT, ["rows", "k"]), "open axes"),
    ],
)
def test_model_that_cannot_be_served_is_rejected_with_a_reason(
    gateway: ScriptedGateway, worker: WorkerProcess, make: object, reason: str
) -> None:
    assert callable(make)
    folder = make(gateway.folder / "bad")
    gateway.send(Load(model_spec(folder)))
    failed = gateway.receive()
    assert isinstance(failed, LoadFailed) and failed.code == "manifest"
    assert reason in failed.message
    gateway.send(Load(model_spec(models.row_ids(gateway.folder / "ids"))))
    assert isinstance(gateway.receive(), Loaded)


@pytest.mark.over_zmq
def test_worker_keeps_its_models_for_the_next_gateway(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    spec = model_spec(models.row_ids(gateway.folder / "ids"))
    gateway.send(Load(spec))
    assert isinstance(gateway.receive(), Loaded)
    (gateway.folder / "ids" / "model.onnx").unlink()
    gateway.hang_up()
    hello = gateway.accept()
    assert (hello.index, hello.cpus) == (0, (0,))
    gateway.welcome()
    gateway.send(Load(spec))
    loaded = gateway.receive()
    assert isinstance(loaded, Loaded)
    write_input(gateway, 0, np.array([4]))
    gateway.send(single_request(9, 0, 1, 0, 0))
    assert isinstance(gateway.receive(), Done)
    assert read_output(gateway, 0, "int64", 1) == [13]
    assert len(shared_mappings(worker.pid)) == 3


def test_worker_exits_if_the_next_gateway_plans_other_cores(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    gateway.hang_up()
    gateway.accept()
    gateway.welcome(cpus=(1,))
    assert worker.process.wait(20) == 0


@pytest.mark.over_zmq
def test_sigterm_finishes_the_batch_and_requests_a_drain(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    gateway.send(Load(model_spec(models.slow(gateway.folder / "slow", 100))))
    assert isinstance(gateway.receive(), Loaded)
    write_input(gateway, 0, np.array([2000]))
    gateway.send(single_request(1, 0, 1, 0, 0))
    eventually(lambda: gateway.last_beat().batch_id == 1, what="a running batch")
    worker.process.send_signal(signal.SIGTERM)
    assert isinstance(gateway.receive(), Done)
    assert gateway.receive() == Leaving()
    gateway.send(Drain())
    assert worker.process.wait(20) == 0


@pytest.mark.over_zmq
def test_rejected_worker_exits_and_logs_the_reason(gateway: ScriptedGateway) -> None:
    worker = WorkerProcess(gateway.socket_path, gateway.folder)
    try:
        gateway.accept()
        gateway.refuse("no worker slot is free")
        assert worker.process.wait(20) == 76
        assert "no worker slot is free" in worker.log.read_text()
    finally:
        worker.end()


@pytest.mark.over_zmq
def test_worker_exits_on_an_unsealed_segment(gateway: ScriptedGateway, tmp_path: Path) -> None:
    """An unsealed segment could shrink while the worker reads it."""
    worker = WorkerProcess(gateway.socket_path, gateway.folder)
    unsealed = os.memfd_create("iskander-unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, len(gateway.input))
    sealed, gateway.input.fd = gateway.input.fd, unsealed
    try:
        gateway.accept()
        gateway.welcome()
        assert worker.process.wait(20) == 71
        assert "unsealed" in worker.log.read_text()
    finally:
        gateway.input.fd = sealed
        os.close(unsealed)
        worker.end()


@pytest.mark.over_zmq
def test_worker_exits_if_no_gateway_listens(tmp_path: Path) -> None:
    worker = WorkerProcess(tmp_path / "missing.sock", tmp_path, "--wait-s", "0.2")
    try:
        assert worker.process.wait(20) == 69
        assert "no gateway listened" in worker.log.read_text()
    finally:
        worker.end()


@pytest.mark.over_zmq
def test_worker_attaches_again_if_a_stopping_gateway_has_removed_its_folder(
    gateway: ScriptedGateway,
) -> None:
    worker = WorkerProcess(gateway.socket_path, gateway.folder, "--group", "0")
    try:
        gateway.accept()
        # The gateway's end cannot bind its socket either.
        with pytest.raises(OSError, match="No such file"):
            gateway.welcome(channel=str(gateway.folder / "removed" / "c1"))
        gateway.accept()
        gateway.welcome()
        worker.process.terminate()
        assert gateway.receive() == Leaving()
        gateway.send(Drain())
        assert worker.process.wait(20) == 0
    finally:
        worker.end()


@pytest.mark.over_zmq
def test_worker_exits_if_the_gateway_closes_each_connection(gateway: ScriptedGateway) -> None:
    worker = WorkerProcess(gateway.socket_path, gateway.folder, "--wait-s", "0.3")
    gateway.listener.settimeout(0.05)

    def has_exited() -> bool:
        with contextlib.suppress(TimeoutError):
            connection, _ = gateway.listener.accept()
            connection.close()
        return worker.process.poll() is not None

    try:
        eventually(has_exited, what="the exit of the worker")
        assert worker.process.returncode == 69
        assert "no gateway registered this worker" in worker.log.read_text()
    finally:
        worker.end()
