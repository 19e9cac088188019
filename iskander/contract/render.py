"""A contract as the manifest that would give it; runs in the operator's tool."""

from __future__ import annotations

import msgspec

from iskander.contract.tensors import Contract


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
