"""Load specifications: sizes that batches are padded to, and time limits of loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from iskander.config.models import ModelConfig
from iskander.config.schema import Config
from iskander.repository.specs import SANDBOX_SHARE, loading_spec, model_spec


def test_sizes_above_the_largest_batch_are_left_out(tmp_path: Path) -> None:
    """As in the batcher, which never pads to them."""
    path = tmp_path / "m.onnx"
    path.touch()
    raw: dict[str, Any] = {"name": "m", "path": str(path), "version": "1", "max_batch_rows": 64}
    model = msgspec.convert(raw | {"lane": {"pad_to": [64, 8, 8, 128]}}, ModelConfig)
    assert model_spec(0, model).pad_to == (8, 64)


def test_build_of_engines_ends_before_the_timeout_of_its_worker() -> None:
    def limit_s(**sections: Any) -> float:
        return loading_spec(msgspec.convert(sections, Config)).engine_s

    assert limit_s(workers={"start_s": 100.0}) == SANDBOX_SHARE * 100
    assert limit_s(workers={"start_s": 3600.0}) == 900
    assert limit_s(workers={"start_s": 3600.0}, loading={"engine_s": 1200.0}) == 1200
