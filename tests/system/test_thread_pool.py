"""Several models of ONNX in one worker: threads of their own, or one pool for all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support import models
from support.processes import Gateway, running

SEVERAL = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one cpu")
COUNT = 4


def served(folder: Path) -> list[dict[str, Any]]:
    return [
        {"name": f"ids{at}", "path": str(models.row_ids(folder / f"ids{at}"))}
        for at in range(COUNT)
    ]


def threads_of(gateway: Gateway) -> int:
    """Of the one worker, once every model has computed."""
    with gateway.client() as client:
        for at in range(COUNT):
            result = client.score(f"ids{at}", pa.record_batch({"x": [1, 2]}))
            assert result["y"].to_pylist() == [4, 7]
    (worker,) = gateway.stats()["workers"]
    return len(os.listdir(f"/proc/{worker['pid']}/task"))


@SEVERAL
def test_one_pool_serves_all_models_of_a_worker(tmp_path: Path) -> None:
    """Beyond the calling thread a pool has one for each further core: once, and not for each."""
    found = {}
    for kind in ("model", "worker"):
        folder = tmp_path / kind
        folder.mkdir()
        workers = {"thread_pool": kind, "count": 1}
        with running(folder, served(folder), workers=workers) as gateway:
            cores = gateway.stats()["workers"][0]["cores"]
            found[kind] = threads_of(gateway)
    assert found["model"] - found["worker"] == (COUNT - 1) * (cores - 1)
