"""Two batches in flight on a fake device, whose streams run in any order that events allow."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from iskander_worker.backends import Run
from iskander_worker.devices import workspace
from iskander_worker.devices.arenas import PageLockedArenas
from iskander_worker.devices.copies import FREE_COPIES, LARGE_BYTES, Copy, is_direct
from iskander_worker.devices.cuda import DeviceLost, DriverError, capture_lock
from iskander_worker.devices.pipeline import SLOTS, Pipeline
from iskander_worker.devices.workspace import DeviceBatch, Workspace
from iskander_worker.loading import loader
from iskander_worker.session import Session
from support import models
from support.fake_device import FAULT, FakeDevice, FakeLauncher
from support.processes import eventually
from support.scripted import model_spec

from iskander.contract.column_types import ColumnType
from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.processing.rows import RowCopier
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.errors import ExecutionFailed
from iskander.interprocess.control.messages import Execute, LoadFailed, Slice
from iskander.interprocess.memory.segment import Segment

CONTRACT = Contract(
    (
        TensorSpec("x", "x", ColumnType("float32"), (3,)),
        TensorSpec("n", "n", ColumnType("int64"), ()),
    ),
    (
        TensorSpec("sum", "sum", ColumnType("float32"), ()),
        TensorSpec("twice", "twice", ColumnType("int64"), ()),
    ),
)
ARENA = 1 << 20


def compute(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"sum": inputs["x"].sum(1), "twice": inputs["n"] * 2}


class Rig:
    """A session on a fake device, with two arenas as a worker maps them."""

    def __init__(self, device: FakeDevice, graph_rows: tuple[int, ...] = ()) -> None:
        self.device = device
        self.created = Segment.create("in", ARENA, is_read_only=True), Segment.create("out", ARENA)
        self.inputs = Segment.attach(os.dup(self.created[0].fd), ARENA, is_writable=False)
        self.outputs = Segment.attach(os.dup(self.created[1].fd), ARENA, is_writable=True)
        self.arenas = PageLockedArenas(device, self.inputs, self.outputs)
        self.launcher = FakeLauncher(device, compute, graph_rows)
        copiers = RowCopier(CONTRACT.inputs), RowCopier(CONTRACT.outputs)
        self.session: Any = SimpleNamespace(
            launcher=self.launcher,
            inputs=copiers[0],
            outputs=copiers[1],
            workspaces=[Workspace(self.launcher, CONTRACT, *copiers) for _ in range(SLOTS)],
        )
        self.pipeline = Pipeline(device)
        self.expected: dict[int, list[tuple[Slice, dict[str, np.ndarray]]]] = {}

    def close(self) -> None:
        self.arenas.release()
        assert all(address in self.device.memory for address in self.device.registered)
        for segment in (self.inputs, self.outputs, *self.created):
            segment.close()

    def batch(self, batch_id: int, slices: list[tuple[int, int, int]], pad: int = 0) -> Execute:
        """Write inputs of slices `(request_rows, first, rows)` to the arena; returns a batch."""
        noise = np.random.default_rng(batch_id)
        parts = []
        self.expected[batch_id] = []
        for position, (request_rows, first, rows) in enumerate(slices):
            offset = (batch_id % 8 * 16 + position) * 4096
            values = {
                "x": noise.integers(0, 100, (request_rows, 3)).astype(np.float32),
                "n": noise.integers(0, 100, request_rows),
            }
            offsets, _ = body_layout(CONTRACT.inputs, request_rows)
            for name, at in zip(("x", "n"), offsets, strict=True):
                raw = values[name].tobytes()
                self.created[0].view[offset + at : offset + at + len(raw)] = raw
            part = Slice(offset, request_rows, first, rows, offset)
            parts.append(part)
            rows_of = {name: each[first : first + rows] for name, each in values.items()}
            self.expected[batch_id].append((part, compute(rows_of)))
        total = sum(rows for _, _, rows in slices)
        return Execute(batch_id, 0, total + pad, tuple(parts))

    def launch(self, message: Execute) -> None:
        self.pipeline.launch(self.session, self.arenas, message, Run())

    def finish(self) -> list[int]:
        """Check the results of the batches that have ended; returns their ids."""
        ids = []
        for flight in self.pipeline.finish():
            ids.append(flight.message.batch_id)
            for part, results in self.expected.pop(ids[-1]):
                offsets, _ = body_layout(CONTRACT.outputs, part.rows)
                for name, at in zip(results, offsets, strict=True):
                    right = results[name]
                    found = np.frombuffer(
                        self.created[1].view, right.dtype, part.rows, part.output_offset + at
                    )
                    np.testing.assert_array_equal(found, right)
        return ids


@pytest.fixture
def rig_of() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(device: FakeDevice, graph_rows: tuple[int, ...] = ()) -> Rig:
        rigs.append(Rig(device, graph_rows))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.mark.parametrize("refused", [(), ("ro",), ("rw",), ("ro", "rw")])
@pytest.mark.parametrize("seed", range(6))
def test_results_are_right_in_every_order_of_the_streams(
    rig_of: Callable[..., Rig], seed: int, refused: tuple[str, ...]
) -> None:
    """Whole requests, several slices with and without padding; ended batches are in order."""
    chance = random.Random(seed)
    rig = rig_of(FakeDevice(seed, refused), graph_rows=(5, 8))
    ended: list[int] = []
    for batch_id in range(1, 25):
        slices = []
        for _ in range(chance.choice([1, 1, 2, 3, 12])):
            request_rows = chance.randint(1, 6)
            rows = chance.choice([request_rows, chance.randint(1, request_rows)])
            slices.append((request_rows, chance.randint(0, request_rows - rows), rows))
        while rig.pipeline.is_full:
            assert rig.device.step()
            ended += rig.finish()
        rig.launch(rig.batch(batch_id, slices, pad=chance.choice([0, 0, 1, 5])))
        for _ in range(chance.randint(0, 10)):
            rig.device.step()
        ended += rig.finish()
    while rig.device.step():
        pass
    assert ended + rig.finish() == list(range(1, 25))
    assert rig.device.blocked == 0, "a copy of memory that is not page-locked"
    kinds = {"ro": "the input arena", "rw": "the output arena"}
    assert [text[: text.index(" (")] for text in rig.arenas.notices] == [
        kinds[each] for each in sorted(refused)
    ]


def test_inputs_of_the_next_batch_are_copied_before_the_first_is_computed(
    rig_of: Callable[..., Rig],
) -> None:
    rig = rig_of(FakeDevice())
    rig.launch(rig.batch(1, [(4, 0, 4)]))
    rig.launch(rig.batch(2, [(4, 0, 4)]))
    assert rig.pipeline.is_full
    while rig.device.step(rig.pipeline._up):
        pass
    assert rig.device.log == ["in", "record"] * 2
    assert rig.finish() == []
    while rig.device.step():
        pass
    assert rig.finish() == [1, 2]


def test_whole_request_is_one_copy_each_way_and_column(rig_of: Callable[..., Rig]) -> None:
    rig = rig_of(FakeDevice())
    rig.launch(rig.batch(1, [(4, 0, 4)]))
    while rig.device.step():
        pass
    assert rig.device.log.count("in") == 1
    assert rig.device.log.count("out") == len(CONTRACT.outputs)
    assert rig.device.copied_in == body_layout(CONTRACT.inputs, 4)[1]
    assert rig.device.copied_out == 4 * (4 + 8)
    assert rig.finish() == [1]


@pytest.mark.parametrize("refused", [(), ("ro",)])
@pytest.mark.parametrize("pad", [1, 2, 5, 8])
def test_padding_repeats_the_last_row(
    rig_of: Callable[..., Rig], refused: tuple[str, ...], pad: int
) -> None:
    """Zeros could be rejected by a model."""
    rig = rig_of(FakeDevice(refused=refused))
    seen: dict[str, np.ndarray] = {}

    def record(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        seen.update({name: array.copy() for name, array in inputs.items()})
        return compute(inputs)

    rig.launcher.compute = record
    rig.launch(rig.batch(1, [(4, 1, 2), (3, 0, 3)], pad=pad))
    while rig.device.step():
        pass
    assert rig.finish() == [1]
    for array in seen.values():
        assert len(array) == 5 + pad
        assert (array[5:] == array[4]).all()


def test_failed_launch_leaves_no_copy_pending_and_its_slot_free(
    rig_of: Callable[..., Rig],
) -> None:
    rig = rig_of(FakeDevice())
    rig.launch(rig.batch(1, [(4, 0, 4)]))
    rig.launcher.failures = [ExecutionFailed("no such row")]
    with pytest.raises(ExecutionFailed, match="no such row"):
        rig.launch(rig.batch(2, [(4, 0, 4)]))
    assert not rig.device.step(), "copies of the failed batch may still read its range"
    assert not rig.pipeline.is_full
    rig.expected.pop(2)
    rig.launch(rig.batch(3, [(4, 0, 4)]))
    while rig.device.step():
        pass
    assert rig.finish() == [1, 3]


def test_missing_device_memory_fails_the_batch_only(rig_of: Callable[..., Rig]) -> None:
    device = FakeDevice()
    rig = rig_of(device)
    device.free_bytes = 4096
    text = r"no device memory for a batch of 256 rows .*lower max_batch_rows"
    with pytest.raises(ExecutionFailed, match=text):
        rig.launch(rig.batch(1, [(200, 0, 200)]))
    assert device.free_bytes == 4096
    rig.expected.clear()
    rig.launch(rig.batch(2, [(2, 0, 2)]))
    while device.step():
        pass
    assert rig.finish() == [2]


def test_fault_is_found_though_no_batch_ends(rig_of: Callable[..., Rig]) -> None:
    """After a fault the driver calls no host function, so nothing is signalled."""
    device = FakeDevice()
    rig = rig_of(device)
    rig.launch(rig.batch(1, [(4, 0, 4)]))
    rig.pipeline.check()
    device.fault = DriverError(FAULT, "cuStreamQuery failed: illegal address (CUDA error 700)")
    with pytest.raises(DeviceLost, match="CUDA error 700"):
        rig.pipeline.finish(is_waiting=True)
    with pytest.raises(DeviceLost):
        rig.launch(rig.batch(2, [(4, 0, 4)]))
    device.fault = None


def test_graph_rows_keep_their_memory_and_other_launches_are_bounded(
    rig_of: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "LAUNCHES_MAX", 2)
    device = FakeDevice()
    rig = rig_of(device, graph_rows=(4, 8))
    space = rig.session.workspaces[0]
    captured = space.prepare(4)
    for rows in (1, 2, 3, 1):  # The third evicts the first.
        space.prepare(rows)
    larger = space.prepare(100).input_address
    assert larger != captured.input_address
    assert space.prepare(1).input_address == larger, "its first memory is freed"
    assert space.prepare(8).input_address == captured.input_address
    assert space.prepare(4) is captured
    assert rig.launcher.prepared == [
        (4, True), (1, False), (2, False), (3, False), (1, False), (100, False), (1, False),
        (8, True),
    ]  # fmt: skip
    space.close()
    assert not device.memory


def model_on(launcher: FakeLauncher) -> Callable[..., Any]:
    """The `load` of a model with the tensors of `row_ids`."""
    model = SimpleNamespace(
        graph=Graph(
            (GraphTensor("x", "tensor(int64)", ("rows",)),),
            (GraphTensor("y", "tensor(int64)", ("rows",)),),
        ),
        compute=None,
        launcher=launcher,
        threads=1,
        providers=("fake",),
        close=launcher.close,
    )
    return lambda spec, cores: model


def test_failed_load_leaves_nothing_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm-up without enough memory, and a wrong manifest."""
    device = FakeDevice()
    folder = models.row_ids(tmp_path / "m")
    launcher = FakeLauncher(device, lambda inputs: {"y": inputs["x"]})
    # The runs that prove what is written: two sizes, two kinds of values, two patterns.
    launcher.failures = [*[None] * 8, None, ExecutionFailed("out of memory")]
    opened = [model_on(launcher)]
    monkeypatch.setattr(loader, "Session", lambda spec, cores: Session(spec, cores, opened[0]))
    loads = loader.LoadQueue(1)

    def load() -> LoadFailed:
        attachment: Any = SimpleNamespace(executor=SimpleNamespace(sessions={}))
        loads.put(attachment, model_spec(folder))
        _, (answer,) = eventually(loads.finish_load, what="end of the load")
        assert isinstance(answer, LoadFailed)
        return answer

    assert "not enough memory for a warm-up" in load().message
    assert not device.memory and not device.streams
    (folder / "manifest.toml").write_text("format = 1\n")
    opened[0] = model_on(FakeLauncher(device, lambda inputs: {}))
    assert "missing required field" in load().message
    assert not device.memory and not device.streams


def test_model_is_released_while_no_batch_runs_and_no_graph_is_captured(
    rig_of: Callable[..., Rig], tmp_path: Path
) -> None:
    """A destructor of the runtime holds the interpreter lock, which the end of a batch needs."""
    device = FakeDevice()
    rig = rig_of(device)
    launcher = FakeLauncher(device, lambda inputs: {"y": inputs["x"]})
    model = model_on(launcher)(None, 1)
    can_capture: list[bool] = []

    def close() -> None:
        assert not device.step(), "a batch of another model is in flight"
        other = threading.Thread(
            target=lambda: can_capture.append(capture_lock.acquire(blocking=False))
        )
        other.start()
        other.join()
        launcher.close()

    model.close = close
    spec = model_spec(models.row_ids(tmp_path / "m"))
    session = Session(spec, 1, lambda spec, cores: model)
    rig.launch(rig.batch(1, [(4, 0, 4)]))
    session.close()
    assert can_capture == [False]
    assert rig.finish() == [1]


def test_load_warms_both_slots_and_captures_their_graphs(tmp_path: Path) -> None:
    """The model of `row_ids` on the fake device; the session is closed with its memory."""
    device = FakeDevice()
    launcher = FakeLauncher(device, lambda inputs: {"y": 3 * inputs["x"] + 1}, graph_rows=(4, 8))
    session = Session(model_spec(models.row_ids(tmp_path / "m")), 1, model_on(launcher))
    session.warm_up(16)
    # The launch of 3 rows proves which memory a run writes.
    assert set(launcher.prepared) == {(1, False), (3, False), (16, False), (4, True), (8, True)}
    assert [launcher.prepared.count((rows, True)) for rows in (4, 8)] == [SLOTS, SLOTS]
    assert launcher.prepared.count((16, False)) == SLOTS
    session.close()
    assert not device.memory


def test_batch_of_a_warm_up_runs_at_once(rig_of: Callable[..., Rig]) -> None:
    rig = rig_of(FakeDevice())
    body = np.zeros(body_layout(CONTRACT.inputs, 3)[1], np.uint8)
    body[: 3 * 3 * 4].view(np.float32)[:] = np.arange(9)
    results = np.zeros(body_layout(CONTRACT.outputs, 3)[1], np.uint8)
    batch = DeviceBatch(
        rig.launcher,
        rig.session.workspaces[0],
        CONTRACT,
        3,
        body.ctypes.data,
        results.ctypes.data,
    )
    batch.run(Run())
    assert results[:12].view(np.float32).tolist() == [3, 12, 21]


def test_many_small_copies_pass_through_a_stage() -> None:
    few = [Copy(0, 0, 8)] * FREE_COPIES
    assert is_direct(few, is_page_locked=True)
    assert not is_direct(few, is_page_locked=False)
    assert not is_direct([*few, Copy(0, 0, 8)], is_page_locked=True)
    assert is_direct([*few, Copy(0, 0, LARGE_BYTES * 17)], is_page_locked=True)
