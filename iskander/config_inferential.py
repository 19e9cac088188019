"""A configuration of Inferential's own server, as one of this server.

What it says and what it would have had by default is taken over where it means something here;
everything else is named, with the reason.

Source: `InferentialConfig` of the package `inferential` 1.4.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from iskander.config import InferentialConfig
from iskander.config_models import LaneConfig, ModelConfig
from iskander.config_reference import render_value
from iskander.errors import ConfigError

POLICIES = (
    "deadline_aware",
    "model_deadline",
    "tiered_deadline",
    "batch_optimized",
    "priority_tiered",
    "round_robin",
)
OVERFLOW = {"drop_oldest": "drop_oldest", "reject_newest": "reject"}
DEFAULTS = {
    "transport.bind": "tcp://*:5555",
    "scheduling.strategy": "model_deadline",
    "scheduling.max_queue_size": 1000,
    "scheduling.request_ttl_ms": 5000,
    "scheduling.overflow_policy": "drop_oldest",
    "clients.defaults.latency_budget_ms": 50,
}
SAME = {
    "transport.bind": ("inferential", "address"),
    "scheduling.max_queue_size": ("lanes", "queue_requests"),
    "scheduling.request_ttl_ms": ("lanes", "ttl_ms"),
    "clients.defaults.latency_budget_ms": ("lanes", "patience_ms"),
    "observations.max_staleness_ms": ("lanes", "staleness_ms"),
}
"""What is said here by another name. A budget was for the order only there, as patience is."""
DROPPED = {
    "ray": "models run in workers of this server",
    "transport.type": "there is ZeroMQ only",
    "transport.recv_hwm": "limits.window_batches bounds what a client has in work",
    "transport.send_hwm": "limits.window_bytes bounds what a client does not take",
    "scheduling.max_retries": "what a lost worker had runs again by itself",
    "scheduling.max_concurrent_dispatch": "a worker has two batches",
    "scheduling.deadline_aware": "weights are fixed; iskander.embed takes a scoring function",
    "scheduling.model_deadline": "weights are fixed; iskander.embed takes a scoring function",
    "scheduling.batch_optimized": "it is read with the strategy batch_optimized only",
    "scheduling.priority_tiered": "there are ten priorities",
    "scheduling.pipeline_dispatch": "a worker always has its next batch before it needs it",
    "scheduling.predictive_pre_dispatch": "lanes learn the rhythm of clients by themselves",
    "models.default_max_inflight": "a worker has two batches",
    "models.known": "a worker has two batches",
    "clients.known": 'a client says its own budget, as in observe(..., deadline_ms="30")',
    "clients.accept_unknown": "every client is served",
    "response_tracking": "rhythms are learned as they are, and a client is gone when it hangs up",
    "observations.temporal_alignment_threshold_ms": "it warned in the log only",
    "metrics.ring_buffer_size": "1024 points of each measure are kept",
    "metrics.enabled": "it is always measured",
}


class Imported(NamedTuple):
    """What a configuration came to.

    Attributes:
        sections: Settings by section.
        models: Names of the models that it knows.
        dropped: Settings that were not taken over, and why.
    """

    sections: dict[str, dict[str, Any]]
    models: list[str]
    dropped: list[tuple[str, str]]


def read_inferential(file: Path) -> dict[str, Any]:
    """A file of Inferential's: JSON by its name, else YAML.

    Raises:
        ConfigError: It cannot be read, or is neither.
    """
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file.name} cannot be read: {error}") from None
    raw = _json(text, file.name) if file.suffix == ".json" else _yaml(text, file.name)
    if not isinstance(raw, dict):
        raise ConfigError(f"{file.name}: wanted a table of settings")
    return raw


def import_inferential(raw: dict[str, Any]) -> Imported:
    """Take over what means something here.

    Raises:
        ConfigError: A setting is not what it may be.
    """
    said = dict(_leaves(raw))
    values = DEFAULTS | said
    imported = Imported({"inferential": {}, "lanes": {}}, [], [])
    strategy = values["scheduling.strategy"]
    for path, value in values.items():
        section, key = SAME.get(path, ("", ""))
        if section:
            imported.sections[section][key] = value
        elif path == "scheduling.strategy" and strategy in POLICIES:
            imported.sections["lanes"]["policy"] = strategy
        elif path == "scheduling.strategy":
            imported.dropped.append(
                (path, "not one of ours; iskander.embed takes a scoring function")
            )
        elif path == "scheduling.overflow_policy" and value in OVERFLOW:
            imported.sections["lanes"]["overflow"] = OVERFLOW[value]
        elif path == "scheduling.batch_optimized.max_wait_ms" and strategy == "batch_optimized":
            imported.sections["lanes"]["linger_us"] = _microseconds(path, value)
        elif path == "scheduling.batch_optimized.max_batch_size" and strategy == "batch_optimized":
            imported.sections["lanes"]["preferred_batch_rows"] = [value]
        else:
            imported.dropped.append((path, _reason(path)))
    known = (raw.get("models") or {}).get("known") if isinstance(raw.get("models"), dict) else None
    imported.models.extend(map(str, known or ()))
    _check(imported)
    return imported


def render_import(imported: Imported) -> str:
    """The configuration as TOML, and what is not in it as comments."""
    lines = []
    for name, settings in imported.sections.items():
        lines += [f"[{name}]", *(f"{key} = {render_value(v)}" for key, v in settings.items()), ""]
    lines.append("# Where each model is: an ONNX file, or a folder with `model.onnx`.")
    for model in imported.models:
        lines += ["[[models]]", f"name = {render_value(model)}", f'path = "models/{model}"', ""]
    if not imported.models:
        lines += ["# [[models]]", '# name = "policy"', '# path = "models/policy"', ""]
    if imported.dropped:
        lines.append("# Not taken over:")
        lines += [f"#   {path}: {reason}" for path, reason in imported.dropped]
    return "\n".join(lines).rstrip() + "\n"


def _json(text: str, name: str) -> Any:  # noqa: ANN401
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None


def _yaml(text: str, name: str) -> Any:  # noqa: ANN401
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"{name}: YAML is read with PyYAML, which is not installed: "
            "`pip install 'iskander[inferential]'`"
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not YAML: {' '.join(str(error).split())}") from None


def _leaves(raw: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{path}.")
        elif value not in ({}, []):
            yield path, value


def _reason(path: str) -> str:
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        reason = DROPPED.get(".".join(parts[:count]))
        if reason is not None:
            return reason
    return "there is no such setting"


def _microseconds(path: str, value: Any) -> int:  # noqa: ANN401
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{path} = {render_value(value)}: wanted a number")
    return round(value * 1000)


def _check(imported: Imported) -> None:
    """Hold what was taken over against this server's own declarations."""
    kinds: dict[str, Any] = {"inferential": InferentialConfig, "lanes": LaneConfig}
    theirs = {ours: path for path, ours in SAME.items()}
    for section, settings in imported.sections.items():
        for key, value in settings.items():
            try:
                msgspec.convert({key: value}, kinds[section])
            except msgspec.ValidationError as error:
                path = theirs.get((section, key), f"{section}.{key}")
                rule = str(error).partition(" - at")[0]
                raise ConfigError(f"{path} = {render_value(value)}: {rule}") from None
    for model in imported.models:
        try:
            msgspec.convert({"name": model, "path": model}, ModelConfig)
        except msgspec.ValidationError:
            raise ConfigError(f"models.known.{model}: a model cannot be called so here") from None
