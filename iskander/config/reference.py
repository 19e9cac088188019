"""The declarations of `config` as lines for people: the reference, the commented default file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from iskander.config.models import ModelConfig
from iskander.config.repository import ModelFile
from iskander.config.schema import Config


class Setting(NamedTuple):
    """One line of the reference: `path` is `section.key`."""

    path: str
    type: str
    default: Any
    sentence: str


def settings() -> Iterator[Setting]:
    """Every setting in the order of the declarations; `[[models]]` last."""
    for section in msgspec.structs.fields(Config):
        kind = ModelConfig if section.name == "models" else section.type
        yield from _settings_of(kind, f"{section.name}.")


def model_file_settings() -> Iterator[Setting]:
    """What `model.toml` may say beside the settings of `[[models]]`; `path` is the key."""
    return _settings_of(ModelFile, but=ModelConfig.__struct_fields__)


def _settings_of(
    kind: type[msgspec.Struct], prefix: str = "", but: tuple[str, ...] = ()
) -> Iterator[Setting]:
    hints = get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        if field.name in but:
            continue
        hint = hints[field.name]
        metas = [meta for meta in get_args(hint)[1:] if isinstance(meta, Meta)]
        sentence = " ".join(meta.description for meta in metas if meta.description)
        default = None if field.default is msgspec.NODEFAULT else field.default
        is_table = isinstance(default, msgspec.Struct) or field.default_factory is dict
        default = {} if is_table else default
        yield Setting(f"{prefix}{field.name}", _type_text(get_args(hint)[0]), default, sentence)


def render_value(value: Any) -> str:  # noqa: ANN401
    """A value as TOML."""
    return "..." if value is None else msgspec.json.encode(value).decode()


def render_reference() -> str:
    """A commented TOML file with every setting at its default."""
    lines = [
        "# Every setting of iskander-gateway at its default.",
        "# Made by: iskander config reference",
    ]
    section = ""
    for setting in settings():
        name, key = setting.path.split(".")
        if name != section:
            section = name
            heading = "[[models]]" if name == "models" else f"[{name}]"
            lines += ["", ("# " if name == "models" else "") + heading]
        lines.append(f"# {setting.sentence} ({setting.type})")
        is_absent = name == "models" or setting.default is None
        lines.append(("# " if is_absent else "") + f"{key} = {render_value(setting.default)}")
    return "\n".join(lines) + "\n"


def _type_text(hint: Any) -> str:  # noqa: ANN401
    if get_origin(hint) is Annotated:
        return _type_text(get_args(hint)[0])
    is_struct = isinstance(hint, type) and issubclass(hint, msgspec.Struct)
    if is_struct or get_origin(hint) is dict:
        return "table"
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
