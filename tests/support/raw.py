"""Calls with custom frames, from a process with grpcio and without pyarrow.flight."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

EXCHANGE = "/arrow.flight.protocol.FlightService/DoExchange"


class RawClient:
    """Sends custom bytes; returns bytes, status and trailers."""

    def __init__(self, address: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "raw_client.py"), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(self, method: str, frames: list[bytes], **options: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        wanted = {"method": method, "frames": [frame.hex() for frame in frames], **options}
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        answer["frames"] = [bytes.fromhex(frame) for frame in answer["frames"]]
        return answer

    def exchange(self, frames: list[bytes], **options: Any) -> dict[str, Any]:
        return self.call(EXCHANGE, frames, **options)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def descriptor(*path: str) -> bytes:
    """A path descriptor as field 1 of FlightData."""
    inner = b"\x08\x01" + b"".join(field(3, part.encode()) for part in path)
    return field(1, inner)


def split(encapsulated: bytes) -> tuple[bytes, bytes]:
    """Header and body of an encapsulated IPC message."""
    length = int.from_bytes(encapsulated[4:8], "little")
    return encapsulated[8 : 8 + length], encapsulated[8 + length :]


def schema_data(schema: pa.Schema) -> bytes:
    return field(2, split(schema.serialize().to_pybytes())[0])


def batch_data(
    batch: pa.RecordBatch, *, app_metadata: bytes = b"", body: bytes | None = None
) -> bytes:
    header, own = split(batch.serialize().to_pybytes())
    middle = field(3, app_metadata) if app_metadata else b""
    return field(2, header) + middle + field(1000, own if body is None else body)


def read_batches(frames: list[bytes]) -> tuple[list[pa.RecordBatch], list[bytes]]:
    """A response as an IPC stream, and the app_metadata of each batch."""
    from iskander.arrow import ipc
    from iskander.gateway.protocols.flight.data import read_flight_data

    parts, metadata = [], []
    for frame in frames:
        data = read_flight_data(frame)
        parts.append(ipc.encapsulate(bytes(data.header), bytes(data.body)))
        metadata.append(bytes(data.app_metadata))
    return list(pa.ipc.open_stream(b"".join(parts))), metadata[1:]
