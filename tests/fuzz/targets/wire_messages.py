"""Control messages of gateway and worker, with msgspec's generic decoder as the reference.

Layout of an input: decoder (1 byte), then the frame. A decoded frame has the values of the generic
decoder, and is unchanged after encoding and decoding.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

from fuzz import mutation
from iskander.contract.column_types import ColumnType
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import ProtocolError
from iskander.foundation.decoders import DECODE_ERRORS
from iskander.foundation.varint import encode_varint, read_varint
from iskander.interprocess.control import messages as wire
from iskander.interprocess.control.attach import read_hello

ITERATIONS = 4000
DECODERS: tuple[Any, ...] = (
    wire.decode_to_gateway, wire.decode_to_worker, wire.decode_hello, wire.decode_welcome,
)  # fmt: skip


def seeds() -> list[bytes]:
    contract = Contract(
        (TensorSpec("x", "x", ColumnType("float32", (3,)), (3,)),),
        (TensorSpec("y", "y", ColumnType("utf8"), (), string_bytes=9),),
    )
    model = wire.ModelSpec(
        1, "m", "1", "onnx", "/m", ("CPUExecutionProvider",), 0, 1, "all", False, True, 8, 9, "f"
    )
    to_gateway = [
        wire.Done(1, 5), wire.Failed(2, "internal", "why"), wire.Stepped(1, (("a", 1),)),
        wire.Loaded(1, contract, ("CPU",), 2, 1.5), wire.LoadFailed(1, "manifest", "no"),
        wire.Unloaded(1), wire.Leaving(), wire.Notice("slow"), wire.LoadStep(1, "build", 9.0),
    ]  # fmt: skip
    to_worker = [
        wire.Execute(1, 1, 3, (wire.Slice(0, 3, 0, 3, 64),)), wire.Load(model), wire.Unload(1),
        wire.Drain(True),
    ]  # fmt: skip
    hello = wire.Hello(wire.PROTOCOL_VERSION, "1", None, 0, (1, 2))
    welcome = wire.Welcome(1, 0, 0, (0, 1), 1, None, 64, 64, 64, 1.0)
    frames = [to_gateway, to_worker, hello, welcome]
    single = [bytes((0,)) + wire.encode([each]) for each in to_gateway]
    single += [bytes((1,)) + wire.encode([each]) for each in to_worker]
    return [
        *(bytes((number,)) + wire.encode(each) for number, each in enumerate(frames)),
        *single,
        b"\3" + wire.encode(wire.Refused("version", "no")),
        *(bytes((number,)) + b"\x91" * 3000 + b"\xc0" for number in range(4)),
        *(b"\0" + b"\x81" * more + b"\1" for more in (1, 4, 8, 9, 10)),
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    if random.randrange(3):
        return mutation.flip(raw, other, random)
    try:
        document = msgspec.msgpack.decode(raw[1:])
    except DECODE_ERRORS:
        return mutation.flip(raw, other, random)
    return raw[:1] + wire.encode(with_changed_value(document, random))


def run(raw: bytes) -> None:
    check_varint(raw[1:])
    number, frame = raw[0] % len(DECODERS) if raw else 0, raw[1:]
    decode = DECODERS[number]
    try:
        message = decode(frame)
    except DECODE_ERRORS:  # The only errors that callers catch.
        message = None
    if number == 2:
        try:
            assert read_hello(frame) == message
        except ProtocolError:
            assert message is None
    if message is None:
        return
    encoded = wire.encode(message)
    assert repr(decode(encoded)) == repr(message)
    try:
        plain = msgspec.msgpack.decode(frame)
    except DECODE_ERRORS:
        return  # Unknown values are not decoded, and may be invalid UTF-8.
    check_prefix(plain, msgspec.msgpack.decode(encoded))


def check_prefix(sent: Any, read: Any) -> None:
    """Checks that values are unchanged; unknown ones at the end of an array are dropped."""
    if isinstance(sent, list) and isinstance(read, list):
        for one, other in zip(sent, read, strict=False):
            check_prefix(one, other)
    elif isinstance(sent, dict) and isinstance(read, dict):
        assert len(sent) == len(read)
    else:
        assert sent == read or repr(sent) == repr(read), (
            f"different values: {read!r}, expected {sent!r}"
        )


def check_varint(raw: bytes) -> None:
    """Checks a varint against the sum of its groups of seven bits."""
    last = next((index for index, byte in enumerate(raw) if byte < 0x80), None)
    try:
        value, end = read_varint(raw, 0)
    except IndexError:
        assert last is None or last >= 10
        return
    assert last is not None and end == last + 1
    assert value == sum((byte & 0x7F) << 7 * index for index, byte in enumerate(raw[:end]))
    assert read_varint(encode_varint(value), 0) == (value, len(encode_varint(value)))


def with_changed_value(document: Any, random: Random) -> Any:
    """Change one value of a document."""
    if isinstance(document, list) and document and random.randrange(8):
        items = list(document)
        at = random.randrange(len(items))
        if random.randrange(8):
            items[at] = with_changed_value(items[at], random)
        else:
            items[at : at + random.randrange(2)] = [items[at]] * random.randrange(3)
        return items
    return random.choice(
        [None, True, -1, 0, 1 << 63, 1.5, float("nan"), "", "x", b"raw", [], [1], {}, {"a": {}}]
    )
