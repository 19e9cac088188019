"""A configuration file, read and checked.

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

from iskander.config.models import ModelConfig
from iskander.config.reference import render_value, settings
from iskander.config.repository import complaint_about_versions
from iskander.config.schema import HEADER_ROOM_BYTES, Config
from iskander.config.section import Section
from iskander.errors import ConfigError

SectionT = TypeVar("SectionT", bound=Section)


class Loaded(NamedTuple):
    """A checked configuration.

    Attributes:
        config: The values.
        origins: For each `section.key` that is not a default: `file`, `environment` or `--set`.
    """

    config: Config
    origins: dict[str, str]


def load_config(
    file: Path, *, overrides: tuple[str, ...] = (), environment: Mapping[str, str] | None = None
) -> Loaded:
    """Read, override, type-check and cross-check a configuration.

    Paths come back absolute, and versions as text.

    Raises:
        ConfigError: The path in the file, the value and the rule that it breaks.
    """
    try:
        raw = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{file.name} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file.name} is not TOML: {error}") from None
    origins = {path: "file" for path, _ in _leaves(raw)}
    environment = os.environ if environment is None else environment
    for name, text in sorted(environment.items()):
        if name.startswith("ISKANDER_") and "__" in name:
            section, key = name.removeprefix("ISKANDER_").lower().split("__", 1)
            _override(raw, origins, f"{section}.{key}", text, "environment")
    for override in overrides:
        path, separator, text = override.partition("=")
        if not separator:
            raise ConfigError(f"--set {override}: wanted section.key=value")
        _override(raw, origins, path.strip(), text.strip(), "--set")
    _inherit_lanes(raw)
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), raw)) from None
    folder = file.resolve().parent
    models = tuple(_complete(model, folder) for model in config.models)
    repository = _absolute(config.repository, folder, "path")
    access = _absolute(config.access, folder, "tokens")
    tls = _absolute(config.tls, folder, "certificate", "key", "client_ca")
    config = msgspec.structs.replace(
        config, models=models, repository=repository, access=access, tls=tls
    )
    _require_relations(config)
    return Loaded(config, origins)


def _absolute(section: SectionT, folder: Path, *keys: str) -> SectionT:
    """A section with its paths, those that are set, taken from the file's folder."""
    found = {key: getattr(section, key) for key in keys}
    paths = {key: str((folder / path).absolute()) for key, path in found.items() if path}
    return msgspec.structs.replace(section, **paths)


def _require_relations(config: Config) -> None:
    limits, arena = config.limits, config.arena
    complaint = complaint_about_versions(config.repository.versions)
    relations = (
        (not complaint, f"repository.{complaint}"),
        (
            limits.bytes + HEADER_ROOM_BYTES <= limits.message_bytes,
            f"limits.message_bytes = {limits.message_bytes} is less than limits.bytes + 1 MiB: "
            "the largest batch would not fit a message with its header",
        ),
        (
            not limits.receive_bytes
            or 2 * limits.message_bytes * config.server.processes <= limits.receive_bytes,
            f"limits.receive_bytes = {limits.receive_bytes} is less than two messages of "
            f"limits.message_bytes = {limits.message_bytes} for each of server.processes",
        ),
        (
            limits.bytes + HEADER_ROOM_BYTES <= arena.input_bytes,
            f"arena.input_bytes = {arena.input_bytes} is less than limits.bytes + 1 MiB: "
            "the largest batch would never find room",
        ),
        (
            limits.bytes <= limits.window_bytes,
            f"limits.window_bytes = {limits.window_bytes} is less than limits.bytes: "
            "the largest batch would never be read",
        ),
        (
            limits.string_bytes <= limits.bytes,
            f"limits.string_bytes = {limits.string_bytes} is more than limits.bytes",
        ),
        (
            not config.http.address or limits.message_bytes <= config.http.bodies_bytes,
            f"http.bodies_bytes = {config.http.bodies_bytes} is less than limits.message_bytes: "
            "the largest request would never find room",
        ),
        (
            bool(config.models or config.repository.path),
            "there is nothing to serve: no [[models]], and no repository.path",
        ),
        (
            not (config.access.tokens and config.inferential.address) or config.access.anonymous,
            "inferential.address and access.tokens: Inferential's clients show no token; say in "
            "access.anonymous which models they may ask",
        ),
        (
            bool(config.access.tokens) or not config.access.anonymous,
            "access.anonymous has no effect without access.tokens",
        ),
        (
            bool(config.tls.certificate) or not (config.tls.key or config.tls.client_ca),
            "tls.key and tls.client_ca have no effect without tls.certificate",
        ),
        (bool(config.addresses), "server.address is an empty list: nobody could connect"),
    )
    for is_met, rule in relations:
        if not is_met:
            raise ConfigError(rule)
    for index, model in enumerate(config.models):
        where = f"models[{index}]"
        require_model(model, where, config)
        same = [
            other
            for other in config.models[:index]
            if (other.name, other.version) == (model.name, model.version)
        ]
        if same:
            raise ConfigError(f"{where}: `{model.name}` version {model.version} is there twice")


def require_model(model: ModelConfig, where: str, config: Config) -> None:
    """Hold the settings of a model against one another, and against those of all.

    Raises:
        ConfigError: Says what is against what; `where` says in what.
    """
    limits = config.limits
    if len(set(model.execution_providers)) < len(model.execution_providers):
        raise ConfigError(f"{where}.execution_providers names a provider twice")
    strange = sorted(set(model.provider_options) - set(model.execution_providers))
    if strange:
        raise ConfigError(
            f"{where}.provider_options has `{strange[0]}`, which is not in execution_providers"
        )
    if config.workers.thread_pool == "worker" and (model.intra_threads or model.inter_threads):
        raise ConfigError(
            f"{where}: intra_threads and inter_threads have no effect with "
            'workers.thread_pool = "worker"'
        )
    if model.inter_threads > 1 and not model.parallel_execution:
        raise ConfigError(
            f"{where}.inter_threads = {model.inter_threads} has no effect without "
            "parallel_execution = true"
        )
    above = [rows for rows in model.lane.pad_to if rows > model.max_batch_rows]
    if above:
        raise ConfigError(
            f"{where}.lane.pad_to = {above[0]} is more than max_batch_rows = {model.max_batch_rows}"
        )
    if model.max_batch_rows > limits.rows:
        raise ConfigError(
            f"{where}.max_batch_rows = {model.max_batch_rows} is more than "
            f"limits.rows = {limits.rows}"
        )


def _inherit_lanes(raw: dict[str, Any]) -> None:
    """Give every model's lane what `[lanes]` says and it does not."""
    lanes, models = raw.get("lanes", {}), raw.get("models")
    if not isinstance(lanes, dict) or not isinstance(models, list):
        return  # The conversion says what is wrong with them.
    for model in models:
        if isinstance(model, dict) and isinstance(model.setdefault("lane", {}), dict):
            model["lane"] = lanes | model["lane"]


def _complete(model: ModelConfig, folder: Path) -> ModelConfig:
    path = (folder / model.path).absolute()
    version = model.version
    if version is None:
        named = path.name if path.is_dir() else path.parent.name
        version = named if named.isdecimal() else "1"
    # Not resolved: an interpreter finds its virtual environment by the link's own place.
    python = str((folder / model.python).absolute()) if model.python else ""
    return msgspec.structs.replace(model, path=str(path), version=str(version), python=python)


def _override(
    raw: dict[str, Any], origins: dict[str, str], path: str, text: str, origin: str
) -> None:
    section, dot, key = path.partition(".")
    if not dot or section == "models" or not isinstance(raw.setdefault(section, {}), dict):
        raise ConfigError(f"{origin} {path}: only section.key of a [section] can be set")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    raw[section][key] = value
    origins[path] = origin


def _leaves(raw: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, values in raw.items():
        if isinstance(values, dict):
            for key, value in values.items():
                yield f"{section}.{key}", value


def _explain(text: str, raw: Any) -> str:  # noqa: ANN401
    """Put the value beside msgspec's rule and path, and the choices where there are some."""
    rule, _, where = text.partition(" - at `$")
    path = where.rstrip("`").removeprefix(".")
    kind = {setting.path: setting.type for setting in settings()}
    wanted = kind.get(re.sub(r"\[\d+\]", "", path), "")
    if rule.startswith("Invalid enum value"):
        rule = f"wanted {wanted}"
    value = raw
    for step in re.findall(r"[^.\[\]]+", path):
        index = int(step) if step.isdecimal() else step
        try:
            value = value[index]
        except (KeyError, IndexError, TypeError):
            return f"{path or 'the file'}: {rule}"
    if not path or isinstance(value, dict | list):
        return f"{path or 'the file'}: {rule}"
    return f"{path} = {render_value(value)}: {rule}"
