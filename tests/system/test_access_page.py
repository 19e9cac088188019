"""The server on the network of docs/access.md: its commands, configuration and client."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.models import ROOT, TWO_TOWER
from support.processes import BIN, Gateway

from iskander.client import Tls

PAGE = (ROOT / "docs" / "access.md").read_text("utf-8")
SECTION = PAGE.partition("## A server on the network\n")[2].partition("\n## ")[0]


def block(language: str) -> str:
    (code,) = re.findall(rf"^```{language}\n(.*?)^```", SECTION, re.M | re.S)
    return str(code)


def checked(folder: Path, config: str) -> subprocess.CompletedProcess[str]:
    (folder / "iskander.toml").write_text(config)
    command = [BIN / "iskander", "check", "iskander.toml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_example_of_a_server_on_the_network_serves(tmp_path: Path) -> None:
    """The printed configuration passes `check`; the test serves it on the loopback address."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "movielens-two-tower").symlink_to(TWO_TOWER.parent)
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["sh", "-e", "-c", block("sh")],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    token = result.stdout.split()[-1]
    config = block("toml")
    accepted = checked(tmp_path, config)
    assert accepted.returncode == 0, accepted.stderr
    for section in ("tls", "access"):
        part = re.sub(rf"^\[{section}\]\n.*?\n\n", "", config, flags=re.M | re.S)
        refused = checked(tmp_path, part)
        assert refused.returncode == 78 and "server.address" in refused.stderr, section
    gateway = Gateway(tmp_path, [])
    local = config.replace("0.0.0.0:50051", "127.0.0.1:0")
    gateway.config.write_text(f'{local}\n[admin]\naddress = ""\n')
    gateway.token, gateway.secrecy = token, Tls(roots=tmp_path / "chain.pem")
    try:
        gateway.start(ISKANDER_SERVER__RUNTIME_DIRECTORY=str(gateway.runtime))
        gateway.wait_full()
        client = block("python").replace("scores.example:50051", gateway.address)
        for given, is_accepted in ((token, True), (token[::-1], False)):
            run = subprocess.run(
                [sys.executable, "-c", client],
                cwd=tmp_path,
                env={**os.environ, "ISKANDER_TOKEN": given},
                capture_output=True,
                text=True,
                check=False,
            )
            assert (run.returncode == 0) == is_accepted, run.stderr
            assert (run.stdout == "(1,)\n") == is_accepted
        assert '"action":"start"' in (tmp_path / "audit.jsonl").read_text()
        assert gateway.stop() == 0
    finally:
        gateway.end()
