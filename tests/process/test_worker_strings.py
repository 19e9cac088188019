"""String columns in a real worker process, with a scripted gateway."""

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

from iskander.contract.processing.strings import body_to_strings, strings_to_body
from iskander.interprocess.control.messages import Done, Execute, Failed, Load, Loaded, Slice


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ScriptedGateway]:
    gateway = ScriptedGateway(tmp_path)
    yield gateway
    gateway.close()


@pytest.fixture
def worker(gateway: ScriptedGateway) -> Iterator[WorkerProcess]:
    """A registered worker with the model `y = x` for strings."""
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
    """Writes a body of one column of at most 15 strings, whose offsets need up to 64 bytes."""
    column = strings_to_body(strings)
    ends, joined = column[: 4 * (len(strings) + 1)], column[4 * (len(strings) + 1) :]
    gateway.input.view[offset : offset + len(ends)] = ends
    gateway.input.view[offset + 64 : offset + 64 + len(joined)] = joined


def read(gateway: ScriptedGateway, offset: int, count: int) -> list[bytes]:
    view = gateway.output.view
    ends = bytes(view[offset : offset + 4 * (count + 1)])
    return body_to_strings(ends + bytes(view[offset + 64 : offset + 64 + 8 * count]), count)


def test_single_request_is_read_and_written_at_its_offsets(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    for batch_id, strings in enumerate([[b"one", b"", "🦎🌍".encode()], [b"x"]], start=1):
        write(gateway, 128, strings)
        rows = len(strings)
        gateway.send(Execute(batch_id, 0, rows, (Slice(128, rows, 0, rows, 512),)))
        assert isinstance(gateway.receive(), Done)
        assert read(gateway, 512, rows) == strings


def test_requests_share_a_batch_and_get_their_own_strings(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    """Two requests are slices, and the batch is padded to eleven rows."""
    write(gateway, 0, [b"a", b"bb"])
    write(gateway, 256, [b"c", b"", b"dd", "é".encode()])
    write(gateway, 512, [b"e", b"f"])
    slices = (Slice(0, 2, 0, 2, 0), Slice(256, 4, 1, 3, 256), Slice(512, 2, 1, 1, 512))

    gateway.send(Execute(1, 0, 11, slices))

    assert isinstance(gateway.receive(), Done)
    assert read(gateway, 0, 2) == [b"a", b"bb"]
    assert read(gateway, 256, 3) == [b"", b"dd", "é".encode()]
    assert read(gateway, 512, 1) == [b"f"]


def test_string_above_the_length_limit_fails_the_batch_without_output(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    """The model's limit is 8 bytes."""
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
def test_offsets_beyond_the_arena_end_the_worker(
    gateway: ScriptedGateway, worker: WorkerProcess, last: int, is_whole: bool
) -> None:
    """A correct gateway never sends them, so the worker exits with a bug report."""
    gateway.input.view[128:140] = struct.pack("<3i", 0, 1, last)

    gateway.send(Execute(1, 0, 2 if is_whole else 3, (Slice(128, 2, 0, 2, 0),)))

    assert worker.process.wait(20) == 70
    assert re.search("bug: .*strings", worker.log.read_text())


def test_string_at_the_end_of_the_arena_is_read(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    offset = ARENA_BYTES - 128
    write(gateway, offset, [b"12345678"] * 8)

    gateway.send(Execute(1, 0, 8, (Slice(offset, 8, 0, 8, 0),)))

    assert isinstance(gateway.receive(), Done)
    assert read(gateway, 0, 8) == [b"12345678"] * 8
