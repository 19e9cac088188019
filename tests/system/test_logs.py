"""Log of real processes: declared JSON lines, the journal's priorities, repeats, the command."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support import models, python_models
from support.processes import BIN, Gateway, eventually, running

from iskander.errors import IskanderError
from iskander.foundation.logs.catalog import EVENTS, LIBRARY_MESSAGE
from iskander.foundation.logs.formats import RESERVED
from iskander.foundation.logs.repeats import FIRST
from iskander.gateway.auth.tokens import add_token

BATCH = pa.record_batch({"x": pa.array([1, 2], pa.int64())})
SECRET = "hunter2-in-a-payload"
BROKEN = """
class Model(Base):
    def load(self, context):
        raise ValueError("broken on purpose")
"""


def lines_of(gateway: Gateway) -> list[dict[str, Any]]:
    """The lines of a log, each checked against its declaration."""
    lines = [json.loads(line) for line in gateway.log.read_text().splitlines()]
    for line in lines:
        assert {"time", "level", "logger", "event", "message", "pid"} <= line.keys()
        if line["event"] == LIBRARY_MESSAGE:
            continue
        event = EVENTS[line["event"]]
        assert line["logger"] == event.logger_name
        fields = {key: line[key] for key in line if key not in RESERVED}
        assert fields.keys() == event.fields.keys(), line
        for key, value in fields.items():
            expected = (int, float) if event.fields[key] is float else event.fields[key]
            assert isinstance(value, expected), (line, key)
        assert ("exception" in line) <= event.has_traceback
    return lines


def named(gateway: Gateway, name: str) -> list[dict[str, Any]]:
    return [line for line in lines_of(gateway) if line["event"] == name]


def test_every_line_is_a_declared_event(tmp_path: Path) -> None:
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    tokens = tmp_path / "tokens.toml"
    token = add_token(tokens, "operator", ("*",), manage=True)
    sections: dict[str, Any] = {"access": {"tokens": str(tokens)}, "admin": {"log_format": "json"}}
    with running(tmp_path, served, token=token, **sections) as gateway:
        with gateway.client() as client:
            client.score("ids", BATCH)
            with pytest.raises(IskanderError):
                client.score("ids", pa.record_batch({"x": pa.array([SECRET])}))
        pid = gateway.kill_worker()
        (exited,) = eventually(lambda: named(gateway, "worker_process_exited"))
        assert (exited["worker_pid"], exited["exit"]) == (pid, "by SIGKILL")
        gateway.wait_ready()

    counts = Counter(line["event"] for line in lines_of(gateway))
    assert counts["ready"] == counts["stopped"] == 1
    assert counts["worker_changed"] > 4 and counts["worker_loaded_model"] == 2
    text = gateway.log.read_text()
    assert SECRET not in text and token not in text


@pytest.mark.slow
def test_failed_start_is_an_event(tmp_path: Path) -> None:
    served = [python_models.entry(tmp_path / "broken", BROKEN)]
    gateway = Gateway(tmp_path, served, admin={"log_format": "json"})
    gateway.start(is_ready=False)
    assert gateway.wait() == 78

    (end,) = named(gateway, "gateway_failed")
    assert "broken on purpose" in end["reason"] and end["pid"] == gateway.pid


@pytest.mark.slow
def test_workers_log_in_the_format_of_their_gateway(tmp_path: Path) -> None:
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    gateway = Gateway(tmp_path, served, admin={"log_format": "json"})
    try:
        gateway.start()
        (pid,) = gateway.worker_pids()
        gateway.signal(signal.SIGKILL)
        (line,) = eventually(lambda: named(gateway, "gateway_connection_lost"))
        assert (line["pid"], line["logger"]) == (pid, "iskander.worker")
    finally:
        gateway.end()


@pytest.mark.slow
def test_lines_for_the_journal_have_priorities(tmp_path: Path) -> None:
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    gateway = Gateway(tmp_path, served)
    gateway.log.touch()
    status = gateway.log.stat()
    try:
        gateway.start(JOURNAL_STREAM=f"{status.st_dev}:{status.st_ino}")
        gateway.kill_worker()
        line = "<4>iskander.supervisor: worker process "
        eventually(lambda: line in gateway.log.read_text())
        gateway.wait_ready()
        assert gateway.stop() == 0
    finally:
        gateway.end()
    lines = gateway.log.read_text().splitlines()
    assert all(re.match(r"<[346]>iskander\.\w+: ", line) for line in lines), lines
    assert any(line.startswith("<6>iskander.server: ready on ") for line in lines)


def test_repeats_are_summed_up(tmp_path: Path) -> None:
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    sent, name = 0, "worker_registration_rejected"
    with running(tmp_path, served, admin={"log_format": "json"}) as gateway:

        def is_withheld() -> bool:
            nonlocal sent
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as impostor:
                impostor.connect(str(gateway.attach_socket))
                impostor.send(b"no hello")
                impostor.settimeout(10)
                impostor.recv(1 << 16)
            sent += 1
            return len(named(gateway, name)) < sent

        eventually(is_withheld, 60)

    found = named(gateway, name)
    passed = [line for line in found if "repeated" not in line]
    repeated = sum(line.get("repeated", 0) for line in found)
    assert len(passed) >= FIRST and repeated and len(passed) + repeated == sent
    assert "(repeated " in found[-1]["message"]


def iskander(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "200"}
    return subprocess.run(
        [str(BIN / "iskander"), *words],
        capture_output=True, text=True, timeout=60, check=False, env=environment, input=stdin,
    )  # fmt: skip


def test_command_explains_events() -> None:
    done = iskander("logs", "explain", "worker_hung")
    assert done.returncode == 0
    assert "meaning: A worker sent no heartbeat during a batch" in done.stdout
    assert "to do: Look for a loop" in done.stdout and "silent_ms (int)" in done.stdout

    event = json.loads(iskander("logs", "explain", "worker_hung", "--json").stdout)
    assert (event["level"], event["topic"]) == ("error", "worker")

    line = 'Nov 26 13:16:37 host gateway[7]: {"event": "worker_changed", "worker": 0}'
    assert iskander("logs", "explain", line).stdout.startswith("worker_changed: info")

    done = iskander("logs", "explain", "worker_hangs")
    assert done.returncode == 2 and "similar: worker_hung" in done.stderr


@pytest.mark.slow
def test_command_explains_every_line_of_a_json_log(tmp_path: Path) -> None:
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    with running(tmp_path, served, admin={"log_format": "json"}) as gateway:
        gateway.kill_worker()
        eventually(lambda: "ended by SIGKILL" in gateway.text())
        gateway.wait_ready()

    explained = iskander("logs", "explain", "-", "--json", stdin=gateway.text())
    names = [event["event"] for event in json.loads(explained.stdout)]
    assert {"worker_changed", "worker_process_exited", "ready", "stopped"} <= set(names)
    assert len(names) == len(set(names))


def test_command_explains_lines_between_bytes_that_are_no_text() -> None:
    line = b'{"event": "worker_changed"}'
    done = subprocess.run(
        [BIN / "iskander", "logs", "explain", "-"],
        input=b"\xff\xfe other program\r\n" + line + b"\r\n",
        capture_output=True, timeout=60, check=False,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"worker_changed: info")


def test_command_lists_events() -> None:
    listed = json.loads(iskander("logs", "list", "--json").stdout)
    assert {event["event"] for event in listed} == EVENTS.keys()
    assert "worker_hung" in iskander("logs", "list").stdout
