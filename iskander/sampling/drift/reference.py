"""Reference profiles of model versions, and their files.

A file is one msgpack document with the summaries of all columns. An unfinished recording has the
same form, so that it continues after a restart.

Runs on: the observer process, the operator's tool.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from iskander.config.drift import Origin
from iskander.contract.paths import read_plain
from iskander.errors import Fault, IskanderError
from iskander.foundation.decoders import DECODE_ERRORS, thread_safe
from iskander.sampling.drift.profile import ColumnKey, Profile
from iskander.sampling.drift.sketches import InvalidSketch
from iskander.sampling.drift.summary import StoredSummary, Summary

FILE: Final = "drift-reference.msgpack"
"""Name of a reference beside a model."""
FORMAT: Final = 1
FILE_BYTES_MAX: Final = 64 << 20
NotNegative = Annotated[int, msgspec.Meta(ge=0)]


class InvalidReference(
    IskanderError, code="drift_reference", fault=Fault.OPERATOR, status="FAILED_PRECONDITION"
):
    """The file of a reference cannot be read or written; record the reference again."""


class StoredColumn(msgspec.Struct, frozen=True):
    """A column in a file."""

    side: str
    name: str
    summary: StoredSummary


@thread_safe
class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A reference as stored in a file.

    Attributes:
        origin: Its source, as in `drift.references`.
        is_complete: Whether it is a reference; otherwise it is a recording that continues.
        created_s: Unix time of its end.
        rows: Rows of its samples.
        left_out: Columns above `drift.columns`.
    """

    format: Literal[1] = FORMAT
    model: str
    version: str
    origin: Origin
    is_complete: bool
    created_s: int
    rows: NotNegative
    left_out: NotNegative
    columns: tuple[StoredColumn, ...]


def to_reference(
    profile: Profile, model: str, version: str, *, origin: Origin, is_complete: bool, created_s: int
) -> Reference:
    """Return the form of a profile for a file."""
    return Reference(
        model=model,
        version=version,
        origin=origin,
        is_complete=is_complete,
        created_s=created_s,
        rows=profile.rows,
        left_out=profile.left_out,
        columns=tuple(
            StoredColumn(key.side, key.name, summary.to_stored())
            for key, summary in profile.summaries.items()
        ),
    )


def to_profile(reference: Reference, columns_max: int) -> Profile:
    """Return the profile of a reference.

    Raises:
        InvalidReference: A sketch of it is damaged.
    """
    try:
        summaries = {
            ColumnKey(each.side, each.name): Summary.from_stored(each.summary)
            for each in reference.columns[:columns_max]
        }
    except InvalidSketch as error:
        raise InvalidReference(f"a drift reference is damaged: {error}") from None
    profile = Profile(columns_max, summaries, reference.rows)
    profile.left_out = reference.left_out + len(reference.columns[columns_max:])
    return profile


def read_reference(file: Path) -> Reference | None:
    """Read a reference; None if there is no file.

    Raises:
        InvalidReference: The file cannot be read, or has another form.
    """
    try:
        data = read_plain(file, FILE_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InvalidReference(f"{file} cannot be read: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise InvalidReference(f"{file} is larger than {FILE_BYTES_MAX} bytes")
    try:
        return msgspec.msgpack.decode(data, type=Reference)
    except DECODE_ERRORS as error:
        raise InvalidReference(
            f"{file} is no drift reference of format {FORMAT}: {error}"
        ) from None


def write_reference(file: Path, reference: Reference) -> None:
    """Write a reference by a rename, so that readers see a whole file.

    Raises:
        InvalidReference: The file cannot be written.
    """
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.msgpack.encode(reference))
        partial.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise InvalidReference(f"{file} cannot be written: {error.strerror}") from None
