"""Query of a source, as a client's descriptor contains it.

Pure. Runs on: gateway loop.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from iskander.config.sources import Filter, Names, UnitRows
from iskander.errors import MalformedInput
from iskander.foundation.decoders import DECODE_ERRORS, thread_safe

PATH_CHARACTERS_MAX: Final = 1024
FOLDER_GLOBS_MAX: Final = 2
"""Segments `**` of a path: each one multiplies the listings by the depth of the folders."""


@thread_safe
class SourceQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client reads of a source; None is the source's own setting.

    Attributes:
        source: Name of the source.
        model: Model that scores the rows.
        columns: Columns of the answer, in this order.
        keep: Columns of the files that are returned with the results.
        filter: Condition of the rows, in addition to that of the source.
        path: File, folder or glob below the source's folder.
        unit_rows: Rows of one endpoint, rounded to row groups.
    """

    source: Annotated[str, Meta(min_length=1, max_length=128)]
    model: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    columns: Annotated[Names, Meta(min_length=1)] | None = None
    keep: Names | None = None
    filter: Filter | None = None
    path: Annotated[str, Meta(max_length=PATH_CHARACTERS_MAX)] | None = None
    unit_rows: UnitRows | None = None


def read_query(command: bytes) -> SourceQuery:
    """Decode the JSON of a command descriptor.

    Raises:
        MalformedInput: It is not JSON, has an unknown key or a wrong type, or its path leaves the
            source's folder.
    """
    try:
        query = msgspec.json.decode(command, type=SourceQuery)
    except DECODE_ERRORS as error:
        raise MalformedInput(
            f'the command is not a query of a source, such as {{"source": NAME}}: {error}'
        ) from None
    if query.path is not None:
        _require_below(query.path)
    return query


def _require_below(path: str) -> None:
    """Require a path that cannot leave its folder, whatever links it has, and is soon listed."""
    segments = path.split("/")
    if segments.count("**") > FOLDER_GLOBS_MAX:
        count = f"{segments.count('**')} segments `**`, limit {FOLDER_GLOBS_MAX}"
        raise MalformedInput(f"`path` is {path[:100]!r} with {count}")
    if not path or path.startswith("/") or "\0" in path or ".." in segments:
        raise MalformedInput(
            f"`path` is {path[:100]!r}; expected a path, or a glob, below the source's folder, "
            "without `..`"
        )
