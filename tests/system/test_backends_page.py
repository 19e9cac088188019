"""Examples of docs/backends.md, run as printed."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import Gateway

PAGE = (Path(__file__).resolve().parent.parent.parent / "docs" / "backends.md").read_text()
FILES = re.compile(r"^`([\w./]+)`[^\n]*:\n\n```\w+\n(.*?)```", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^prints\n\n```\n(.*?)```", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_examples_print_the_documented_output(tmp_path: Path) -> None:
    """Also through a second gateway, with the backend `remote`."""
    files = dict(FILES.findall(PAGE))
    assert len(files) == 6
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with started(tmp_path, "iskander.toml", files["iskander.toml"]) as near:
        assert [printed(tmp_path, near)] == PRINTED.findall(PAGE)
        manifest = files["far/manifest.toml"].replace("127.0.0.1:50051", near.address)
        (tmp_path / "far" / "manifest.toml").write_text(manifest)
        with started(tmp_path, "front.toml", files["front.toml"]) as front:
            assert [printed(tmp_path, front)] == PRINTED.findall(PAGE)


@contextlib.contextmanager
def started(folder: Path, name: str, text: str) -> Iterator[Gateway]:
    """A gateway with a configuration of the page, on any port."""
    gateway = Gateway(folder, [])
    gateway.config, gateway.runtime = folder / name, folder / f"run-{name}"
    gateway.config.write_text(re.sub(r":500\d1", ":0", text) + '[admin]\naddress = ""\n')
    try:
        gateway.start(ISKANDER_SERVER__RUNTIME_DIRECTORY=str(gateway.runtime))
        yield gateway
        assert gateway.stop() == 0
    finally:
        gateway.end()


def printed(folder: Path, gateway: Gateway) -> str:
    command = [sys.executable, str(folder / "score.py"), gateway.address]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
