"""Exit codes of each command's failures, and JSON output of each command with results."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models import ROOT, row_ids
from support.processes import BIN, Gateway, WorkerProcess, eventually, running

from iskander.gateway.auth.tokens import add_token

QUICKSTART = str(ROOT / "configs" / "quickstart.toml")
MODEL = str(ROOT / "configs" / "models" / "movielens-two-tower" / "1" / "model.onnx")
NOWHERE = ("--address", "127.0.0.1:1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("codes")
    token = add_token(folder / "tokens.toml", "operator", ("*",), manage=True)
    served = [{"name": "ids", "path": str(row_ids(folder / "ids"))}]
    with running(folder, served, token=token, access={"tokens": "tokens.toml"}) as gateway:
        yield gateway


def run(*words: str, token: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "ISKANDER_TOKEN"}
    environment |= {"ISKANDER_TOKEN": token} if token else {}
    done = subprocess.run(
        [str(BIN / words[0]), *words[1:]],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (2, ("nonsense",)),
        (2, ("check",)),
        (2, ("check", QUICKSTART, "--sample", MODEL, "--model", "other")),
        (78, ("check", "/nowhere.toml")),
        (78, ("check", QUICKSTART, "--set", "limits.rows=0")),
        (78, ("manifest", "/nowhere.onnx")),
        (78, ("config", "show", "/nowhere.toml")),
        (78, ("config", "import-inferential", "/nowhere.yaml")),
        (78, ("doctor", "/nowhere.toml")),
        (2, ("doctor", "--pid", "999999999")),
        (1, ("doctor", QUICKSTART, "--set", "arena.input_bytes=1000000000000000")),
        *((69, (command, *NOWHERE)) for command in ("models", "stats", "drain", "reload")),
        *((69, (command, "m", *NOWHERE)) for command in ("load", "unload", "bench")),
        (2, ("token", "name")),
        (78, ("token", "name", "--file", "/nowhere/tokens.toml")),
        (2, ("completion", "powershell")),
        (2, ("score", "/nowhere.onnx", "in.parquet", "-o", "out")),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, tuple) else str(value),
)
def test_failures_without_a_server(code: int, words: tuple[str, ...]) -> None:
    done = run("iskander", *words)
    assert done.returncode == code, done.stderr
    assert (code == 1) == (not done.stderr), "a finding is a result, any other failure an error"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, ("load", "other")),
        (1, ("unload", "other")),
        (1, ("bench", "other")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_failures_of_a_server(server: Gateway, code: int, words: tuple[str, ...]) -> None:
    done = run("iskander", *words, "--address", server.address, token=server.token)
    assert done.returncode == code and done.stderr.startswith("iskander: ")


@pytest.mark.parametrize("command", ["models", "stats", "drain", "reload"])
@pytest.mark.parametrize("token", [None, "isk_unknown"])
def test_missing_and_unknown_tokens(server: Gateway, command: str, token: str | None) -> None:
    assert run("iskander", command, "--address", server.address, token=token).returncode == 77


@pytest.mark.parametrize(
    "words",
    [
        ("check", QUICKSTART),
        ("manifest", MODEL),
        ("doctor", QUICKSTART),
        ("config", "show", QUICKSTART),
        ("config", "reference"),
        ("install-systemd", "--config", QUICKSTART, "--dry-run"),
        ("logs", "list"),
        ("models",),
        ("stats",),
        ("reload",),
    ],
    ids=" ".join,
)
def test_results_as_json(server: Gateway, words: tuple[str, ...]) -> None:
    is_remote = words[0] in ("models", "stats", "reload")
    address = ("--address", server.address) if is_remote else ()
    done = run("iskander", *words, "--json", *address, token=server.token)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


@pytest.mark.slow
def test_interrupted_command_ends_with_130() -> None:
    """The peer accepts and never answers; the call ends by its timeout at the latest."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        process = subprocess.Popen(
            [BIN / "iskander", "stats", "--address", f"127.0.0.1:{port}"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        connection, _ = listening.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and errors == "iskander: interrupted\n"


def test_codes_of_the_gateway(tmp_path: Path) -> None:
    assert run("iskander-gateway").returncode == 2
    assert run("iskander-gateway", "--config", "/nowhere.toml").returncode == 78
    served = [{"name": "ids", "path": str(row_ids(tmp_path / "ids"))}]
    gateway = Gateway(tmp_path, served, arena={"input_bytes": 1 << 50})
    gateway.start(is_ready=False)
    try:
        assert gateway.wait() == 71
    finally:
        gateway.end()
    (tmp_path / "second").mkdir()
    gateway = Gateway(tmp_path / "second", served, server={"lame_duck_s": 30.0}).start()
    try:
        gateway.signal(signal.SIGTERM)
        eventually(lambda: "not ready; requests" in gateway.text(), what="the lame duck")
        gateway.signal(signal.SIGTERM)
        assert gateway.wait() == 130
    finally:
        gateway.end()


def test_codes_of_the_worker(tmp_path: Path) -> None:
    assert run("iskander-worker").returncode == 2
    worker = WorkerProcess(tmp_path / "attach.sock", tmp_path, "--wait-s", "0.1")
    try:
        assert worker.process.wait(60) == 69
    finally:
        worker.end()
