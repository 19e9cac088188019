"""Strings in a real worker process, and the gateway's side played by the test."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from onnx import TensorProto
from support import models
from support.processes import WorkerProcess
from support.scripted import ARENA_BYTES, ScriptedGateway, model_spec

from iskander.contract.strings import body_to_strings, strings_to_body
from iskander.control.messages import Done, Execute, Failed, Load, Loaded, Slice


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ScriptedGateway]:
    gateway = ScriptedGateway(tmp_path)
    yield gateway
    gateway.close()


@pytest.fixture
def worker(gateway: ScriptedGateway) -> Iterator[WorkerProcess]:
    """Attached, with `y = x` for strings loaded."""
    worker = WorkerProcess(gateway.socket_path, gateway.folder, "--group", "0")
    try:
        gateway.accept()
        gateway.welcome()
        echo = models.identity(gateway.folder / "echo", TensorProto.STRING, ["rows"])
        gateway.send(Load(model_spec(echo, string_bytes=8)))
        assert isinstance(gateway.receive(), Loaded)
        yield worker
    finally:
        worker.end()


def write(gateway: ScriptedGateway, offset: int, strings: list[bytes]) -> None:
    """A body of one column of at most 15 strings: its offsets take up to 64 bytes."""
    column = strings_to_body(strings)
    ends, joined = column[: 4 * (len(strings) + 1)], column[4 * (len(strings) + 1) :]
    gateway.input.view[offset : offset + len(ends)] = ends
    gateway.input.view[offset + 64 : offset + 64 + len(joined)] = joined


def read(gateway: ScriptedGateway, offset: int, count: int) -> list[bytes]:
    view = gateway.output.view
    ends = bytes(view[offset : offset + 4 * (count + 1)])
    return body_to_strings(ends + bytes(view[offset + 64 : offset + 64 + 8 * count]), count)


def test_one_request_is_read_and_written_where_it_lies(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    for batch_id, strings in enumerate([[b"one", b"", "🦎🌍".encode()], [b"x"]], start=1):
        write(gateway, 128, strings)
        rows = len(strings)
        gateway.send(Execute(batch_id, 0, rows, (Slice(128, rows, 0, rows, 512),)))
        assert isinstance(gateway.receive(), Done)
        assert read(gateway, 512, rows) == strings


def test_requests_are_put_together_and_each_gets_its_own_strings(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    """Two of them in part, and filled up to eleven rows."""
    write(gateway, 0, [b"a", b"bb"])
    write(gateway, 256, [b"c", b"", b"dd", "é".encode()])
    write(gateway, 512, [b"e", b"f"])
    slices = (Slice(0, 2, 0, 2, 0), Slice(256, 4, 1, 3, 256), Slice(512, 2, 1, 1, 512))

    gateway.send(Execute(1, 0, 11, slices))

    assert isinstance(gateway.receive(), Done)
    assert read(gateway, 0, 2) == [b"a", b"bb"]
    assert read(gateway, 256, 3) == [b"", b"dd", "é".encode()]
    assert read(gateway, 512, 1) == [b"f"]


def test_a_string_that_is_too_long_is_told_and_writes_nothing(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    """Both sides of what the model's settings say."""
    write(gateway, 0, [b"12345678", b"123456789"])
    gateway.output.view[0:256] = b"\xaa" * 256

    gateway.send(Execute(1, 0, 2, (Slice(0, 2, 0, 2, 0),)))

    failed = gateway.receive()
    assert isinstance(failed, Failed) and failed.code == "execution_failed"
    assert "`y` has a string of 9 bytes" in failed.message
    assert bytes(gateway.output.view[0:256]) == b"\xaa" * 256
    write(gateway, 0, [b"12345678", b""])
    gateway.send(Execute(2, 0, 2, (Slice(0, 2, 0, 2, 0),)))
    assert isinstance(gateway.receive(), Done)
    assert read(gateway, 0, 2) == [b"12345678", b""]


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("last", [-1, ARENA_BYTES - 128 - 64 + 1, 2**31 - 1])
def test_nothing_is_read_beyond_the_arena(
    gateway: ScriptedGateway, worker: WorkerProcess, last: int, is_whole: bool
) -> None:
    """A gateway never says so: the worker ends, since one of the two programs is wrong."""
    gateway.input.view[128:140] = struct.pack("<3i", 0, 1, last)

    gateway.send(Execute(1, 0, 2 if is_whole else 3, (Slice(128, 2, 0, 2, 0),)))

    assert worker.process.wait(20) == 70
    assert re.search("bug: .*strings", worker.log.read_text())


def test_the_last_byte_of_the_arena_is_read(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    offset = ARENA_BYTES - 128
    write(gateway, offset, [b"12345678"] * 8)

    gateway.send(Execute(1, 0, 8, (Slice(offset, 8, 0, 8, 0),)))

    assert isinstance(gateway.receive(), Done)
    assert read(gateway, 0, 8) == [b"12345678"] * 8
