"""All hostile models added at once to a watched repository while a good model serves."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from support import models
from support.processes import BIN, eventually, running
from support.repositories import Folder

from iskander.client import OFF, Client

pytestmark = pytest.mark.slow

MIB = 1 << 20
SCRIPT = models.ROOT / "scripts" / "make_hostile_models.py"
LOADING = {
    "sandbox_s": 3.0,
    "sandbox_bytes": 512 * MIB,
    "model_bytes": 512 * MIB,
    "cache_bytes": 64 * MIB,
}


LATE = "not loaded and warmed in a sandbox within"
"""On a busy machine the timeout can come before the expected error."""


class Load(threading.Thread):
    """Sequential calls of the good model until `stopped` is set."""

    def __init__(self, address: str) -> None:
        super().__init__(name="load")
        self._address, self.stopped = address, threading.Event()
        self.count = 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with Client(self._address, retry=OFF) as client:
                while not self.stopped.is_set():
                    first = self.count
                    scored = client.score("good", pa.record_batch({"x": [first, first + 1]}))
                    assert scored["y"].to_pylist() == [3 * first, 3 * first + 3]
                    self.count += 1
                    self.stopped.wait(0.005)  # Leaves cpu time for the loads.
        except Exception as error:
            self.error = error


def test_hostile_models_do_not_affect_calls_or_workers(tmp_path: Path) -> None:
    """The list of models gives the reason for each; no call fails, and no worker exits."""
    hostile = tmp_path / "hostile"
    subprocess.run([BIN / "python", SCRIPT, hostile], check=True)
    expected: dict[str, str | None] = json.loads((hostile / "expected.json").read_text())
    folder = Folder(tmp_path / "models")
    folder.put("good", 1, 3)
    loading = {**LOADING, "cache": str(tmp_path / "cache")}
    repository = {"path": str(folder.root), "settle_ms": 50}
    workers = {"groups": ["0", "1"]}
    with running(tmp_path, [], repository=repository, workers=workers, loading=loading) as gateway:
        pids = sorted(gateway.worker_pids())
        load = Load(gateway.address)
        load.start()
        try:
            eventually(lambda: load.count, what="the first response")
            for name in expected:
                if not os.path.lexists(hostile / name / "model.onnx"):
                    folder.write_settings(name, 'backend = "pipeline"\n')
                folder.put(name, 1, hostile / name)

            with gateway.client() as client:

                def load_errors() -> dict[str, str] | None:
                    """Returns the error of each model, empty if ready; None while any loads."""
                    listed = {each["name"]: each for each in client.models()}
                    errors = {
                        name: "" if each["state"] == "ready" else each["reason"]
                        for name in expected
                        if (each := listed.get(name)) and each["state"] != "loading"
                    }
                    return errors if len(errors) == len(expected) else None

                errors = eventually(load_errors, what="the end of all loads", within_s=150)
            completed = load.count
            eventually(lambda: load.count > completed or load.error, what="one more response")
        finally:
            load.stopped.set()
            load.join(30)
        for name, text in expected.items():
            if LATE not in errors[name]:
                assert (text is None) == (not errors[name]), (name, errors[name])
                assert (text or "") in errors[name], (name, errors[name])
        assert load.error is None
        assert sorted(gateway.worker_pids()) == pids
