"""Backend `python` on a real server: results, errors and isolation.

An ONNX model on the same server must return correct results whatever the Python models do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from support import models
from support.processes import Gateway, eventually, running
from support.python_models import entry

from iskander.errors import ExecutionFailed, IskanderError

PLAIN = "class Model(Base): pass\n"
BATCH = pa.record_batch({"x": [1, 2, 3]})

HOSTILE = """
import os, sys, time

class Model(Base):
    def predict(self, batch):
        first = batch.column("x")[0].as_py()
        if first == 10:
            raise KeyError("no such thing")
        if first == 11:
            sys.exit(3)
        if first == 12:
            return pa.record_batch({"z": batch.column("x")})
        if first == 13:
            return tripled(batch.slice(1))
        if first == 14:
            return pa.table({"y": batch.column("x")})
        if first == 15:
            return pa.record_batch({"y": pa.array([None] * len(batch), pa.int64())})
        if first == 16:
            return pa.record_batch({"y": pa.array([0.5] * len(batch))})
        if first == 17:
            return pa.record_batch({"y": pa.array([{"a": 1}] * len(batch))})
        if first == 18:
            print("noise " * 200_000)
        if first == 19:
            if os.fork() == 0:
                os.fork()
        if first == 20:
            return (tripled(batch) for _ in iter(int, 1))
        if first == 21:
            os._exit(5)
        if first == 22:
            while True:
                pass
        if first == 23:
            if os.fork() == 0:
                time.sleep(3600)
        return tripled(batch)
"""


def onnx(folder: Path) -> dict[str, Any]:
    return {"name": "ids", "path": str(models.row_ids(folder / "ids")), "intra_threads": 1}


def own_worker(gateway: Gateway, name: str) -> dict[str, Any]:
    """Returns the stats of a model's own worker."""
    (worker,) = [w for w in gateway.stats()["workers"] if w["pool"] == f"{name}/1"]
    return worker


def score(gateway: Gateway, name: str, first: int) -> list[int]:
    with gateway.client() as client:
        results: list[int] = client.score(name, batch_of(first))["y"].to_pylist()
        return results


def batch_of(first: int) -> pa.RecordBatch:
    return pa.record_batch({"x": [first, 2, 3]})


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Serves a plain, a hostile and an ONNX model."""
    folder = tmp_path_factory.mktemp("backends")
    served = [onnx(folder), entry(folder / "plain", PLAIN), entry(folder / "hostile", HOSTILE)]
    with running(folder, served, workers={"hang_s": 2.0}) as ready:
        yield ready


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Gateway]:
    """Serves the same models for one test that replaces processes."""
    served = [onnx(tmp_path), entry(tmp_path / "plain", PLAIN)]
    served.append(entry(tmp_path / "hostile", HOSTILE))
    with running(tmp_path, served, workers={"hang_s": 2.0}) as ready:
        yield ready


def require_correct_results(gateway: Gateway) -> None:
    for name in ("ids", "plain"):
        assert score(gateway, name, 1) == [4, 7, 10]


def test_class_results_include_passthrough_columns(gateway: Gateway) -> None:
    with gateway.client() as client:
        batch = BATCH.append_column("id", pa.array(["a", "b", "c"]))
        result = client.score("plain", batch)
    assert result.to_pydict() == {"y": [4, 7, 10], "id": ["a", "b", "c"]}


def test_batched_requests_get_their_own_rows(gateway: Gateway) -> None:
    batches = [pa.record_batch({"x": list(range(at, at + 5))}) for at in range(0, 200, 5)]
    with gateway.client() as client:
        results = [result["y"].to_pylist() for result in client.stream("plain", batches)]
    assert results == [[3 * x + 1 for x in b["x"].to_pylist()] for b in batches]


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (10, r"KeyError: 'no such thing' \(model.py, line \d+\)"),
        (11, r"SystemExit: 3 \(model.py, line \d+\)"),
        (12, "returned the columns z, expected y once"),
        (13, "returned 2 rows for a batch of 3"),
        (14, "returned a Table, expected a pyarrow.RecordBatch"),
        (15, "column `y` has nulls"),
        (16, "`y` has dtype float64, expected int64"),
        (17, "column `y` has type struct<a: int64>, which is no tensor"),
        (20, "returned 6 or more rows for a batch of 3"),
    ],
)
def test_class_errors_fail_only_their_request(gateway: Gateway, first: int, message: str) -> None:
    """The caller gets the reason, and the worker keeps running."""
    before = own_worker(gateway, "hostile")["pid"]
    with pytest.raises(ExecutionFailed, match=message):
        score(gateway, "hostile", first)
    assert own_worker(gateway, "hostile")["pid"] == before
    assert score(gateway, "hostile", 1) == [4, 7, 10]
    require_correct_results(gateway)


@pytest.mark.parametrize("first", [18, 19], ids=["large output", "forked child returns"])
def test_side_effects_of_a_class_do_not_change_results(fresh: Gateway, first: int) -> None:
    before = own_worker(fresh, "hostile")["pid"]
    for _ in range(3):
        assert score(fresh, "hostile", first) == [3 * first + 1, 7, 10]
    assert own_worker(fresh, "hostile")["pid"] == before
    require_correct_results(fresh)


@pytest.mark.slow
@pytest.mark.parametrize("first", [21, 22], ids=["exits", "never returns"])
def test_worker_lost_to_its_model_is_replaced_and_the_request_fails(
    fresh: Gateway, first: int
) -> None:
    """The request is poisoned when it has ended two workers."""
    shared = [w["pid"] for w in fresh.stats()["workers"] if not w["pool"]]
    with pytest.raises(IskanderError):
        score(fresh, "hostile", first)
    require_correct_results(fresh)
    eventually(lambda: is_serving(fresh, "hostile"), what="the replacement worker")
    assert [w["pid"] for w in fresh.stats()["workers"] if not w["pool"]] == shared


def is_serving(gateway: Gateway, name: str) -> bool:
    try:
        return score(gateway, name, 1) == [4, 7, 10]
    except IskanderError:
        return False


@pytest.mark.slow
def test_forked_child_neither_hides_nor_outlives_its_workers_exit(
    fresh: Gateway,
) -> None:
    assert score(fresh, "hostile", 23) == [70, 7, 10]
    worker = own_worker(fresh, "hostile")
    (child,) = psutil.Process(worker["pid"]).children()
    os.kill(worker["pid"], 9)
    eventually(
        lambda: not child.is_running() or child.status() == "zombie", what="the exit of the child"
    )
    eventually(
        lambda: own_worker(fresh, "hostile")["pid"] not in (0, worker["pid"]), what="a replacement"
    )
    eventually(lambda: is_serving(fresh, "hostile"), what="the replacement worker")


def test_model_folder_is_not_written(tmp_path: Path) -> None:
    """A new file would invalidate the signature of a signed folder."""
    gateway = Gateway(tmp_path, [entry(tmp_path / "own", PLAIN)])
    try:
        gateway.start(PYTHONDONTWRITEBYTECODE="")
        assert score(gateway, "own", 1) == [4, 7, 10]
        assert gateway.stop() == 0
    finally:
        gateway.end()
    files = sorted(path.name for path in (tmp_path / "own").iterdir())
    assert files == ["manifest.toml", "model.py"]


def test_each_python_model_has_its_own_worker(gateway: Gateway) -> None:
    """A worker loads only its own models: ONNX without Arrow, Python without ONNX Runtime."""
    workers = {worker["pool"]: worker for worker in gateway.stats()["workers"]}
    assert sorted(workers) == ["", "hostile/1", "plain/1"]
    maps = {pool: Path(f"/proc/{w['pid']}/maps").read_text() for pool, w in workers.items()}
    assert "libarrow" not in maps[""]
    assert "onnxruntime" in maps[""]
    assert "libarrow" in maps["plain/1"]
    assert "onnxruntime" not in maps["plain/1"]
    assert "hostile" not in maps["plain/1"]


def running_with_onnx(folder: Path, source: str, **settings: Any) -> Any:
    return running(folder, [onnx(folder), entry(folder / "own", source, **settings)])


def test_yielded_parts_form_one_result(tmp_path: Path) -> None:
    source = """
class Model(Base):
    def predict(self, batch):
        for at in range(len(batch)):
            yield tripled(batch.slice(at, 1))
"""
    with running_with_onnx(tmp_path, source) as gateway:
        assert score(gateway, "own", 5) == [16, 7, 10]


def test_class_load_failure_is_a_start_error(tmp_path: Path) -> None:
    source = (
        "class Model(Base):\n    def load(self, context):\n        raise OSError('no weights')\n"
    )
    gateway = Gateway(tmp_path, [onnx(tmp_path), entry(tmp_path / "own", source)])
    try:
        gateway.start(is_ready=False)
        assert gateway.wait() == 78
    finally:
        gateway.end()
    assert "its class cannot be loaded: OSError: no weights (model.py, line" in gateway.text()


def linked_environment(folder: Path, *packages: str) -> str:
    """Creates an environment with links to some packages of this one; returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (target,) = folder.glob("lib/python3*/site-packages")
    source = Path(pa.__file__).parent.parent
    for package in packages:
        for path in source.glob(f"{package}*"):
            (target / path.name).symlink_to(path)
    return str(folder / "bin" / "python")


@pytest.mark.slow
def test_class_runs_in_an_environment_without_this_distribution(tmp_path: Path) -> None:
    """It needs NumPy, msgspec and the model's packages; the gateway adds the path of its code."""
    python = linked_environment(tmp_path / "venv", "numpy", "msgspec", "pyarrow")
    source = "import sys\n" + PLAIN + "sys.stderr.write(f'it runs in {sys.prefix}\\n')\n"
    with running_with_onnx(tmp_path, source, python=python, workers=2) as gateway:
        assert score(gateway, "own", 1) == [4, 7, 10]
        pids = [w["pid"] for w in gateway.stats()["workers"] if w["pool"] == "own/1"]
        assert len(pids) == 2
        assert {psutil.Process(pid).cmdline()[0] for pid in pids} == {python}
        assert f"it runs in {tmp_path / 'venv'}" in gateway.text()


def test_graph_runs_in_another_environment(tmp_path: Path) -> None:
    """The sandboxed load uses the same interpreter."""
    python = linked_environment(tmp_path / "venv", "numpy", "msgspec", "onnxruntime", "packaging")
    with running(tmp_path, [onnx(tmp_path) | {"python": python}]) as gateway:
        assert score(gateway, "ids", 1) == [4, 7, 10]
        assert psutil.Process(own_worker(gateway, "ids")["pid"]).cmdline()[0] == python


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        ((), "lacks msgspec and numpy, which a worker needs"),
        (("numpy", "msgspec"), "backend `python` cannot be imported: No module named 'pyarrow'"),
    ],
)
def test_missing_package_of_an_interpreter_is_a_start_error(
    tmp_path: Path, packages: tuple[str, ...], message: str
) -> None:
    python = linked_environment(tmp_path / "venv", *packages)
    gateway = Gateway(tmp_path, [entry(tmp_path / "own", PLAIN, python=python)])
    try:
        gateway.start(is_ready=False)
        assert gateway.wait(60) in (69, 78)
    finally:
        gateway.end()
    assert message in gateway.text()


SKLEARN = """
class Model(Base):
    def load(self, context):
        self.estimator = context.load_{how}("{file}")

    def predict(self, batch):
        import numpy as np

        x = np.asarray(batch.column("x")).reshape(-1, 1)
        return pa.record_batch({{"y": pa.array(self.estimator.predict(x).round().astype("int64"))}})
"""


def fitted() -> Any:
    from sklearn.linear_model import LinearRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    x = [[float(value)] for value in range(10)]
    # skops does not trust functions by default.
    identity = FunctionTransformer(np.copy)
    return make_pipeline(identity, LinearRegression()).fit(x, [3 * value + 1 for (value,) in x])


@pytest.mark.slow
def test_scikit_learn_estimator_loads_with_skops(tmp_path: Path) -> None:
    """`trusted_types` must list the types that skops does not trust by default."""
    from skops import io

    source = SKLEARN.format(how="skops", file="model.skops")
    table = entry(tmp_path / "own", source)
    io.dump(fitted(), tmp_path / "own" / "model.skops")
    untrusted = io.get_untrusted_types(file=tmp_path / "own" / "model.skops")
    assert untrusted
    gateway = Gateway(tmp_path, [table])
    try:
        gateway.start(is_ready=False)
        assert gateway.wait() == 78
    finally:
        gateway.end()
    assert f"has untrusted types: {', '.join(untrusted)}" in gateway.text()
    with running(tmp_path, [table | {"trusted_types": untrusted}]) as ready:
        assert score(ready, "own", 1) == [4, 7, 10]


@pytest.mark.slow
def test_pickle_is_loaded_only_with_trust_pickle(tmp_path: Path) -> None:
    import pickle

    table = entry(tmp_path / "own", SKLEARN.format(how="pickle", file="model.pickle"))
    (tmp_path / "own" / "model.pickle").write_bytes(pickle.dumps(fitted()))
    gateway = Gateway(tmp_path, [table])
    try:
        gateway.start(is_ready=False)
        assert gateway.wait() == 78
    finally:
        gateway.end()
    assert "`model.pickle` is a pickle, which runs code when it is read" in gateway.text()
    with running(tmp_path, [table | {"trust_pickle": True}]) as ready:
        assert score(ready, "own", 1) == [4, 7, 10]
