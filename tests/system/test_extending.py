"""Examples of docs/extending.md: a policy, a protocol, a backend and a setting."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from support.models import row_ids
from support.processes import Gateway, running

PAGE = (Path(__file__).resolve().parent.parent.parent / "docs" / "extending.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def send_lines(address: str, *lines: bytes) -> list[bytes]:
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        file = connection.makefile("rwb")
        responses = []
        for line in lines:
            file.write(line + b"\n")
            file.flush()
            responses.append(file.readline().rstrip(b"\n"))
        return responses


def test_extensions_of_the_page_work_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, backend = blocks("python")
    script = tmp_path / "program.py"
    script.write_text(
        program.replace('serve("iskander.toml")', "import sys\n\nserve(sys.argv[-1])")
    )
    package = tmp_path / "site"
    info = package / "doubling-1.0.dist-info"
    info.mkdir(parents=True)
    (package / "doubling.py").write_text(backend)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: doubling\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(blocks("ini")[0])
    monkeypatch.setenv("PYTHONPATH", str(package))
    model = tmp_path / "double.bin"
    model.write_bytes(b"")
    models = [
        {"name": "ids", "path": str(row_ids(tmp_path / "ids"))},
        {"name": "double", "path": str(model), "backend": "doubling", "workers": 1},
    ]
    with running(
        tmp_path,
        models,
        prefix=(sys.executable, str(script)),
        workers={"count": 1},
        lanes={"policy": "smallest_first"},
        extensions={"protocols": {"lines": {"line_bytes": 100}}},
    ) as gateway:
        address = gateway.stats()["protocol_addresses"]["lines"]
        assert send_lines(address, b"ids 1 2", b"double 1 2", b"nothing 1") == [
            b"4 7",
            b"2 4",
            b"model_not_found: there is no model `nothing`; available: double, ids",
        ]
        assert b"line_bytes" in send_lines(address, b"ids " + b"1 " * 100)[0]
        with gateway.client() as client:
            assert client.score("double", pa.record_batch({"x": [3]}))["y"].to_pylist() == [6]
    assert 'policy = "smallest_first"' in blocks("toml")[0]


def test_unknown_protocol_is_a_start_error(tmp_path: Path) -> None:
    models = [{"name": "ids", "path": str(row_ids(tmp_path / "ids"))}]
    gateway = Gateway(tmp_path, models, extensions={"protocols": {"lines": {}}})
    gateway.start(is_ready=False)
    assert gateway.wait() == 78
    assert "unknown protocol: extensions.protocols.lines" in gateway.log.read_text()
