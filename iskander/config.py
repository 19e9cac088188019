"""Every setting, declared once: type, bounds, unit, default and a sentence.

Precedence: default < file < environment (`ISKANDER_LIMITS__ROWS=100`) < `--set limits.rows=100`.
The reference page, the commented default file, `iskander config show` and all error texts come
from the declarations below. Nothing here touches a model or a core.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from iskander.errors import ConfigError

MIB = 1 << 20
HEADER_ROOM_BYTES = MIB
"""Room beside a batch's body for its metadata and padding."""

Positive = Meta(ge=1)


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class ServerConfig(_Section, frozen=True, kw_only=True):
    """Where the gateway listens and where it keeps its sockets."""

    address: Annotated[
        str | tuple[str, ...],
        Meta(description="`HOST:PORT`, `unix:PATH`, or a list of them. Port 0 takes a free one."),
    ] = "127.0.0.1:50051"
    unix_mode: Annotated[
        str, Meta(pattern=r"^0?[0-7]{3}\Z", description="Mode of a `unix:` socket, octal.")
    ] = "0660"
    unix_owner: Annotated[
        str,
        Meta(description="`USER`, `USER:GROUP` or `:GROUP` to own a `unix:` socket; empty: us."),
    ] = ""
    runtime_directory: Annotated[
        str,
        Meta(
            description="Folder for the attach socket, ZMQ sockets and locks; workers are started "
            "with its `attach.sock`. Empty: $RUNTIME_DIRECTORY, else a folder per address below "
            "$XDG_RUNTIME_DIR or /tmp."
        ),
    ] = ""
    drain_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="Seconds that a stopping gateway waits for accepted batches.",
        ),
    ] = 30.0


class LimitsConfig(_Section, frozen=True, kw_only=True):
    """What one batch, stream or lane may take. Beyond a limit a request is refused by name."""

    rows: Annotated[int, Positive, Meta(description="Rows of a batch.")] = 1_048_576
    bytes: Annotated[int, Positive, Meta(description="Bytes of a batch, decompressed.")] = 64 * MIB
    columns: Annotated[int, Positive, Meta(description="Columns of a batch.")] = 1024
    string_bytes: Annotated[
        int, Positive, Meta(description="Bytes in the string and binary columns of a batch.")
    ] = 16 * MIB
    nesting: Annotated[
        int, Meta(ge=1, le=64, description="Depth of a column's type; a primitive has 1.")
    ] = 16
    message_bytes: Annotated[
        int, Positive, Meta(description="Bytes of one gRPC message.", le=2**31 - 1)
    ] = 72 * MIB
    streams: Annotated[int, Positive, Meta(description="DoExchange streams open at once.")] = 1024
    window_batches: Annotated[
        int, Positive, Meta(description="Batches of one stream in flight; then reading pauses.")
    ] = 8
    window_bytes: Annotated[
        int, Positive, Meta(description="Bytes of one stream in flight; then reading pauses.")
    ] = 64 * MIB
    queue_requests: Annotated[
        int, Positive, Meta(description="Requests of one lane that wait for a worker.")
    ] = 4096
    arena_wait_ms: Annotated[
        int, Meta(ge=0, description="Milliseconds to wait for room in a full arena.")
    ] = 5000


class WorkersConfig(_Section, frozen=True, kw_only=True):
    """The worker processes."""

    groups: Annotated[
        Literal["auto"] | tuple[str, ...],
        Meta(
            description="Core groups: `auto` is one for each NUMA node's cores, or a list of cpu "
            'lists such as ["0-3", "4-7"].'
        ),
    ] = "auto"
    count: Annotated[
        int, Meta(ge=0, le=1024, description="Workers in all; 0: one for each group.")
    ] = 0
    spawn: Annotated[
        bool, Meta(description="Start the workers; false where a service manager does.")
    ] = True
    start_s: Annotated[
        float,
        Meta(gt=0, le=86_400, description="Seconds for a worker to attach and load its models."),
    ] = 120.0
    hang_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="Seconds without a beat while a batch runs; then it is replaced.",
        ),
    ] = 30.0
    reattach_s: Annotated[
        float,
        Meta(
            ge=0, le=86_400, description="Seconds that workers outlive their gateway; 0: for ever."
        ),
    ] = 30.0


class ArenaConfig(_Section, frozen=True, kw_only=True):
    """Shared memory, taken whole at start."""

    input_bytes: Annotated[
        int, Positive, Meta(description="Input arena of the gateway, in bytes.")
    ] = 256 * MIB
    output_bytes: Annotated[
        int, Positive, Meta(description="Output arena of each worker, in bytes.")
    ] = 64 * MIB


class AdminConfig(_Section, frozen=True, kw_only=True):
    """What the operator sees."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least level to log.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="Lines on stderr: for people, or JSON.")
    ] = "text"


class ModelConfig(_Section, frozen=True, kw_only=True):
    """One model version to serve."""

    name: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}\Z", description="Name to call it.")
    ]
    path: Annotated[
        str,
        Meta(
            min_length=1,
            description="Model file, or folder with `model.onnx`; relative to this file. "
            "A `manifest.toml` beside the model is its contract.",
        ),
    ]
    version: Annotated[
        str | int | None,
        Meta(description="Version; the folder's name where that is a number, else 1."),
    ] = None
    backend: Annotated[Literal["onnx"], Meta(description="What runs it.")] = "onnx"
    execution_providers: Annotated[
        tuple[Literal["cpu", "cuda", "tensorrt"], ...],
        Meta(min_length=1, description="In order of preference; each one must be there."),
    ] = ("cpu",)
    intra_threads: Annotated[
        int, Meta(ge=0, le=1024, description="Threads within an operator; 0: the worker's cores.")
    ] = 0
    inter_threads: Annotated[
        int, Meta(ge=0, le=1024, description="Operators at once, with parallel_execution; 0: 1.")
    ] = 0
    optimization_level: Annotated[
        Literal["disable", "level1", "level2", "level3"],
        Meta(description="Graph optimisation by ONNX Runtime."),
    ] = "level3"
    parallel_execution: Annotated[bool, Meta(description="Run independent operators at once.")] = (
        False
    )
    memory_pattern: Annotated[
        bool, Meta(description="Plan memory from the first run's shapes.")
    ] = True
    max_batch_rows: Annotated[int, Positive, Meta(description="Rows of a batch.")] = 65_536


class Config(_Section, frozen=True, kw_only=True):
    """All settings."""

    server: ServerConfig = ServerConfig()
    limits: LimitsConfig = LimitsConfig()
    workers: WorkersConfig = WorkersConfig()
    arena: ArenaConfig = ArenaConfig()
    admin: AdminConfig = AdminConfig()
    models: Annotated[
        tuple[ModelConfig, ...], Meta(min_length=1, description="The models to serve.")
    ]

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses as a tuple, however they were written."""
        address = self.server.address
        return (address,) if isinstance(address, str) else address


class Setting(NamedTuple):
    """One line of the reference: `path` is `section.key`."""

    path: str
    type: str
    default: Any
    sentence: str


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

    Model paths come back absolute, and versions as text.

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
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), raw)) from None
    folder = file.resolve().parent
    models = tuple(_complete(model, folder) for model in config.models)
    config = msgspec.structs.replace(config, models=models)
    _require_relations(config)
    return Loaded(config, origins)


def settings() -> Iterator[Setting]:
    """Every setting in the order of the declarations; `[[models]]` last."""
    for section in msgspec.structs.fields(Config):
        kind = ModelConfig if section.name == "models" else section.type
        hints = get_type_hints(kind, include_extras=True)
        for field in msgspec.structs.fields(kind):
            hint = hints[field.name]
            metas = [meta for meta in get_args(hint)[1:] if isinstance(meta, Meta)]
            sentence = " ".join(meta.description for meta in metas if meta.description)
            default = None if field.default is msgspec.NODEFAULT else field.default
            yield Setting(
                f"{section.name}.{field.name}", _type_text(get_args(hint)[0]), default, sentence
            )


def render_value(value: Any) -> str:  # noqa: ANN401
    """A value as TOML."""
    return "..." if value is None else msgspec.json.encode(value).decode()


def _require_relations(config: Config) -> None:
    limits, arena = config.limits, config.arena
    relations = (
        (
            limits.bytes + HEADER_ROOM_BYTES <= limits.message_bytes,
            f"limits.message_bytes = {limits.message_bytes} is less than limits.bytes + 1 MiB: "
            "the largest batch would not fit a message with its header",
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
        (bool(config.addresses), "server.address is an empty list: nobody could connect"),
    )
    for is_met, rule in relations:
        if not is_met:
            raise ConfigError(rule)
    for index, model in enumerate(config.models):
        where = f"models[{index}]"
        if len(set(model.execution_providers)) < len(model.execution_providers):
            raise ConfigError(f"{where}.execution_providers names a provider twice")
        if model.inter_threads > 1 and not model.parallel_execution:
            raise ConfigError(
                f"{where}.inter_threads = {model.inter_threads} has no effect without "
                "parallel_execution = true"
            )
        if model.max_batch_rows > limits.rows:
            raise ConfigError(
                f"{where}.max_batch_rows = {model.max_batch_rows} is more than "
                f"limits.rows = {limits.rows}"
            )
        same = [
            other
            for other in config.models[:index]
            if (other.name, other.version) == (model.name, model.version)
        ]
        if same:
            raise ConfigError(f"{where}: `{model.name}` version {model.version} is there twice")


def _complete(model: ModelConfig, folder: Path) -> ModelConfig:
    path = (folder / model.path).absolute()
    version = model.version
    if version is None:
        named = path.name if path.is_dir() else path.parent.name
        version = named if named.isdecimal() else "1"
    return msgspec.structs.replace(model, path=str(path), version=str(version))


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


def _type_text(hint: Any) -> str:  # noqa: ANN401
    if get_origin(hint) is Literal:
        return " | ".join(msgspec.json.encode(value).decode() for value in get_args(hint))
    if get_origin(hint) is tuple:
        return f"list of {_type_text(get_args(hint)[0])}"
    parts = [part for part in get_args(hint) if part is not type(None)]
    if parts:
        return " or ".join(_type_text(part) for part in parts)
    return {str: "text", int: "integer", float: "number", bool: "true or false"}.get(
        hint, str(hint)
    )
