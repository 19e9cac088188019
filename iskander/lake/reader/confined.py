"""Filesystem that is confined to one folder.

A path is opened first, and then the opened file is checked: the kernel's path of its descriptor
must be below the folder. So the checked file is the file that is read, even if links or names
change meanwhile. Hard links and mounts inside the folder are permitted.

Runs in: reader processes. Source: proc(5), `/proc/PID/fd`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.fs as pafs

from iskander.errors import SourceError

ENTRIES_MAX: Final = 1_000_000
"""Limit of the files and folders in one listing."""
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""Without O_NONBLOCK, opening a named pipe would block; the opened pipe is rejected afterwards."""


class ConfinedFileSystem(pafs.LocalFileSystem):  # type: ignore[misc]
    """Local files of one folder, with paths that begin with the name of the source.

    Args:
        name: Name of the source.
        root: The folder, without links in its path.
    """

    def __init__(self, name: str, root: Path) -> None:
        super().__init__()
        self._name = name
        self._root = str(root)

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open a regular file; raise OSError, or SourceError for a file outside of the folder."""
        with self._open(path) as descriptor:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SourceError(f"{path}: not a regular file", file=path)
            return pa.OSFile(f"/proc/self/fd/{descriptor}")

    def get_file_info(self, wanted: Any) -> Any:  # noqa: ANN401
        """Describe a path, or list a folder; raise SourceError for a link out of the folder."""
        if isinstance(wanted, pafs.FileSelector):
            return list(self._list(wanted.base_dir, is_recursive=wanted.recursive))
        return self._info(wanted)

    def local(self, path: str) -> str:
        """Return the path on this machine for a path of this filesystem."""
        return os.path.join(self._root, path.partition("/")[2].lstrip("/")).rstrip("/")

    def shown(self, real: str) -> str:
        """Return the text for a path on this machine in messages, which show no absolute path."""
        if os.path.commonpath([self._root, real]) != self._root:
            return f"that contains source `{self._name}`"
        return f"{self._name}{real[len(self._root) :]}"

    def _info(self, path: str) -> pafs.FileInfo:
        try:
            with self._open(path) as descriptor:
                status = os.fstat(descriptor)
        except (FileNotFoundError, NotADirectoryError):
            return pafs.FileInfo(path, type=pafs.FileType.NotFound)
        if stat.S_ISDIR(status.st_mode):
            return pafs.FileInfo(path, type=pafs.FileType.Directory)
        kind = pafs.FileType.File if stat.S_ISREG(status.st_mode) else pafs.FileType.Unknown
        return pafs.FileInfo(path, type=kind, size=status.st_size, mtime_ns=status.st_mtime_ns)

    def _list(self, folder: str, *, is_recursive: bool) -> Iterator[pafs.FileInfo]:
        folders, count = [folder], 0
        while folders:
            path = folders.pop()
            with self._open(path) as descriptor:
                names = os.listdir(descriptor)
            count += len(names)
            if count > ENTRIES_MAX:
                raise SourceError(f"{folder}: more than {ENTRIES_MAX:,} files", file=folder)
            for name in names:
                info = self._info(f"{path}/{name}")
                yield info
                if is_recursive and info.type == pafs.FileType.Directory:
                    folders.append(info.path)

    @contextlib.contextmanager
    def _open(self, path: str) -> Iterator[int]:
        """Open a path during the block; raise SourceError if it is not below the folder."""
        name, _, rest = path.partition("/")
        assert name == self._name, "paths begin with the name of the source"
        try:
            descriptor = os.open(os.path.join(self._root, rest.lstrip("/")), _FLAGS)
        except OSError as error:
            # The message of the original error has the absolute path.
            raise OSError(error.errno, error.strerror, path) from None
        try:
            place = os.readlink(f"/proc/self/fd/{descriptor}")
            if os.path.commonpath([self._root, place]) != self._root:
                raise SourceError(f"{path}: a link leaves the folder of the source", file=path)
            yield descriptor
        finally:
            os.close(descriptor)


def filesystem_of(name: str, path: str) -> tuple[ConfinedFileSystem, str]:
    """Return the confined filesystem for a source: its folder, or the folder with its one file.

    Returns:
        The filesystem, and the path of the source in it.

    Raises:
        SourceError: The path does not exist.
    """
    try:
        target = Path(path).resolve(strict=True)
    except OSError as error:
        text = f"{name}: the path of the source: {error.strerror}"
        raise SourceError(text, source=name) from None
    if target.is_dir():
        return ConfinedFileSystem(name, target), name
    return ConfinedFileSystem(name, target.parent), f"{name}/{target.name}"
