"""Configuration files, with `tomllib` and the values of the file as the references.

Layout of an input: number of overrides (1 byte), a line for each, then the file. The only error is
`ConfigError`, with a text of one printable line. Accepted settings have the values that were
written, each override replaces its setting, and a printed setting can be read again.
"""

from __future__ import annotations

import tempfile
import tomllib
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from fuzz import engine, mutation
from iskander.config.loader import load_config
from iskander.config.reference import render_value
from iskander.errors import ConfigError

ITERATIONS = 250
FOLDER = tempfile.TemporaryDirectory(prefix="isk-fuzz-")
FILE = Path(FOLDER.name, "iskander.toml")
OVERRIDES_MAX = 3
FILES = ("configs/iskander.toml", "configs/quickstart.toml")
MODEL = '[[models]]\nname = "m"\npath = "models/m/1"\n'
WORDS = [
    "[limits]", "[[models]]", "[server]", "[", "]", "{", "}", "=", "\n", '"', "'", "#", "true",
    "-1", "0", "1e999", "nan", "inf", "[]", "{}", "rows", "name", "path", "address", "lane",
    "9" * 25, "9" * 5000, "[" * 2000, "a." * 200, "1979-05-27T07:32:00Z", "2020-99-99", "0x7f",
    "\\u0000", "\\ud800", "\ufeff", "\0", "x" * 300, "é", "lanes.ttl_ms=1", "repository", "tls",
    "access", "sources", "http", "workers", '"127.0.0.1:0"', '["unix:/tmp/x", "0.0.0.0:1"]',
]  # fmt: skip


def seeds() -> list[bytes]:
    """The repository's configurations, and others."""
    files = [(engine.ROOT / name).read_text()[:6000] for name in FILES]
    plain = MODEL + "version = 3\n[models.lane]\nweight = 2.0\n[lanes]\nttl_ms = 5\nweight = 1.5\n"
    sources = MODEL + '[[sources]]\nname = "s"\npath = "data"\nmodel = "m"\nfilter = "a > 1"\n'
    sources += '[source_reads]\nkey_file = "key"\nlocations = ["grpc://h:1"]\n'
    return [
        *(b"\0" + text.encode() for text in files),
        b"\0" + plain.encode(),
        b"\2limits.rows=100\nserver.processes = 2\n" + MODEL.encode(),
        b'\1repository.path="models"\n' + b'[repository]\nversions = "latest"\n',
        b"\0" + sources.encode(),
        b'\0[access]\ntokens = "t.toml"\n[tls]\ncertificate = "c"\nkey = "k"\n' + MODEL.encode(),
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    count = raw[:1] if random.randrange(10) else bytes((random.randrange(4),))
    lines, more = (each[1:].decode(errors="replace").split("\n") for each in (raw, other))

    def change(line: str) -> str:
        at = random.randrange(len(line) + 1)
        end = min(at + random.choice((0, 0, 1, 4, 20)), len(line))
        return line[:at] + random.choice(WORDS) + line[end:]

    lines = mutation.shuffle(lines, more, random, change)
    return count + "\n".join(lines).encode(errors="replace")


def run(raw: bytes) -> None:
    count = min(raw[0], OVERRIDES_MAX) if raw else 0
    lines = raw[1:].split(b"\n")
    overrides = tuple(line.decode(errors="replace") for line in lines[:count])
    text = b"\n".join(lines[count:])
    FILE.write_bytes(text)
    try:
        loaded = load_config(FILE, overrides=overrides, environment={})
    except ConfigError as error:
        assert str(error)
        return
    expected = tomllib.loads(text.decode())
    config: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(loaded.config))
    for section, origin in loaded.origins.items():
        name, _, key = section.partition(".")
        if key in config[name] and origin == "file":
            check_value(config[name][key], expected[name].get(key, config[name][key]))
        value = config[name].get(key)
        if value not in (None, {}):
            assert tomllib.loads(f"value = {render_value(value)}")["value"] == value
    assert len(config["models"]) == len(expected.get("models", []))
    for model, written in zip(config["models"], expected.get("models", []), strict=True):
        assert model["name"] == written["name"] and Path(model["path"]).is_absolute()
        assert isinstance(model["version"], str)


def check_value(actual: Any, written: Any) -> None:
    """Checks a setting against the file; paths become absolute, numbers may become floats."""
    if isinstance(written, str) and isinstance(actual, str):
        assert actual == written or Path(actual).is_absolute()
    elif isinstance(written, int | float | bool):
        assert actual == written
