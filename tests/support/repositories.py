"""Folders of models for a real server, put there as an operator would: by a rename."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from onnx import TensorProto, helper

from support.models import save


def scaled(folder: Path, factor: int, element: int = TensorProto.INT64) -> Path:
    """`y = factor * x`: a result tells which model made it."""
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
        """A version's folder that is not in place yet."""
        return scaled(self.root / f".{uuid.uuid4().hex}", factor, element)

    def put(self, name: str, version: int, made: int | Path) -> None:
        """Put a version in place, instead of one that is there."""
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

    def take(self, name: str, version: int | None = None) -> None:
        """Take a version, or a model, away."""
        target = self.root / name if version is None else self.root / name / str(version)
        gone = self.root / f".{uuid.uuid4().hex}"
        target.rename(gone)
        shutil.rmtree(gone)

    def say(self, name: str, text: str) -> None:
        """Write a model's `model.toml`."""
        (self.root / name).mkdir(exist_ok=True)
        made = self.root / f".{uuid.uuid4().hex}"
        made.write_text(text)
        made.rename(self.root / name / "model.toml")
