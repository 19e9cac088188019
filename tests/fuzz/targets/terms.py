"""Terms that clients say: in headers and `app_metadata`, against JSON and plain rules.

Layout of an input: kind (1 byte: headers, JSON, msgpack), then text; headers are lines.
"""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

import msgspec

from fuzz import mutation
from iskander.errors import MalformedInput, Unsupported
from iskander.protocols.oip.terms import parse_terms
from iskander.protocols.terms import ClientTerms, read_headers, read_metadata

ITERATIONS = 4000
NAMES = list(ClientTerms.__struct_fields__)
WORDS = [
    *NAMES, "iskander", "null", "true", "false", "0", "-1", "1e400", "NaN", "Infinity", "1.5", "9",
    "10", "{", "}", "[", "]", '"', ":", ",", "\\ud800", "\\u0000", "18446744073709551616",
    "x" * 129, "86400000", "86400001", "in-band", "end", "errors", "region", "1_000",
    " 1", "٣", "\ufeff",
]  # fmt: skip
BOUNDS = {
    "priority": (0, 9), "urgency": (0, 1), "deadline_ms": (0, 86_400_000),
    "ttl_ms": (0, 86_400_000), "steps_remaining": (0, math.inf), "timestamp_ns": (0, math.inf),
}  # fmt: skip


def seeds() -> list[bytes]:
    said = {"deadline_ms": 20, "priority": 0, "client": "robot-7", "newest_wins": True}
    said |= {"urgency": 0.5, "ttl_ms": 1.5, "steps_remaining": 3, "timestamp_ns": 1 << 60}
    lines = "\n".join(f"iskander-{name.replace('_', '-')}: {said[name]}" for name in said)
    return [
        b"\0" + lines.encode().replace(b"\niskander-timestamp-ns: 1152921504606846976", b""),
        b"\0iskander-errors: in-band\niskander-region: r\nother: x",
        b"\1" + json.dumps({"iskander": said, "mine": [1, None]}).encode(),
        b"\1" + json.dumps({"iskander": None}).encode(),
        b"\2" + msgspec.msgpack.encode({"iskander": said, "mine": b"raw"}),
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    if raw[:1] == b"\2" or not random.randrange(3):
        return mutation.flip(raw, other, random)
    text = raw[1:].decode(errors="replace")
    at = random.randrange(len(text) + 1)
    word = random.choice(WORDS)
    end = min(at + random.choice((0, 0, 1, 2, 8)), len(text))
    return raw[:1] + (text[:at] + word + text[end:]).encode(errors="replace")


def run(raw: bytes) -> None:
    kind, text = raw[:1], raw[1:]
    if kind == b"\0":
        check_headers(text)
    else:
        check_metadata(text)


def check_headers(text: bytes) -> None:
    lines = [line.partition(": ") for line in text.decode(errors="replace").split("\n")]
    pairs = [(name, value) for name, _, value in lines]
    ours = {name: value for name, value in pairs if name.startswith("iskander-")}
    try:
        said = read_headers(pairs)
    except MalformedInput:
        assert ours
        return
    named = {name.removeprefix("iskander-").replace("-", "_"): ours[name] for name in ours}
    for field, value in named.items():  # Of one that is spelled in two ways, the last counts.
        got = getattr(said, field)
        if field in ("client", "route_key", "errors", "region"):
            assert got == value or (got is None and value == "null")
        elif got is not None and not isinstance(got, bool):
            assert float(got) == float(value)
        check_bounds(field, got)
    try:
        parse_terms({name: value for name, value in pairs})
    except (MalformedInput, Unsupported) as error:
        assert str(error)


def check_metadata(raw: bytes) -> None:
    wanted = decoded(raw)
    try:
        said = read_metadata(raw)
    except MalformedInput:
        assert (isinstance(wanted, dict) and "iskander" in wanted) or wanted is None
        return
    if wanted is None:
        return
    if not isinstance(wanted, dict) or wanted.get("iskander") is None:
        assert said is None
        return
    assert said is not None
    for name, value in wanted["iskander"].items():
        assert getattr(said, name) == value
        check_bounds(name, getattr(said, name))


def decoded(raw: bytes) -> Any:
    """A document as Python values; None for what is not one or has a key twice."""
    try:
        if raw.lstrip()[:1] == b"{":
            if b"\\ud" in raw.lower():
                return None  # Half of a surrogate pair is no text elsewhere.
            return json.loads(raw.decode(), object_pairs_hook=unique, parse_constant=refuse)
        read = msgspec.msgpack.decode(raw)
    except (ValueError, msgspec.MsgspecError, RecursionError, TypeError):
        return None
    return read if has_text_keys(read) else None


def has_text_keys(document: Any) -> bool:
    return not isinstance(document, dict) or all(type(key) is str for key in document)


def refuse(name: str) -> None:
    raise ValueError(name)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)


def check_bounds(name: str, value: Any) -> None:
    if value is not None and name in BOUNDS:
        least, most = BOUNDS[name]
        assert least <= value <= most
