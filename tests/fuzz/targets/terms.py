"""Terms in headers and `app_metadata`, with `json` and msgpack as the references.

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
from iskander.gateway.protocols.oip.terms import parse_terms
from iskander.gateway.protocols.terms import ClientTerms, read_headers, read_metadata

ITERATIONS = 4000
NAMES = list(ClientTerms.__struct_fields__)
WORDS = [
    *NAMES, "iskander", "null", "true", "false", "0", "-1", "1e400", "NaN", "Infinity", "1.5", "9",
    "10", "{", "}", "[", "]", '"', ":", ",", "\\ud800", "\\u0000", "18446744073709551616",
    "x" * 129, "86400000", "86400001", "in-band", "end", "errors", "region", "1_000",
    " 1", "٣", "\ufeff", "[" * 3000,
]  # fmt: skip
TEXTS = {"client", "route_key", "errors", "region", "read", "traceparent", "tracestate"}
BOUNDS = {
    "priority": (0, 9), "urgency": (0, 1), "deadline_ms": (0, 86_400_000),
    "ttl_ms": (0, 86_400_000), "steps_remaining": (0, math.inf), "timestamp_ns": (0, math.inf),
}  # fmt: skip


def seeds() -> list[bytes]:
    terms = {"deadline_ms": 20, "priority": 0, "client": "robot-7", "newest_wins": True}
    terms |= {"urgency": 0.5, "ttl_ms": 1.5, "steps_remaining": 3, "timestamp_ns": 1 << 60}
    lines = "\n".join(f"iskander-{name.replace('_', '-')}: {terms[name]}" for name in terms)
    return [
        b"\0" + lines.encode().replace(b"\niskander-timestamp-ns: 1152921504606846976", b""),
        b"\0iskander-errors: in-band\niskander-region: r\nother: x",
        b"\1" + json.dumps({"iskander": terms, "mine": [1, None]}).encode(),
        b"\1" + json.dumps({"iskander": None}).encode(),
        b"\2" + msgspec.msgpack.encode({"iskander": terms, "mine": b"raw"}),
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
    iskander_headers = {name: value for name, value in pairs if name.startswith("iskander-")}
    try:
        terms = read_headers(pairs)
    except MalformedInput:
        assert iskander_headers
        return
    by_field = {
        name.removeprefix("iskander-").replace("-", "_"): iskander_headers[name]
        for name in iskander_headers
    }
    for field, value in by_field.items():  # The last of two spellings counts.
        value_read = getattr(terms, field)
        if field in TEXTS:
            assert value_read == value or (value_read is None and value == "null")
        elif value_read is not None and not isinstance(value_read, bool):
            assert float(value_read) == float(value)
        check_bounds(field, value_read)
    try:
        parse_terms({name: value for name, value in pairs})
    except (MalformedInput, Unsupported) as error:
        assert str(error)


def check_metadata(raw: bytes) -> None:
    expected = reference(raw)
    try:
        terms = read_metadata(raw)
    except MalformedInput:
        assert (isinstance(expected, dict) and "iskander" in expected) or expected is None
        return
    if expected is None:
        return
    if not isinstance(expected, dict) or expected.get("iskander") is None:
        assert terms is None
        return
    assert terms is not None
    for name, value in expected["iskander"].items():
        assert getattr(terms, name) == value
        check_bounds(name, getattr(terms, name))


def reference(raw: bytes) -> Any:
    """A document as Python values; None if it is invalid or has a duplicate key."""
    try:
        if raw.lstrip()[:1] == b"{":
            if b"\\ud" in raw.lower():
                return None  # An unpaired surrogate is not valid text.
            return json.loads(
                raw.decode(), object_pairs_hook=unique, parse_constant=reject_constant
            )
        read = msgspec.msgpack.decode(raw)
    except (ValueError, msgspec.MsgspecError, RecursionError, TypeError):
        return None
    return read if has_text_keys(read) else None


def has_text_keys(document: Any) -> bool:
    return not isinstance(document, dict) or all(type(key) is str for key in document)


def reject_constant(name: str) -> None:
    raise ValueError(name)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("duplicate key")
    return dict(pairs)


def check_bounds(name: str, value: Any) -> None:
    if value is not None and name in BOUNDS:
        least, most = BOUNDS[name]
        assert least <= value <= most
