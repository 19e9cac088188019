"""Filesystems of inputs: URIs, globs, folders, and the state of one file.

Runs in: the operator's tool, threads of one process.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import re
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.fs as pafs

from iskander.errors import SourceChanged, SourceError, utf8_problem

FILES_MAX: Final = 1_000_000
"""Limit of the files of one job; the plan keeps a few hundred bytes for a file."""
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://([^/?]*)(.*)", re.DOTALL)
_OPTIONS = re.compile(r"\?([a-z_]+=[^&]*(?:&[a-z_]+=[^&]*)*)$")
GLOB_CHARACTERS: Final = re.compile(r"[*?[]")
"""Pattern of the characters that make a path a glob."""


class LocalPaths(Protocol):
    """Conversion between paths of a local filesystem and paths of this machine."""

    def local(self, path: str) -> str:
        """Return the path on this machine for a path of the filesystem; links are not resolved."""

    def shown(self, real: str) -> str:
        """Return the text for a path on this machine in messages."""


class _SamePaths:
    """Implements `LocalPaths` for a filesystem whose paths are those of this machine."""

    def local(self, path: str) -> str:
        return path

    def shown(self, real: str) -> str:
        return real


LOCAL_PATHS: Final = _SamePaths()


@dataclass(frozen=True)
class Place:
    """A path in a filesystem.

    Attributes:
        filesystem: Filesystem of pyarrow.
        path: Path in the filesystem, without scheme and options, with `/` between folders.
        uri: Input as the user wrote it.
        prefix: Text before `path` in messages and locators: scheme and host; empty for local files.
        local: Conversion to paths of this machine; None in an object store.
    """

    filesystem: pafs.FileSystem
    path: str
    uri: str
    prefix: str = ""
    local: LocalPaths | None = None

    @property
    def is_local(self) -> bool:
        """Whether the files are in the filesystem of this machine."""
        return isinstance(self.filesystem, pafs.LocalFileSystem)

    def is_folder(self, path: str) -> bool:
        """Whether a folder exists at a path of the same filesystem."""
        return bool(_info(self, path).type == pafs.FileType.Directory)

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder of the same filesystem.

        None if the folder does not exist.
        """
        return [info.base_name for info in _list(self, folder, is_recursive=False)]


@dataclass(frozen=True)
class Stamp:
    """State of a file; files with equal stamps have equal bytes.

    Attributes:
        bytes: Size of the file.
        mtime_ns: Time of the last change; None if an ETag identifies the bytes, or if the files of
            a table never change.
        etag: ETag of an object store; None for other filesystems.
    """

    bytes: int
    mtime_ns: int | None
    etag: str | None

    def matches(self, found: Stamp) -> bool:
        """Whether the state `found` matches this planned state, whose None matches all values."""
        return (
            self.bytes == found.bytes
            and self.mtime_ns in (None, found.mtime_ns)
            and self.etag in (None, found.etag)
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to the fields of a locator."""
        if self.etag is not None:
            return {"bytes": self.bytes, "etag": self.etag}
        if self.mtime_ns is not None:
            return {"bytes": self.bytes, "mtime_ns": self.mtime_ns}
        return {"bytes": self.bytes}

    @staticmethod
    def from_json(values: dict[str, Any]) -> Stamp:
        """Convert back from the fields of a locator."""
        return Stamp(values["bytes"], values.get("mtime_ns"), values.get("etag"))


def locate(uri: str) -> Place:
    """Return the place of an input: its filesystem and path.

    The path of a `file://` URI is percent-decoded; a key of an object store is not, as in the
    store's own tools. Options of pyarrow follow a `?`, for example
    `s3://bucket/key?endpoint_override=http://host:port`.

    Raises:
        SourceError: The scheme is unknown or its options are not valid.
    """
    if problem := utf8_problem(uri):
        raise SourceError(f"{problem}: paths must be, because Arrow has no others")
    match = _URI.match(uri)
    if match is None:
        path = os.path.abspath(uri).replace(os.sep, "/")
        if problem := utf8_problem(path):
            raise SourceError(f"the working folder {problem}: give an absolute path")
        return Place(pafs.LocalFileSystem(), path, uri, local=LOCAL_PATHS)
    scheme, authority, rest = match.groups()
    if scheme == "file":
        path = os.path.abspath(unquoted(rest)).replace(os.sep, "/")
        return Place(pafs.LocalFileSystem(), path, uri, local=LOCAL_PATHS)
    options = _OPTIONS.search(rest)
    if options is not None:
        rest = rest[: options.start()]
    base = f"{scheme}://{authority}" + (f"?{_quote_options(options[1])}" if options else "")
    try:
        filesystem, root = _filesystem(base)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError, KeyError) as error:
        raise SourceError(f"{uri}: cannot open the filesystem: {error}") from error
    path = f"{root.rstrip('/')}/{rest.lstrip('/')}".rstrip("/")
    return Place(filesystem, path, uri, f"{scheme}://")


def unquoted(text: str) -> str:
    """Decode the percent-encoding of a path or folder name; raise SourceError if it is not UTF-8.

    If invalid bytes were replaced, two folders could get the same name.
    """
    try:
        return urllib.parse.unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise SourceError(f"`{text}` is not UTF-8 in its percent-encoding") from None


def _quote_options(options: str) -> str:
    """Percent-encode the values of options, which may contain a URI."""
    pairs = [pair.partition("=") for pair in options.split("&")]
    return "&".join(
        f"{key}={urllib.parse.quote(urllib.parse.unquote(value), safe='')}"
        for key, _, value in pairs
    )


@functools.lru_cache(maxsize=64)
def _filesystem(base: str) -> tuple[pafs.FileSystem, str]:
    """Open a filesystem; cached, because finding the region of a bucket is a request."""
    filesystem, root = pafs.FileSystem.from_uri(base)
    return filesystem, root


class Listener(Protocol):
    """Function that receives the listings of `expand`."""

    def __call__(
        self, place: Place, folder: str, infos: list[pafs.FileInfo], *, is_recursive: bool
    ) -> None:
        """Receive all entries of a folder, if `is_recursive` with all entries below it."""


def expand(
    place: Place, on_listed: Listener | None = None
) -> tuple[list[pafs.FileInfo], str | None]:
    """List the files of a path, a glob or a folder, sorted by path.

    A path that exists is not a glob, whatever characters it has. In folders, names that begin with
    `_` or `.` are left out, as in other tools: they belong to writers.

    Args:
        place: The path.
        on_listed: Receives the listings, including the names that are left out.

    Returns:
        The files, and the folder below which folders are hive folders; None for a single file.

    Raises:
        SourceError: The path does not exist, or has no files.
    """
    info = _info(place, place.path)
    if info.type == pafs.FileType.File:
        return [info], None
    if info.type == pafs.FileType.Directory:
        return _require_and_sort(_files_below(place, place.path, on_listed), place), place.path
    if not GLOB_CHARACTERS.search(place.path):
        raise SourceError(f"{place.uri}: no such file or folder", input=place.uri)
    segments = place.path.split("/")
    fixed = next(index for index, each in enumerate(segments) if GLOB_CHARACTERS.search(each))
    base = "/".join(segments[:fixed])
    found: dict[str, pafs.FileInfo] = {}
    for info_found in _matches(place, base, segments[fixed:], on_listed):
        if info_found.type == pafs.FileType.File:
            found[info_found.path] = info_found
        elif info_found.type == pafs.FileType.Directory:
            found.update(
                {inner.path: inner for inner in _files_below(place, info_found.path, on_listed)}
            )
    return _require_and_sort(list(found.values()), place), base


def _require_and_sort(files: list[pafs.FileInfo], place: Place) -> list[pafs.FileInfo]:
    if not files:
        raise SourceError(f"{place.uri}: no files", input=place.uri)
    if len(files) > FILES_MAX:
        raise SourceError(
            f"{place.uri}: {len(files):,} files; a job reads at most {FILES_MAX:,}", input=place.uri
        )
    return sorted(files, key=lambda info: info.path)


def _files_below(place: Place, folder: str, on_listed: Listener | None) -> list[pafs.FileInfo]:
    start = len(folder.rstrip("/")) + 1
    return [
        info
        for info in _list_and_report(place, folder, on_listed, is_recursive=True)
        if info.type == pafs.FileType.File
        and not any(part.startswith(("_", ".")) for part in info.path[start:].split("/"))
    ]


def _matches(
    place: Place, folder: str, segments: list[str], on_listed: Listener | None
) -> Iterator[pafs.FileInfo]:
    """Expand the first segment of a glob in a folder, and the other segments below it."""
    pattern, rest = segments[0], segments[1:]
    if pattern == "**":
        if rest:
            yield from _matches(place, folder, rest, on_listed)
        for info in _list_and_report(place, folder, on_listed, is_recursive=False):
            if info.base_name.startswith((".", "_")):
                continue
            if info.type == pafs.FileType.Directory:
                yield from _matches(place, info.path, segments, on_listed)
            elif not rest:
                yield info
        return
    for info in _list_and_report(place, folder, on_listed, is_recursive=False):
        name = info.base_name
        if not fnmatch.fnmatchcase(name, pattern):
            continue
        if name.startswith((".", "_")) and not pattern.startswith(name[0]):
            continue
        if not rest:
            yield info
        elif info.type == pafs.FileType.Directory:
            yield from _matches(place, info.path, rest, on_listed)


def _list_and_report(
    place: Place, folder: str, on_listed: Listener | None, *, is_recursive: bool
) -> list[pafs.FileInfo]:
    found = _list(place, folder, is_recursive=is_recursive)
    if on_listed is not None:
        on_listed(place, folder, found, is_recursive=is_recursive)
    return found


def _list(place: Place, folder: str, *, is_recursive: bool) -> list[pafs.FileInfo]:
    selector = pafs.FileSelector(folder or "/", allow_not_found=True, recursive=is_recursive)
    try:
        return infos_below(place.filesystem, selector)
    except OSError as error:
        raise SourceError(f"{place.uri}: cannot list {folder}: {error}") from error


def infos_below(filesystem: pafs.FileSystem, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
    """List a folder.

    Raises:
        SourceError: The name of a file is not UTF-8; Arrow can neither read nor skip such a file.
        OSError: The folder cannot be read.
    """
    found: list[pafs.FileInfo] = filesystem.get_file_info(selector)
    try:
        for info in found:
            info.path  # noqa: B018 - Arrow decodes the name here.
    except UnicodeDecodeError as error:
        problem = utf8_problem(os.fsdecode(error.object))
        raise SourceError(f"file name {problem}: rename or remove the file") from None
    return found


def _info(place: Place, path: str) -> pafs.FileInfo:
    try:
        return place.filesystem.get_file_info(path)
    except OSError as error:
        raise SourceError(f"{place.uri}: cannot read {path}: {error}") from error


def open_file(filesystem: pafs.FileSystem, path: str) -> tuple[pa.NativeFile, Stamp]:
    """Open a file for reading; return it with its state.

    Raises:
        SourceError: The file does not exist or cannot be read.
    """
    try:
        file = filesystem.open_input_file(path)
        return file, _stamp(filesystem, path, file)
    except OSError as error:
        raise SourceError(f"{path}: cannot read the file: {error}", file=path) from error


def open_as_planned(filesystem: pafs.FileSystem, path: str, planned: Stamp) -> pa.NativeFile:
    """Open a file for reading, if its state is the planned one.

    Raises:
        SourceChanged: The file was deleted or has another state.
    """
    try:
        file = filesystem.open_input_file(path)
        found = _stamp(filesystem, path, file)
    except FileNotFoundError as error:
        raise SourceChanged(f"{path}: the file is gone since the plan", file=path) from error
    except OSError as error:
        raise SourceError(f"{path}: cannot read the file: {error}", file=path) from error
    if not planned.matches(found):
        file.close()
        raise SourceChanged(
            f"{path}: the file changed since the plan: {_difference(planned, found)}; "
            "plan again with --restart",
            file=path,
        )
    return file


def check_unchanged(filesystem: pafs.FileSystem, path: str, planned: Stamp) -> None:
    """Require that a file that was read still has the planned state.

    Raises:
        SourceChanged: The file was deleted or has another state.
    """
    open_as_planned(filesystem, path, planned).close()


def _stamp(filesystem: pafs.FileSystem, path: str, file: pa.NativeFile) -> Stamp:
    metadata = file.metadata() or {}
    etag = metadata.get("ETag", metadata.get(b"ETag"))
    if etag is not None:
        return Stamp(file.size(), None, etag.decode() if isinstance(etag, bytes) else str(etag))
    # The filesystem of a Delta table opens a file without a request: its size is from the log.
    info = filesystem.get_file_info(path)
    if info.type != pafs.FileType.File:
        raise FileNotFoundError(f"no file {path}")
    return Stamp(info.size, info.mtime_ns, None)


def _difference(planned: Stamp, found: Stamp) -> str:
    if planned.bytes != found.bytes:
        return f"{planned.bytes:,} bytes were planned, it has {found.bytes:,}"
    if planned.etag not in (None, found.etag):
        return f"ETag {planned.etag} was planned, it has {found.etag}"
    return "its modification time is another one"
