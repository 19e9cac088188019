"""The first part of docs/models.md as it stands: trained, converted, served, compared."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.models import ROOT
from support.processes import BIN, running

GUIDE = (ROOT / "docs" / "models.md").read_text().split("\n## ")[1]
PARTS = {
    heading: [(kind, code) for kind, code in re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S)]
    for heading, text in re.findall(r"^### (.+?)\n(.*?)(?=^### |\Z)", GUIDE, re.M | re.S)
}
TRAINED = [heading for heading in PARTS if heading.startswith("From ")]


def block(heading: str, kind: str) -> str:
    (code,) = [code for of, code in PARTS[heading] if of == kind]
    return code


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("heading", TRAINED)
def test_a_model_is_served_as_the_page_says(heading: str, tmp_path: Path) -> None:
    train = block(heading, "python")
    for library in ("skl2onnx", "lightgbm", "onnxmltools", "torch", "onnxscript"):
        if library in train:
            pytest.importorskip(library)
    run(sys.executable, "-c", train, cwd=tmp_path)
    manifest = block(heading, "toml")
    named = re.fullmatch(r"# (models/(\w+)/1)/manifest\.toml", manifest.split("\n")[0])
    assert named is not None
    folder, name = named.groups()
    (tmp_path / folder / "manifest.toml").write_text(manifest)
    config = block("Serve it", "toml").replace("iris", name)
    (tmp_path / "iskander.toml").write_text(config)
    assert f"{name}/1" in run(str(BIN / "iskander"), "check", "iskander.toml", cwd=tmp_path)
    served = [{"name": name, "path": str(tmp_path / folder)}]
    own = tmp_path / "own"
    own.mkdir()
    with running(own, served, workers={"groups": ["0"]}) as gateway:
        client = block("Serve it", "python").replace("127.0.0.1:50051", gateway.address)
        shown = run(sys.executable, "-c", client, name, cwd=tmp_path)
    assert "prediction" in shown
    scored = pq.read_table(tmp_path / "scored.parquet")
    assert len(scored) > 64
    np.testing.assert_allclose(scored["prediction"], scored["expected"], rtol=1e-3, atol=1e-3)
    if name == "iris":
        is_setosa = scored["expected"].to_numpy() > 0.5
        assert [each == "setosa" for each in scored["species"].to_pylist()] == is_setosa.tolist()


def test_all_ways_are_tried() -> None:
    assert TRAINED == ["From scikit-learn", "From LightGBM", "From PyTorch"]
