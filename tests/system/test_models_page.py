"""The first part of docs/models.md, run as printed: train, convert, serve, compare."""

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
SECTIONS = {
    heading: [(kind, code) for kind, code in re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S)]
    for heading, text in re.findall(r"^### (.+?)\n(.*?)(?=^### |\Z)", GUIDE, re.M | re.S)
}
TRAINED = [heading for heading in SECTIONS if heading.startswith("From ")]


def block(heading: str, kind: str) -> str:
    (code,) = [code for language, code in SECTIONS[heading] if language == kind]
    return code


def run(*command: str, cwd: Path) -> str:
    result = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("heading", TRAINED)
def test_commands_of_the_page_serve_a_model(heading: str, tmp_path: Path) -> None:
    train = block(heading, "python")
    for library in ("skl2onnx", "lightgbm", "onnxmltools", "torch", "onnxscript"):
        if library in train:
            pytest.importorskip(library)
    run(sys.executable, "-c", train, cwd=tmp_path)
    manifest = block(heading, "toml")
    match = re.fullmatch(r"# (models/(\w+)/1)/manifest\.toml", manifest.split("\n")[0])
    assert match is not None
    folder, name = match.groups()
    (tmp_path / folder / "manifest.toml").write_text(manifest)
    config = block("Serve it", "toml").replace("iris", name)
    (tmp_path / "iskander.toml").write_text(config)
    assert f"{name}/1" in run(str(BIN / "iskander"), "check", "iskander.toml", cwd=tmp_path)
    served = [{"name": name, "path": str(tmp_path / folder)}]
    runtime = tmp_path / "own"
    runtime.mkdir()
    with running(runtime, served, workers={"groups": ["0"]}) as gateway:
        client = block("Serve it", "python").replace("127.0.0.1:50051", gateway.address)
        output = run(sys.executable, "-c", client, name, cwd=tmp_path)
    assert "prediction" in output
    scored = pq.read_table(tmp_path / "scored.parquet")
    assert len(scored) > 64
    np.testing.assert_allclose(scored["prediction"], scored["expected"], rtol=1e-3, atol=1e-3)
    if name == "iris":
        is_setosa = scored["expected"].to_numpy() > 0.5
        assert [each == "setosa" for each in scored["species"].to_pylist()] == is_setosa.tolist()


def test_all_frameworks_are_covered() -> None:
    assert TRAINED == ["From scikit-learn", "From LightGBM", "From PyTorch"]
