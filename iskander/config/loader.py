"""Configuration loader: reads a file, applies overrides, checks types and relations.

Precedence: default < file < environment (`ISKANDER_LIMITS__ROWS=100`) < `--set limits.rows=100`.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from iskander.config.drift import require_model_drift
from iskander.config.migration.renamed import new_name, rename_keys
from iskander.config.models import ModelConfig
from iskander.config.observation import is_uri, require_log, require_model_log
from iskander.config.placement import require_placement
from iskander.config.reference import TABLES, render_value, settings
from iskander.config.repository import versions_error
from iskander.config.schema import HEADER_BYTES_MAX, Config
from iskander.config.section import Section, require
from iskander.config.sources import SourceConfig, require_sources
from iskander.errors import ConfigError, utf8_problem

SectionT = TypeVar("SectionT", bound=Section)


class Loaded(NamedTuple):
    """A checked configuration.

    Attributes:
        config: The values.
        origins: `file`, `environment` or `--set` for each `section.key` that is not a default.
        warnings: One line for each setting with a deprecated name.
    """

    config: Config
    origins: dict[str, str]
    warnings: tuple[str, ...] = ()


def load_config(
    file: Path, *, overrides: tuple[str, ...] = (), environment: Mapping[str, str] | None = None
) -> Loaded:
    """Read, override, type-check and cross-check a configuration.

    The result has absolute paths, and versions as text.

    Raises:
        ConfigError: Contains the path in the file, the value and the rule.
    """
    try:
        raw = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{file.name} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file.name} is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{file.name} is nested too deeply") from None
    warnings: list[str] = []
    rename_keys(raw, warnings)
    origins = {path: "file" for path, _ in _leaves(raw)}
    for name, text in sorted((os.environ if environment is None else environment).items()):
        if name.startswith("ISKANDER_") and "__" in name:
            section, key = name.removeprefix("ISKANDER_").lower().split("__", 1)
            path = new_name(f"{section}.{key}", warnings)
            _override(raw, origins, path, text, "environment")
    for override in overrides:
        path, separator, text = override.partition("=")
        require(bool(separator), f"--set {override}: expected section.key=value")
        _override(raw, origins, new_name(path.strip(), warnings), text.strip(), "--set")
    _inherit_lanes(raw)
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), raw)) from None
    folder = file.resolve().parent
    if problem := utf8_problem(str(folder)):
        raise ConfigError(f"folder of the configuration {problem}: paths in it could not be sent")
    config = msgspec.structs.replace(
        config,
        models=tuple(_complete(model, folder) for model in config.models),
        repository=_absolute(config.repository, folder, "path"),
        access=_absolute(config.access, folder, "tokens", "audit_file"),
        tls=_absolute(config.tls, folder, "certificate", "key", "client_ca", "client_crl"),
        source_reads=_absolute(config.source_reads, folder, "key_file"),
        prediction_log=_absolute(config.prediction_log, folder, "path", "spool", "key_file"),
        drift=_absolute(config.drift, folder, "folder"),
        sources=tuple(_complete_source(source, folder) for source in config.sources),
    )
    require_relations(config)
    return Loaded(config, origins, tuple(warnings))


def _absolute(section: SectionT, folder: Path, *keys: str) -> SectionT:
    """A section with its paths resolved against the file's folder."""
    found = {key: getattr(section, key) for key in keys}
    paths = {
        key: path if is_uri(path) else str((folder / path).absolute())
        for key, path in found.items()
        if path
    }
    return msgspec.structs.replace(section, **paths)


def require_relations(config: Config) -> None:
    """Check the settings of all sections against one another."""
    limits, arena, http, access = config.limits, config.arena, config.http, config.access
    problem = versions_error(config.repository.versions)
    require(not problem, f"repository.{problem}")
    batch_bytes, batch = limits.bytes + HEADER_BYTES_MAX, "limits.bytes + 1 MiB: the largest batch"

    def require_at_least(path: str, value: int, least: int, rule: str) -> None:
        require(least <= value, f"{path} = {value} is less than {rule}")

    message_bytes, rule = limits.message_bytes, f"{batch} and its header do not fit in a message"
    require_at_least("limits.message_bytes", message_bytes, batch_bytes, rule)
    if limits.receive_bytes:
        needed, each = 2 * message_bytes * config.server.processes, "each of server.processes"
        rule = f"two messages of limits.message_bytes = {message_bytes} for {each}"
        require_at_least("limits.receive_bytes", limits.receive_bytes, needed, rule)
    rule = f"{batch} does not fit in the arena"
    require_at_least("arena.input_bytes", arena.input_bytes, batch_bytes, rule)
    rule = "limits.bytes: the largest batch would never be read"
    require_at_least("limits.window_bytes", limits.window_bytes, limits.bytes, rule)
    rule = f"limits.string_bytes = {limits.string_bytes} is more than limits.bytes"
    require(limits.string_bytes <= limits.bytes, rule)
    if http.address:
        rule = "limits.message_bytes: the largest request does not fit in the buffer"
        require_at_least("http.bodies_bytes", http.bodies_bytes, message_bytes, rule)
    has_repository = bool(config.repository.path)
    require_sources(
        config.sources, config.source_reads, config.models, has_repository=has_repository
    )
    require_log(config.prediction_log)
    has_models = bool(config.models) or has_repository
    require(has_models, "there is nothing to serve: no [[models]], and no repository.path")
    require(
        not (access.tokens and config.inferential.address) or bool(access.anonymous),
        "inferential.address and access.tokens: Inferential's clients send no token; set "
        "access.anonymous to the models that they may use",
    )
    has_effect = bool(access.tokens) or not access.anonymous
    require(has_effect, "access.anonymous has no effect without access.tokens")
    listeners = ["server.address", "http.address", "inferential.address"]
    listeners += ["admin.address"]
    listeners += (f"extensions.protocols.{name}" for name in config.extensions.protocols)
    for name in access.allow_unprotected_network:
        rule = f"access.allow_unprotected_network: {name} is no listener; expected one of"
        require(name in listeners, f"{rule} {', '.join(listeners)}")
    for host in access.allowed_hosts:
        rule = f"access.allowed_hosts: `{host}` is no host name; expected one without a port"
        require(not set(host) & set("/:@ "), f"{rule}, such as `scores.example`")
    for origin in access.allowed_origins:
        rule = f"access.allowed_origins: `{origin}` is no origin; expected scheme and host"
        require(_is_origin(origin), f"{rule}, such as `https://ui.example`")
    has_effect = bool(config.tls.certificate) or not (config.tls.key or config.tls.client_ca)
    require(has_effect, "tls.key and tls.client_ca have no effect without tls.certificate")
    has_effect = bool(config.tls.client_ca) or not config.tls.client_crl
    require(has_effect, "tls.client_crl has no effect without tls.client_ca")
    require(bool(config.addresses), "server.address is an empty list: there is no listener")
    seen = set()
    for index, model in enumerate(config.models):
        where, key = f"models[{index}]", (model.name, model.version)
        require_model(model, where, config)
        require(key not in seen, f"{where}: duplicate of `{key[0]}` version {key[1]}")
        seen.add(key)
    _require_served_versions(config)


def _is_origin(text: str) -> bool:
    """Whether a text is an origin as browsers send it: scheme, host and, optionally, port."""
    scheme, separator, host = text.partition("://")
    return scheme in ("http", "https") and bool(separator and host) and not set(host) & set("/*@ ")


def _require_served_versions(config: Config) -> None:
    """Require a version without `shadow_share` for each version with it."""
    served = {model.name for model in config.models if model.shadow_share is None}
    for index, model in enumerate(config.models):
        problem = f"`{model.name}` has no other version, whose requests it would run"
        is_met = model.shadow_share is None or model.name in served
        require(is_met, f"models[{index}].shadow_share: {problem}")


def require_model(model: ModelConfig, where: str, config: Config) -> None:
    """Check the settings of a model against one another, and against the other sections.

    Raises:
        ConfigError: Names `where` and the settings that contradict each other.
    """
    require_model_log(model.prediction_log, config.prediction_log, f"{where}.prediction_log")
    require_model_drift(model.drift, config.drift, f"{where}.drift")
    providers, rows_max = model.execution_providers, model.max_batch_rows
    is_distinct = len(set(providers)) == len(providers)
    require(is_distinct, f"{where}.execution_providers names a provider twice")
    other = ", ".join(sorted(set(model.provider_options) - set(providers)))
    problem = f"provider_options has `{other}`, which is not in execution_providers"
    require(not other, f"{where}.{problem}")
    require_placement(model, where)
    has_effect = config.workers.thread_pool != "worker"
    has_effect = has_effect or not (model.intra_threads or model.inter_threads)
    problem = 'intra_threads and inter_threads have no effect with workers.thread_pool = "worker"'
    require(has_effect, f"{where}: {problem}")
    has_effect = model.inter_threads <= 1 or model.parallel_execution
    problem = f"inter_threads = {model.inter_threads} has no effect without"
    require(has_effect, f"{where}.{problem} parallel_execution = true")
    rows = max(model.lane.pad_to, default=0)
    limit = f"max_batch_rows = {rows_max}"
    require(rows <= rows_max, f"{where}.lane.pad_to = {rows} is more than {limit}")
    problem = f"{limit} is more than limits.rows = {config.limits.rows}"
    require(rows_max <= config.limits.rows, f"{where}.{problem}")


def _inherit_lanes(raw: dict[str, Any]) -> None:
    """Apply `[lanes]` as defaults to every model's lane."""
    lanes, models = raw.get("lanes", {}), raw.get("models")
    if not isinstance(lanes, dict) or not isinstance(models, list):
        return  # The conversion reports the error.
    for model in models:
        if isinstance(model, dict) and isinstance(model.setdefault("lane", {}), dict):
            model["lane"] = lanes | model["lane"]


def _complete(model: ModelConfig, folder: Path) -> ModelConfig:
    """Return a model with absolute paths, and a version as text."""
    path = (folder / model.path).absolute()
    version = model.version
    if version is None:
        named = path.name if os.path.isdir(path) else path.parent.name
        version = named if named.isdecimal() else "1"
    # The link stays: an interpreter finds its virtual environment from the path of its link.
    python = str((folder / model.python).absolute()) if model.python else ""
    return msgspec.structs.replace(model, path=str(path), version=str(version), python=python)


def _complete_source(source: SourceConfig, folder: Path) -> SourceConfig:
    return msgspec.structs.replace(source, path=str((folder / source.path).absolute()))


def _override(
    raw: dict[str, Any], origins: dict[str, str], path: str, text: str, origin: str
) -> None:
    if problem := utf8_problem(f"{path}={text}"):
        raise ConfigError(f"{origin} {problem}")
    section, dot, key = path.partition(".")
    if not dot or section in TABLES or not isinstance(raw.setdefault(section, {}), dict):
        raise ConfigError(f"{origin} {path}: only section.key of a [section] can be set")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text
    raw[section][key] = value
    origins[path] = origin


def _leaves(raw: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, values in raw.items():
        if isinstance(values, dict):
            for key, value in values.items():
                yield f"{section}.{key}", value


def _explain(text: str, raw: Any) -> str:  # noqa: ANN401
    """Add the value, and the choices of an enum, to msgspec's rule and path."""
    rule, _, where = text.partition(" - at `$")
    path = where.rstrip("`").removeprefix(".")
    if rule.startswith("Invalid enum value"):
        kinds = {setting.path: setting.type for setting in settings()}
        kind = kinds.get(re.sub(r"\[\d+\]", "", path), "")
        rule = f"expected {kind}"
    value = raw
    try:
        for step in re.findall(r"[^.\[\]]+", path):
            value = value[int(step) if step.isdecimal() else step]
    except (KeyError, IndexError, TypeError):
        value = raw
    shown = "" if isinstance(value, dict | list) else f" = {render_value(value)}"
    return f"{path or 'the file'}{shown}: {rule}"
