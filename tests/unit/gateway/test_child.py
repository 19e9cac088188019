"""The place of one gateway process: what it was told, and for how long it is silent."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from iskander.clock import NS_PER_S
from iskander.config.models import ModelConfig
from iskander.config.schema import Config, LimitsConfig, ServerConfig
from iskander.errors import ConfigError
from iskander.gateway.child import ChildProcess
from iskander.gateway.child_settings import fixed, read_settings, write_settings

CONFIG = Config(
    server=ServerConfig(address=("127.0.0.1:1", "[::1]:2"), processes=3, drain_s=0.25),
    limits=LimitsConfig(rows=7),
    models=(ModelConfig(name="m", path="/models/m", version="2"),),
)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ChildProcess]:
    found = ChildProcess(1, tmp_path, CONFIG)
    yield found
    found.close()


def say(process: ChildProcess, folder: Path, text: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto(text.encode(), str(folder / "notify"))
    process.read_notices()


def test_one_that_serves_is_silent_since_it_was_heard_last(
    process: ChildProcess, tmp_path: Path
) -> None:
    assert process.silent_s(60 * NS_PER_S) == 0.0  # There is none.
    os.close(process.start([sys.executable, "-c", "import time; time.sleep(60)"], CONFIG))
    started = process.notified_ns
    assert not process.has_notified and process.silent_s(started + 60 * NS_PER_S) == 60.0
    say(process, tmp_path, "WATCHDOG=1")
    assert process.has_notified and not process.is_ready and process.notified_ns > started
    say(process, tmp_path, "READY=1\nX_ISKANDER_READY=1")
    assert process.is_ready and process.has_ready_models
    before = process.notified_ns
    assert process.silent_s(before + 60 * NS_PER_S) == 60.0
    say(process, tmp_path, "WATCHDOG=1")
    assert process.notified_ns > before
    assert process.is_ready and process.has_ready_models
    say(process, tmp_path, "STOPPING=1")
    assert not process.is_ready
    assert process.silent_s(process.notified_ns + 60 * NS_PER_S) == 60.0
    process.kill()
    assert process.reap() == (-9, False)
    assert process.silent_s(process.notified_ns + 60 * NS_PER_S) == 0.0


def test_settings_come_through_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISKANDER_LIMITS__ROWS", "8")
    path = write_settings(CONFIG, tmp_path)
    server = replace(CONFIG.server, runtime_directory=str(tmp_path))
    assert read_settings(path) == replace(CONFIG, server=server)


def test_settings_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    with pytest.raises(ConfigError, match=r"settings\.json cannot be read"):
        read_settings(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"settings\.json is not a settings file of a parent"):
        read_settings(path)


def test_a_child_is_given_its_settings_and_what_to_beat_by(
    process: ChildProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_PID", "1")
    out = tmp_path / "out"
    code = f"import os, sys; open({str(out)!r}, 'w').write(repr((sys.argv[1:], dict(os.environ))))"
    os.close(process.start([sys.executable, "-c", code], CONFIG))
    assert process.reap() == (0, False)
    words, environment = eval(out.read_text())
    assert words == ["--config", str(tmp_path / "settings.json"), "--process", "1"]
    assert environment["WATCHDOG_USEC"].isdigit() and "WATCHDOG_PID" not in environment
    assert process.failures == 1


def test_another_port_for_inferential_takes_a_restart() -> None:
    other = replace(CONFIG, inferential=replace(CONFIG.inferential, address="tcp://*:9"))
    assert fixed(other) != fixed(CONFIG)
