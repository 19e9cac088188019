"""TensorRT engines on a GPU: built once in a sandbox, opened by every worker, for all sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from iskander_worker.loading.engines import tensorrt_version
from onnx import TensorProto, helper, numpy_helper
from support import models
from support.processes import WorkerProcess
from support.scripted import ScriptedGateway, model_spec

from iskander.interprocess.control.messages import (
    Copied,
    Done,
    Drain,
    Execute,
    Load,
    Loaded,
    LoadFailed,
    LoadingSpec,
    LoadStep,
    Notice,
    Slice,
)

pytestmark = pytest.mark.skipif(
    not tensorrt_version(),
    reason="TensorRT is not installed: pip install 'tensorrt-cu13-libs>=10,<11'",
)

COLUMNS, ROWS_MAX = 16, 64
BUILD_S = 600.0


def network(folder: Path) -> Path:
    """`y = relu(x @ w + 1)`, where w is a permutation."""
    weight = np.roll(np.eye(COLUMNS, dtype=np.float32), 1, axis=1)
    shape = ["rows", COLUMNS]
    return models.save(
        folder,
        [
            helper.make_node("MatMul", ["x", "w"], ["m"]),
            helper.make_node("Add", ["m", "one"], ["a"]),
            helper.make_node("Relu", ["a"], ["y"]),
        ],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.float32([1]), "one")],
    )


def load(gateway: ScriptedGateway, folder: Path, **changes: Any) -> Any:
    loading = LoadingSpec(cache=str(gateway.folder / "cache"), engine_s=BUILD_S)
    values = {"execution_providers": ("tensorrt", "cuda"), "loading": loading}
    values |= {"rows_max": ROWS_MAX} | changes
    gateway.send(Load(model_spec(folder, **values)))
    while not isinstance(answer := gateway.receive(BUILD_S), Loaded | LoadFailed):
        assert isinstance(answer, LoadStep | Copied | Notice)
    return answer


def entries(gateway: ScriptedGateway) -> list[Path]:
    return [each.parent for each in (gateway.folder / "cache").glob("*/entry.json")]


def require_results(gateway: ScriptedGateway) -> None:
    for batch_id, rows in enumerate([1, 3, ROWS_MAX, 7], start=1):
        x = np.random.default_rng(rows).integers(-50, 50, (rows, COLUMNS)).astype(np.float32)
        gateway.input.view[: x.nbytes] = x.tobytes()
        gateway.send(Execute(batch_id, 0, rows, (Slice(0, rows, 0, rows, 0),)))
        while isinstance(answer := gateway.receive(60), Copied):
            pass
        assert isinstance(answer, Done), answer
        found = np.frombuffer(gateway.output.view, np.float32, x.size).reshape(x.shape)
        expected = np.maximum(np.roll(x, 1, axis=1) + 1, 0)
        # TF32 has ten bits.
        np.testing.assert_allclose(found, expected, rtol=1e-2, atol=0.1)


def test_engine_is_built_once_and_serves_all_sizes(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    folder = network(gateway.folder / "m")
    answer = load(gateway, folder)
    assert isinstance(answer, Loaded), answer
    assert answer.providers[0] == "TensorrtExecutionProvider"
    require_results(gateway)
    (entry,) = entries(gateway)
    files = {each: each.stat() for each in entry.iterdir()}
    assert any(each.suffix == ".engine" for each in files)
    assert not any(status.st_mode & 0o077 for status in files.values())
    gateway.send(Drain())
    assert worker.process.wait(60) == 0
    second = WorkerProcess(gateway.socket_path, gateway.folder, "--group", "0")
    try:
        gateway.accept()
        gateway.welcome()
        assert isinstance(load(gateway, folder), Loaded)
        require_results(gateway)
        assert entries(gateway) == [entry]
        for each, status in files.items():
            assert each.name == "entry.json" or each.stat().st_mtime_ns == status.st_mtime_ns
    finally:
        second.end()


def test_build_that_exceeds_its_time_is_a_load_error(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    loading = LoadingSpec(cache=str(gateway.folder / "cache"), engine_s=1.5)
    answer = load(gateway, network(gateway.folder / "m"), loading=loading)
    assert isinstance(answer, LoadFailed) and "(loading.engine_s)" in answer.message
