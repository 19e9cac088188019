"""Durable files of outputs: local folders and object stores.

Local files are written, synced and renamed. Object stores have no rename: an object appears as a
whole when its upload ends, and `move` is a copy by the store. Every operation is safe to repeat.

Runs in: the operator's tool, threads of one process.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.fs as pafs

from iskander.errors import SourceError
from iskander.lake.errors import JobConflict
from iskander.lake.sinks.errors import OutputError
from iskander.lake.sources.places import infos_below, locate

RECORD: Final = "output.json"
RESUMABLE: Final = "the job can be resumed when this is corrected"
COPY_BYTES_MAX: Final = 5 << 30
"""Largest object that S3 copies in one request."""


class _Target(Protocol):
    def write(self, data: Any, /) -> Any: ...  # noqa: ANN401
    def flush(self) -> None: ...
    def close(self) -> None: ...


@contextmanager
def writing(
    path: str, *others: type[Exception], failure: str = "cannot write", advice: str = RESUMABLE
) -> Iterator[None]:
    """Convert errors of the system during the block to `OutputError` with the path.

    Args:
        path: File, folder or table.
        others: Errors of a library that writes.
        failure: Text about what failed, before the error in the message.
        advice: Text about what to do, after the error in the message.

    Raises:
        OutputError: Any error of the system, of pyarrow, or of `others`.
    """
    try:
        yield
    except (OSError, pa.ArrowException, *others) as error:
        raise OutputError(f"{path}: {failure}: {error}; {advice}", output=path) from error


class OutputFile(io.RawIOBase):
    """A file that counts the bytes that pass through it.

    Args:
        target: File to which the bytes are written.
        is_synced: Sync the file to disk at `finish`.
    """

    def __init__(self, target: _Target, *, is_synced: bool) -> None:
        super().__init__()
        self._target = target
        self._is_synced = is_synced
        self._is_dead = self._is_finished = False
        self.bytes = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes so far."""
        return self.bytes

    def write(self, data: Any) -> int:  # noqa: ANN401
        """Write all of the data."""
        view = memoryview(data).cast("B")
        if self._is_dead:
            return view.nbytes
        rest = view
        while rest.nbytes:
            rest = rest[self._target.write(rest) or rest.nbytes :]
        self.bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Flush the target."""
        # The base class calls `flush` when it is closed, even after the target was closed.
        if not self._is_dead and not self._is_finished:
            self._target.flush()

    def finish(self) -> None:
        """Sync the file to disk if it is to be synced, and close it."""
        try:
            self._target.flush()
            if self._is_synced:
                os.fsync(self._target.fileno())  # type: ignore[attr-defined]
        except OSError:
            self.abandon()
            raise
        self._is_finished = True
        self._target.close()

    def discard(self) -> None:
        """Ignore all bytes from now on, so that a writer can be closed on a full disk."""
        self._is_dead = True

    def abandon(self) -> None:
        """Close the file without further writes; its contents are not used."""
        self._is_dead = True
        with suppress(OSError, pa.ArrowException):
            self._target.close()


class Storage:
    """Files of one filesystem.

    Args:
        filesystem: Filesystem of pyarrow.
    """

    def __init__(self, filesystem: pafs.FileSystem) -> None:
        self.filesystem = filesystem
        self.is_local = isinstance(filesystem, pafs.LocalFileSystem)

    def kind(self, path: str) -> str:
        """Return `file`, `folder` or `none`."""
        kind = self.filesystem.get_file_info(path).type
        if kind == pafs.FileType.Directory:
            return "folder"
        return "none" if kind == pafs.FileType.NotFound else "file"

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; none if it does not exist."""
        selector = pafs.FileSelector(folder, allow_not_found=True)
        found = infos_below(self.filesystem, selector)
        return sorted(info.base_name for info in found if info.base_name)

    def files(self, folder: str) -> dict[str, int]:
        """Return bytes of all files below a folder by relative path, sorted by path."""
        selector = pafs.FileSelector(folder, allow_not_found=True, recursive=True)
        found = infos_below(self.filesystem, selector)
        start = len(folder.rstrip("/")) + 1
        return {
            each.path[start:]: each.size
            for each in sorted(found, key=lambda info: info.path)
            if each.type == pafs.FileType.File
        }

    def create(self, path: str) -> OutputFile:
        """Create a file and the folders above it, and open it."""
        if not self.is_local:
            return OutputFile(self.filesystem.open_output_stream(path), is_synced=False)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return OutputFile(open(path, "wb", buffering=0), is_synced=True)

    def write(self, path: str, text: bytes) -> None:
        """Write a small file as a whole or not at all."""
        partial = path if not self.is_local else path + ".partial"
        file = self.create(partial)
        try:
            file.write(text)
        except OSError:
            file.abandon()
            raise
        file.finish()
        if self.is_local:
            self._replace(partial, path)

    def publish(self, partial: str, folder: str) -> None:
        """Rename a complete folder to its final name, unless it has that name already."""
        if partial == folder:
            return
        os.makedirs(partial, exist_ok=True)
        for base, _, _ in os.walk(partial, topdown=False):
            sync_folder(base)
        if os.path.isdir(folder):
            shutil.rmtree(folder)
        self._replace(partial, folder)

    def move(self, source: str, target: str) -> None:
        """Move a file; a repetition after the move does nothing.

        Raises:
            OutputError: Neither file exists, or the store cannot copy it.
        """
        if self.kind(source) == "none":
            if self.kind(target) == "file":
                return
            raise OutputError(
                f"{source}: the staged file is lost; delete the output and the state folder, and "
                "score again",
                output=target,
            )
        if self.is_local:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            self._replace(source, target)
            return
        size = self.filesystem.get_file_info(source).size
        if size > COPY_BYTES_MAX:
            raise OutputError(
                f"{target}: the file has {size:,} bytes; object stores copy at most "
                f"{COPY_BYTES_MAX:,}; write a folder, or smaller files with --file-size",
                output=target,
            )
        self.filesystem.copy_file(source, target)

    def remove_file(self, path: str) -> None:
        """Delete a file if it exists."""
        if self.kind(path) == "file":
            self.filesystem.delete_file(path)

    def remove_folder(self, path: str) -> None:
        """Delete a folder with its files if it exists."""
        with suppress(FileNotFoundError):
            if self.kind(path) == "folder":
                self.filesystem.delete_dir(path)

    def remove_empty(self, root: str, folder: str) -> None:
        """Delete a folder and its parents below the root while they are empty."""
        if not self.is_local:
            return
        while len(folder) > len(root):
            try:
                os.rmdir(folder)
            except OSError:
                return
            folder = os.path.dirname(folder)

    def _replace(self, source: str, target: str) -> None:
        os.replace(source, target)
        sync_folder(os.path.dirname(target))
        if os.path.dirname(source) != os.path.dirname(target):
            sync_folder(os.path.dirname(source))


def storage_of(uri: str) -> tuple[Storage, str]:
    """Return the storage of an output, and its path in the storage.

    Raises:
        OutputError: The scheme is unknown or its options are not valid.
    """
    try:
        place = locate(uri)
    except SourceError as error:
        raise OutputError(error.message, output=uri) from error
    return Storage(place.filesystem), place.path


class Record:
    """Progress of an output, kept in the state folder of the job until `remove`.

    Attributes:
        values: JSON values: `fingerprint`, `state` (`prepared`, `committing` or `committed`), and
            the values of the sink.

    Args:
        folder: State folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._path = Path(folder, RECORD)
        self._storage = Storage(pafs.LocalFileSystem())
        self.values: dict[str, Any] = {}

    @property
    def state(self) -> str:
        """State of the output; empty before `prepare`."""
        return str(self.values.get("state", ""))

    def load(self, fingerprint: str) -> bool:
        """Read the record of this job into `values`; return False if there is none.

        Raises:
            JobConflict: The record is damaged.
            OutputError: The record cannot be read.
        """
        values = self.peek()
        if values.get("fingerprint") != fingerprint:
            return False
        self.values = values
        return True

    def peek(self) -> dict[str, Any]:
        """Return the values of the record of any job; empty if there is none.

        Raises:
            JobConflict: The record is damaged.
            OutputError: The record cannot be read.
        """
        with writing(str(self._path), failure="cannot read"):
            try:
                text = self._path.read_bytes()
            except FileNotFoundError:
                return {}
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise JobConflict(f"{self._path}: is damaged; delete the file")
        return values

    def save(self, **values: Any) -> None:  # noqa: ANN401
        """Change values, which are on disk when this returns.

        Raises:
            OutputError: The record cannot be written.
        """
        changed = {**self.values, **values}
        with writing(str(self._path)):
            text = json.dumps(changed, sort_keys=True).encode()
            self._storage.write(os.path.abspath(self._path).replace(os.sep, "/"), text)
        self.values = changed

    def remove(self) -> None:
        """Delete the record, and the folder if nothing else is in it.

        Raises:
            OutputError: The record cannot be deleted.
        """
        with writing(str(self._path), failure="cannot delete"):
            self._path.unlink(missing_ok=True)
        self.values = {}
        with suppress(OSError):
            self._path.parent.rmdir()


def sync_folder(folder: str) -> None:
    """Write new and renamed entries of a folder to disk, if the system supports that."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
