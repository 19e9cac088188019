"""A model folder on disk: which file is the model, and what the manifest beside it says.

Reading one runs in the worker that loads the model and in the operator's tool; the gateway opens no
model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from iskander.contract.outputs import ColumnOrder, OutputColumn
from iskander.errors import ManifestError

MANIFEST_BYTES_MAX = 1 << 20

Passthrough = Literal["all", "none"] | tuple[str, ...]


class InputColumn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[[inputs]]` of a manifest."""

    column: str
    type: str
    tensor: str
    nullable: bool = False


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A manifest as written, before it is held against a graph."""

    format: Literal[1]
    inputs: tuple[InputColumn, ...]
    outputs: tuple[OutputColumn, ...]
    passthrough: Passthrough = "none"
    columns: ColumnOrder = "passthrough_first"


def model_file(path: Path) -> Path:
    """The model file that a configured path means: itself, or `model.onnx` in the folder."""
    return path / "model.onnx" if path.is_dir() else path


def read_manifest(path: Path) -> Manifest | None:
    """The `manifest.toml` beside the model, or None where there is none.

    Raises:
        ManifestError: It cannot be read, or is not a manifest; names the key and the rule.
    """
    file = model_file(path).parent / "manifest.toml"
    try:
        raw = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ManifestError(f"manifest.toml cannot be read: {error.strerror}") from None
    if len(raw) > MANIFEST_BYTES_MAX:
        raise ManifestError(f"manifest.toml is larger than {MANIFEST_BYTES_MAX} bytes")
    try:
        return msgspec.toml.decode(raw, type=Manifest)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ManifestError(f"manifest.toml: {error}") from None
