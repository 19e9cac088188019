"""Monitors of model versions: sources of references, recordings, verdicts, and changed files."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from iskander.config.drift import DriftConfig
from iskander.foundation.clock import NS_PER_S
from iskander.gateway.observation.drift_report import ModelDrift
from iskander.sampling.drift.monitor import ModelMonitor
from iskander.sampling.drift.reference import FILE, read_reference

CONFIG = DriftConfig(enabled=True, window_s=60.0, rows_min=500, record_rows=2000)
NOW = 1_000_000 * NS_PER_S
WARM_UP = """
format = 1
[[inputs]]
tensor = "t"
column = "x"
type = "float32"
[[outputs]]
column = "y"
type = "float32"
tensor = "u"
[warm_up]
samples = "samples.npz"
results = "results.npz"
"""
PACKED = """
format = 1
[[inputs]]
tensor = "t"
columns = ["age", "income"]
[[outputs]]
column = "y"
type = "float32"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path


def open_monitor(folder: Path, config: DriftConfig = CONFIG) -> ModelMonitor:
    recording = folder / "references" / "m@1.msgpack"
    return ModelMonitor("m", "1", config, 50, folder / "model", recording)


def feed(monitor: ModelMonitor, rows: int, *, mean: float = 0.0, now_ns: int = NOW) -> ModelDrift:
    random = np.random.default_rng(rows)
    for part in np.array_split(random.normal(mean, size=rows), 10):
        inputs = pa.record_batch({"x": pa.array(part, pa.float32())})
        monitor.add(now_ns, inputs, pa.record_batch({"y": pa.array(part * 2, pa.float32())}))
    return monitor.compare(now_ns)


def test_first_rows_are_recorded_and_then_compared(folder: Path) -> None:
    monitor = open_monitor(folder)
    found = feed(monitor, 1000)
    assert (found.reference, found.reference_rows, found.rows) == ("recording", 1000, 1000)
    assert found.states["input"] == {"drifting": 0, "steady": 0, "unjudged": 1}
    found = feed(monitor, 1000)
    assert (found.reference, found.reference_rows) == ("live", 2000)
    assert found.states == {
        side: {"drifting": 0, "steady": 1, "unjudged": 0} for side in ("input", "output")
    }
    found = feed(monitor, 3000, mean=2.0)
    assert found.states["input"]["drifting"] == found.states["output"]["drifting"] == 1
    worst = found.columns[0]
    assert worst.state == "drifting" and worst.severity > 1
    assert {"psi", "ks"} <= set(worst.exceeded)
    assert worst.recent.mean is not None and worst.reference is not None
    assert worst.reference.mean == pytest.approx(0, abs=0.2)
    assert len(worst.recent.quantiles) == 3


def test_recent_samples_only_are_compared(folder: Path) -> None:
    monitor = open_monitor(folder)
    feed(monitor, 2000)
    assert feed(monitor, 3000, mean=2.0).states["input"]["drifting"] == 1
    later_ns = NOW + 120 * NS_PER_S
    assert monitor.compare(later_ns).rows == 0
    assert feed(monitor, 2000, now_ns=later_ns).states["input"]["steady"] == 1


def test_recording_continues_after_a_restart(folder: Path) -> None:
    monitor = open_monitor(folder)
    feed(monitor, 1500)
    monitor.save(NOW)
    monitor = open_monitor(folder)
    assert monitor.compare(NOW).reference_rows == 1500
    assert feed(monitor, 500).reference == "live"
    monitor = open_monitor(folder)
    found = monitor.compare(NOW)
    assert (found.reference, found.reference_rows) == ("live", 2000)
    stored = read_reference(folder / "references" / "m@1.msgpack")
    assert stored is not None and stored.is_complete and stored.created_s == NOW // NS_PER_S
    monitor.save(NOW)
    assert read_reference(folder / "references" / "m@1.msgpack") == stored


def test_first_complete_recording_serves_all_processes(folder: Path) -> None:
    """The others store an unfinished one, or finish theirs, before they have seen it."""
    first, second, third = (open_monitor(folder) for _ in range(3))
    feed(second, 500)
    feed(third, 1900)
    feed(first, 2000)
    stored = read_reference(folder / "references" / "m@1.msgpack")
    second.save(NOW)
    assert feed(third, 100, mean=9.0).reference == "live"
    assert read_reference(folder / "references" / "m@1.msgpack") == stored
    assert third.compare(NOW).reference_rows == second.compare(NOW).reference_rows == 2000
    assert feed(second, 1000, mean=2.0).states["input"]["drifting"] == 1


def test_file_beside_the_model_is_found_after_a_recording_is_stored(folder: Path) -> None:
    """It appears between two checks, and a check compares with the files after the store."""
    trained = open_monitor(folder / "other", CONFIG)
    feed(trained, 2000)
    monitor = open_monitor(folder)
    feed(monitor, 500)
    (folder / "other/references/m@1.msgpack").rename(folder / "model" / FILE)
    monitor.save(NOW)
    monitor.reload()
    assert monitor.compare(NOW).reference == "training"


def test_nothing_is_recorded_if_it_is_off(folder: Path) -> None:
    monitor = open_monitor(folder, DriftConfig(enabled=True, references=("training", "warm-up")))
    found = feed(monitor, 1000)
    monitor.save(NOW)
    assert found.reference == "" and found.states["input"]["unjudged"] == 1
    assert not (folder / "references").exists()


def test_file_beside_the_model_is_preferred_and_read_again(folder: Path) -> None:
    monitor = open_monitor(folder)
    feed(monitor, 2000)
    recorded = folder / "references" / "m@1.msgpack"
    trained = open_monitor(folder / "other", CONFIG)
    feed(trained, 2000, mean=5.0)
    (folder / "other/references/m@1.msgpack").rename(folder / "model" / FILE)
    monitor.reload()
    found = monitor.compare(NOW)
    assert found.reference == "training" and found.states["input"]["drifting"] == 1
    assert recorded.exists()
    (folder / "model" / FILE).unlink()
    monitor.reload()
    assert monitor.compare(NOW).reference == "live"
    recorded.unlink()
    monitor.reload()
    assert monitor.compare(NOW).reference == "recording"


def test_damaged_file_is_reported_and_the_next_source_is_used(folder: Path) -> None:
    (folder / "model" / FILE).write_bytes(b"damaged")
    found = feed(open_monitor(folder), 2000)
    assert found.reference == "live" and FILE in found.problem


def test_file_that_cannot_be_written_is_reported(folder: Path) -> None:
    (folder / "references").write_bytes(b"")
    monitor = open_monitor(folder)
    monitor_of_more = open_monitor(folder, msgspec.structs.replace(CONFIG, record_rows=9000))
    found = feed(monitor, 2000)
    assert found.reference == "live" and "cannot be written" in found.problem
    feed(monitor_of_more, 500)
    monitor_of_more.save(NOW)
    assert "cannot be written" in monitor_of_more.compare(NOW).problem
    (folder / "references").unlink()
    monitor_of_more.save(NOW)
    assert not monitor_of_more.compare(NOW).problem


@pytest.mark.parametrize("rows", [499, 500])
def test_recorded_batches_of_the_manifest(folder: Path, rows: int) -> None:
    (folder / "model/manifest.toml").write_text(WARM_UP)
    values = np.random.default_rng(0).normal(size=rows).astype(np.float32)
    np.savez(folder / "model/samples.npz", t=values)
    np.savez(folder / "model/results.npz", u=values * 2)
    found = open_monitor(folder).compare(NOW)
    if rows < CONFIG.rows_min:
        assert found.reference == "recording"
        return
    assert (found.reference, found.reference_rows) == ("warm-up", rows)
    monitor = open_monitor(folder)
    assert feed(monitor, 1000).states["output"]["steady"] == 1
    assert feed(monitor, 3000, mean=2.0).states["output"]["drifting"] == 1


@pytest.mark.parametrize("damage", ["all", "zip version", "compression"])
def test_damaged_batches_of_the_manifest(folder: Path, damage: str) -> None:
    (folder / "model/manifest.toml").write_text(WARM_UP)
    file = io.BytesIO()
    np.savez_compressed(file, t=np.arange(100.0))
    data = bytearray(file.getvalue())
    if damage == "all":
        data[:] = b"damaged"
    elif damage == "zip version":
        data[data.index(b"PK\1\2") + 6] = 0xFF
    else:
        data[60:80] = b"\xff" * 20
    (folder / "model/samples.npz").write_bytes(data)
    found = open_monitor(folder).compare(NOW)
    assert found.reference == "recording" and "warm-up samples" in found.problem


def test_packed_columns_have_their_names(folder: Path) -> None:
    (folder / "model/manifest.toml").write_text(PACKED)
    monitor = open_monitor(folder)
    array = pa.array([[1.0, 2.0]] * 10, pa.list_(pa.float32(), 2))
    monitor.add(NOW, pa.record_batch({"t": array}), pa.record_batch({"y": pa.array([0.0] * 10)}))
    names = {column.column for column in monitor.compare(NOW).columns}
    assert names == {"t[age]", "t[income]", "y"}


def test_only_the_named_sources_are_used(folder: Path) -> None:
    monitor = open_monitor(folder)
    feed(monitor, 2000)
    recorded = folder / "references" / "m@1.msgpack"
    (folder / "model" / FILE).write_bytes(recorded.read_bytes())
    recorded.unlink()
    for references, origin in ((("live",), "recording"), (("live", "training"), "training")):
        config = msgspec.structs.replace(CONFIG, references=references)
        assert open_monitor(folder, config).compare(NOW).reference == origin
