"""Strings in raw tensors, with a reader of single strings as the reference.

Layout of an input: count (2 bytes), then the raw tensor.
"""

from __future__ import annotations

import struct
from random import Random

from fuzz import mutation
from iskander.contract.processing.strings import body_to_strings
from iskander.errors import MalformedInput
from iskander.gateway.protocols.oip.tensors import body_to_raw, raw_strings, raw_to_body

ITERATIONS = 2500


def seeds() -> list[bytes]:
    samples = [[], [b""], [b"a", b"", b"ccc"], [b"x" * 300] * 3, [b"\xff\0", "é".encode()] * 9]
    return [len(texts).to_bytes(2) + raw_strings(texts) for texts in samples]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    texts = split(raw[2:])
    if texts is None or not random.randrange(4):
        return mutation.patch(raw[2:], random, ("<I",)).join((raw[:2], b""))
    changed = mutation.shuffle(
        texts,
        split(other[2:]) or [],
        random,
        lambda text: mutation.flip(text, other, random),
        lambda: random.randbytes(random.choice((0, 1, 2, 3, 4, 5, 100))),
    )
    count = len(changed) if random.randrange(4) else mutation.number(random, len(changed))
    return (count & 0xFFFF).to_bytes(2) + raw_strings(changed)


def run(raw: bytes) -> None:
    count, data = int.from_bytes(raw[:2]), raw[2:]
    texts = split(data)
    is_valid = texts is not None and len(texts) == count
    try:
        body = raw_to_body(memoryview(data), count)
    except MalformedInput:
        assert not is_valid, "rejected, but the number of strings is correct"
        return
    assert is_valid, "accepted, but the number of strings is wrong"
    assert [bytes(text) for text in body_to_strings(body, count)] == texts
    assert bytes(body_to_raw(body, count)) == data


def split(data: bytes) -> list[bytes] | None:
    """All strings; None if the last one is incomplete."""
    texts, at = [], 0
    while at < len(data):
        if at + 4 > len(data):
            return None
        (length,) = struct.unpack_from("<I", data, at)
        at += 4 + length
        if at > len(data):
            return None
        texts.append(data[at - length : at])
    return texts
