"""Parts of a source: a part has the files, columns and filter of one endpoint's ticket.

Pure. Runs in: reader processes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from iskander.errors import LimitExceeded, ProtocolError
from iskander.foundation.decoders import DECODE_ERRORS, thread_safe
from iskander.lake.job import UNIT_BYTES
from iskander.lake.plan import Unit, make_unit, total_rows
from iskander.lake.sources.reading import target_bytes

FILES_MAX: Final = 256
"""Limit of the files of one part, which keeps its ticket small."""
DECODED_BYTES_MAX: Final = 64 << 20


@thread_safe
class Part(msgspec.Struct, frozen=True, array_like=True):
    """What the ticket of one endpoint reads: some files of a source, and how.

    Attributes:
        format: Format of the files.
        schema: Columns that are read or filtered, as an IPC message.
        files: Files with their states and row groups, as in the locator of a unit.
        rows: Rows before the filter; None if they are unknown before reading.
        size: Approximate bytes of the files.
        keep: Columns of the files that are in the answer.
        columns: All columns of the answer.
        filter: Condition of the rows; empty for all.
    """

    format: str
    schema: bytes
    files: list[dict[str, Any]]
    rows: int | None
    size: int
    keep: tuple[str, ...]
    columns: tuple[str, ...]
    filter: str

    @property
    def unit(self) -> Unit:
        """The part as a unit of a scoring job."""
        return make_unit(0, {"files": self.files}, rows=self.rows, bytes=self.size)


def encode_part(part: Part) -> bytes:
    """Encode and compress a part: paths of the same folder compress well."""
    return zlib.compress(msgspec.msgpack.encode(part))


def decode_part(encoded: bytes) -> Part:
    """Decode a part from a ticket whose signature was checked.

    Raises:
        ProtocolError: A gateway of another version made the ticket.
    """
    try:
        text = zlib.decompressobj().decompress(encoded, DECODED_BYTES_MAX)
        return msgspec.msgpack.decode(text, type=Part)
    except (zlib.error, *DECODE_ERRORS) as error:
        raise ProtocolError(f"the part of a ticket cannot be read: {error}") from None


def join_units(units: Sequence[Unit], *, unit_rows: int | None, parts_max: int) -> list[Unit]:
    """Join neighboring units of row groups and small files to the parts of an answer.

    Args:
        units: Units of one row group or file each, in order.
        unit_rows: Rows of a part; None: parts have about the bytes of a scoring job's unit. A unit
            that is larger is a part of its own.
        parts_max: Limit of the number of parts; parts become larger than `unit_rows` to respect it.

    Raises:
        LimitExceeded: There are too many files for so many parts.
    """
    sizes = [
        unit.bytes if unit_rows is None else (unit_rows if unit.rows is None else unit.rows)
        for unit in units
    ]
    total = sum(sizes)
    target = target_bytes(total, UNIT_BYTES) if unit_rows is None else unit_rows
    groups = _group_units(units, sizes, target)
    while len(groups) > parts_max and target < total:
        target *= 2
        groups = _group_units(units, sizes, target)
    if len(groups) > parts_max:
        raise LimitExceeded(
            f"the source has more than {parts_max} parts of {FILES_MAX} files; limit {parts_max} "
            "endpoints (`source_reads.endpoints`); read a part of it (`path`)"
        )
    return [_join_group(index, group) for index, group in enumerate(groups)]


def _group_units(units: Sequence[Unit], sizes: Sequence[int], target: int) -> list[list[Unit]]:
    groups: list[list[Unit]] = []
    size = files = 0
    last_path = ""
    for unit, unit_size in zip(units, sizes, strict=True):
        paths = [file["path"] for file in unit.locator["files"]]
        more = len(paths) - (paths[:1] == [last_path])
        if not groups or size + unit_size > target or files + more > FILES_MAX:
            groups.append([])
            size, files, more = 0, 0, len(paths)
        groups[-1].append(unit)
        size, files = size + unit_size, files + more
        last_path = paths[-1] if paths else ""
    return groups


def _join_group(index: int, units: Sequence[Unit]) -> Unit:
    """Join units to one unit, and neighboring row groups of a file to one range."""
    files: list[dict[str, Any]] = []
    for file in (file for unit in units for file in unit.locator["files"]):
        last = files[-1] if files else {}
        is_next = last.get("path") == file["path"] and "groups" in last
        if is_next and last["groups"][1] == file["groups"][0]:
            last["groups"] = [last["groups"][0], file["groups"][1]]
        else:
            files.append(dict(file))
    size = sum(unit.bytes for unit in units)
    return make_unit(index, {"files": files}, rows=total_rows(units), bytes=size)
