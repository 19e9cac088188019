"""Shared weights: private memory of workers, validation of cache entries, cache limit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pytest
from onnx import TensorProto, helper, numpy_helper
from support import models
from support.processes import MIB, Gateway, running

WIDTH, LAYERS = 1280, 16
LIGHT_BYTES = WIDTH * WIDTH * 4
WEIGHT_BYTES = LAYERS * LIGHT_BYTES  # 100 MiB
TWO = {"groups": ["0", "1"]}


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`y` of `x` through 16 layers of 1,280 by 1,280."""
    return deep(tmp_path_factory.mktemp("heavy"), LAYERS)


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with one layer, which is large enough to be shared."""
    return deep(tmp_path_factory.mktemp("light"), 1)


def deep(folder: Path, layers: int) -> Path:
    random = np.random.default_rng(3)
    nodes, weights, last = [], [], "x"
    for layer in range(layers):
        weight = (random.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{layer}"], [f"m{layer}"]))
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [f"r{layer}"]))
        last = f"r{layer}"
    nodes.append(helper.make_node("Identity", [last], ["y"]))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", WIDTH])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, folder / "model.onnx")
    return folder


def serving(folder: Path, model: Path, **loading: Any) -> Any:
    folder.mkdir(exist_ok=True)
    entry = {"name": "deep", "path": str(model), "intra_threads": 1, "max_batch_rows": 64}
    loading.setdefault("cache", str(folder / "cache"))
    return running(folder, [entry], workers=dict(TWO), loading=loading)


def batch(rows: int = 24) -> pa.RecordBatch:
    values = np.random.default_rng(5).standard_normal((rows, WIDTH)).astype(np.float32)
    return pa.record_batch({"x": pa.FixedSizeListArray.from_arrays(values.reshape(-1), WIDTH)})


def results(gateway: Gateway, count: int = 8) -> list[np.ndarray]:
    with gateway.client() as client:
        stream = client.stream("deep", [batch()] * count, timeout_s=60)
        return [each["y"].flatten().to_numpy().reshape(-1, WIDTH) for each in stream]


def private_bytes(pid: int) -> int:
    """Private memory of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def entries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def test_two_workers_share_one_copy_of_the_weights(tmp_path: Path, heavy: Path) -> None:
    """Saves nearly all of the weights in each worker's private memory, with equal results."""
    with serving(tmp_path / "own", heavy, share_weights=False) as gateway:
        own = results(gateway)
        private_own = [private_bytes(pid) for pid in gateway.worker_pids()]
    with serving(tmp_path / "shared", heavy) as gateway:
        shared = results(gateway)
        private_shared = [private_bytes(pid) for pid in gateway.worker_pids()]
        assert all(not worker["notices"] for worker in gateway.stats()["workers"])
    (entry,) = entries(tmp_path / "shared" / "cache")

    assert len(private_own) == len(private_shared) == 2
    assert min(private_own) > WEIGHT_BYTES
    for before, after in zip(private_own, private_shared, strict=True):
        assert before - after > 0.9 * WEIGHT_BYTES, (private_own, private_shared)
    assert {path.name for path in entry.iterdir()} == {"entry.json", "model.onnx", "weights.bin"}
    (expected,) = models.in_process(
        heavy, {"x": batch()["x"].flatten().to_numpy().reshape(-1, WIDTH)}
    )
    for each in (*own, *shared):
        assert np.array_equal(each, expected)


@pytest.mark.slow
def test_modified_cache_entry_is_rebuilt(tmp_path: Path, light: Path) -> None:
    """The checksum of the weights does not match."""
    with serving(tmp_path, light) as gateway:
        before = results(gateway, 1)
    (entry,) = entries(tmp_path / "cache")
    good = (entry / "weights.bin").read_bytes()
    with (entry / "weights.bin").open("r+b") as stream:
        stream.seek(LIGHT_BYTES // 2)
        stream.write(b"\xff" * 4)
    with serving(tmp_path, light) as gateway:
        after = results(gateway, 1)

    assert np.array_equal(before[0], after[0])
    assert (entry / "weights.bin").read_bytes() == good


@pytest.mark.slow
@pytest.mark.parametrize("writable", ["folder", "file", "link"])
def test_cache_entry_writable_by_others_is_not_used(
    tmp_path: Path, light: Path, writable: str
) -> None:
    with serving(tmp_path, light) as gateway:
        before = results(gateway, 1)
    cache = tmp_path / "cache"
    (entry,) = entries(cache)
    if writable == "folder":
        cache.chmod(0o777)
    elif writable == "file":
        (entry / "weights.bin").chmod(0o666)
    else:
        (entry / "weights.bin").rename(tmp_path / "elsewhere")
        (entry / "weights.bin").symlink_to(tmp_path / "elsewhere")
    with serving(tmp_path, light) as gateway:
        after = results(gateway, 1)
        notices = [text for worker in gateway.stats()["workers"] for text in worker["notices"]]
        mapped = [
            "weights.bin" in Path(f"/proc/{pid}/maps").read_text() for pid in gateway.worker_pids()
        ]

    assert np.array_equal(before[0], after[0])
    if writable == "folder":
        assert mapped == [False, False]
        assert all("can be written by others" in text for text in notices) and len(notices) == 2
    else:
        assert mapped == [True, True] and not notices
        weights = entry / "weights.bin"
        assert not weights.is_symlink() and weights.stat().st_mode & 0o777 == 0o600


def test_model_with_different_results_does_not_share_weights(tmp_path: Path) -> None:
    """The results are random, so the comparison with the saved model fails."""
    weight = np.ones((1024, 1024), np.float32)
    folder = models.save(
        tmp_path / "random",
        [
            helper.make_node("RandomNormalLike", ["x"], ["noise"]),
            helper.make_node("Add", ["x", "noise"], ["noisy"]),
            helper.make_node("MatMul", ["noisy", "w"], ["y"]),
        ],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 1024])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 1024])],
        [numpy_helper.from_array(weight, "w")],
    )
    entry = {"name": "random", "path": str(folder), "max_batch_rows": 64}
    with running(tmp_path, [entry], loading={"cache": str(tmp_path / "cache")}) as gateway:
        (worker,) = gateway.stats()["workers"]
        assert any("the saved model has other results" in text for text in worker["notices"])
    (kept,) = entries(tmp_path / "cache")
    assert [path.name for path in kept.iterdir()] == ["entry.json"]
    assert json.loads((kept / "entry.json").read_text())["note"]


@pytest.mark.slow
def test_cache_folder_stays_within_its_limit(tmp_path: Path, light: Path) -> None:
    """The entry of an unused model is deleted for the next one."""
    other = tmp_path / "other"
    other.mkdir()
    model = onnx.load(light / "model.onnx")
    model.graph.initializer[0].raw_data = bytes(WIDTH * WIDTH * 4)
    onnx.save(model, other / "model.onnx")
    limit = int(2.5 * LIGHT_BYTES)  # An entry has the weights twice: plain and packed.
    with serving(tmp_path, light, cache_bytes=limit):
        pass
    (first,) = entries(tmp_path / "cache")
    with serving(tmp_path, other, cache_bytes=limit) as gateway:
        assert not results(gateway, 1)[0].any()
    (second,) = entries(tmp_path / "cache")

    assert first.name != second.name
    assert sum(path.stat().st_size for path in second.iterdir()) <= limit + MIB
    assert not os.path.exists(first)
