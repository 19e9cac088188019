"""Configurations of Inferential, with PyYAML's and Python's own loaders as the references.

Layout of an input: kind of file (1 byte: YAML, JSON), then its text. The only error is
`ConfigError`. A converted file is TOML, and has the models of the original.
"""

from __future__ import annotations

import json
import tempfile
import tomllib
from pathlib import Path
from random import Random
from typing import Any

import yaml

from fuzz import mutation
from iskander.config.migration.import_inferential import (
    import_inferential,
    read_inferential,
    render_import,
)
from iskander.contract.formats.mlflow import manifest_of_signature
from iskander.errors import ConfigError, ManifestError

ITERATIONS = 250
FOLDER = tempfile.TemporaryDirectory(prefix="isk-fuzz-")
FILES = (Path(FOLDER.name, "config.yaml"), Path(FOLDER.name, "config.json"))
SETTINGS = {
    "transport": {"type": "zmq", "bind": "tcp://*:5555", "recv_hwm": 10},
    "scheduling": {"strategy": "batch_optimized", "max_queue_size": 10, "request_ttl_ms": 5.5},
    "models": {"known": {"policy": {"max_inflight": 1}, "a b": {}}},
    "clients": {"defaults": {"latency_budget_ms": 20}, "known": {}},
}
SIGNATURE = {
    "signature": {
        "inputs": json.dumps([{"type": "double", "name": "x"}, {"type": "string", "name": "w"}]),
        "outputs": '[{"type": "tensor", "tensor-spec": {"dtype": "float32", "shape": [-1, 2]}}]',
    }
}
WORDS = [
    "transport", "bind", "scheduling", "models", "known", ": ", "- ", "\n", "  ", "{", "}", "[",
    "]", ",", '"', "'", "&a ", "*a", "<<: *a", "!!int ", "!!python/object:os.system ", "| ", "> ",
    "null", "true", "1e999", ".nan", "2020-99-99", "0o7", "1:30", "9" * 5000, "[" * 300, "? ", "#",
    "\t", "\0", "\ud7ff", "\\ud800", "tensor", "type", "shape", "dtype", "name", "inputs", "-1",
    "signature", "outputs", "double", "%YAML 1.1", "---", "...", "=", "tcp://*:1", "ipc:///x",
]  # fmt: skip


def seeds() -> list[bytes]:
    return [
        *(b"\0" + yaml.safe_dump(each).encode() for each in (SETTINGS, SIGNATURE)),
        *(b"\1" + json.dumps(each).encode() for each in (SETTINGS, SIGNATURE)),
        b"\0a: &a {b: 1}\nmodels: {known: [x, y]}\nscheduling: {<<: *a, strategy: mine}\n",
        b'\0signature: {inputs: [{type: [x]}], outputs: \'[{"type": "long"}]\'}\n',
        b"\0a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]\n",
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    lines, more = (each[1:].decode(errors="replace").split("\n") for each in (raw, other))

    def change(line: str) -> str:
        at = random.randrange(len(line) + 1)
        end = min(at + random.choice((0, 0, 1, 4, 20)), len(line))
        return line[:at] + random.choice(WORDS) + line[end:]

    lines = mutation.shuffle(lines, more, random, change)
    return raw[:1] + "\n".join(lines).encode(errors="replace")


def run(raw: bytes) -> None:
    is_json, text = raw[:1] == b"\1", raw[1:]
    file = FILES[is_json]
    file.write_bytes(text)
    try:
        document = read_inferential(file)
    except ConfigError as error:
        assert str(error)
        return
    expected: Any = json.loads(text) if is_json else yaml.safe_load(text.decode())
    assert repr(document) == repr(expected)
    check_import(document)
    try:
        manifest = manifest_of_signature(document)
    except ManifestError as error:
        assert str(error)
        return
    assert manifest.inputs and manifest.outputs


def check_import(document: dict[str, Any]) -> None:
    try:
        imported = import_inferential(document, lambda address: address.startswith("tcp://"))
    except ConfigError as error:
        assert str(error)
        return
    rendered = tomllib.loads(render_import(imported))
    assert [model["name"] for model in rendered.get("models", [])] == imported.models
    for section, settings in imported.sections.items():
        assert rendered[section] == settings
