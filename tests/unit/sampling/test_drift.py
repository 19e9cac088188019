"""Consumer of samples: shares, limits, the rhythm of its work, and its report."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from iskander.config.drift import DriftConfig, ModelDriftConfig
from iskander.config.models import ModelConfig
from iskander.foundation.clock import NS_PER_S
from iskander.gateway.observation import drift_report as report
from iskander.gateway.observation.drift_report import DriftReport
from iskander.gateway.observation.messages import FRAME_BYTES_MAX
from iskander.gateway.observation.sampling import is_within, threshold_of
from iskander.sampling import drift_consumer as drift
from iskander.sampling.drift.reference import FILE
from iskander.sampling.drift_consumer import DriftConsumer, recording_file
from iskander.sampling.sample import Sample

CONFIG = DriftConfig(enabled=True, window_s=60.0, rows_min=50, record_rows=200)
NOW = 1_000_000 * NS_PER_S


class Models(dict[tuple[str, str], ModelConfig]):
    """Every model, with a share."""

    def __init__(self, folder: Path, share: float) -> None:
        super().__init__()
        self.folder, self.share = folder, share

    def __missing__(self, key: tuple[str, str]) -> ModelConfig:
        return ModelConfig(
            name=key[0], path=str(self.folder), drift=ModelDriftConfig(share=self.share)
        )


def open_consumer(folder: Path, config: DriftConfig = CONFIG, share: float = 1.0) -> DriftConsumer:
    return DriftConsumer(config, folder / "references", Models(folder, share))


def sample(
    model: str = "m", number: int = 0, *, rows: int = 100, mean: float = 0.0, columns: int = 1
) -> Sample:
    values = np.random.default_rng(number).normal(mean, size=rows)
    inputs = pa.record_batch({f"x{index}": values for index in range(columns)})
    return Sample(model, "1", NOW, rows, f"{number:032x}", inputs, pa.record_batch({"y": values}))


def read_report(consumer: DriftConsumer) -> DriftReport:
    return msgspec.convert(
        msgspec.msgpack.decode(msgspec.msgpack.encode(consumer.report())), DriftReport
    )


def test_drift_is_reported_after_a_tick(tmp_path: Path) -> None:
    consumer = open_consumer(tmp_path)
    consumer.tick(NOW)
    assert read_report(consumer) == DriftReport(counts={"samples": 0, "rows": 0})
    for number in range(4):
        consumer.consume(sample(number=number))
    assert not read_report(consumer).models
    consumer.tick(NOW + NS_PER_S)
    found = read_report(consumer)
    assert found.counts == {"samples": 4, "rows": 400}
    (model,) = found.models
    assert (model.model, model.version, model.reference) == ("m", "1", "live")
    assert model.states["input"]["steady"] == 1
    for number in range(10, 20):
        consumer.consume(sample(number=number, mean=3))
    consumer.tick(NOW + 2 * NS_PER_S)
    (model,) = read_report(consumer).models
    assert model.states["input"]["drifting"] == model.states["output"]["drifting"] == 1


def test_samples_outside_the_share_are_ignored(tmp_path: Path) -> None:
    """The other consumers may have a larger share."""
    consumer = open_consumer(tmp_path, share=0.25)
    for number in range(200):
        consumer.consume(sample(number=number, rows=1))
    consumer.tick(NOW)
    expected = sum(is_within(number, threshold_of(0.25)) for number in range(200))
    assert 20 < expected < 80
    assert read_report(consumer).counts["samples"] == expected


def test_recording_is_stored_at_the_end_and_at_intervals(tmp_path: Path) -> None:
    file = recording_file(tmp_path / "references", "m", "1")
    consumer = open_consumer(tmp_path)
    consumer.tick(NOW)
    consumer.consume(sample())
    consumer.tick(NOW + NS_PER_S)
    assert not file.exists()
    consumer.tick(NOW + drift.SAVE_NS)
    before = file.stat().st_ino
    consumer.close()
    assert file.stat().st_ino != before
    again = open_consumer(tmp_path)
    again.consume(sample(number=1))
    again.tick(NOW)
    assert read_report(again).models[0].reference == "live"


def test_problem_of_a_reference_is_the_failure_of_the_consumer(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"damaged")
    consumer = open_consumer(tmp_path)
    consumer.consume(sample())
    consumer.tick(NOW)
    assert read_report(consumer).failure.startswith("m/1: ")
    (tmp_path / FILE).unlink()
    consumer.tick(NOW + drift.RELOAD_NS)
    consumer.tick(NOW + 2 * drift.RELOAD_NS)
    assert not read_report(consumer).failure


def test_idle_model_versions_are_forgotten_and_their_recordings_kept(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, window_s=6.0)
    consumer = open_consumer(tmp_path, config)
    consumer.tick(NOW)
    consumer.consume(sample())
    idle_ns = int(drift.IDLE_WINDOWS * config.window_s * NS_PER_S)
    consumer.tick(NOW + idle_ns)
    assert len(read_report(consumer).models) == 1
    consumer.tick(NOW + idle_ns + NS_PER_S)
    assert not read_report(consumer).models
    consumer.consume(sample(number=1))
    consumer.tick(NOW + idle_ns + 2 * NS_PER_S)
    assert read_report(consumer).models[0].reference_rows == 200


def test_models_and_columns_above_the_limits(tmp_path: Path) -> None:
    consumer = open_consumer(tmp_path)
    for number in range(report.MODELS_MAX + 3):
        consumer.consume(sample(f"m{number}"))
    consumer.tick(NOW)
    found = read_report(consumer)
    assert len(found.models) == report.MODELS_MAX and found.left_out == 3

    consumer = open_consumer(tmp_path, DriftConfig(enabled=True, columns=900))
    consumer.consume(sample("wide", columns=700))
    consumer.consume(sample("wider", columns=700))
    consumer.consume(sample("narrow"))
    consumer.tick(NOW)
    found = read_report(consumer)
    models = {model.model: model for model in found.models}
    total = sum(sum(states.values()) for m in models.values() for states in m.states.values())
    assert total == drift.COLUMNS_MAX
    assert models["wider"].left_out == 1402 - drift.COLUMNS_MAX
    assert "narrow" not in models and found.left_out == 1


def test_worst_columns_of_all_models_are_listed() -> None:
    def model(name: str, *severities: float) -> report.ModelDrift:
        columns = (
            report.ColumnDrift(side="input", column="x", state="steady", severity=severity)
            for severity in severities
        )
        return report.ModelDrift(model=name, version="1", columns=tuple(columns))

    half = [0.5] * (report.COLUMNS_MAX - 10)
    found = report.limited([model("c", 0.1), model("a", *half), model("b", 3.0, *[0.2] * 100)])
    assert [(each.model, len(each.columns)) for each in found] == [
        ("b", 10), ("a", len(half)), ("c", 0),
    ]  # fmt: skip


@pytest.mark.long
def test_largest_report_fits_in_a_frame(tmp_path: Path) -> None:
    """Names and labels of any length, and the most models and columns."""
    config = msgspec.structs.replace(CONFIG, columns_listed=100)
    consumer = open_consumer(tmp_path, config)
    name, columns = "m" * 120, 9
    labels = pa.array([f"{index:03}{'😀' * 61}" for index in range(100)])
    many = {f"{'é' * 500}{index}": labels for index in range(columns)}
    for number in range(report.MODELS_MAX):
        for each in range(4):
            made = sample(f"{name}{number}", each)._replace(inputs=pa.record_batch(many))
            consumer.consume(made)
    consumer.tick(NOW)
    found = read_report(consumer)
    assert len(found.models) == report.MODELS_MAX
    assert sum(len(model.columns) for model in found.models) > 30
    assert len(msgspec.msgpack.encode(consumer.report())) < FRAME_BYTES_MAX * 3 // 4


def test_most_columns_of_common_names_fit_too(tmp_path: Path) -> None:
    consumer = open_consumer(tmp_path, msgspec.structs.replace(CONFIG, columns_listed=100))
    labels = pa.array([f"label {index}" for index in range(100)])
    many = {f"column {index}": labels for index in range(50)}
    for number in range(16):
        made = sample("m", number)._replace(model=f"m{number % 4}", inputs=pa.record_batch(many))
        consumer.consume(made)
    consumer.tick(NOW)
    found = read_report(consumer)
    assert sum(len(model.columns) for model in found.models) == report.COLUMNS_MAX


def test_long_names_stay_different() -> None:
    """Equal ones would be one series of a metric, with two values."""
    names = {report.shorten(f"{'a' * 60}{index}{'b' * 60}") for index in range(10)}
    assert len(names) == 10
    assert all(len(name) == report.NAME_CHARACTERS for name in names)
    assert report.shorten("x" * 80) == "x" * 80


def test_names_of_files_stay_in_the_folder(tmp_path: Path) -> None:
    for model, version in (("../a", "../b"), ("a/b", "."), ("..", "..")):
        file = recording_file(tmp_path, model, version)
        assert file.parent == tmp_path and file.name not in (".", "..")
    assert recording_file(tmp_path, "a", "b@c") != recording_file(tmp_path, "a@b", "c")


def test_worst_columns_are_listed(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, columns_listed=1)
    consumer = open_consumer(tmp_path, config)
    consumer.consume(sample(number=1, rows=200, columns=3))
    for number in range(2, 12):
        made = sample(number=number, columns=3)
        moved = made.inputs.set_column(1, "x1", pa.array(np.full(100, 9.0)))
        consumer.consume(made._replace(inputs=moved))
    consumer.tick(NOW)
    (model,) = read_report(consumer).models
    assert [column.column for column in model.columns] == ["x1"]
    assert sum(model.states["input"].values()) == 3
