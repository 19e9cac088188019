"""Parts of a source: the files, columns and conditions of one endpoint.

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
from iskander.lake.plan import Unit, total_rows
from iskander.lake.plan import unit as make_unit
from iskander.lake.sources.reading import target_bytes

FILES_MAX: Final = 256
"""Files of one part, so that a ticket stays small."""
DECODED_BYTES_MAX: Final = 64 << 20


@thread_safe
class Part(msgspec.Struct, frozen=True, array_like=True):
    """A part of a source, for the ticket of an endpoint.

    Attributes:
        format: Format of the files.
        schema: Columns that are read or filtered, as an IPC message.
        files: Files with their states and row groups, as the locator of a unit has them.
        rows: Rows before the filter; None if only reading tells.
        size: Approximate bytes of the files.
        keep: Columns of the files in the answer.
        columns: Columns of the answer.
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
    """Encode a part; paths of the same folder compress well."""
    return zlib.compress(msgspec.msgpack.encode(part))


def decode_part(encoded: bytes) -> Part:
    """Decode a part, whose ticket was checked.

    Raises:
        ProtocolError: A gateway of another version made it.
    """
    try:
        text = zlib.decompressobj().decompress(encoded, DECODED_BYTES_MAX)
        return msgspec.msgpack.decode(text, type=Part)
    except (zlib.error, *DECODE_ERRORS) as error:
        raise ProtocolError(f"the part of a ticket cannot be read: {error}") from None


def joined(units: Sequence[Unit], *, unit_rows: int | None, parts_max: int) -> list[Unit]:
    """Join neighboring units of row groups and small files to the parts of an answer.

    Args:
        units: Units of one row group or file each, in order.
        unit_rows: Rows of a part; None: bytes, as for a scoring job. A larger unit is a part.
        parts_max: Number of parts; parts become larger than `unit_rows` to respect it.

    Raises:
        LimitExceeded: There are too many files for so many parts.
    """
    sizes = [
        unit.bytes if unit_rows is None else (unit_rows if unit.rows is None else unit.rows)
        for unit in units
    ]
    total = sum(sizes)
    target = target_bytes(total, UNIT_BYTES) if unit_rows is None else unit_rows
    groups = _groups(units, sizes, target)
    while len(groups) > parts_max and target < total:
        target *= 2
        groups = _groups(units, sizes, target)
    if len(groups) > parts_max:
        raise LimitExceeded(
            f"the source has more than {parts_max} parts of {FILES_MAX} files; limit {parts_max} "
            "endpoints (`source_reads.endpoints`); read a part of it (`path`)"
        )
    return [_joined(index, group) for index, group in enumerate(groups)]


def _groups(units: Sequence[Unit], sizes: Sequence[int], target: int) -> list[list[Unit]]:
    groups: list[list[Unit]] = []
    size = files = 0
    last_path = ""
    for unit, unit_size in zip(units, sizes, strict=True):
        paths = [each["path"] for each in unit.locator["files"]]
        more = len(paths) - (paths[:1] == [last_path])
        if not groups or size + unit_size > target or files + more > FILES_MAX:
            groups.append([])
            size, files, more = 0, 0, len(paths)
        groups[-1].append(unit)
        size, files = size + unit_size, files + more
        last_path = paths[-1] if paths else ""
    return groups


def _joined(index: int, units: Sequence[Unit]) -> Unit:
    """Join units, and the neighboring row groups of one file."""
    files: list[dict[str, Any]] = []
    for each in (each for unit in units for each in unit.locator["files"]):
        last = files[-1] if files else {}
        is_next = last.get("path") == each["path"] and "groups" in last
        if is_next and last["groups"][1] == each["groups"][0]:
            last["groups"] = [last["groups"][0], each["groups"][1]]
        else:
            files.append(dict(each))
    size = sum(unit.bytes for unit in units)
    return make_unit(index, {"files": files}, rows=total_rows(units), bytes=size)
