"""A model folder on disk, read: which file is the model, and what its manifest says.

Runs in the worker that loads the model and in the operator's tool; the gateway opens no model.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from iskander.contract.tensors import Contract, Manifest
from iskander.errors import ManifestError

MANIFEST_BYTES_MAX = 1 << 20


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


def render_manifest(contract: Contract) -> str:
    """A contract as the manifest that would give it."""
    lines = ["format = 1", f"passthrough = {_quote(contract.passthrough)}"]
    for spec in contract.inputs:
        lines += ["", "[[inputs]]"]
        lines += [f"column = {_quote(spec.column)}"]
        lines += [f"type = {_quote(str(spec.type))}", "nullable = false"]
        lines += [f"tensor = {_quote(spec.tensor)}"]
    for spec in contract.outputs:
        lines += ["", "[[outputs]]"]
        lines += [f"tensor = {_quote(spec.tensor)}"]
        lines += [f"column = {_quote(spec.column)}"]
        lines += [f"type = {_quote(str(spec.type))}"]
    return "\n".join(lines) + "\n"


def _quote(value: str | tuple[str, ...]) -> str:
    """Text or a list of it as TOML, which is JSON but for one letter that it does not take raw."""
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
