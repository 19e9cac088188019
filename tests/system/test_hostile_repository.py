"""A watched repository into which every hostile model is put at once, while a good one serves."""

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

from iskander.client import Client

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
"""On a busy machine this may come before what is wrong with it."""


class Load(threading.Thread):
    """Calls of the good model one after the other, until it is over."""

    def __init__(self, address: str) -> None:
        super().__init__(name="load")
        self._address, self.over = address, threading.Event()
        self.count = 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with Client(self._address) as client:
                while not self.over.is_set():
                    first = self.count
                    scored = client.score("good", pa.record_batch({"x": [first, first + 1]}))
                    assert scored["y"].to_pylist() == [3 * first, 3 * first + 3]
                    self.count += 1
                    self.over.wait(0.005)  # What is loaded meanwhile wants the cores, too.
        except Exception as error:
            self.error = error


def test_hostile_models_in_a_repository_harm_nobody(tmp_path: Path) -> None:
    """Each says in the list why it is not served; no call fails, and no worker ends."""
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
            eventually(lambda: load.count, what="the first answer")
            for name in expected:
                if not os.path.lexists(hostile / name / "model.onnx"):
                    folder.say(name, 'backend = "pipeline"\n')
                folder.put(name, 1, hostile / name)

            with gateway.client() as client:

                def outcome() -> dict[str, str] | None:
                    """Why each is not served, empty where it is, once that is known of all."""
                    found = {each["name"]: each for each in client.models()}
                    told = {
                        name: "" if each["state"] == "ready" else each["reason"]
                        for name in expected
                        if (each := found.get(name)) and each["state"] != "loading"
                    }
                    return told if len(told) == len(expected) else None

                told = eventually(outcome, what="what came of all", within_s=150)
            answered = load.count
            eventually(lambda: load.count > answered or load.error, what="one more answer")
        finally:
            load.over.set()
            load.join(30)
        for name, words in expected.items():
            if LATE not in told[name]:
                assert (words is None) == (not told[name]), (name, told[name])
                assert (words or "") in told[name], (name, told[name])
        assert load.error is None
        assert sorted(gateway.worker_pids()) == pids
