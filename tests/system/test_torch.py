"""Models of the backend `torch` on a running server; skipped if PyTorch is not installed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import save_file
from support.processes import Gateway, running

from iskander.errors import ExecutionFailed

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")

MANIFEST = """
format = 1
[torch]
file = "{file}"
{more}
[[inputs]]
column = "scale"
type = "float32"
tensor = "scale"
[[inputs]]
column = "x"
type = "fixed_size_list<float32>[4]"
tensor = "x"
[[outputs]]
tensor = "logits"
column = "logits"
type = "fixed_size_list<float32>[3]"
[[outputs]]
tensor = "total"
column = "total"
type = "float32"
"""
MODULE = """
import sys
import torch

class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x, scale):
        return self.linear(x) * scale[:, None], x.sum(1)

torch.manual_seed(3)
module = Scaled().eval()
weight, bias = (each.detach().tolist() for each in (module.linear.weight, module.linear.bias))
"""
EXPORT = """
rows = torch.export.Dim("rows", min=1, max=65536)
example = (torch.randn(2, 4), torch.randn(2))
program = torch.export.export(module, example, dynamic_shapes={"x": {0: rows}, "scale": {0: rows}})
torch.export.save(program, sys.argv[1])
"""
SCRIPT = "torch.jit.script(module).save(sys.argv[1])"
WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)
BIAS = np.array([1, 2, 3], np.float32)


def write_program(target: Path, source: str) -> None:
    """Write a program in a child process, to keep PyTorch out of the tests' process."""
    target.parent.mkdir(parents=True, exist_ok=True)
    script = target.with_name("make.py")
    script.write_text(MODULE + textwrap.dedent(source))
    subprocess.run([sys.executable, str(script), str(target)], check=True, capture_output=True)


def served(folder: Path, file: str, source: str, more: str = "", **settings: Any) -> dict[str, Any]:
    """A model with the weights above."""
    write_program(folder / file, source)
    save_file({"linear.weight": WEIGHT, "linear.bias": BIAS}, folder / "model.safetensors")
    (folder / "manifest.toml").write_text(MANIFEST.format(file=file, more=more))
    return {"name": folder.name, "path": str(folder), "backend": "torch", **settings}


def batch(rows: int) -> pa.RecordBatch:
    x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    column = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 4)
    return pa.record_batch({"x": column, "scale": pa.array(np.arange(rows, dtype=np.float32))})


WEIGHTS = 'weights = "model.safetensors"'


@pytest.mark.parametrize(("file", "source"), [("model.pt2", EXPORT), ("model.pt", SCRIPT)])
def test_programs_compute_with_weights_from_safetensors(
    tmp_path: Path, file: str, source: str
) -> None:
    """Inputs are matched by name, in any order of the manifest, for any number of rows."""
    table = served(tmp_path / "scaled", file, source, WEIGHTS)
    with running(tmp_path, [table]) as gateway, gateway.client() as client:
        for rows in (1, 2, 7, 300):
            result = client.score("scaled", batch(rows))
            x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
            expected = (x @ WEIGHT.T + BIAS) * np.arange(rows, dtype=np.float32)[:, None]
            np.testing.assert_allclose(result["logits"].to_pylist(), expected, rtol=1e-5)
            np.testing.assert_allclose(result["total"].to_pylist(), x.sum(1), rtol=1e-5)
        (worker,) = gateway.stats()["workers"]
        maps = Path(f"/proc/{worker['pid']}/maps").read_text()
        assert "libtorch" in maps
        assert "libarrow" not in maps
        assert "onnxruntime" not in maps


def log_of_failed_start(folder: Path, table: dict[str, Any]) -> str:
    """Log of a server that rejects the model at the start."""
    gateway = Gateway(folder, [table])
    try:
        gateway.start(is_ready=False)
        assert gateway.wait(60) == 78
    finally:
        gateway.end()
    return gateway.text()


def test_manifest_that_contradicts_the_program_is_rejected(tmp_path: Path) -> None:
    table = served(tmp_path / "scaled", "model.pt2", EXPORT)
    manifest = tmp_path / "scaled" / "manifest.toml"
    manifest.write_text(manifest.read_text().replace("[4]", "[5]"))
    assert "`x` has the shape" in log_of_failed_start(tmp_path, table)


def test_incomplete_weights_are_rejected(tmp_path: Path) -> None:
    table = served(tmp_path / "scaled", "model.pt2", EXPORT, WEIGHTS)
    save_file({"linear.weight": WEIGHT}, tmp_path / "scaled" / "model.safetensors")
    assert "lacks weights of the program" in log_of_failed_start(tmp_path, table)


EVIL = (
    EXPORT
    + """
import os, pickle, shutil, zipfile

class Evil:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[1]}.ran",)

source = sys.argv[1] + ".whole"
shutil.move(sys.argv[1], source)
with zipfile.ZipFile(source) as whole, zipfile.ZipFile(sys.argv[1], "w") as changed:
    for name in whole.namelist():
        raw = whole.read(name)
        changed.writestr(name, pickle.dumps(Evil()) if name.endswith("inputs/model.pt") else raw)
"""
)


def test_program_with_a_pickle_is_rejected(tmp_path: Path) -> None:
    table = served(tmp_path / "evil", "model.pt2", EVIL)
    text = log_of_failed_start(tmp_path, table)
    assert "it contains a pickle that imports" in text
    assert not (tmp_path / "evil" / "model.pt2.ran").exists()


def test_exception_in_the_program_fails_the_request(tmp_path: Path) -> None:
    source = SCRIPT.replace("module", "Picky()")
    failing = """
class Picky(torch.nn.Module):
    def forward(self, x, scale):
        assert float(scale[0]) != 13.0, "not that one"
        return x[:, :3], x.sum(1)
"""
    table = served(tmp_path / "picky", "model.pt", failing + source)
    with running(tmp_path, [table]) as gateway, gateway.client() as client:
        bad = batch(1).set_column(1, "scale", pa.array([13.0], pa.float32()))
        with pytest.raises(ExecutionFailed, match="not that one"):
            client.score("picky", bad)
        assert client.score("picky", batch(2)).num_rows == 2
