"""Held-out ratings, scored by the server, have the error recorded at training."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support import models
from support.processes import running

ROOT = models.ROOT
RATINGS = Path(
    os.environ.get(
        "MOVIELENS_RATINGS", ROOT.parent / "shared" / "data" / "movielens" / "ratings.csv"
    )
)


def training_script() -> Any:
    path = ROOT / "scripts" / "train_two_tower.py"
    spec = importlib.util.spec_from_file_location("train_two_tower", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not RATINGS.exists(), reason="MovieLens ratings not found")
def test_held_out_ratings_score_as_recorded(tmp_path: Path) -> None:
    """Repeats the split and scores it in batches of 1,000; RMSE and MAE agree to four digits."""
    script = training_script()
    recorded = json.loads((models.TWO_TOWER / "heldout.json").read_text())
    ratings = script.read_ratings(RATINGS)
    split = script.split_timestamp(ratings.timestamps, recorded["holdout_fraction"])
    assert split == recorded["split_timestamp"]
    held_out = ratings.where(ratings.timestamps >= split)
    training = ratings.where(ratings.timestamps < split)
    table = pa.table({"user_id": held_out.user_ids, "item_id": held_out.item_ids})
    assert len(table) == recorded["rows_heldout"]
    served = [{"name": "m", "path": str(models.TWO_TOWER), "intra_threads": 1}]
    with running(tmp_path, served) as gateway, gateway.client() as client:
        scored = pa.Table.from_batches(
            list(client.stream("m", table.combine_chunks().to_batches(1000)))
        )
    assert scored.select(["user_id", "item_id"]).combine_chunks() == table.combine_chunks()
    figures = script.metrics(scored["score"].to_numpy(), held_out.scores)
    baseline = script.metrics(script.item_mean_scores(training, held_out.item_ids), held_out.scores)
    for name in ("rmse", "mae"):
        assert figures[name] == pytest.approx(recorded["model"][name], abs=1e-4)
        assert baseline[name] == pytest.approx(recorded["baseline"][name], abs=1e-4)
        assert figures[name] < baseline[name]
