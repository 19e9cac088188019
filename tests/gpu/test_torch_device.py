"""PyTorch programs on a GPU in a real worker, with a scripted gateway."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from support.processes import WorkerProcess
from support.scripted import ScriptedGateway, model_spec

from iskander.contract.tensors import body_layout
from iskander.interprocess.control.messages import (
    Copied,
    Done,
    Execute,
    Failed,
    Load,
    Loaded,
    LoadFailed,
    Slice,
)

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")

COLUMNS = 8
EXPORT = """
import sys
import torch

class Doubled(torch.nn.Module):
    def forward(self, x, index):
        table = torch.arange(10, device=x.device, dtype=x.dtype)
        return {"y": x * 2, "t": table[index], "turned": x.t().contiguous().t()}

kind = getattr(torch, sys.argv[2])
rows = torch.export.Dim("rows", min=1, max=65536)
example = (torch.ones(4, 8, dtype=kind), torch.zeros(4, dtype=torch.int64))
shapes = {"x": {0: rows}, "index": {0: rows}}
torch.export.save(torch.export.export(Doubled(), example, dynamic_shapes=shapes), sys.argv[1])
"""
MANIFEST = """
format = 1
[torch]
file = "model.pt2"
[[inputs]]
column = "x"
type = "fixed_size_list<{kind}>[8]"
tensor = "x"
[[inputs]]
column = "index"
type = "int64"
tensor = "index"
[[outputs]]
tensor = "y"
column = "y"
type = "fixed_size_list<{kind}>[8]"
[[outputs]]
tensor = "t"
column = "t"
type = "{kind}"
[[outputs]]
tensor = "turned"
column = "turned"
type = "fixed_size_list<{kind}>[8]"
"""
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def receive(gateway: ScriptedGateway, within_s: float = 20.0) -> Any:
    """The next message but `Copied`."""
    while isinstance(message := gateway.receive(within_s), Copied):
        pass
    return message


def answer_of_load(gateway: ScriptedGateway, kind: str, **changes: Any) -> Any:
    folder = gateway.folder / "m"
    folder.mkdir()
    script = folder / "make.py"
    script.write_text(EXPORT)
    subprocess.run([sys.executable, str(script), str(folder / "model.pt2"), kind], check=True)
    script.unlink()
    (folder / "manifest.toml").write_text(MANIFEST.format(kind=kind))
    values = {"backend": "torch", "execution_providers": ("cuda",), "pool": "m/1"} | changes
    spec = model_spec(folder, **values)
    gateway.send(Load(msgspec.structs.replace(spec, path=str(folder / "manifest.toml"))))
    return receive(gateway, 180)


def load(gateway: ScriptedGateway, kind: str) -> Loaded:
    answer = answer_of_load(gateway, kind)
    assert isinstance(answer, Loaded), answer
    return answer


def place(
    gateway: ScriptedGateway, loaded: Loaded, at: int, x: np.ndarray, index: np.ndarray
) -> None:
    offsets, _ = body_layout(loaded.contract.inputs, len(x))
    for offset, array in zip(offsets, (x, index), strict=True):
        raw = array.tobytes()
        gateway.input.view[at + offset : at + offset + len(raw)] = raw


def read(
    gateway: ScriptedGateway, loaded: Loaded, at: int, rows: int, dtype: Any
) -> list[np.ndarray]:
    offsets, _ = body_layout(loaded.contract.outputs, rows)
    return [
        np.frombuffer(gateway.output.view, dtype, rows * spec.elements, at + offset)
        .reshape(rows, *spec.shape)
        .copy()
        for spec, offset in zip(loaded.contract.outputs, offsets, strict=True)
    ]


def inputs(rows: int, dtype: Any, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.integers(0, 60, (rows, COLUMNS)).astype(dtype)
    return x, random.integers(0, 10, rows).astype(np.int64)


@pytest.mark.parametrize("kind", TYPES)
def test_program_computes_from_and_to_the_arenas(
    gateway: ScriptedGateway, worker: WorkerProcess, kind: str
) -> None:
    """Whole requests, several slices with padding, and batches sent together."""
    dtype = TYPES[kind]
    loaded = load(gateway, kind)
    sent = {}
    for batch_id in range(1, 9):
        rows = 3 + batch_id % 3
        x, index = sent[batch_id] = inputs(rows, dtype, batch_id)
        place(gateway, loaded, batch_id * 8192, x, index)
        part = Slice(batch_id * 8192, rows, 0, rows, batch_id * 8192)
        gateway.send(Execute(batch_id, 0, rows, (part,)))
    for batch_id, (x, index) in sent.items():
        answer = receive(gateway, 60)
        assert isinstance(answer, Done) and answer.batch_id == batch_id, answer
        y, table, turned = read(gateway, loaded, batch_id * 8192, len(x), dtype)
        np.testing.assert_array_equal(y, x * dtype(2))
        np.testing.assert_array_equal(table, index.astype(dtype))
        np.testing.assert_array_equal(turned, x)
    parts = tuple(Slice(n * 8192, len(sent[n][0]), 1, 2, n * 8192) for n in (1, 2, 3))
    gateway.send(Execute(20, 0, 9, parts))
    assert isinstance(receive(gateway, 60), Done)
    for number in (1, 2, 3):
        y, table, _ = read(gateway, loaded, number * 8192, 2, dtype)
        np.testing.assert_array_equal(y, sent[number][0][1:3] * dtype(2))
        np.testing.assert_array_equal(table, sent[number][1][1:3].astype(dtype))


def test_program_that_exceeds_its_memory_fails(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    """The budget is less than a segment of PyTorch's allocator."""
    answer = answer_of_load(gateway, "float32", gpu_memory_bytes=1 << 20)
    if isinstance(answer, Loaded):
        place(gateway, answer, 0, *inputs(4, np.float32, 1))
        gateway.send(Execute(1, 0, 4, (Slice(0, 4, 0, 4, 0),)))
        answer = receive(gateway, 60)
    assert isinstance(answer, Failed | LoadFailed) and "out of memory" in answer.message


def test_fault_of_a_kernel_ends_the_worker(gateway: ScriptedGateway, worker: WorkerProcess) -> None:
    """An index beyond a table stops the device for this process; the gateway replaces it."""
    loaded = load(gateway, "float32")
    x, index = inputs(4, np.float32, 1)
    index[2] = 1 << 40
    place(gateway, loaded, 0, x, index)
    gateway.send(Execute(1, 0, 4, (Slice(0, 4, 0, 4, 0),)))
    assert worker.process.wait(60) == 74
    assert "device lost: " in worker.log.read_text()
    assert not [each for each in gateway.waiting if isinstance(each, Done | Failed)]
