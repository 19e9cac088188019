"""Repositories for a real server, changed by renames as an operator would."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from onnx import TensorProto, helper

from support.models import save


def scaled(folder: Path, factor: int, element: int = TensorProto.INT64) -> Path:
    """`y = factor * x`: a result identifies its model."""
    return save(
        folder,
        [helper.make_node("Mul", ["x", "factor"], ["y"])],
        [helper.make_tensor_value_info("x", element, ["rows"])],
        [helper.make_tensor_value_info("y", element, ["rows"])],
        [helper.make_tensor("factor", element, [], [factor])],
    )


class Folder:
    """A repository.

    Attributes:
        root: Its folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True)

    def make(self, factor: int, element: int = TensorProto.INT64) -> Path:
        """A version's folder outside its final path."""
        return scaled(self.root / f".{uuid.uuid4().hex}", factor, element)

    def put(self, name: str, version: int, made: int | Path) -> None:
        """Move a version to its path, and replace an existing one."""
        source = self.make(made) if isinstance(made, int) else made
        target = self.root / name / str(version)
        target.parent.mkdir(exist_ok=True)
        if target.exists():
            old = self.root / f".{uuid.uuid4().hex}"
            target.rename(old)
            source.rename(target)
            shutil.rmtree(old)
        else:
            source.rename(target)

    def remove(self, name: str, version: int | None = None) -> None:
        """Remove a version, or a model."""
        target = self.root / name if version is None else self.root / name / str(version)
        gone = self.root / f".{uuid.uuid4().hex}"
        target.rename(gone)
        shutil.rmtree(gone)

    def write_settings(self, name: str, text: str) -> None:
        """Write a model's `model.toml`."""
        (self.root / name).mkdir(exist_ok=True)
        made = self.root / f".{uuid.uuid4().hex}"
        made.write_text(text)
        made.rename(self.root / name / "model.toml")
