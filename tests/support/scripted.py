"""Scripted peers: a gateway for a real worker, a worker for a real gateway."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from iskander import __version__
from iskander.interprocess.control import attach
from iskander.interprocess.control.attach import open_channel
from iskander.interprocess.control.channel import Channel
from iskander.interprocess.control.messages import (
    PROTOCOL_VERSION,
    Hello,
    ModelSpec,
    Refused,
    Welcome,
    decode_to_gateway,
    decode_to_worker,
    encode,
)
from iskander.interprocess.memory.heartbeat import HEARTBEAT_BYTES, Heartbeat, read_heartbeat
from iskander.interprocess.memory.segment import Segment
from support import processes

ARENA_BYTES = 1 << 20


def model_spec(path: Path, key: int = 0, **changes: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "key": key,
        "name": path.name,
        "version": "1",
        "backend": "onnx",
        "path": str(path / "model.onnx"),
        "execution_providers": ("cpu",),
        "threads_intra": 1,
        "threads_inter": 0,
        "optimization_level": "level3",
        "is_parallel": False,
        "has_memory_pattern": True,
        "rows_max": 1000,
        "string_bytes": 256,
        "fingerprint": str(path),
    }
    return ModelSpec(**(values | changes))


class ScriptedGateway:
    """Accepts one worker after another, and sends the test's messages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_zmq = processes.CHANNEL == "zmq"
        self.socket_path = folder / "attach.sock"
        self.listener = attach.listen(str(self.socket_path))
        self.listener.setblocking(True)
        self.listener.settimeout(20)
        self.input = Segment.create("iskander-input", ARENA_BYTES, is_read_only=True)
        self.output = Segment.create("iskander-output", ARENA_BYTES)
        self.beat = Segment.create("iskander-beat", HEARTBEAT_BYTES)
        self.incarnation = 0
        self.waiting: list[Any] = []
        self.connection: socket.socket | None = None
        self.channel: Channel | None = None
        self.abort_fd = -1

    def accept(self) -> Hello:
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        if self.connection is not None:
            self.connection.close()
        self.connection, _ = self.listener.accept()
        self.connection.settimeout(20)
        return attach.read_hello(self.connection.recv(1 << 16))

    def welcome(self, **changes: Any) -> None:
        assert self.connection is not None
        self.incarnation += 1
        values: dict[str, Any] = {
            "incarnation": self.incarnation,
            "index": 0,
            "group": 0,
            "cpus": (0,),
            "cores": 1,
            "node": None,
            "input_bytes": ARENA_BYTES,
            "output_bytes": ARENA_BYTES,
            "heartbeat_bytes": HEARTBEAT_BYTES,
            "reattach_s": 20.0,
            "channel": str(self.folder / f"c{self.incarnation}") if self._is_zmq else "",
        }
        welcome = Welcome(**(values | changes))
        read_end, self.abort_fd = os.pipe2(os.O_CLOEXEC)
        fds = (self.input.fd, self.output.fd, self.beat.fd, read_end)
        attach.send_answer(self.connection, welcome, fds)
        os.close(read_end)
        self.channel = open_channel(self.connection, welcome.channel, is_gateway=True)

    def refuse(self, message: str) -> None:
        assert self.connection is not None
        attach.send_answer(self.connection, Refused("protocol", message))

    def send(self, message: Any) -> None:
        assert self.channel is not None
        self.channel.send(encode([message]))

    def receive(self, within_s: float = 20.0) -> Any:
        """The next message of the worker."""
        assert self.channel is not None
        deadline = time.monotonic() + within_s
        while True:
            for frame in self.channel.receive():
                self.waiting += decode_to_gateway(frame)
            if self.waiting:
                return self.waiting.pop(0)
            assert time.monotonic() < deadline, "the worker said nothing"
            time.sleep(0.002)

    def last_beat(self) -> Heartbeat:
        return read_heartbeat(self.beat.view)

    def hang_up(self) -> None:
        """Close the connection, as a gateway's death does."""
        assert self.channel is not None
        self.channel.close()
        os.close(self.abort_fd)
        self.channel = None

    def abort(self, batch_id: int) -> None:
        os.write(self.abort_fd, batch_id.to_bytes(8, "little"))

    def close(self) -> None:
        if self.channel is not None:
            self.hang_up()
        if self.connection is not None:
            self.connection.close()
        self.listener.close()
        for path in self.folder.iterdir():
            if path.is_socket():  # Also those of a killed worker.
                path.unlink()
        for segment in (self.input, self.output, self.beat):
            segment.close()


class ScriptedWorker:
    """Attaches to a real gateway, and sends the test's messages."""

    def __init__(self, socket_path: Path, **changes: Any) -> None:
        self.connection = attach.connect(str(socket_path), 20.0)
        values: dict[str, Any] = {
            "protocol": PROTOCOL_VERSION,
            "version": __version__,
            "group": None,
            "index": None,
            "cpus": (),
        }
        attach.send_hello(self.connection, Hello(**(values | changes)))
        answer, self.descriptors = attach.receive_answer(self.connection)
        self.answer = answer
        self.waiting: list[Any] = []
        prefix = answer.channel if isinstance(answer, Welcome) else ""
        self.channel = open_channel(self.connection, prefix, is_gateway=False)

    @property
    def incarnation(self) -> int:
        assert isinstance(self.answer, Welcome)
        return self.answer.incarnation

    def send(self, message: Any) -> None:
        self.channel.send(encode([message]))

    def receive(self, within_s: float = 20.0) -> Any:
        deadline = time.monotonic() + within_s
        while True:
            for frame in self.channel.receive():
                self.waiting += decode_to_worker(frame)
            if self.waiting:
                return self.waiting.pop(0)
            assert time.monotonic() < deadline, "the gateway said nothing"
            time.sleep(0.002)

    def close(self) -> None:
        self.channel.close()
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors = []
