"""A configuration of Inferential's own server, as one of this server.

What it says and what it would have had by default is taken over where it means something here;
everything else is named, with the reason.

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
from iskander.errors import FIELD_BYTES_MAX, ConfigError, shorten

FILE_BYTES_MAX = 1 << 20
NODES_MAX = 100_000
"""Keys and values of a YAML file with its aliases written out."""
DEPTH_MAX = 10
KEY_LETTERS_MAX = 256
WAIT_MS_MAX = 10_000
INTEGER_MAX = 2**63 - 1
"""The largest that TOML has."""
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
    "scheduling.strategy": ("lanes", "policy"),
    "scheduling.overflow_policy": ("lanes", "overflow"),
    "scheduling.batch_optimized.max_wait_ms": ("lanes", "linger_us"),
    "scheduling.batch_optimized.max_batch_size": ("lanes", "preferred_batch_rows"),
    "scheduling.max_queue_size": ("lanes", "queue_requests"),
    "scheduling.request_ttl_ms": ("lanes", "ttl_ms"),
    "clients.defaults.latency_budget_ms": ("lanes", "patience_ms"),
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
    "observations.max_staleness_ms": "it was never held to there; lanes.staleness_ms is here",
    "observations.temporal_alignment_threshold_ms": "it warned in the log only",
    "metrics.ring_buffer_size": "1024 points of each measure are kept",
    "metrics.enabled": "it is always measured",
}
UNNAMED = (
    "a name here has at most 128 letters, digits and _ . : - within: its clients have to ask for "
    "another"
)
UNREACHABLE = "inferential.address has to be set, to tcp://HOST:PORT or ipc://PATH"
TABLES = {path.rpartition(".")[0] for path in (*SAME, *DROPPED)} - {""} | {"models.known"}


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
        ConfigError: It cannot be read, is neither, or is too large or too deep.
    """
    name = _line(file.name)
    try:
        with file.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise ConfigError(f"{name} has more than {FILE_BYTES_MAX} bytes")
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from None
    try:
        raw = _json(text, name) if file.suffix == ".json" else _yaml(text, name)
    except RecursionError:
        raise ConfigError(f"{name} is nested too deep") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{name}: wanted a table of settings")
    return raw


def import_inferential(raw: dict[str, Any], is_address: Callable[[str], bool]) -> Imported:
    """Take over what means something here.

    Args:
        raw: The configuration.
        is_address: Whether this server could listen at a ZeroMQ address.

    Raises:
        ConfigError: A setting is not what it may be.
    """
    values = DEFAULTS | dict(_leaves(raw))
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
        raise ConfigError(
            f"{name}: YAML is read with PyYAML, which is not installed: "
            "`pip install 'iskander[inferential]'`"
        ) from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Says where a value is that PyYAML cannot make, such as the date 2020-99-99."""

        def construct_object(self, node: Any, deep: bool = False) -> Any:  # noqa: ANN401
            try:
                return super().construct_object(node, deep)
            except (ArithmeticError, AttributeError, LookupError, ValueError):
                problem = f"{node.value!r:.80} is no {node.tag.rpartition(':')[2]}"
                raise yaml.MarkedYAMLError(None, None, problem, node.start_mark) from None

    try:
        loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if not _is_bounded(node):
            raise ConfigError(f"{name} has more than {NODES_MAX} values, its aliases written out")
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not YAML: {_line(' '.join(str(error).split()))}") from None


def _is_bounded(node: Any) -> bool:  # noqa: ANN401
    """Whether a YAML node is of at most `NODES_MAX`, each alias counted as what it stands for."""
    waiting, count = [node], 1
    while waiting and count <= NODES_MAX:
        node = waiting.pop()
        if node.id != "scalar":
            inner = list(chain(*node.value)) if node.id == "mapping" else node.value
            count += len(inner)
            waiting += inner
    return count <= NODES_MAX


def _leaves(raw: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        _check_key(key, above)
        path = ".".join((*above, key))
        if path in TABLES and value is not None and not isinstance(value, dict):
            raise ConfigError(f"{_shown(path, value)}: wanted a table")
        if isinstance(value, dict) and path not in SAME:
            yield from _leaves(value, (*above, key))
        elif path in SAME or (path not in TABLES and value != []):
            yield path, value


def _check_key(key: Any, above: tuple[str, ...]) -> None:  # noqa: ANN401
    if not isinstance(key, str):
        rule = f"wanted text as a key, got {type(key).__name__}"
    elif len(key) > KEY_LETTERS_MAX:
        rule = f"a key has more than {KEY_LETTERS_MAX} letters"
    elif len(above) > DEPTH_MAX:
        rule = f"nested deeper than {DEPTH_MAX} tables"
    else:
        return
    table = shorten(_line(".".join(above)), FIELD_BYTES_MAX) or "the file"
    raise ConfigError(f"{table}: {rule}")


def _is_name(model: str) -> bool:
    """Whether a model can be called so here."""
    try:
        msgspec.convert({"name": model, "path": model}, ModelConfig)
    except msgspec.ValidationError:
        return False
    return True


def _reason(path: str, values: dict[str, Any], is_address: Callable[[str], bool]) -> str:
    """Why a setting is not taken over; empty: it is."""
    strategy, bind = values["scheduling.strategy"], values["transport.bind"]
    if path == "transport.bind" and isinstance(bind, str) and bind.isprintable():
        return "" if is_address(bind) else UNREACHABLE
    if path == "scheduling.strategy" and isinstance(strategy, str) and strategy not in POLICIES:
        return "not one of ours; iskander.embed takes a scoring function"
    is_of_batches = path.startswith("scheduling.batch_optimized.")
    if path in SAME and (strategy == "batch_optimized" or not is_of_batches):
        return ""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        reason = DROPPED.get(".".join(parts[:count]))
        if reason is not None:
            return reason
    return "there is no such setting"


def _translated(path: str, value: Any) -> Any:  # noqa: ANN401
    """A value as this server says it, held against its own declarations."""
    section, key = SAME[path]
    kind = InferentialConfig if section == "inferential" else LaneConfig
    try:
        ours = _ours(key, value)
        msgspec.convert({key: ours}, kind)
    except (ValueError, msgspec.ValidationError) as error:
        rule = str(error).partition(" - at")[0]
        raise ConfigError(f"{_shown(path, value)}: {rule}") from None
    return ours


def _ours(key: str, value: Any) -> Any:  # noqa: ANN401
    if key == "overflow":
        if not isinstance(value, str) or value not in OVERFLOW:
            raise ValueError(f"unknown, wanted one of {', '.join(OVERFLOW)}")
        return OVERFLOW[value]
    if key == "linger_us":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= WAIT_MS_MAX:
            raise ValueError(f"wanted a number from 0 to {WAIT_MS_MAX}")
        return round(value * 1000)
    if isinstance(value, str) and not value.isprintable():
        raise ValueError("wanted one line of printable text")
    if isinstance(value, int) and value > INTEGER_MAX:
        raise ValueError(f"wanted at most {INTEGER_MAX}")
    return [value] if key == "preferred_batch_rows" else value


def _shown(path: str, value: Any) -> str:  # noqa: ANN401
    """A setting, and its value where that is a text or a number of a sane size."""
    if isinstance(value, str | float) or (isinstance(value, int) and abs(value) <= INTEGER_MAX):
        return f"{path} = {shorten(json.dumps(value), FIELD_BYTES_MAX)}"
    return path


def _line(text: str) -> str:
    """A text as it is where it is one printable line, else quoted and escaped."""
    return text if text.isprintable() else json.dumps(text)
