"""Commands: help, check, manifest, models, config, quickstart."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from onnx import TensorProto
from support import models
from support.processes import BIN, running

import iskander

ROOT = models.ROOT


def run(*command: object, code: int = 0) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("command", ["iskander", "iskander-gateway", "iskander-worker"])
def test_help_fits_a_screen(command: str) -> None:
    text = run(BIN / command, "--help")
    assert len(text.splitlines()) <= (42 if command == "iskander" else 24)
    assert all(len(line) <= 80 for line in text.splitlines())


def test_check_prints_the_plan() -> None:
    text = run(BIN / "iskander", "check", ROOT / "configs" / "quickstart.toml")
    assert "movielens-two-tower/1" in text and "CPUExecutionProvider" in text
    assert "user_id int64, item_id int64" in text and "shared memory 320 MiB" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("limits.rows=0", "limits.rows = 0: Expected `int` >= 1"),
        ("limits.lines=1", "limits: Object contains unknown field `lines`"),
        ("workers.count=1000", "puts 1000 workers on the"),
        ('workers.groups=["9999"]', "may not use the cpus [9999]"),
        ('workers.groups="l2"', "workers.groups"),
        ('server.cores="9999"', "may not use the cpus [9999]"),
        ("server.cores=most", "expected `auto` or a cpu list"),
        ("arena.output_bytes=4096", "raise arena.output_bytes"),
        ("arena.input_bytes=4096", "does not fit in the arena"),
        ("server.address=nonsense", "expected HOST:PORT"),
        ("server.address=unix:/nonexistent/x.sock", "in an existing folder"),
        ("server.unix_owner=nobodyxx", "no such user or group"),
        ("admin.address=0.0.0.0:0", "open to the network without TLS and tokens"),
        ('inferential.address="tcp://*:0"', 'allow_unprotected_network = ["inferential.address"]'),
    ],
)
def test_check_and_start_print_the_same_config_error(change: str, words: str) -> None:
    """The error has the setting, its value and the rule, but no traceback."""
    file = ROOT / "configs" / "quickstart.toml"
    text = run(BIN / "iskander", "check", file, "--set", change, code=78)
    assert words in text and "Traceback" not in text
    text = run(
        BIN / "iskander-gateway", "--config", file, "--set", "server.address=127.0.0.1:0",
        "--set", change, code=78,
    )  # fmt: skip
    assert words in text and "Traceback" not in text


def test_manifest_is_derived_and_read_back(tmp_path: Path) -> None:
    ids = models.row_ids(tmp_path / "ids")
    text = run(BIN / "iskander", "manifest", ids / "model.onnx")
    (ids / "manifest.toml").write_text(text)
    assert run(BIN / "iskander", "manifest", ids) == text
    assert 'column = "x"' in text and 'type = "int64"' in text
    words = models.identity(tmp_path / "words", TensorProto.STRING, ["rows", 2])
    assert run(BIN / "iskander", "manifest", words).count('"fixed_size_list<utf8>[2]"') == 2
    assert "not found at the configured path" in run(
        BIN / "iskander", "manifest", tmp_path / "none", code=78
    )


def test_config_show_prints_the_origin_of_each_value() -> None:
    text = run(
        BIN / "iskander", "config", "show", ROOT / "configs" / "quickstart.toml",
        "--set", "limits.streams=7",
    )  # fmt: skip
    lines = {line.split()[0]: line.split() for line in text.splitlines()}
    assert lines["limits.streams"] == ["limits.streams", "--set", "7"]
    assert lines["server.address"][1] == "file"
    assert lines["limits.rows"][1] == "default"


def test_config_reference_is_a_valid_configuration(tmp_path: Path) -> None:
    text = run(BIN / "iskander", "config", "reference")
    file = tmp_path / "all.toml"
    path = models.TWO_TOWER
    file.write_text(f'{text}\n[[models]]\nname = "m"\npath = "{path}"\nintra_threads = 1\n')
    run(BIN / "iskander", "check", file)


def test_models_lists_the_models_of_a_running_server(tmp_path: Path) -> None:
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids")), "intra_threads": 1}]
    with running(tmp_path, served) as gateway:
        text = run(BIN / "iskander", "models", "--address", gateway.address)
        names = {psutil.Process(pid).name() for pid in gateway.worker_pids()}
        assert psutil.Process(gateway.pid).name() == "isk-gateway"
        assert names == {"isk-worker-0"}
    assert text.splitlines()[1].split() == ["ids", "1", "ready", "x", "int64", "y", "int64"]


@pytest.mark.parametrize("command", ["iskander", "iskander-gateway", "iskander-worker"])
def test_version_shows_the_kind_of_build(command: str) -> None:
    arena = find_spec("iskander.interprocess.memory.arena")
    assert arena is not None and arena.origin is not None
    build = "interpreted" if arena.origin.endswith(".py") else "compiled"
    assert run(BIN / command, "--version").startswith(
        f"{command} {iskander.__version__} ({build}, CPython 3."
    )


def test_quickstart_scores_and_cleans_up() -> None:
    """`make quickstart` runs this script."""
    text = run(sys.executable, ROOT / "scripts" / "quickstart.py")
    assert "predicted" in text and "1,861 rows in 15 batches" in text
    assert text.endswith("stopped: exit code 0, nothing left behind\n")


@pytest.mark.parametrize("command", ["models", "stats"])
def test_missing_gateway_is_reported_in_one_line(command: str) -> None:
    text = run(BIN / "iskander", command, "--address", "127.0.0.1:1", code=69)
    assert text.startswith("iskander: no gateway answers at 127.0.0.1:1")
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("lanes.policy=nonsense", "available: deadline_aware"),
        ("workers.quorum=9", "can never be met"),
        ("admin.address=here", "expected HOST:PORT"),
        ("http.address=here", "expected HOST:PORT"),
        ("http.address=127.0.0.1:50051", "port already used by server.address"),
        ("http.address=127.0.0.1:50052", "port already used by admin.address"),
        ("lanes.pad_to=[1000000]", "is more than max_batch_rows"),
    ],
)
def test_check_and_start_reject_the_same_settings(setting: str, words: str) -> None:
    file = ROOT / "configs" / "quickstart.toml"
    assert words in run(BIN / "iskander", "check", file, "--set", setting, code=78)
    assert words in run(BIN / "iskander-gateway", "--config", file, "--set", setting, code=78)
