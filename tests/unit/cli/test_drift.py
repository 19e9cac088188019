"""`iskander drift`: table, exit codes, JSON, wrong usage, and batches of a recording."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from iskander.cli import command
from iskander.cli.command import UsageError
from iskander.cli.drift_recording import _send
from iskander.cli.main import build_parser
from iskander.client import ModelDescription
from iskander.errors import ConfigError
from iskander.gateway.observation.drift_report import (
    ColumnDrift,
    DriftReport,
    ModelDrift,
    SideSummary,
)

COLUMNS = (
    ColumnDrift(
        side="input",
        column="x[age]",
        state="drifting",
        exceeded=("psi",),
        severity=2.0,
        measures={"psi": 0.4, "ks": 0.1},
        recent=SideSummary(count=600, mean=54.8312),
        reference=SideSummary(count=900, mean=40.02),
    ),
    ColumnDrift(
        side="output",
        column="y",
        state="unjudged",
        recent=SideSummary(count=6, labels={"a\x1b[31m": 1.0}),
    ),
)
DRIFTING = ModelDrift(
    model="churn",
    version="1",
    reference="live",
    reference_rows=10_000,
    rows=4_120,
    states={"input": {"drifting": 1, "steady": 0, "unjudged": 0}},
    left_out=3,
    problem="a file is damaged",
    columns=COLUMNS,
)
STEADY = ModelDrift(
    model="quiet", version="2", states={"input": {"drifting": 0, "steady": 1, "unjudged": 0}}
)


class Server:
    """Answers `stats` with a report."""

    def __init__(self, observation: dict[str, Any]) -> None:
        self._observation = observation

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {"observation": self._observation}


def show(monkeypatch: pytest.MonkeyPatch, models: tuple[ModelDrift, ...], *options: str) -> int:
    report = {"drift": msgspec.to_builtins(DriftReport(models))}
    return run(monkeypatch, {"report": report}, *options)


def run(monkeypatch: pytest.MonkeyPatch, observation: dict[str, Any], *options: str) -> int:
    monkeypatch.setattr(command, "connect", lambda arguments: Server(observation))
    arguments: argparse.Namespace = build_parser().parse_args(["drift", "show", *options])
    code: int = arguments.run(arguments)
    return code


def test_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(monkeypatch, (DRIFTING, STEADY)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "churn/1: 4,120 recent rows; reference: live, 10,000 rows",
        "inputs: 1 drifting, 0 steady, 0 unjudged",
        "3 columns are not summarized (drift.columns)",
        "a file is damaged",
    ]
    assert lines[5].split() == ["input", "x[age]", "drifting", "0.400!", "0.100", "-", "-", "-",
                                "54.83", "40.02"]  # fmt: skip
    assert lines[6].split() == ["output", "y", "unjudged", *"-----", "a?[31m", "100%", "-"]
    assert lines[7] == "quiet/2: 0 recent rows; reference: none"
    assert max(map(len, lines)) <= 100


def test_one_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(monkeypatch, (DRIFTING, STEADY), "quiet") == 0
    assert "churn" not in capsys.readouterr().out
    assert show(monkeypatch, (DRIFTING, STEADY), "other") == 0
    assert capsys.readouterr().out == "no samples yet\n"


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(monkeypatch, (DRIFTING,), "--json") == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert msgspec.convert(found, ModelDrift) == DRIFTING


@pytest.mark.parametrize("observation", [{}, {"report": {"prediction_log": {}}}])
def test_server_without_drift(monkeypatch: pytest.MonkeyPatch, observation: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"drift\.enabled"):
        run(monkeypatch, observation)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--map", "a"), "expected INPUT=COLUMN"),
        (("--map", "a=b", "--map", "a=c"), "expected INPUT=COLUMN"),
        (("--config", "f.toml"), "--config needs --output"),
    ],
)
def test_wrong_usage_of_record(options: tuple[str, ...], problem: str) -> None:
    arguments = build_parser().parse_args(["drift", "record", "m", "data.parquet", *options])
    with pytest.raises((UsageError, ConfigError), match=problem):
        arguments.run(arguments)


def test_recorded_batches_are_within_the_limits_of_the_server(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(100)}), tmp_path / "in.parquet")
    ten = pa.record_batch({"x": list(range(10))})
    limits = {"rows": 4096, "bytes": pa.ipc.get_record_batch_size(ten), "string_bytes": 1 << 20}
    columns = pa.schema([("x", pa.int64())])
    description = ModelDescription(
        name="m",
        version="1",
        ready=True,
        backend="onnx",
        max_batch_rows=4096,
        limits=limits,
        versions=("1",),
        aliases={},
        input_schema=columns,
        output_schema=columns,
        input_types={"x": "int64"},
        passthrough="none",
        ranked_within=(),
        metadata={},
    )
    sent: list[int] = []

    def stream(name: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            sent.extend(batch["x"].to_pylist())
            assert pa.ipc.get_record_batch_size(batch) <= limits["bytes"]
            yield batch

    client: Any = SimpleNamespace(
        model=lambda name, version: SimpleNamespace(description=description), stream=stream
    )
    files = [str(tmp_path / "in.parquet")]
    assert _send(client, "m", files, {}, plain_files=False) == 100
    assert sent == list(range(100))
