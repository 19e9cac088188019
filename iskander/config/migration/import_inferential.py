"""Import of a configuration of Inferential's own server.

Its settings and defaults are converted where this server has an equivalent. The others are listed
with the reason.

Source: `InferentialConfig` of the package `inferential` 1.4.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from iskander.config.models import LaneConfig, ModelConfig
from iskander.config.reference import render_value
from iskander.config.schema import InferentialConfig
from iskander.config.section import require
from iskander.errors import FIELD_BYTES_MAX, ConfigError, shorten

FILE_BYTES_MAX = 1 << 20
NODES_MAX = 100_000
"""Keys and values of a YAML file with expanded aliases."""
DEPTH_MAX = 10
KEY_LETTERS_MAX = 256
WAIT_MS_MAX = 10_000
INTEGER_MAX = 2**63 - 1
"""The largest integer of TOML."""
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
BATCH_DEFAULTS = {
    "scheduling.batch_optimized.max_batch_size": 8,
    "scheduling.batch_optimized.max_wait_ms": 10.0,
}
"""Settings of the strategy `batch_optimized` only."""
SAME = {
    "transport.bind": ("inferential", "address"),
    "scheduling.strategy": ("lanes", "policy"),
    "scheduling.overflow_policy": ("lanes", "overflow"),
    "scheduling.batch_optimized.max_wait_ms": ("lanes", "linger_us"),
    "scheduling.batch_optimized.max_batch_size": ("lanes", "preferred_batch_rows"),
    "scheduling.max_queue_size": ("lanes", "queue_requests"),
    "scheduling.request_ttl_ms": ("lanes", "ttl_ms"),
    "clients.defaults.latency_budget_ms": ("lanes", "patience_ms"),
}
"""Equivalent settings. A latency budget only affects the order there, like patience here."""
DROPPED = {
    "ray": "models run in workers of this server",
    "transport.type": "ZeroMQ is the only transport",
    "transport.recv_hwm": "limits.window_batches limits the batches of a client",
    "transport.send_hwm": "limits.window_bytes limits the unread responses of a client",
    "scheduling.max_retries": "the batches of a lost worker are retried automatically",
    "scheduling.max_concurrent_dispatch": "a worker has at most two batches in flight",
    "scheduling.deadline_aware": "weights are fixed; iskander.embed accepts a scoring function",
    "scheduling.model_deadline": "weights are fixed; iskander.embed accepts a scoring function",
    "scheduling.batch_optimized": "only the strategy batch_optimized uses it",
    "scheduling.priority_tiered": "there are ten priorities",
    "scheduling.pipeline_dispatch": "a worker always has its next batch queued",
    "scheduling.predictive_pre_dispatch": "lanes learn the rhythm of clients",
    "models.default_max_inflight": "a worker has at most two batches in flight",
    "models.known": "a worker has at most two batches in flight",
    "clients.known": 'a client sends its own budget, as in observe(..., deadline_ms="30")',
    "clients.accept_unknown": "every client is served",
    "response_tracking": "rhythms are learned; a client is removed when it disconnects",
    "observations.max_staleness_ms": "Inferential does not apply it; see lanes.staleness_ms",
    "observations.temporal_alignment_threshold_ms": "Inferential only logs a warning for it",
    "metrics.ring_buffer_size": "1024 points of each metric are kept",
    "metrics.enabled": "metrics are always on",
}
UNNAMED = "a name has at most 128 letters, digits and _ . : -; clients have to use another name"
UNREACHABLE = "inferential.address has to be set, to tcp://HOST:PORT or ipc://PATH"
UNPROTECTED = (
    "# The clients send no tokens and do not use TLS. An address other than loopback needs:",
    "# [access]",
    '# allow_unprotected_network = ["inferential.address"]',
)
TABLES = {path.rpartition(".")[0] for path in (*SAME, *DROPPED)} - {""} | {"models.known"}


class Imported(NamedTuple):
    """A converted configuration; `dropped` has the settings without an equivalent, and why."""

    sections: dict[str, dict[str, Any]]
    models: list[str]
    dropped: list[tuple[str, str]]


def read_inferential(file: Path) -> dict[str, Any]:
    """Parse a file of Inferential: JSON by its extension, else YAML.

    Raises:
        ConfigError: The file cannot be read or parsed, or exceeds a limit.
    """
    name = _line(file.name)
    try:
        with file.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
        require(len(content) <= FILE_BYTES_MAX, f"{name} has more than {FILE_BYTES_MAX} bytes")
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from None
    try:
        raw = _json(text, name) if file.suffix == ".json" else _yaml(text, name)
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{name}: expected a table of settings")
    return raw


def import_inferential(raw: dict[str, Any], is_address: Callable[[str], bool]) -> Imported:
    """Convert a configuration; `is_address` tests whether this server supports a ZeroMQ address.

    Raises:
        ConfigError: A setting has an invalid value.
    """
    values = DEFAULTS | dict(_leaves(raw))
    if values["scheduling.strategy"] == "batch_optimized":
        values = BATCH_DEFAULTS | values
    models = (raw.get("models") or {}).get("known") or ()
    unnamed = [model for model in models if not _is_name(model)]
    imported = Imported(
        {"inferential": {}, "lanes": {}},
        [model for model in models if model not in unnamed],
        [(shorten(_line(f"models.known.{model}"), FIELD_BYTES_MAX), UNNAMED) for model in unnamed],
    )
    for path, value in values.items():
        reason = _reason(path, values, is_address)
        if reason:
            imported.dropped.append((path, reason))
        else:
            section, key = SAME[path]
            imported.sections[section][key] = _translated(path, value)
    return imported


def render_import(imported: Imported) -> str:
    """The configuration as TOML, with the dropped settings as comments."""
    lines = []
    for name, settings in imported.sections.items():
        lines += [f"[{name}]", *(f"{key} = {render_value(v)}" for key, v in settings.items()), ""]
    if imported.sections["inferential"].get("address", "").startswith("tcp://"):
        lines += [*UNPROTECTED, ""]
    lines.append("# The path of each model: an ONNX file, or a folder with `model.onnx`.")
    for model in imported.models:
        lines += ["[[models]]", f"name = {render_value(model)}", f'path = "models/{model}"', ""]
    if not imported.models:
        lines += ["# [[models]]", '# name = "policy"', '# path = "models/policy"', ""]
    if imported.dropped:
        lines.append("# Dropped settings:")
        lines += [f"#   {_line(path)}: {reason}" for path, reason in imported.dropped]
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
        problem = "reading YAML needs PyYAML: `pip install 'iskander[inferential]'`"
        raise ConfigError(f"{name}: {problem}") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Adds the position of a value that PyYAML cannot convert, such as 2020-99-99."""

        def construct_object(self, node: Any, deep: bool = False) -> Any:  # noqa: ANN401
            try:
                return super().construct_object(node, deep)
            except (ArithmeticError, AttributeError, LookupError, ValueError):
                kind = node.tag.rpartition(":")[2]
                problem = f"{node.value!r:.80} is not of the type {kind}"
                raise yaml.MarkedYAMLError(None, None, problem, node.start_mark) from None

    try:
        loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        counted = f"more than {NODES_MAX} values with expanded aliases"
        require(_is_bounded(node), f"{name} has {counted}")
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not YAML: {_line(' '.join(str(error).split()))}") from None


def _is_bounded(node: Any) -> bool:  # noqa: ANN401
    """Whether a YAML node has at most `NODES_MAX` nodes with expanded aliases."""
    pending, count = [node], 1
    while pending and count <= NODES_MAX:
        node = pending.pop()
        if node.id != "scalar":
            inner = list(chain(*node.value)) if node.id == "mapping" else node.value
            count += len(inner)
            pending += inner
    return count <= NODES_MAX


def _leaves(raw: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        _check_key(key, above)
        path = ".".join((*above, key))
        is_table = path not in TABLES or value is None or isinstance(value, dict)
        require(is_table, f"{_shown(path, value)}: expected a table")
        if isinstance(value, dict) and path not in SAME:
            yield from _leaves(value, (*above, key))
        elif path in SAME or (path not in TABLES and value != []):
            yield path, value


def _check_key(key: Any, above: tuple[str, ...]) -> None:  # noqa: ANN401
    table = shorten(_line(".".join(above)), FIELD_BYTES_MAX) or "the file"
    if not isinstance(key, str):
        raise ConfigError(f"{table}: expected text as a key, got {type(key).__name__}")
    is_short = len(key) <= KEY_LETTERS_MAX
    require(is_short, f"{table}: a key has more than {KEY_LETTERS_MAX} letters")
    require(len(above) <= DEPTH_MAX, f"{table}: nested deeper than {DEPTH_MAX} tables")


def _is_name(model: str) -> bool:
    """Whether this server accepts the name of a model."""
    try:
        msgspec.convert({"name": model, "path": model}, ModelConfig)
    except msgspec.ValidationError:
        return False
    return True


def _reason(path: str, values: dict[str, Any], is_address: Callable[[str], bool]) -> str:
    """The reason to drop a setting; empty for a converted one."""
    strategy, bind = values["scheduling.strategy"], values["transport.bind"]
    if path == "transport.bind" and isinstance(bind, str) and bind.isprintable():
        return "" if is_address(bind) else UNREACHABLE
    if path == "scheduling.strategy" and isinstance(strategy, str) and strategy not in POLICIES:
        return "unknown policy; iskander.embed accepts a scoring function"
    is_used = strategy == "batch_optimized" or not path.startswith("scheduling.batch_optimized.")
    if path in SAME and is_used:
        return ""
    parts = path.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    reasons = (DROPPED[prefix] for prefix in prefixes if prefix in DROPPED)
    return next(reasons, "there is no such setting")


def _translated(path: str, value: Any) -> Any:  # noqa: ANN401
    """The value of the equivalent setting, checked against its declaration."""
    section, key = SAME[path]
    kind = InferentialConfig if section == "inferential" else LaneConfig
    try:
        converted = _converted(key, value)
        msgspec.convert({key: converted}, kind)
    except (ValueError, msgspec.ValidationError) as error:
        rule = str(error).partition(" - at")[0]
        raise ConfigError(f"{_shown(path, value)}: {rule}") from None
    return converted


def _converted(key: str, value: Any) -> Any:  # noqa: ANN401
    if key == "overflow":
        if not isinstance(value, str) or value not in OVERFLOW:
            raise ValueError(f"unknown, expected one of {', '.join(OVERFLOW)}")
        return OVERFLOW[value]
    if key == "linger_us":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= WAIT_MS_MAX:
            raise ValueError(f"expected a number from 0 to {WAIT_MS_MAX}")
        return round(value * 1000)
    if isinstance(value, str) and not value.isprintable():
        raise ValueError("expected one line of printable text")
    if isinstance(value, int) and value > INTEGER_MAX:
        raise ValueError(f"expected at most {INTEGER_MAX}")
    return [value] if key == "preferred_batch_rows" else value


def _shown(path: str, value: Any) -> str:  # noqa: ANN401
    """A setting, with its value if that is a text, or a number up to `INTEGER_MAX`."""
    if isinstance(value, str | float) or (isinstance(value, int) and abs(value) <= INTEGER_MAX):
        return f"{path} = {shorten(json.dumps(value), FIELD_BYTES_MAX)}"
    return path


def _line(text: str) -> str:
    """A text, quoted and escaped unless it is one printable line."""
    return text if text.isprintable() else json.dumps(text)
