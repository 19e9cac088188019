"""Models of the backend `python`, written on demand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MANIFEST = """
format = 1
passthrough = "all"
[[inputs]]
column = "x"
type = "int64"
tensor = "x"
[[outputs]]
tensor = "y"
column = "y"
type = "int64"
"""

PREAMBLE = """
import pyarrow as pa
import pyarrow.compute as pc

def tripled(batch):
    x = batch.column("x")
    return pa.record_batch({"y": pc.add(pc.multiply(x, 3), 1)})

class Base:
    def load(self, context):
        self.context = context

    def predict(self, batch):
        return tripled(batch)
"""


def write(folder: Path, source: str, manifest: str = MANIFEST) -> Path:
    """Write a model; its file is the preamble and `source`."""
    folder.mkdir(parents=True)
    (folder / "manifest.toml").write_text(manifest)
    (folder / "model.py").write_text(PREAMBLE + source)
    return folder


def entry(folder: Path, source: str, manifest: str = MANIFEST, **settings: Any) -> dict[str, Any]:
    """The same, as a configuration entry with the folder's name."""
    path = write(folder, source, manifest)
    return {"name": folder.name, "path": str(path), "backend": "python", **settings}
