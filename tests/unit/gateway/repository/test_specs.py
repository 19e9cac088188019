"""Load specifications: sizes that batches are padded to, fingerprints, time limits of loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from iskander.config.models import ModelConfig
from iskander.config.schema import Config
from iskander.gateway.repository.specs import SANDBOX_SHARE, loading_spec, model_spec
from iskander.interprocess.control.messages import ModelSpec


def spec_of(folder: Path, **settings: Any) -> ModelSpec:
    path = folder / "m.onnx"
    if not path.exists():
        path.touch()
    raw = {"name": "m", "path": str(path), "version": "1", "max_batch_rows": 64}
    return model_spec(0, msgspec.convert(raw | settings, ModelConfig))


def test_sizes_above_the_largest_batch_are_left_out(tmp_path: Path) -> None:
    """As in the batcher, which never pads to them."""
    assert spec_of(tmp_path, lane={"pad_to": [64, 8, 8, 128]}).pad_to == (8, 64)


@pytest.mark.parametrize(
    ("settings", "is_equal"),
    [
        ({"lane": {"ttl_ms": 1.0}}, True),
        ({"lane": {"policy": "fifo", "weight": 2.0}}, True),
        ({"lane": {"pad_to": [128]}}, True),
        ({"shadow_share": 0.5}, True),
        ({"prediction_log": {"share": 0.5}, "drift": {"share": 0.5}}, True),
        ({"lane": {"pad_to": [8]}}, False),
        ({"max_batch_rows": 32}, False),
        ({"intra_threads": 2}, False),
    ],
)
def test_fingerprint_depends_on_the_settings_of_a_load(
    tmp_path: Path, settings: dict[str, Any], is_equal: bool
) -> None:
    """A worker keeps a model with the same one when its gateway restarts."""
    found = spec_of(tmp_path, **settings).fingerprint
    assert (found == spec_of(tmp_path).fingerprint) == is_equal


def test_build_of_engines_ends_before_the_timeout_of_its_worker() -> None:
    def limit_s(**sections: Any) -> float:
        return loading_spec(msgspec.convert(sections, Config)).engine_s

    assert limit_s(workers={"start_s": 100.0}) == SANDBOX_SHARE * 100
    assert limit_s(workers={"start_s": 3600.0}) == 900
    assert limit_s(workers={"start_s": 3600.0}, loading={"engine_s": 1200.0}) == 1200
