"""Thread pools of ONNX models in one worker: one for each model, or one for all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support import models
from support.processes import Gateway, running

SEVERAL_CPUS = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one cpu")
COUNT = 4


def served(folder: Path) -> list[dict[str, Any]]:
    return [
        {"name": f"ids{at}", "path": str(models.row_ids(folder / f"ids{at}"))}
        for at in range(COUNT)
    ]


def threads_of(gateway: Gateway) -> int:
    """Number of threads of the only worker, after one request to every model."""
    with gateway.client() as client:
        for at in range(COUNT):
            result = client.score(f"ids{at}", pa.record_batch({"x": [1, 2]}))
            assert result["y"].to_pylist() == [4, 7]
    (worker,) = gateway.stats()["workers"]
    return len(os.listdir(f"/proc/{worker['pid']}/task"))


@SEVERAL_CPUS
def test_one_pool_serves_all_models_of_a_worker(tmp_path: Path) -> None:
    """A pool has one thread fewer than cores, because the calling thread works too."""
    counts = {}
    for kind in ("model", "worker"):
        folder = tmp_path / kind
        folder.mkdir()
        workers = {"thread_pool": kind, "count": 1}
        with running(folder, served(folder), workers=workers) as gateway:
            cores = gateway.stats()["workers"][0]["cores"]
            counts[kind] = threads_of(gateway)
    assert counts["model"] - counts["worker"] == (COUNT - 1) * (cores - 1)
