"""Inferential's own clients, models for robots, and ZeroMQ peers without a library."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from inferential import Connection, proto
from onnx import TensorProto, helper

from support.models import save
from support.processes import Gateway

DTYPES = {
    "uint8": TensorProto.UINT8,
    "float16": TensorProto.FLOAT16,
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)
TIMEOUT_MS = 20_000

POLICY_MANIFEST = """
format = 1
[[inputs]]
column = "joint_positions"
type = "fixed_size_list<float32>[7]"
tensor = "joints"
[[inputs]]
column = "camera/wrist"
type = "fixed_shape_tensor<uint8>[3, 4, 4]"
tensor = "image"
[[outputs]]
tensor = "moves"
column = "actions"
type = "fixed_size_list<float32>[7]"
[[outputs]]
tensor = "brightness"
column = "brightness"
type = "float32"
"""


def policy(folder: Path) -> Path:
    """`actions = 2 * joint_positions`, and the mean of an image."""
    save(
        folder,
        [
            helper.make_node("Add", ["joints", "joints"], ["moves"]),
            helper.make_node("Cast", ["image"], ["pixels"], to=TensorProto.FLOAT),
            helper.make_node("ReduceMean", ["pixels"], ["brightness"], axes=[1, 2, 3], keepdims=0),
        ],
        [
            helper.make_tensor_value_info("joints", TensorProto.FLOAT, ["rows", 7]),
            helper.make_tensor_value_info("image", TensorProto.UINT8, ["rows", 3, 4, 4]),
        ],
        [
            helper.make_tensor_value_info("moves", TensorProto.FLOAT, ["rows", 7]),
            helper.make_tensor_value_info("brightness", TensorProto.FLOAT, ["rows"]),
        ],
    )
    (folder / "manifest.toml").write_text(POLICY_MANIFEST)
    return folder


def mirrors(folder: Path, dtypes: dict[str, int]) -> Path:
    """`y_T = x_T` for each type T, three elements a row."""
    return save(
        folder,
        [helper.make_node("Identity", [f"x_{name}"], [f"y_{name}"]) for name in dtypes],
        [helper.make_tensor_value_info(f"x_{n}", t, ["rows", 3]) for n, t in dtypes.items()],
        [helper.make_tensor_value_info(f"y_{n}", t, ["rows", 3]) for n, t in dtypes.items()],
    )


def address_of(gateway: Gateway) -> str:
    """Address for Inferential's clients."""
    address: str = gateway.stats()["inferential"]["address"]
    return address


@contextmanager
def connected(address: str, client_id: Any = "robot", **options: Any) -> Iterator[Connection]:
    """The package's own sync client."""
    connection = Connection(server=address, client_id=client_id, **options)
    try:
        yield connection
    finally:
        connection.close()


def ask(model: Any, **observation: Any) -> dict[str, Any] | None:
    """Send an observation, and wait for the result."""
    model.observe(**observation)
    result: dict[str, Any] | None = model.get_result(timeout_ms=TIMEOUT_MS)
    return result


def joints(number: float) -> dict[str, np.ndarray]:
    """An observation of `policy`."""
    picture = np.full((3, 4, 4), int(number) % 256, np.uint8)
    return {"joint_positions": np.full(7, number, np.float32), "camera/wrist": picture}


class Peer:
    """A ZeroMQ DEALER that can send invalid bytes."""

    def __init__(self, address: str, identity: bytes = b"", *, is_greeted: bool = True) -> None:
        host, port = address.removeprefix("tcp://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=20.0)
        self.received = b""
        if is_greeted:
            self.socket.sendall(GREETING + self.ready(identity))
            self.read_exactly(64)
            assert self.read_frame()[1].startswith(b"\x05READY")

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    @staticmethod
    def ready(identity: bytes, kind: bytes = b"DEALER") -> bytes:
        body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
        body += b"\x08Identity" + struct.pack(">I", len(identity)) + identity
        return bytes((4, len(body))) + body

    @staticmethod
    def message(*parts: bytes) -> bytes:
        raw = b""
        for number, part in enumerate(parts):
            more = int(number < len(parts) - 1)
            raw += bytes((more | 2,)) + struct.pack(">Q", len(part)) + part
        return raw

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(self.message(*parts))

    def read_exactly(self, count: int) -> bytes:
        while len(self.received) < count:
            chunk = self.socket.recv(65_536)
            if not chunk:
                raise ConnectionResetError("the server hung up")
            self.received += chunk
        taken, self.received = self.received[:count], self.received[count:]
        return taken

    def read_frame(self) -> tuple[int, bytes]:
        flags, length = self.read_exactly(2)
        if flags & 2:
            length = int.from_bytes(bytes((length,)) + self.read_exactly(7), "big")
        return flags, self.read_exactly(length)

    def read(self) -> list[bytes]:
        """Read one message."""
        parts = []
        while True:
            flags, body = self.read_frame()
            parts.append(body)
            if not flags & 1:
                return parts

    def is_closed(self) -> bool:
        """Whether the server closes the connection in time."""
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            try:
                if not self.socket.recv(65_536):
                    return True
            except ConnectionResetError:
                return True
        return False


def observation(
    model: str, tensors: dict[str, np.ndarray], client: str = "peer", **fields: Any
) -> tuple[bytes, bytes]:
    """Envelope and payload of the client; `tensor__FIELD` sets a field of its tensors."""
    ours = {name: value for name, value in fields.items() if name.startswith("tensor__")}
    envelope = proto.Observation(client=proto.Client(id=client), model_id=model)
    payload = b""
    for key, array in tensors.items():
        raw = array.tobytes()
        described = {
            "key": key,
            "dtype": proto.dtype_from_numpy(array.dtype),
            "shape": array.shape,
            "byte_offset": len(payload),
            "byte_length": len(raw),
            "encoding": proto.RAW,
        }
        described |= {name.removeprefix("tensor__"): value for name, value in ours.items()}
        envelope.tensors.add(**described)
        payload += raw
    envelope.metadata.update(fields.pop("metadata", {}))
    for name in fields.keys() - ours.keys():
        setattr(envelope, name, fields[name])
    return envelope.SerializeToString(), payload


def response(parts: list[bytes]) -> proto.ModelResponse:
    """The envelope of a response."""
    assert len(parts) == 3 and not parts[0]
    return proto.ModelResponse.FromString(parts[1])
