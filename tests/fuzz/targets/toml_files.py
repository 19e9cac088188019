"""Files written by operators (model manifests and tokens), with `tomllib` as the reference.

Layout of an input: kind of file (1 byte), then its text.
"""

from __future__ import annotations

import tempfile
import tomllib
from pathlib import Path
from random import Random
from typing import Any

from fuzz import engine, mutation
from iskander.contract.manifest import read_manifest
from iskander.errors import ConfigError, ManifestError
from iskander.gateway.auth.tokens import read_tokens

ITERATIONS = 600
FOLDER = tempfile.TemporaryDirectory(prefix="isk-fuzz-")
MANIFEST, TOKENS = Path(FOLDER.name, "manifest.toml"), Path(FOLDER.name, "tokens.toml")
WORDS = [
    "[[inputs]]", "[[outputs]]", "[warm_up]", "[", "]", "{", "}", "=", "\n", '"', "'", '"""', "#",
    "tensor", "column", "type", "nulls", "fill", "true", "1", "-1", "1e999", "nan", "inf", "[]",
    "format = 1", "passthrough", "all", "max_length", "buckets", "float32", "list<int64>", "sha256",
    "fixed_size_list<float32>[3]", "[" * 200, "a." * 200, "1979-05-27T07:32:00Z", "0x7f", "1_0",
    "\\u0000", "\\ud800", "\ufeff", "\0", "x" * 1000,
]  # fmt: skip


def seeds() -> list[bytes]:
    """Manifests of the repository's models, and other files."""
    manifests = sorted((engine.ROOT / "configs").rglob("manifest.toml"))
    token = '[[tokens]]\nname = "a"\nsha256 = "' + "0f" * 32 + '"\nmodels = ["m*"]\nmanage = true\n'
    plain = 'format = 1\n[[inputs]]\ntensor = "x"\ncolumn = "a.b"\nnulls = "fill"\nfill = 1.5\n'
    plain += 'type = "list<int64>"\nmax_length = 8\nbuckets = [4, 8]\n[warm_up]\nseed = 3\n'
    return [
        *(b"\0" + path.read_bytes()[:4000] for path in manifests),
        b"\0" + plain.encode(),
        b"\1" + token.encode(),
        b"\1" + (token + token.replace("0f", "1f")).encode() + b"expires = 2030-01-01T00:00:00Z\n",
        b"\1" + (token + token.replace('"a"', '"b"')).encode(),
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    text, more = (each[1:].decode(errors="replace").split("\n") for each in (raw, other))

    def change(line: str) -> str:
        at = random.randrange(len(line) + 1)
        end = min(at + random.choice((0, 0, 1, 4, 20)), len(line))
        return line[:at] + random.choice(WORDS) + line[end:]

    lines = mutation.shuffle(text, more, random, change)
    return raw[:1] + "\n".join(lines).encode(errors="replace")


def run(raw: bytes) -> None:
    is_manifest, text = raw[:1] != b"\1", raw[1:]
    expected = reference(text)
    path = MANIFEST if is_manifest else TOKENS
    path.write_bytes(text)
    if is_manifest:
        check_manifest(path, expected)
    else:
        check_tokens(path, expected)


def check_manifest(path: Path, expected: Any) -> None:
    try:
        manifest = read_manifest(path.with_name("model.onnx"))
    except ManifestError:
        return
    assert manifest is not None
    assert expected is not None, "accepted, but tomllib rejects it"
    assert manifest.format == expected["format"] == 1
    assert [each.tensor for each in manifest.inputs] == [x["tensor"] for x in expected["inputs"]]
    for each, entry in zip(manifest.inputs, expected["inputs"], strict=True):
        assert each.column == entry.get("column")
        assert list(each.columns) == list(entry.get("columns", []))
        assert list(each.buckets) == list(entry.get("buckets", []))


def check_tokens(path: Path, expected: Any) -> None:
    try:
        tokens = read_tokens(path).tokens
    except ConfigError:
        return
    assert expected is not None, "accepted, but tomllib rejects it"
    entries = expected.get("tokens", [])
    assert [token.name for token in tokens] == [each["name"] for each in entries]
    assert [token.sha256 for token in tokens] == [each["sha256"] for each in entries]
    assert len({token.sha256 for token in tokens}) == len(tokens)
    assert [token.manage for token in tokens] == [each.get("manage", False) for each in entries]


def reference(text: bytes) -> Any:
    try:
        return tomllib.loads(text.decode())
    except (ValueError, RecursionError):
        return None
