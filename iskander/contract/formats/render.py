"""Manifests as TOML text.

Runs on: the operator's tool.
"""

from __future__ import annotations

from typing import Any

import msgspec

from iskander.contract.inputs import entries_of
from iskander.contract.manifest import Manifest
from iskander.contract.tensors import Contract


def render_manifest(contract: Contract, manifest: Manifest) -> str:
    """Render a contract as a manifest, with the post-processing steps of the model's manifest."""
    compiled = msgspec.structs.replace(
        manifest,
        inputs=tuple(entries_of(contract)),
        passthrough=contract.passthrough,
        columns=contract.column_order,
    )
    return render_entries(compiled)


def render_entries(manifest: Manifest) -> str:
    """Return the text of a manifest's columns and remote server, without its other tables."""
    lines = ["format = 1", f"passthrough = {_toml_value(manifest.passthrough)}"]
    if manifest.columns != "passthrough_first":
        lines.append(f"columns = {_toml_value(manifest.columns)}")
    for side, entries in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
        for entry in entries:
            lines += ["", f"[[{side}]]"]
            built = msgspec.to_builtins(entry)
            lines += [f"{key} = {_toml_value(value)}" for key, value in built.items()]
    if manifest.remote is not None:
        built = msgspec.to_builtins(manifest.remote)
        lines += [
            "",
            "[remote]",
            *(f"{key} = {_toml_value(value)}" for key, value in built.items()),
        ]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:  # noqa: ANN401
    """Return a value as TOML."""
    if isinstance(value, dict):
        pairs = (f"{_key(key)} = {_toml_value(item)}" for key, item in value.items())
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, float):
        return repr(value)
    # JSON is TOML, except that TOML does not allow a raw DEL.
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if key.isidentifier() and key.isascii() else _toml_value(key)
