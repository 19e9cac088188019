"""Drift by real traffic: shifted values and nulls, equal traffic, restarts, recorded references."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import TensorProto
from support import models
from support.processes import BIN, Gateway, eventually, running

from iskander.sampling.drift.reference import FILE, read_reference

MANIFEST = """
format = 1
[[inputs]]
tensor = "x"
columns = ["age", "income"]
type = "float32"
nulls = "nan"
[[outputs]]
tensor = "y"
column = "y"
type = "fixed_size_list<float32>[2]"
"""
ROWS = 500
DRIFT = {"enabled": True, "window_s": 6.0, "rows_min": 500, "record_rows": 2000}


def save_model(folder: Path) -> Path:
    models.identity(folder / "churn", TensorProto.FLOAT, ["rows", 2])
    (folder / "churn/manifest.toml").write_text(MANIFEST)
    return folder / "churn"


def people(random: np.random.Generator, rows: int = ROWS, *, older: float = 0.0) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "age": pa.array(random.normal(40 + older, 10, rows), pa.float32()),
            "income": pa.array(random.lognormal(8, 1, rows), pa.float32()),
        }
    )


def without_ages(batch: pa.RecordBatch) -> pa.RecordBatch:
    ages = pa.array([None if i % 3 == 0 else v.as_py() for i, v in enumerate(batch["age"])])
    return batch.set_column(0, "age", ages.cast(pa.float32()))


class Traffic:
    """Requests of one kind until the report of drift is as expected."""

    def __init__(self, gateway: Gateway, make: Callable[[np.random.Generator], Any]) -> None:
        self._gateway, self._make = gateway, make
        self._random = np.random.default_rng()

    def until(self, what: str, is_as_expected: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        def is_done() -> dict[str, Any] | None:
            with self._gateway.client() as client:
                for _ in range(2):
                    client.score("churn", self._make(self._random))
                report = client.stats()["observation"]["report"].get("drift", {"models": []})
            found = next(iter(report["models"]), None)
            return found if found is not None and is_as_expected(found) else None

        found: dict[str, Any] = eventually(is_done, 40, what)
        return found


def entry(model: Path) -> dict[str, Any]:
    return {"name": "churn", "path": str(model), "drift": {"share": 1.0}}


def is_steady(found: dict[str, Any]) -> bool:
    states = found["states"]
    return states["input"]["steady"] == states["output"]["steady"] == 2


def column(found: dict[str, Any], side: str, name: str) -> dict[str, Any]:
    return next(c for c in found["columns"] if (c["side"], c["column"]) == (side, name))


def age_of(found: dict[str, Any]) -> dict[str, Any]:
    return column(found, "input", "x[age]")


def fetch(gateway: Gateway, path: str) -> str:
    url = f"http://{gateway.stats()['admin_address']}{path}"
    with urllib.request.urlopen(url, timeout=10) as response:
        text: str = response.read().decode()
    return text


def drift(gateway: Gateway, *options: str) -> subprocess.CompletedProcess[str]:
    command = [BIN / "iskander", "drift", "show", "--address", gateway.address, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_shifted_values_drift_and_equal_ones_do_not(tmp_path: Path) -> None:
    sections = {"drift": DRIFT | {"folder": "references"}, "workers": {"count": 1}}
    with running(tmp_path, [entry(save_model(tmp_path))], **sections) as gateway:
        same = Traffic(gateway, people)
        found = same.until("a reference", lambda found: found["reference"] == "live")
        assert found["reference_rows"] == 2000
        found = same.until("four steady columns", is_steady)
        assert age_of(found)["measures"]["psi"] < 0.2
        assert drift(gateway).returncode == 0

        shifted = Traffic(gateway, lambda random: people(random, older=15))
        found = shifted.until(
            "drift", lambda found: {"psi", "ks"} <= set(age_of(found)["exceeded"])
        )
        assert age_of(found)["state"] == "drifting"
        assert age_of(found)["measures"]["psi"] > 0.2
        assert age_of(found)["recent"]["mean"] > 42 > age_of(found)["reference"]["mean"]
        assert column(found, "input", "x[income]")["state"] == "steady"

        page = fetch(gateway, "/metrics")
        labels = r'column="x\[age\]",model="churn",side="input",version="1"'
        psi = re.search(rf"^iskander_drift_psi\{{{labels}\}} (\S+)$", page, re.MULTILINE)
        assert psi is not None and float(psi[1]) > 0.2, page
        states = 'model="churn",side="input",state="drifting",version="1"'
        assert f"iskander_drift_columns{{{states}}} 1.0" in page
        listed = json.loads(fetch(gateway, "/status.json"))["drift"]
        assert listed[0]["state"] == "drifting" and len(listed) == 4
        assert "x[age]" in fetch(gateway, "/")
        shown = drift(gateway, "churn")
        assert shown.returncode == 1 and "x[age]" in shown.stdout
        assert "1 drifting, 1 steady, 0 unjudged" in shown.stdout
        (model,) = json.loads(drift(gateway, "--json").stdout)
        assert model["reference"] == "live"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_restart_keeps_the_reference_and_continues_a_recording(
    tmp_path: Path, processes: int
) -> None:
    file = tmp_path / "references/churn@1.msgpack"
    sections = {
        "drift": DRIFT | {"folder": "references"},
        "workers": {"count": 1},
        "server": {"processes": processes},
    }
    with running(tmp_path, [entry(save_model(tmp_path))], **sections) as gateway:
        with gateway.client() as client:
            client.score("churn", people(np.random.default_rng(0)))
        gateway.stop()
        recording = read_reference(file)
        assert recording is not None and (recording.rows, recording.is_complete) == (ROWS, False)

        gateway.start()
        Traffic(gateway, people).until("four steady columns", is_steady)
        gateway.stop()
        complete = read_reference(file)
        assert complete is not None and (complete.rows, complete.is_complete) == (2000, True)

        gateway.start()
        found = Traffic(gateway, people).until("four steady columns", is_steady)
        assert (found["reference"], found["reference_rows"]) == ("live", 2000)
        assert read_reference(file) == complete


@pytest.mark.slow
def test_nulls_drift(tmp_path: Path) -> None:
    sections = {"drift": DRIFT | {"folder": "references"}, "workers": {"count": 1}}
    with running(tmp_path, [entry(save_model(tmp_path))], **sections) as gateway:
        Traffic(gateway, people).until("four steady columns", is_steady)
        nulls = Traffic(gateway, lambda random: without_ages(people(random)))
        found = nulls.until("drift", lambda found: "missing" in age_of(found)["exceeded"])
        assert age_of(found)["exceeded"] == ["missing"]
        assert 0.05 < age_of(found)["recent"]["missing"] < 0.4


@pytest.mark.slow
def test_reference_from_training_data(tmp_path: Path) -> None:
    model = save_model(tmp_path)
    random = np.random.default_rng(0)
    trained = pa.Table.from_batches([people(random, 20_000, older=30)]).rename_columns(
        ["years", "income"]
    )
    pq.write_table(trained, tmp_path / "trained.parquet")
    command = [BIN / "iskander", "drift", "record", model, tmp_path / "trained.parquet"]
    done = subprocess.run(
        [*command, "--map", "age=years", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    recorded = json.loads(done.stdout)
    assert recorded["sent"] == 20_000 and recorded["rows"] >= 4096
    reference = read_reference(model / FILE)
    assert reference is not None and (reference.origin, reference.rows) == (
        "training",
        recorded["rows"],
    )
    names = {(each.side, each.name) for each in reference.columns}
    assert names == {
        ("input", "x[age]"), ("input", "x[income]"), ("output", "y[0]"), ("output", "y[1]"),
    }  # fmt: skip
    sections = {"drift": DRIFT | {"folder": "references"}, "workers": {"count": 1}}
    with running(tmp_path, [entry(model)], **sections) as gateway:
        found = Traffic(gateway, people).until(
            "drift", lambda found: found["states"]["output"]["drifting"]
        )
        assert found["reference"] == "training"
        assert column(found, "input", "x[income]")["state"] == "steady"
        older = Traffic(gateway, lambda random: people(random, older=30))
        older.until("four steady columns", is_steady)
    assert not (tmp_path / "references").exists()


@pytest.mark.slow
def test_reference_of_a_model_of_a_configuration(tmp_path: Path) -> None:
    """The training data is not in its prediction log."""
    pq.write_table(
        pa.Table.from_batches([people(np.random.default_rng(0), 4000)]), tmp_path / "t.parquet"
    )
    served = entry(save_model(tmp_path)) | {"prediction_log": {"share": 1.0}}
    Gateway(tmp_path, [served], drift=DRIFT, prediction_log={"path": "log"})
    command = [BIN / "iskander", "drift", "record", "churn", tmp_path / "t.parquet"]
    options = ["--config", tmp_path / "iskander.toml", "-o", tmp_path / "out.msgpack"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reference = read_reference(tmp_path / "out.msgpack")
    assert reference is not None and (reference.model, reference.rows) == ("churn", 4000)
    assert not (tmp_path / "log").exists()

    served["drift"] = {"share": 0.0}
    Gateway(tmp_path, [served], drift=DRIFT, prediction_log={"path": "log"})
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no row of `churn` was recorded" in done.stderr
