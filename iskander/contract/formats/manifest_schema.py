"""JSON schema and reference tables of the manifest.

Runs on: the operator's tool, and the script that writes the reference.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec

from iskander.contract import backend_manifest as backends
from iskander.contract.manifest import InputColumn, Manifest, WarmUp
from iskander.contract.outputs import OutputColumn

TABLES: dict[str, type[msgspec.Struct]] = {
    "manifest": Manifest,
    "[[inputs]]": InputColumn,
    "[[outputs]]": OutputColumn,
    "[warm_up]": WarmUp,
    "[graph]": backends.GraphSection,
    "[python]": backends.PythonSection,
    "[torch]": backends.TorchSection,
    "[remote]": backends.RemoteSection,
    "[remote.tls]": backends.RemoteTls,
    "[[steps]]": backends.PipelineStep,
}
"""The tables of a manifest, by their TOML header."""


class TableKey(NamedTuple):
    """One key of a table of the manifest; `default` is None for a required key."""

    name: str
    type: str
    default: str | None
    sentence: str


def manifest_schema() -> dict[str, Any]:
    """Return the JSON schema of a manifest's parsed TOML."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "manifest.toml of an Iskander model",
        **msgspec.json.schema(Manifest),
    }


def keys_of(table: type[msgspec.Struct]) -> Iterator[TableKey]:
    """Yield every key of a table, in declaration order."""
    hints, sentences = get_type_hints(table, include_extras=True), _attribute_texts(table)
    for field in msgspec.structs.fields(table):
        default: str | None = None
        if not field.required:
            value = field.default if field.default is not msgspec.NODEFAULT else None
            is_table = isinstance(value, msgspec.Struct) or value is None
            default = "" if is_table else msgspec.json.encode(value).decode()
        sentence = sentences.get(field.encode_name) or sentences.get(field.name, "")
        yield TableKey(field.encode_name, _type_text(hints[field.name]), default, sentence)


def _attribute_texts(kind: type) -> dict[str, str]:
    """Return the sentences under `Attributes:` of a class docstring, by attribute."""
    _, _, attributes = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", attributes, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _type_text(hint: Any) -> str:  # noqa: ANN401
    """Return a declared type in words, from its JSON schema."""
    schema = msgspec.json.schema(get_args(hint)[0] if hasattr(hint, "__metadata__") else hint)
    return _schema_words(schema, schema.get("$defs", {}))


def _schema_words(schema: dict[str, Any], named: dict[str, Any]) -> str:
    if "anyOf" in schema:
        parts = [
            _schema_words(part, named) for part in schema["anyOf"] if part.get("type") != "null"
        ]
        return " or ".join(dict.fromkeys(parts))
    if "enum" in schema:
        return " or ".join(
            msgspec.json.encode(value).decode() for value in schema["enum"] if value is not None
        )
    if "$ref" in schema:
        return _schema_words(named.get(schema["$ref"].rpartition("/")[2], {}), named)
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {_schema_words(schema.get('items') or {}, named)}"
    words = {"string": "text", "object": "table", "boolean": "true or false", "null": "nothing"}
    return words.get(kind, str(kind))
