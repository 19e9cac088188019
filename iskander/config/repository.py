"""Settings of the model repository, and of one of its models (`model.toml`)."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta, field

from iskander.config.models import ModelConfig
from iskander.config.section import Section
from iskander.config.shadow import Share
from iskander.foundation.decoders import thread_safe

ALIAS = r"^(?![0-9]+\Z)[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\Z"
"""A name that is not a version number."""
ALIASES_MAX = 64

Version = Annotated[int, Meta(ge=0, le=10**18)]
Versions = str | tuple[Version, ...]
"""`versions_error` checks the text, instead of a pattern in the type.

msgspec 0.22 applies the pattern of a text or list to the list's entries, and crashes when it frees
the type. Source: TypeNode_get_traverse_ranges of its `_core.c`, which does not count the pattern.
"""

_POLICY = re.compile(r"all|latest:[1-9][0-9]{0,2}")


def versions_error(versions: Versions) -> str:
    """The error of a version policy; empty for a valid one."""
    if not isinstance(versions, str) or _POLICY.fullmatch(versions):
        return ""
    shown = msgspec.json.encode(versions).decode()
    return f"versions = {shown}: expected `latest:N` with N from 1 to 999, `all`, or a list"


class RepositoryConfig(Section, frozen=True, kw_only=True):
    """A folder of models, `NAME/VERSION/model.onnx`; see `docs/repository.md`.

    Attributes:
        path: The folder, relative to this file. Empty: only `[[models]]`.
        control: `watched`: serve the models in the folder and follow changes. `explicit`: load and
            unload models by API calls.
        load: Models to load at startup if `control` is `explicit`; `*`: all models in the folder.
        versions: Default version policy of a model without one in `model.toml`: `latest:N`, `all`,
            or a list.
        marker: File that marks a version's folder as complete, such as `.complete`; others are
            ignored. Empty: every folder is complete, so create it by a rename.
        settle_ms: Milliseconds without changes in a version's folder before a change is applied.
        rescan_s: Seconds between folder scans if no change is reported.
    """

    restart_reason: ClassVar[str] = "the folder is watched with it from the start"

    path: str = ""
    control: Literal["watched", "explicit"] = "watched"
    load: tuple[str, ...] = ()
    versions: Versions = "latest:1"
    marker: Annotated[str, Meta(pattern=r"^[^/]{0,100}\Z")] = ""
    settle_ms: Annotated[int, Meta(ge=10, le=3_600_000)] = 200
    rescan_s: Annotated[float, Meta(ge=0.1, le=86_400)] = 30.0


@thread_safe
class ModelFile(ModelConfig, frozen=True, kw_only=True):
    """`model.toml` beside the versions of a model: settings of `[[models]]`, and routing.

    Attributes:
        versions: Version policy; by default `repository.versions`.
        default: Version or alias of calls without one; by default the highest version.
        aliases: Versions by alias.
        split: Weights by version or alias, for calls without either.
        shadows: Shadow versions by version or alias, each with its share as in
            `models.shadow_share`.
    """

    name: str = ""
    path: str = ""
    versions: Versions | None = None
    default: str | int = ""
    aliases: Annotated[
        dict[Annotated[str, Meta(pattern=ALIAS)], Version], Meta(max_length=ALIASES_MAX)
    ] = field(default_factory=dict)
    split: Annotated[
        dict[str, Annotated[float, Meta(ge=0, le=1_000_000)]], Meta(max_length=ALIASES_MAX)
    ] = field(default_factory=dict)
    shadows: Annotated[dict[str, Share], Meta(max_length=ALIASES_MAX)] = field(default_factory=dict)
