"""The models of the GPU benchmark, and the configuration of a server with one of them."""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.gpu.resnet import IMAGE, STAGES, make_resnet

ROOT = Path(__file__).resolve().parents[2]
TWO_TOWER = ROOT / "configs" / "models" / "movielens-two-tower" / "1"
ROWS = {
    "resnet50-float32": 32,
    "resnet50-float16": 32,
    "two-tower": 128,
    "two-tower-large": 8192,
}
"""Rows of a batch by model."""
MIB = 1 << 20

CONFIG = """
[arena]
input_bytes = {input_bytes}
output_bytes = {output_bytes}
[limits]
bytes = {limit}
message_bytes = {message}
window_bytes = {window}
[loading]
sandbox = false
[[models]]
name = "{name}"
path = "{path}"
execution_providers = ["{provider}"]
max_batch_rows = {rows}
lane = {{pad_to = [{rows}]}}
{more}
"""
MANIFEST = """
format = 1
[[inputs]]
column = "images"
type = "fixed_shape_tensor<{element}>[3, 224, 224]"
tensor = "images"
[[outputs]]
tensor = "scores"
column = "scores"
type = "fixed_size_list<{element}>[1000]"
"""


def write_models(folder: Path, stages: tuple[tuple[int, int], ...] = STAGES) -> dict[str, Path]:
    """Write the models; return their folders."""
    folders = {"two-tower": TWO_TOWER, "two-tower-large": TWO_TOWER}
    for element in ("float32", "float16"):
        target = folder / f"resnet50-{element}" / "1"
        target.mkdir(parents=True)
        model = make_resnet(element, stages=stages)
        (target / "model.onnx").write_bytes(model.SerializeToString())
        (target / "manifest.toml").write_text(MANIFEST.format(element=element))
        folders[f"resnet50-{element}"] = target
    return folders


def config_of(name: str, folder: Path, provider: str, *, more: str = "") -> str:
    """Configuration of a server with one model; `more` is added to the model's settings."""
    rows = ROWS[name]
    row_bytes = 4 * math.prod(IMAGE) if name.startswith("resnet") else 16
    limit = max(row_bytes * rows + MIB, 32 * MIB)
    return CONFIG.format(
        input_bytes=16 * limit,
        output_bytes=64 * MIB,
        limit=limit,
        message=limit + MIB,
        window=4 * limit,
        name=name,
        path=folder,
        provider=provider,
        rows=rows,
        more=more,
    )
