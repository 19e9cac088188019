"""Models of the backend `remote`, and their manifests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from support.oip_stub import MODES
from support.processes import Gateway, render_config

COLUMNS = {"x": "float64"}, {"y": "float64"}
"""Inputs and outputs of `oip_stub`, each a column and its type."""


def remote(
    folder: Path,
    *addresses: str,
    model: str = "stub",
    columns: tuple[dict[str, str], dict[str, str]] = COLUMNS,
    more: str = "",
    **settings: Any,
) -> Path:
    """A folder with a manifest; `settings` are keys of `[remote]`, `more` is TOML."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["format = 1"]
    lines += [render_config(remote={"addresses": addresses, "model": model, **settings}), more]
    for table, entries in zip(("inputs", "outputs"), columns, strict=True):
        for name, kind in entries.items():
            keys = f'column = "{name}"\ntype = "{kind}"\ntensor = "{name}"'
            lines += [f"[[{table}]]", keys]
    (folder / "manifest.toml").write_text("\n".join(lines))
    return folder


def served(path: Path, **settings: Any) -> dict[str, Any]:
    """A `[[models]]` table, with the folder's name."""
    return {"name": path.name, "path": str(path), "backend": "remote", **settings}


def mode(name: str) -> pa.RecordBatch:
    """A batch for which `oip_stub` has this mode."""
    return pa.record_batch({"x": [float(MODES.index(name))]})


def score(gateway: Gateway, model: str, batch: pa.RecordBatch, **options: Any) -> dict[str, Any]:
    """Score a batch, without retries."""
    with gateway.client() as client:
        result: dict[str, Any] = client.score(model, batch, **options).to_pydict()
        return result
