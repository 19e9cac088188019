"""A contract as the manifest that would give it; runs in the operator's tool."""

from __future__ import annotations

from typing import Any

import msgspec

from iskander.contract.inputs import entries_of, said
from iskander.contract.manifest import Manifest
from iskander.contract.tensors import Contract


def render_manifest(contract: Contract, manifest: Manifest) -> str:
    """A contract as the manifest that would give it.

    Args:
        contract: Of the model.
        manifest: That it was made of, which alone says how results come about.
    """
    lines = ["format = 1", f"passthrough = {_quote(contract.passthrough)}"]
    if contract.column_order != "passthrough_first":
        lines += [f"columns = {_quote(contract.column_order)}"]
    for source in entries_of(contract):
        lines += ["", "[[inputs]]"]
        lines += [f"{key} = {_quote(value)}" for key, value in said(source).items()]
    for entry in manifest.outputs:
        lines += ["", "[[outputs]]"]
        lines += [f"{key} = {_value(value)}" for key, value in msgspec.to_builtins(entry).items()]
    return "\n".join(lines) + "\n"


def render_entries(manifest: Manifest) -> str:
    """A manifest of which no graph is known, as text."""
    lines = [f"format = {manifest.format}", f"passthrough = {_quote(manifest.passthrough)}"]
    for side, entries in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
        for entry in entries:
            lines += ["", f"[[{side}]]"]
            built = msgspec.to_builtins(entry)
            lines += [f"{key} = {_value(value)}" for key, value in built.items()]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if key.isidentifier() and key.isascii() else _quote(key)


def _quote(value: Any) -> str:  # noqa: ANN401
    """A value or a list as TOML, which is JSON but for one letter that it does not take raw."""
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")


def _value(value: Any) -> str:  # noqa: ANN401
    """A value of an entry as TOML."""
    if isinstance(value, dict):
        pairs = (f"{_key(key)} = {_value(each)}" for key, each in value.items())
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return _quote(value) if isinstance(value, str) else repr(value)
