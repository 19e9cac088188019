"""Child processes of the gateway parent: settings, notifications, and watchdog."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from iskander.config.models import ModelConfig
from iskander.config.schema import Config, LimitsConfig, ServerConfig
from iskander.errors import ConfigError
from iskander.foundation.clock import NS_PER_S
from iskander.gateway.child import ChildProcess
from iskander.gateway.child_settings import fixed, read_settings, write_settings

CONFIG = Config(
    server=ServerConfig(address=("127.0.0.1:1", "[::1]:2"), processes=3, drain_s=0.25),
    limits=LimitsConfig(rows=7),
    models=(ModelConfig(name="m", path="/models/m", version="2"),),
)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ChildProcess]:
    child = ChildProcess(1, tmp_path, CONFIG)
    yield child
    child.close()


def notify(process: ChildProcess, folder: Path, text: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto(text.encode(), str(folder / "notify"))
    process.read_notices()


def test_drain_is_not_replaced_by_a_reload(process: ChildProcess, tmp_path: Path) -> None:
    for action in ("reload", "drain", "reload"):
        notify(process, tmp_path, f"X_ISKANDER_ACTION={action}")
    assert process.action == "drain"


def test_silence_is_measured_from_the_last_notification(
    process: ChildProcess, tmp_path: Path
) -> None:
    assert process.silent_s(60 * NS_PER_S) == 0.0  # No process runs.
    os.close(process.start([sys.executable, "-c", "import time; time.sleep(60)"], CONFIG))
    started = process.notified_ns
    assert not process.has_notified and process.silent_s(started + 60 * NS_PER_S) == 60.0
    notify(process, tmp_path, "WATCHDOG=1")
    assert process.has_notified and not process.is_ready and process.notified_ns > started
    notify(process, tmp_path, "READY=1\nX_ISKANDER_READY=1")
    assert process.is_ready and process.has_ready_models
    notified_ns = process.notified_ns
    assert process.silent_s(notified_ns + 60 * NS_PER_S) == 60.0
    notify(process, tmp_path, "WATCHDOG=1")
    assert process.notified_ns > notified_ns
    assert process.is_ready and process.has_ready_models
    notify(process, tmp_path, "STOPPING=1")
    assert not process.is_ready
    assert process.silent_s(process.notified_ns + 60 * NS_PER_S) == 60.0
    process.kill()
    assert process.reap() == (-9, False)
    assert process.silent_s(process.notified_ns + 60 * NS_PER_S) == 0.0


def test_settings_round_trip_through_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISKANDER_LIMITS__ROWS", "8")
    path = write_settings(CONFIG, tmp_path)
    server = replace(CONFIG.server, runtime_directory=str(tmp_path))
    assert read_settings(path) == replace(CONFIG, server=server)


def test_invalid_settings_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    with pytest.raises(ConfigError, match=r"settings\.json cannot be read"):
        read_settings(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"settings\.json is not a settings file of a parent"):
        read_settings(path)


def test_child_receives_settings_and_watchdog_interval(
    process: ChildProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_PID", "1")
    output = tmp_path / "out"
    code = (
        f"import os, sys; open({str(output)!r}, 'w').write(repr((sys.argv[1:], dict(os.environ))))"
    )
    os.close(process.start([sys.executable, "-c", code], CONFIG))
    assert process.reap() == (0, False)
    arguments, environment = eval(output.read_text())
    assert arguments == ["--config", str(tmp_path / "settings.json"), "--process", "1"]
    assert environment["WATCHDOG_USEC"].isdigit() and "WATCHDOG_PID" not in environment
    assert process.failures == 1


def test_changed_inferential_address_requires_a_restart() -> None:
    other = replace(CONFIG, inferential=replace(CONFIG.inferential, address="tcp://*:9"))
    assert fixed(other) != fixed(CONFIG)


def configuration(*models: dict[str, Any], **sections: Any) -> Config:
    named = [{"path": "p", "version": "1", **model} for model in models]
    return msgspec.convert({"models": named, **sections}, Config)


SHARED = {"name": "shared"}
OWN = {"name": "own", "backend": "python"}
GPU = {"name": "gpu", "execution_providers": ["cuda"], "gpu_memory_bytes": 1}
FOLDER = {"path": "models"}


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        (configuration(OWN), configuration(OWN, SHARED), ["shared workers"]),
        (configuration(OWN), configuration(OWN, repository=FOLDER), ["shared workers"]),
        (configuration(GPU), configuration(GPU, repository=FOLDER), ["shared workers"]),
        (
            configuration(OWN),
            configuration(OWN | {"backend": "remote"}),
            ["workers of models"],
        ),
        (
            configuration(OWN),
            configuration(OWN | {"placement": "gpu"}),
            ["workers of models", "GPUs of models"],
        ),
        (
            configuration(),
            configuration(workers={"reattach_s": 1.0}, admin={"log_format": "json"}),
            ["workers.reattach_s", "admin.log_format"],
        ),
        (
            configuration(),
            configuration(server={"runtime_directory": "/run/other"}),
            ["server.runtime_directory"],
        ),
        (configuration(SHARED), configuration(SHARED, SHARED | {"name": "second"}), []),
        (configuration(SHARED), configuration(SHARED, repository=FOLDER), []),
        (configuration(OWN), configuration(OWN | {"max_batch_rows": 7}), []),
    ],
)
def test_change_of_the_worker_plan_requires_a_restart(
    before: Config, after: Config, names: list[str]
) -> None:
    """Running workers have the slots of the previous plan."""
    for one, other in ((before, after), (after, before)):
        found, wanted = fixed(one), fixed(other)
        assert [name for name in found if found[name] != wanted[name]] == names
