"""Example of docs/backends.md, run as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from support.processes import Gateway

PAGE = (Path(__file__).resolve().parent.parent.parent / "docs" / "backends.md").read_text()
FILES = re.compile(r"^`([\w./]+)`[^\n]*:\n\n```\w+\n(.*?)```", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^prints\n\n```\n(.*?)```", re.MULTILINE | re.DOTALL)


def test_example_prints_the_documented_output(tmp_path: Path) -> None:
    files = dict(FILES.findall(PAGE))
    assert len(files) == 4
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    gateway = Gateway(tmp_path, [])
    (tmp_path / "iskander.toml").write_text(
        files["iskander.toml"].replace(":50051", ":0") + '[admin]\naddress = ""\n'
    )
    environment = {"ISKANDER_SERVER__RUNTIME_DIRECTORY": str(gateway.runtime)}
    try:
        gateway.start(**environment)
        command = [sys.executable, str(tmp_path / "score.py"), gateway.address]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert [done.stdout] == PRINTED.findall(PAGE)
        assert gateway.stop() == 0
    finally:
        gateway.end()
