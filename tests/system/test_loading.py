"""Checks of model files at load: sandbox, recorded samples, signatures, operator libraries."""

from __future__ import annotations

import base64
import hashlib
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from onnx import TensorProto, helper
from support import models
from support.processes import BIN, Gateway, eventually, render_config, running

TWO = {"groups": ["0", "1"]}
MANIFEST = """
format = 1
{keys}
[[inputs]]
column = "x"
type = "float32"
tensor = "x"
[[outputs]]
tensor = "y"
column = "y"
type = "float32"
{tables}
"""


def halved(folder: Path, *, keys: str = "", tables: str = "") -> Path:
    """Saves `y = x / 2` with a manifest."""
    models.save(
        folder,
        [helper.make_node("Mul", ["x", "half"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows"])],
        [helper.make_tensor("half", TensorProto.FLOAT, [], [0.5])],
    )
    (folder / "manifest.toml").write_text(MANIFEST.format(keys=keys, tables=tables))
    return folder


def check(folder: Path, model: Path, **sections: Any) -> tuple[int, str]:
    """Runs `iskander check` with one model; returns the exit code and the output."""
    config = folder / "check.toml"
    config.write_text(render_config(models=[{"name": "m", "path": str(model)}], **sections))
    result = subprocess.run(
        [BIN / "iskander", "check", config],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return result.returncode, result.stdout + result.stderr


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.slow
def test_crashing_model_is_rejected_while_the_good_one_serves(tmp_path: Path) -> None:
    """The file is replaced by a model that crashes its process, and then a worker restarts.

    The new worker reports the load error and stays alive; the other one continues to serve.
    """
    hostile = tmp_path / "hostile"
    script = models.ROOT / "scripts" / "make_hostile_models.py"
    subprocess.run([BIN / "python", script, hostile], check=True)
    served = [
        {"name": "good", "path": str(models.row_ids(tmp_path / "good")), "intra_threads": 1},
        {"name": "bad", "path": str(halved(tmp_path / "bad")), "intra_threads": 1},
    ]
    with running(tmp_path, served, workers=dict(TWO), loading={"sandbox_s": 5.0}) as gateway:
        (hostile / "overflowing_division" / "model.onnx").replace(tmp_path / "bad" / "model.onnx")
        (tmp_path / "bad" / "manifest.toml").unlink()
        gateway.kill_worker(0)

        def is_logged() -> bool:
            return "it crashed the sandbox process by SIGFPE" in gateway.text()

        eventually(is_logged, what="the load error in the log")
        with gateway.client() as client:
            for turn in range(20):
                batch = pa.record_batch({"x": [turn, turn + 1]})
                assert client.score("good", batch)["y"].to_pylist() == [3 * turn + 1, 3 * turn + 4]
        halved(tmp_path / "bad")
        gateway.wait_full()


@pytest.mark.parametrize(
    ("absolute", "text"), [(0.02, ""), (0.001, "row 2: 1.5, expected 1.51; 1 of 5 differ")]
)
def test_model_must_match_its_recorded_results(tmp_path: Path, absolute: float, text: str) -> None:
    """Above the tolerance, the error names the first difference."""
    tables = (
        f'[warm_up]\nsamples = "s.npz"\nresults = "r.npz"\nabsolute = {absolute}\nrelative = 0.0'
    )
    folder = halved(tmp_path / "m", tables=tables)
    np.savez(folder / "s.npz", x=np.arange(1, 6, dtype=np.float32))
    np.savez_compressed(folder / "r.npz", y=np.array([0.5, 1.0, 1.51, 2.0, 2.5], np.float32))

    code, output = check(tmp_path, folder)

    assert (code == 0) == (not text), output
    assert text in output


@pytest.mark.parametrize(
    ("samples", "results", "text"),
    [
        ({"z": [1.0]}, None, "has no array for the input `x`"),
        ({"x": [[1.0, 2.0]]}, None, "`x` has shape [1, 2], expected [1]"),
        ({"x": ["a"]}, None, "`x` has dtype <U1, expected float32"),
        ({"x": [1.0], "z": [1.0, 2.0]}, None, "do not have the same number of rows"),
        ({"x": [1.0]}, {"z": [1.0]}, "`r.npz` has `z`, which is no output"),
        ({"x": [1.0, 2.0]}, {"y": [1.0]}, "`y` does not have 2 rows"),
    ],
)
def test_sample_that_does_not_match_the_model_is_a_load_error(
    tmp_path: Path, samples: dict[str, Any], results: dict[str, Any] | None, text: str
) -> None:
    tables = '[warm_up]\nsamples = "s.npz"\n' + ('results = "r.npz"\n' if results else "")
    folder = halved(tmp_path / "m", tables=tables)
    np.savez(folder / "s.npz", **{k: np.array(v) for k, v in samples.items()})
    if results:
        np.savez(folder / "r.npz", **{k: np.array(v) for k, v in results.items()})

    code, output = check(tmp_path, folder)

    assert code == 78 and text in output


@pytest.mark.slow
def test_public_key_requires_signed_manifests_and_pinned_files(tmp_path: Path) -> None:
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    key = ed25519.Ed25519PrivateKey.generate()
    public = base64.b64encode(key.public_key().public_bytes_raw()).decode()
    folder = halved(tmp_path / "m")
    loading = {"public_key": public}

    def sign(keys: str) -> None:
        manifest = folder / "manifest.toml"
        manifest.write_text(MANIFEST.format(keys=keys, tables=""))
        (folder / "manifest.toml.sig").write_bytes(key.sign(manifest.read_bytes()))

    pinned = f'sha256 = {{"model.onnx" = "{sha256(folder / "model.onnx")}"}}'
    code, output = check(tmp_path, folder, loading=loading)
    assert code == 78 and "`manifest.toml.sig` cannot be read" in output
    sign("")
    code, output = check(tmp_path, folder, loading=loading)
    assert code == 78 and "pins no sha256 of `model.onnx`" in output
    sign(pinned)
    with running(tmp_path, [{"name": "m", "path": str(folder)}], loading=loading) as gateway:
        with gateway.client() as client:
            scored = client.score("m", pa.record_batch({"x": pa.array([3.0], pa.float32())}))
        assert scored["y"].to_pylist() == [1.5]
    models.save(
        folder,
        [helper.make_node("Identity", ["x"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows"])],
    )
    code, output = check(tmp_path, folder, loading=loading)
    assert code == 78 and "`model.onnx` is not the file that the manifest pins" in output


def test_gateway_with_a_rejected_model_logs_the_error_and_exits(tmp_path: Path) -> None:
    folder = halved(tmp_path / "m", keys='custom_ops = ["/tmp/evil.so"]')
    gateway = Gateway(tmp_path, [{"name": "m", "path": str(folder)}])
    try:
        gateway.start(is_ready=False)
        assert gateway.wait() != 0
        assert "operator library `/tmp/evil.so` is not allowed" in gateway.text()
    finally:
        gateway.end()


@pytest.mark.slow
def test_without_sandbox_the_error_names_the_model_that_crashes_workers(tmp_path: Path) -> None:
    """The server stops starting workers after three crashes and exits."""
    hostile = tmp_path / "hostile"
    script = models.ROOT / "scripts" / "make_hostile_models.py"
    subprocess.run([BIN / "python", script, hostile], check=True)
    served = [
        {"name": "good", "path": str(models.row_ids(tmp_path / "good"))},
        {"name": "bad", "path": str(hostile / "overflowing_division")},
    ]
    loading = {"sandbox": False, "share_weights": False}
    gateway = Gateway(tmp_path, served, workers={"groups": ["0"]}, loading=loading)
    try:
        gateway.start(is_ready=False)
        assert gateway.wait() != 0
        assert "ended 3 times before it was ready, the last time by SIGFPE" in gateway.text()
        assert "model `bad/1`: the worker ended during the load" in gateway.text()
        assert "model `good/1`: the worker ended" not in gateway.text()
    finally:
        gateway.end()
