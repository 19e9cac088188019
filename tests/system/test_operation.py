"""Reload and drain of a running gateway: by command, by signal, without permission."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.models import row_ids
from support.processes import BIN, Gateway, Notices, eventually, running

from iskander.errors import DeadlineExceeded, LimitExceeded
from iskander.gateway.auth.tokens import add_token

ROWS = pa.record_batch({"x": pa.array([1, 2, 3], pa.int64())})


class Operated:
    """A gateway with an operator's token and a token without it."""

    def __init__(self, gateway: Gateway, tokens: dict[str, str]) -> None:
        self.gateway = gateway
        self.tokens = tokens

    def iskander(self, *words: str, token: str = "operator", code: int = 0) -> str:
        """Run a command with a token; return its output."""
        environment = {key: value for key, value in os.environ.items() if key != "ISKANDER_TOKEN"}
        if token:
            environment["ISKANDER_TOKEN"] = self.tokens[token]
        done = subprocess.run(
            [str(BIN / "iskander"), *words, "--address", self.gateway.address],
            env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    def change(self, old: str, new: str) -> None:
        """Replace a text of the configuration."""
        text = self.gateway.config.read_text()
        assert old in text
        self.gateway.config.write_text(text.replace(old, new))


@contextmanager
def operated(folder: Path, **sections: Any) -> Iterator[Operated]:
    file = folder / "tokens.toml"
    tokens = {
        "operator": add_token(file, "operator", ("*",), manage=True),
        "caller": add_token(file, "caller", ("*",)),
        "some models": add_token(file, "some", ("ids*",), manage=True),
    }
    served = [{"name": "ids", "path": str(row_ids(folder / "ids")), "max_batch_rows": 2}]
    with running(
        folder,
        served,
        token=tokens["operator"],
        access={"tokens": "tokens.toml"},
        workers={"count": 1},
        limits={"rows": 100},
        lanes={"queue_requests": 100},
        **sections,
    ) as gateway:
        yield Operated(gateway, tokens)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    with operated(tmp_path_factory.mktemp("operated")) as each:
        yield each


@pytest.fixture
def restored(server: Operated) -> Iterator[Operated]:
    """The server, whose configuration is restored."""
    text = server.gateway.config.read_text()
    yield server
    server.gateway.config.write_text(text)
    server.iskander("reload")


def test_reload_applies_live_settings(restored: Operated) -> None:
    """No worker is replaced, and an open stream keeps its limits."""
    gateway, pids = restored.gateway, restored.gateway.worker_pids()
    restored.change("rows = 100", "rows = 2")
    restored.change("queue_requests = 100", "queue_requests = 7")

    def batches() -> Iterator[pa.RecordBatch]:
        yield ROWS
        outcome = json.loads(restored.iskander("reload", "--json"))
        assert outcome == {
            "changed": ["limits.rows", "lanes.queue_requests", "models[ids/1].lane.queue_requests"]
        }
        yield ROWS

    with gateway.client() as client:
        assert [result.num_rows for result in client.stream("ids", batches())] == [3, 3]
        with pytest.raises(LimitExceeded, match=r"limit 2 \(`limits\.rows`\)"):
            client.score("ids", ROWS)
        assert client.score("ids", ROWS.slice(0, 2)).num_rows == 2
    assert gateway.worker_pids() == pids
    assert restored.iskander("reload") == "changed: nothing\n"


def test_reload_that_needs_a_restart_changes_nothing(restored: Operated) -> None:
    restored.change("rows = 100", "rows = 2")
    restored.change("[workers]", "[workers]\nstart_s = 77.0")
    for _ in range(2):
        text = restored.iskander("reload", code=78)
        assert "workers.start_s (workers are placed and set up when they start)" in text
        assert "limits.rows" not in text
        with restored.gateway.client() as client:
            assert client.score("ids", ROWS).num_rows == 3


def test_lane_settings_apply_to_the_next_request(restored: Operated) -> None:
    old = [(ROWS.slice(0, 1), {"timestamp_ns": 1})]
    with restored.gateway.client() as client:
        assert [each.num_rows for each in client.stream("ids", old)] == [1]
        restored.change("queue_requests = 100", "queue_requests = 100\nstaleness_ms = 1000.0")
        restored.iskander("reload")
        with pytest.raises(DeadlineExceeded, match=r"`lanes\.staleness_ms`"):
            list(client.stream("ids", old))


def test_reload_changes_the_log_level(restored: Operated) -> None:
    restored.change("[admin]", '[admin]\nlog_level = "error"')
    restored.iskander("reload")
    lines = len(restored.gateway.text().splitlines())
    restored.change("rows = 100", "rows = 99")
    restored.iskander("reload")
    assert len(restored.gateway.text().splitlines()) == lines


def test_signal_reloads_and_reports_to_the_service_manager(tmp_path: Path) -> None:
    notices = Notices()
    served = [{"name": "ids", "path": str(row_ids(tmp_path / "ids")), "max_batch_rows": 2}]
    gateway = Gateway(tmp_path, served, limits={"rows": 100})
    with gateway.log.open("ab") as log:
        gateway.process = subprocess.Popen(
            [BIN / "iskander-gateway", "--config", gateway.config],
            stdout=log, stderr=log, env=os.environ | {"NOTIFY_SOCKET": notices.path},
        )  # fmt: skip
    try:
        gateway.address = notices.wait_for("X_ISKANDER_ADDRESS", gateway)
        text = gateway.config.read_text()
        for changed, words in (
            (text.replace("rows = 100", "rows = 50"), "; limits.rows changed"),
            ("nonsense", "; reload rejected: iskander.toml is not TOML"),
        ):
            notices.lines.clear()
            gateway.config.write_text(changed)
            gateway.signal(signal.SIGHUP)
            # `RELOADING` comes first, and `READY` ends the reload.
            assert notices.wait_for("RELOADING", gateway) == "1"
            assert notices.wait_for("MONOTONIC_USEC", gateway).isdecimal()
            assert notices.wait_for("READY", gateway) == "1"
            assert words in notices.wait_for("STATUS", gateway)
        with gateway.client() as client:
            assert client.score("ids", ROWS).num_rows == 3
        assert gateway.stop() == 0
    finally:
        gateway.end()
        notices.close()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("rows = 100", "rows = 0", "limits.rows = 0: Expected `int` >= 1"),
        ("rows = 100", "lines = 1", "unknown field `lines`"),
        ("rows = 100", "rows = 1", "max_batch_rows = 2 is more than limits.rows = 1"),
        ('tokens = "tokens.toml"', 'tokens = "none.toml"', "none.toml cannot be read"),
    ],
)
def test_reload_of_an_invalid_file_changes_nothing(
    restored: Operated, old: str, new: str, words: str
) -> None:
    restored.change(old, new)
    assert words in restored.iskander("reload", code=78)
    with restored.gateway.client() as client:
        assert client.score("ids", ROWS).num_rows == 3


@pytest.mark.parametrize("command", ["reload", "drain"])
@pytest.mark.parametrize("token", ["", "caller", "some models"])
def test_operation_requires_a_token_for_all_models(
    server: Operated, command: str, token: str
) -> None:
    words = "token" if not token else "which needs manage = true for all models"
    assert words in server.iskander(command, token=token, code=77)
    server.gateway.wait_ready()


@pytest.mark.parametrize(("command", "number"), [("reload", "SIGHUP"), ("drain", "SIGTERM")])
def test_server_without_tokens_refuses_operation(
    unprotected: Gateway, command: str, number: str
) -> None:
    text = Operated(unprotected, {}).iskander(command, token="", code=77)
    assert f"{command} needs a token, and this server has none (`access.tokens`)" in text
    assert f"send {number} to the process" in text
    unprotected.wait_ready()


@pytest.fixture(scope="module")
def unprotected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("unprotected")
    with running(folder, [{"name": "ids", "path": str(row_ids(folder / "ids"))}]) as gateway:
        yield gateway


def test_drain_finishes_accepted_batches_and_ends_the_server(tmp_path: Path) -> None:
    """A second call during the drain does not force the end."""
    with operated(tmp_path, server={"lame_duck_s": 1.0}) as server:
        gateway = server.gateway

        def batches() -> Iterator[pa.RecordBatch]:
            yield ROWS
            with gateway.client() as client:
                assert client.drain() == {"state": "draining"}
                eventually(lambda: not client.health()["ready"], what="the lame duck")
                assert client.drain() == {"state": "draining"}
            yield ROWS  # Accepted in the lame duck.

        with gateway.client() as client:
            assert sum(result.num_rows for result in client.stream("ids", batches())) == 6
        assert gateway.wait() == 0
        assert "stopped" in gateway.text()


def test_first_signal_during_a_drain_by_call_does_not_force_the_end(tmp_path: Path) -> None:
    """A service manager sends it after a drain by an operator or a hook."""
    with operated(tmp_path, server={"lame_duck_s": 1.0}) as server:
        server.iskander("drain", "--timeout-s", "0")
        server.gateway.signal(signal.SIGTERM)
        assert server.gateway.wait() == 0
        assert "stopped" in server.gateway.text()


def test_drain_waits_for_the_end(tmp_path: Path) -> None:
    with operated(tmp_path) as server:
        outcome = json.loads(server.iskander("drain", "--json"))
        assert outcome == {"address": server.gateway.address, "state": "stopped"}
        assert server.gateway.wait() == 0
        text = server.iskander("drain", code=69)
        assert "no gateway answers" in text


def test_drain_that_takes_longer_fails(tmp_path: Path) -> None:
    with operated(tmp_path, server={"lame_duck_s": 3.0}) as server:
        text = server.iskander("drain", "--timeout-s", "0.5", code=1)
        assert text.endswith(": draining\n")
        assert server.gateway.wait() == 0


@pytest.mark.slow
def test_operation_of_several_processes(tmp_path: Path) -> None:
    """The process that answers passes the action on to the parent."""
    with operated(tmp_path, server={"processes": 2}) as server:
        server.change("rows = 100", "rows = 2")
        assert json.loads(server.iskander("reload", "--json")) == {"state": "reloading"}
        text = server.gateway.text
        outcome = "reloaded: limits.rows changed"
        eventually(lambda: text().count(outcome) == 3, what="the reload of all processes")
        assert "is replaced" not in text()
        with server.gateway.client() as client, pytest.raises(LimitExceeded):
            client.score("ids", ROWS)
        server.iskander("drain")
        assert server.gateway.wait() == 0
