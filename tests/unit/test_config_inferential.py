"""Configurations of Inferential's own server, by its own declarations."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from inferential.config import InferentialConfig

from iskander.config_file import load_config
from iskander.config_inferential import (
    DROPPED,
    import_inferential,
    read_inferential,
    render_import,
)
from iskander.errors import ConfigError

ROBOTS = """
transport:
  bind: tcp://127.0.0.1:6000
  recv_hwm: 50
scheduling:
  strategy: batch_optimized
  max_queue_size: 20
  request_ttl_ms: 250
  overflow_policy: reject_newest
  batch_optimized: {max_batch_size: 16, max_wait_ms: 2.5}
models:
  known:
    manipulation-policy: {max_inflight: 3}
observations:
  max_staleness_ms: 90
"""


def imported(tmp_path: Path, text: str, name: str = "robots.yaml") -> Any:
    file = tmp_path / name
    file.write_text(text)
    return import_inferential(read_inferential(file))


def test_what_means_something_here_is_taken_over(tmp_path: Path) -> None:
    """And what comes out is a configuration of this server."""
    result = imported(tmp_path, ROBOTS)
    (tmp_path / "iskander.toml").write_text(render_import(result))
    config = load_config(tmp_path / "iskander.toml", environment={}).config
    (model,) = config.models
    assert config.inferential.address == "tcp://127.0.0.1:6000"
    assert model.name == "manipulation-policy"
    lane = model.lane
    assert (lane.policy, lane.queue_requests, lane.ttl_ms) == ("batch_optimized", 20, 250)
    assert (lane.overflow, lane.linger_us, lane.staleness_ms) == ("reject", 2500, 90)
    assert (lane.preferred_batch_rows, lane.patience_ms) == ((16,), 50)
    assert [path for path, _ in result.dropped] == [
        "transport.recv_hwm",
        "models.known.manipulation-policy.max_inflight",
    ]


def test_json_is_read_as_well(tmp_path: Path) -> None:
    text = json.dumps(yaml.safe_load(ROBOTS))
    assert imported(tmp_path, text, "robots.json") == imported(tmp_path, ROBOTS)


def test_what_a_file_does_not_say_is_as_it_was_there(tmp_path: Path) -> None:
    theirs = InferentialConfig()
    lanes = imported(tmp_path, "{}").sections["lanes"]
    assert lanes["policy"] == theirs.scheduling.strategy
    assert lanes["queue_requests"] == theirs.scheduling.max_queue_size
    assert lanes["ttl_ms"] == theirs.scheduling.request_ttl_ms
    assert lanes["overflow"] == theirs.scheduling.overflow_policy
    assert lanes["patience_ms"] == theirs.clients.defaults.latency_budget_ms
    address = imported(tmp_path, "{}").sections["inferential"]["address"]
    assert address == theirs.transport.bind


def test_every_setting_of_theirs_is_taken_over_or_has_a_reason(tmp_path: Path) -> None:
    every = InferentialConfig().model_dump()
    every["ray"] = {"address": "auto"}
    every["clients"]["known"] = [{"id": "7", "model": "policy", "latency_budget_ms": 20}]
    every["models"]["known"] = {"policy": {"max_inflight": 4}}
    result = import_inferential(every)
    assert result.dropped
    assert {reason for _, reason in result.dropped} <= {*DROPPED.values()}
    text = render_import(result)
    assert all(f"#   {path}: {reason}" in text for path, reason in result.dropped)


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("scheduling: {request_ttl_ms: soon}", 'scheduling.request_ttl_ms = "soon"'),
        ("scheduling: {max_queue_size: 0}", "scheduling.max_queue_size = 0"),
        ("models: {known: {'a b': {}}}", "models.known.a b"),
        ("- 1", "wanted a table"),
        ("a: [", "is not YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as error:
        imported(tmp_path, text)
    assert wanted in error.value.message


def test_what_nobody_knows_is_named(tmp_path: Path) -> None:
    result = imported(tmp_path, "scheduling: {strategy: mine}\nrobots: 7")
    assert dict(result.dropped) == {
        "scheduling.strategy": "not one of ours; iskander.embed takes a scoring function",
        "robots": "there is no such setting",
    }


def test_yaml_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"iskander\[inferential\]"):
        imported(tmp_path, ROBOTS)
    assert imported(tmp_path, "{}", "robots.json")
