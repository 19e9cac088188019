"""Examples with unusual columns, compared with their NumPy implementations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support import examples


@pytest.mark.slow
def test_lidar_scores_clouds_of_any_length(tmp_path: Path) -> None:
    """A cloud has the same scores in a batch of all buckets as alone and unpadded."""
    example = examples.module("lidar")
    random = np.random.default_rng(7)
    lengths = [3, 700, 64, 65, 0, 1024, 12, 256, 1500, 9]
    clouds = [
        random.normal(size=(length, example.FEATURES)).astype(np.float32) for length in lengths
    ]
    points = pa.array([cloud.tolist() for cloud in clouds], pa.list_(pa.list_(pa.float32(), 4)))
    frames = pa.array(range(len(clouds)))
    with examples.served("lidar", tmp_path) as gateway, gateway.client() as client:
        result = client.score("lidar", pa.record_batch({"frame": frames, "points": points}))
        batches = [pa.record_batch({"frame": frames[n : n + 1], "points": points[n : n + 1]})
                   for n in range(3)]  # fmt: skip
        alone = [batch["scores"][0].as_py() for batch in client.stream("lidar", batches)]
    assert result["frame"].to_pylist() == frames.to_pylist()
    expected = np.array([example.classify(cloud[:1024]) for cloud in clouds])
    np.testing.assert_allclose(result["scores"].to_pylist(), expected, atol=1e-5)
    np.testing.assert_allclose(alone, expected[:3], atol=1e-5)


def test_sensor_anomaly_scores_a_stream_of_windows(tmp_path: Path) -> None:
    """Some readings are missing, and one window is an outlier."""
    example = examples.module("sensor-anomaly")
    random = np.random.default_rng(8)
    begins = 1_700_000_000 + 3600 * np.arange(30)
    wave = example.LEVEL + example.SWING * np.sin(2 * np.pi * (begins / 3600 % 24) / 24)
    readings = wave[:, None] + random.normal(0, example.NOISE, (30, example.WINDOW))
    readings[17] += 9
    missing = random.random(readings.shape) < 0.01
    flat = pa.array(readings.reshape(-1), mask=missing.reshape(-1))
    windows = pa.FixedSizeListArray.from_arrays(flat, example.WINDOW)
    moments = pa.array(begins, pa.timestamp("s", "America/Lima")).cast(
        pa.timestamp("us", "America/Lima")
    )
    names = pa.array([f"s{n % 3}" for n in range(30)])
    whole = pa.record_batch({"sensor": names, "begins": moments, "readings": windows})
    with examples.served("sensor-anomaly", tmp_path) as gateway, gateway.client() as client:
        results = list(
            client.stream("sensor-anomaly", [whole.slice(n, 5) for n in range(0, 30, 5)])
        )
    result = pa.Table.from_batches(results)
    expected = example.score(begins / 3600, np.where(missing, 20.0, readings))
    assert result.column_names == ["sensor", "score", "is_unusual"]
    assert result["sensor"].to_pylist() == names.to_pylist()
    np.testing.assert_allclose(result["score"].to_numpy(), expected, rtol=1e-3, atol=1e-3)
    assert result["is_unusual"].to_pylist() == (result["score"].to_numpy() >= 4.0).tolist()
    assert result["is_unusual"][17].as_py() and not all(result["is_unusual"].to_pylist())
