"""`iskander top` in a terminal, and its snapshots without one."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support import models
from support.processes import BIN, Gateway, eventually, running, suspended
from support.terminal import Terminal, terminal

BATCH = pa.RecordBatch.from_pydict({"x": pa.array(range(7), pa.int64())})


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with two models; `ids` has requests all the time."""
    folder = tmp_path_factory.mktemp("top")
    path = str(models.row_ids(folder))
    served = [{"name": name, "path": path} for name in ("ids", "other")]
    with running(folder, served, workers={"groups": ["0"], "count": 1}) as gateway:
        is_over = threading.Event()

        def load() -> None:
            with gateway.client() as client:
                while not is_over.wait(0.01):
                    client.score("ids", BATCH)

        loading = threading.Thread(target=load)
        loading.start()
        yield gateway
        is_over.set()
        loading.join()


@pytest.fixture
def top(gateway: Gateway) -> Iterator[Terminal]:
    with terminal(command(gateway, "--interval", "0.2")) as opened:
        opened.wait_for("ids/1")
        yield opened


def command(gateway: Gateway, *words: str) -> list[str]:
    return [str(BIN / "iskander"), "top", "--address", gateway.address, *words]


def run(gateway: Gateway, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        command(gateway, *words),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def rows(top: Terminal) -> list[str]:
    """Names of the models on the screen."""
    return [line.split()[0] for line in top.lines()[4:] if "/1 " in line]


def test_models_have_rates_and_percentiles(top: Terminal) -> None:
    def values() -> list[str]:
        line = next((line for line in top.lines() if line.startswith("ids/1")), "")
        return line.split()[2:]

    def is_measured() -> bool:
        # req/s, rows/s, queue, p50 ms.
        return len(values()) == 7 and values()[0] not in ("-", "0.00") and values()[3] != "-"

    eventually(is_measured, what="rates of the model with requests")
    assert float(values()[1]) > float(values()[0])
    assert rows(top) == ["ids/1", "other/1"]
    assert "iskander" in top.lines()[0]
    assert "q: quit" in top.lines()[23]


def test_keys_sort_filter_switch_and_quit(top: Terminal) -> None:
    top.press("nn")
    eventually(lambda: rows(top) == ["other/1", "ids/1"], what="names in reverse")
    top.press("/ID")
    eventually(lambda: rows(top) == ["ids/1"], what="the filtered row")
    top.press("\r\t")
    top.wait_for("batch/s")
    assert any(line.startswith("0      ready") for line in top.lines())
    top.press("\t\x1b")
    eventually(lambda: len(rows(top)) == 2, what="all rows")
    top.press("?")
    top.wait_for("A key sorts by its column")

    top.press("q")

    assert top.wait() == 0
    assert top.current_mode() == top.mode
    assert top.received.index(b"\x1b[?1049h") < top.received.index(b"\x1b[?1049l")


def test_pause_keeps_the_screen(top: Terminal) -> None:
    top.press(" ")
    paused = top.wait_for("PAUSED")
    top.press("?")
    top.wait_for("A key sorts")
    top.press("?")
    eventually(lambda: top.lines() == paused, what="the same screen")


def test_screen_follows_the_size_of_the_terminal(top: Terminal) -> None:
    top.resize(40, 8)
    eventually(lambda: top.lines()[7].startswith("tab: view"), what="the last line")
    assert "rej/s" not in " ".join(top.lines())
    top.resize(120, 30)
    eventually(lambda: top.lines()[29].startswith("tab: view"), what="the last line")
    assert "rej/s" in top.lines()[3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_restores_the_terminal(top: Terminal, number: signal.Signals) -> None:
    top.process.send_signal(number)

    assert top.wait() == 128 + number
    assert top.current_mode() == top.mode
    assert b"\x1b[?1049l" in top.received
    assert b"Traceback" not in top.received


def test_keys_work_while_the_server_hangs(gateway: Gateway, top: Terminal) -> None:
    with suspended(gateway.pid):
        top.press("\t")
        top.wait_for("batch/s")
        top.press("q")
        assert top.wait() == 0


def test_snapshot_as_json(gateway: Gateway) -> None:
    found: dict[str, Any] = json.loads(run(gateway, "--json", "--interval", "0.5"))

    ids = next(model for model in found["models"] if model["name"] == "ids/1")
    assert found["interval_s"] >= 0.5
    assert ids["requests_per_s"] > 0
    assert ids["rows_per_s"] == pytest.approx(7 * ids["requests_per_s"], rel=0.01)
    assert 0 < ids["p50_ms"] <= ids["p99_ms"]
    assert found["workers"][0]["state"] == "ready"


@pytest.mark.parametrize("words", [("--once",), ()])
def test_snapshot_as_text_without_a_terminal(gateway: Gateway, words: tuple[str, ...]) -> None:
    lines = run(gateway, "--interval", "0.2", *words).splitlines()

    assert lines[0].split()[:3] == ["model", "state", "req/s"]
    assert [line.split()[0] for line in lines[1:3]] == ["ids/1", "other/1"]
    assert not any("\x1b" in line for line in lines)


def test_invalid_interval_is_a_usage_error(gateway: Gateway) -> None:
    assert "argument --interval" in run(gateway, "--interval", "0.01", code=2)
    assert "argument --interval" in run(gateway, "--interval", "nan", code=2)


def test_missing_rich_names_the_extra(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['rich'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with terminal(command(gateway)) as opened:
        assert opened.wait() == 78
        assert "needs the extra `score` (rich)" in " ".join(opened.lines())
    assert "ids/1" in run(gateway, "--once", "--interval", "0.2")


def test_server_that_ends_is_shown(tmp_path: Path) -> None:
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path))}]
    with (
        running(tmp_path, served, workers={"groups": ["0"], "count": 1}) as gateway,
        terminal(command(gateway, "--interval", "0.2")) as opened,
    ):
        opened.wait_for("ids/1")
        assert gateway.stop() == 0
        eventually(lambda: opened.lines()[1], what="the error")
        assert opened.lines()[4].startswith("ids/1"), "the last values stay"
        opened.press("q")
        assert opened.wait() == 0
