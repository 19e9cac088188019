"""Messages between the gateway and the processes that read sources.

    gateway -> reader    length, `Request` as msgpack; one at a time
    reader -> gateway    frames until `Kind.END` or `Kind.ERROR`

A frame has a header of fixed length, metadata and a body. Frames of batches are Arrow IPC messages,
so that the gateway passes them on without a look at them.

Pure. Runs on: gateway loop; reader processes.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, Final, NamedTuple

import msgspec

from iskander.errors import IskanderError, LimitExceeded, ReaderLost
from iskander.foundation.decoders import DECODE_ERRORS, thread_safe

LENGTH: Final = struct.Struct("<I")
HEAD: Final = struct.Struct("<BIIQ")
REQUEST_BYTES_MAX: Final = 16 << 20
METADATA_BYTES_MAX: Final = 16 << 20
PARTS_BYTES_MAX: Final = 3 << 20
"""Bytes of all parts of a plan: gRPC clients accept answers of 4 MiB by default."""
BATCH_BYTES: Final = 4 << 20
"""Bytes of a message above which the reader cuts a batch, unless it has one row."""


_decode_error = msgspec.msgpack.Decoder(dict[str, Any]).decode


class Kind(IntEnum):
    """Kinds of frames.

    PLANNED: metadata is `Planned` as msgpack.
    SCHEMA: metadata is the flatbuffer of an IPC message.
    BATCH: metadata is that of an IPC message, and the body its body.
    END: the request is done, and the reader accepts another one.
    ERROR: metadata is an error as msgpack.
    """

    PLANNED = 1
    SCHEMA = 2
    BATCH = 3
    END = 4
    ERROR = 5


class Head(NamedTuple):
    """Header of a frame."""

    kind: Kind
    rows: int
    metadata_bytes: int
    body_bytes: int


class Frame(NamedTuple):
    """A frame of a reader; `rows` is that of a batch."""

    kind: Kind
    rows: int
    metadata: memoryview
    body: memoryview


def read_head(raw: bytes | memoryview, frame_bytes: int) -> Head:
    """Parse the header of a frame; its body has at most `frame_bytes` bytes.

    Raises:
        LimitExceeded: A row of the source is too large.
        ReaderLost: The process sent something else.
    """
    kind, rows, metadata_bytes, body_bytes = HEAD.unpack(raw)
    if metadata_bytes > METADATA_BYTES_MAX or body_bytes > frame_bytes:
        limit = f"limit {frame_bytes:,} (`limits.message_bytes`)"
        raise LimitExceeded(f"a row of the source has {body_bytes:,} bytes, {limit}")
    try:
        return Head(Kind(kind), rows, metadata_bytes, body_bytes)
    except ValueError:
        raise ReaderLost(f"the process that reads the source sent a frame of kind {kind}") from None


def read_error(metadata: memoryview) -> IskanderError:
    """Decode the metadata of `Kind.ERROR`; an error if it is no error."""
    try:
        return IskanderError.from_wire(_decode_error(metadata))
    except DECODE_ERRORS:
        return ReaderLost("the process that reads the source sent an error that cannot be read")


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """Plan the read of a source.

    Attributes:
        source: Name of the source.
        root: Path of the source.
        contract: Results of the action `contract` of the model.
        filters: Conditions that a row has to meet.
        parts_max: Parts of the answer.
        permitted: Columns that may be returned with the results; None for all.
        path, keep, columns, unit_rows: As in `SourceQuery`.
        plain_files: Whether files of a table are read as plain files (`SourceConfig.plain_files`).
    """

    source: str
    root: str
    contract: list[bytes]
    filters: list[str]
    parts_max: int
    permitted: tuple[str, ...] | None = None
    path: str | None = None
    keep: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    unit_rows: int | None = None
    plain_files: bool = False


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True, tag="read"):
    """Read and score a part of a source.

    Attributes:
        source: Name of the source.
        root: Path of the source.
        contract: Results of the action `contract` of the model.
        part: The part, as `Planned` has it.
        address: Address of the gateway for this process.
        token: Token of the caller, with which the model is called.
        read: Identity of the read at the gateway.
    """

    source: str
    root: str
    contract: list[bytes]
    part: bytes
    address: str
    token: str | None
    read: str


Request = PlanRequest | ReadRequest


@thread_safe
class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A request as it is sent."""

    request: Request


@thread_safe
class Planned(msgspec.Struct, frozen=True, array_like=True):
    """Answer to `PlanRequest`.

    Attributes:
        schema: Columns of the answer, as an IPC message.
        parts: Parts in the order of the files, encoded for `ReadRequest.part`.
        rows: Rows of all parts; -1 if only reading tells.
    """

    schema: bytes
    parts: list[bytes]
    rows: int
