"""Rejection of files that belong to a Delta, Iceberg or Hudi table.

The log of a table decides which files belong to it, and which of their rows were deleted. A reader
of the plain files would return removed and repeated rows. So a file below a table's folder is an
error, even if a link or a glob led to it. Listings of the inputs show whether the listed folders
are tables. Each folder above them is examined once, with at most three lookups and one listing of a
folder `metadata`.

Runs in: the operator's tool and reader processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import pyarrow.fs as pafs

from iskander.errors import SourceError
from iskander.lake.sources.places import LOCAL_PATHS, Place

DELTA_LOG: Final = "_delta_log"
HUDI: Final = ".hoodie"
ICEBERG_METADATA: Final = "metadata"
ICEBERG_ENDS: Final = (".metadata.json", ".metadata.json.gz")
_MARKS: Final = {DELTA_LOG: "Delta", HUDI: "Hudi"}
_NO_TABLE: Final = ""
"""Format of a folder that is no table."""
_THREADS: Final = 16


class Advice(NamedTuple):
    """What the error about files of a table recommends.

    Attributes:
        override: Option or setting with which the files are read as plain files.
        has_tables: Whether tables can be inputs.
    """

    override: str
    has_tables: bool


COMMAND: Final = Advice("`--plain-files`", has_tables=True)
"""Advice of `iskander score`."""


class Tables:
    """Table formats of the folders that were examined, for all inputs of one job.

    Args:
        advice: What the error recommends.
    """

    def __init__(self, advice: Advice = COMMAND) -> None:
        self._advice = advice
        # The format of the table, or `_NO_TABLE`, by number of the filesystem and folder.
        self._known: dict[tuple[int, str], str] = {}
        self._filesystems: list[pafs.FileSystem] = []

    def note(
        self, place: Place, folder: str, infos: Sequence[pafs.FileInfo], *, is_recursive: bool
    ) -> None:
        """Remember which folders are tables, as a complete listing of a folder shows."""
        tables: dict[str, str] = {}
        folders = {folder}
        for info in infos:
            parent, _, name = info.path.rpartition("/")
            folders.add(parent)
            if info.type == pafs.FileType.Directory:
                folders.add(info.path)
            above, _, last = parent.rpartition("/")
            if last == ICEBERG_METADATA and name.endswith(ICEBERG_ENDS):
                tables[above] = "Iceberg"
        for each in folders:
            above, _, last = each.rpartition("/")
            if last in _MARKS:
                tables[above] = _MARKS[last]
        if not is_recursive:
            metadata = f"{folder}/{ICEBERG_METADATA}"
            if metadata in folders and folder not in tables:
                tables[folder] = _iceberg_format(place, folder)
            folders = {folder}
        number = self._filesystem_number(place)
        for known in folders:
            self._known.setdefault((number, known), _NO_TABLE)
        for each, format in tables.items():
            self._known[number, each] = format

    def require_plain(self, place: Place, paths: Iterable[str]) -> None:
        """Require that no file is below a table, by its path or by the targets of its links.

        Raises:
            SourceError: A file is below a table, or one of its folders cannot be looked up.
        """
        parents: dict[str, str] = {}
        linked: dict[str, str] = {}
        for path in paths:
            parents.setdefault(path.rpartition("/")[0], path)
            if place.local is not None and os.path.islink(place.local.local(path)):
                real = _real_path(place.local.local(path))
                linked.setdefault(real.rpartition("/")[0], path)
        self._require_no_table(place, parents)
        if place.local is None:
            return
        for parent, path in parents.items():
            linked.setdefault(_real_path(place.local.local(parent)), path)
        if place.local is LOCAL_PATHS:
            linked = {real: path for real, path in linked.items() if real not in parents}
        machine = Place(pafs.LocalFileSystem(), "", place.uri, local=place.local)
        self._require_no_table(machine, linked, is_real=True)

    def _require_no_table(
        self, place: Place, parents: dict[str, str], *, is_real: bool = False
    ) -> None:
        """Examine the folders that are not known yet; raise an error for the first table.

        `parents` has a file in each folder, by the folder. `is_real`: the folders are resolved
        paths of this machine.
        """
        number = self._filesystem_number(place)
        unknown = {
            folder: path
            for parent, path in parents.items()
            for folder in _with_parents(parent)
            if (number, folder) not in self._known
        }
        for folder, format in zip(unknown, self._look_up(place, unknown), strict=True):
            self._known[number, folder] = format
        for parent, path in parents.items():
            for folder in _with_parents(parent):
                if format := self._known[number, folder]:
                    raise self._error(place, folder, format, path, is_real=is_real)

    def _filesystem_number(self, place: Place) -> int:
        """Return a number for the filesystem of a place.

        Buckets of the same name at two endpoints have different numbers.
        """
        if place.local is not None:
            return 0
        for number, filesystem in enumerate(self._filesystems, start=1):
            if filesystem is place.filesystem:
                return number
        self._filesystems.append(place.filesystem)
        return len(self._filesystems)

    def _look_up(self, place: Place, unknown: dict[str, str]) -> list[str]:
        """Return the format of each folder; in an object store several are examined at a time."""

        def look_up(folder: str) -> str:
            try:
                return _table_format(place, folder)
            except SourceError as error:
                path = unknown[folder]
                raise SourceError(
                    f"{path}: cannot tell whether it belongs to a table: {error.message}; "
                    f"{self._advice.override} reads plain files without this check",
                    file=path,
                ) from error

        if isinstance(place.filesystem, pafs.LocalFileSystem):
            return [look_up(folder) for folder in unknown]
        with ThreadPoolExecutor(_THREADS, "tables") as executor:
            return list(executor.map(look_up, unknown))

    def _error(
        self, place: Place, folder: str, format: str, path: str, *, is_real: bool
    ) -> SourceError:
        shown = place.local.shown(folder) if is_real and place.local is not None else folder
        table = f"{place.prefix}{shown}" if shown else "/"
        if not self._advice.has_tables:
            use = "a source has files only, and `iskander score` reads tables"
        elif format == "Delta":
            use = f"use the input delta://{table}, and --filter for a part of it"
        elif format == "Iceberg":
            use = "use the input iceberg://CATALOG/NAMESPACE.TABLE, with the catalog that has it"
        else:
            use = "export the rows with a library of Hudi, or send them to the input `-`"
        return SourceError(
            f"{path}: belongs to the {format} table {table}, whose log decides which files and "
            f"rows count; {use}. {self._advice.override} reads its files as they are, with "
            "removed and repeated rows",
            file=path,
            table=table,
        )


def _table_format(place: Place, folder: str) -> str:
    """Return the format of the table in a folder; `_NO_TABLE` if there is none."""
    for name, format in _MARKS.items():
        if place.is_folder(f"{folder}/{name}"):
            return format
    if place.is_folder(f"{folder}/{ICEBERG_METADATA}"):
        return _iceberg_format(place, folder)
    return _NO_TABLE


def _iceberg_format(place: Place, folder: str) -> str:
    """Return the format of a folder that contains a folder `metadata`."""
    names = place.names(f"{folder}/{ICEBERG_METADATA}")
    return "Iceberg" if any(name.endswith(ICEBERG_ENDS) for name in names) else _NO_TABLE


def _with_parents(folder: str) -> Iterator[str]:
    """Yield a folder and the folders above it, the nearest first, without the root."""
    while folder:
        yield folder
        folder = folder.rpartition("/")[0]


def _real_path(path: str) -> str:
    return os.path.realpath(path).replace(os.sep, "/")
