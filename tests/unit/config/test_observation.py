"""Settings of the prediction log: what needs, excludes or starts what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.processes import render_config

from iskander.config.loader import load_config
from iskander.config.schema import Config
from iskander.errors import ConfigError


def load(folder: Path, log: dict[str, Any], model: dict[str, Any], **sections: Any) -> Config:
    file = folder / "iskander.toml"
    models = [{"name": "m", "path": "p", "prediction_log": model}]
    file.write_text(render_config(models=models, prediction_log=log, **sections))
    return load_config(file, environment={}).config


@pytest.mark.parametrize(
    ("log", "model", "message"),
    [
        ({}, {"share": 0.5}, r"models\[0\].prediction_log.share has no effect without"),
        ({"path": "log"}, {"hash": ["x"]}, "hash: set prediction_log.key_file"),
        ({"path": "s3://b/x"}, {"share": 1.0}, "set prediction_log.spool to a local folder"),
        ({"path": "log", "spool": "s"}, {}, "spool has no effect without an object store"),
        ({"path": "file:///log", "spool": "s"}, {}, "spool has no effect"),
        (
            {"path": "log", "key_file": "k"},
            {"omit": ["a", "b"], "hash": ["b"]},
            "`b` is both in omit and in hash",
        ),
        ({"path": "log"}, {"share": 1.5}, r"models\[0\].prediction_log.share = 1.5: Expected"),
    ],
)
def test_contradictions_are_rejected(
    tmp_path: Path, log: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, log, model)


def test_paths_are_relative_to_the_file_and_uris_unchanged(tmp_path: Path) -> None:
    config = load(tmp_path, {"path": "log", "key_file": "k"}, {"share": 1.0})
    assert config.prediction_log.path == str(tmp_path / "log")
    assert config.prediction_log.key_file == str(tmp_path / "k")
    remote = load(tmp_path, {"path": "s3://b/x", "spool": "spool"}, {"share": 1.0})
    assert remote.prediction_log.path == "s3://b/x"
    assert remote.prediction_log.spool == str(tmp_path / "spool")


def test_observer_runs_only_if_a_model_may_be_sampled(tmp_path: Path) -> None:
    log = {"path": "log"}
    assert not load(tmp_path, {}, {}).is_observed
    assert not load(tmp_path, log, {}).is_observed
    assert load(tmp_path, log, {"share": 0.1}).is_observed
    assert load(tmp_path, log, {}, repository={"path": "models"}).is_observed
