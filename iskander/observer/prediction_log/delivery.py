"""Delivery of complete files: a rename in a local folder, or an upload to an object store.

Readers see complete files only. An object appears when its upload ends; it is not sent again only
after the store has confirmed its size.

Runs on: the writer thread, and a thread for uploads, of the observer process.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import pyarrow as pa

from iskander.clock import NS_PER_S, now_ns
from iskander.errors import IskanderError
from iskander.observer.prediction_log.counts import Counts
from iskander.observer.prediction_log.workspace import Workspace
from iskander.scoring.sinks.storage import sync_folder
from iskander.scoring.sources.places import locate

RETRY_FIRST_S: Final = 1.0
RETRY_MOST_S: Final = 60.0
PIECE_BYTES: Final = 8 << 20
WITHOUT_FOLDERS: Final = ("s3", "gcs", "abfs")
"""Stores with keys; a folder would be an empty object."""


class Complete(NamedTuple):
    """A complete file: where it is, and where it belongs."""

    path: Path
    relative: str
    samples: int
    bytes: int


class Delivery(Protocol):
    """Brings complete files to the log."""

    @property
    def is_full(self) -> bool:
        """Whether no more files can wait."""

    def deliver(self, file: Complete) -> None:
        """Take over a file; raises OSError if this fails."""

    def close(self, deadline_ns: int) -> None:
        """Wait for the files until a monotonic time."""


class LocalFolder:
    """A folder on the same filesystem as the incomplete files."""

    is_full = False

    def __init__(self, root: Path, counts: Counts) -> None:
        self._root = root
        self._counts = counts

    def deliver(self, file: Complete) -> None:
        """See `Delivery`."""
        target = self._root / file.relative
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(file.path, target)
        sync_folder(str(target.parent))
        self._counts.on_delivered(file.samples, file.bytes)

    def close(self, deadline_ns: int) -> None:
        """See `Delivery`."""


class Uploads:
    """An object store, and the files that wait for their upload in a local folder.

    Args:
        uri: URI of the log.
        workspace: Where the files wait; those of an earlier process are uploaded first.
        spool_bytes: Limit of waiting files.
        counts: Counters of the log.
    """

    def __init__(self, uri: str, workspace: Workspace, spool_bytes: int, counts: Counts) -> None:
        self._uri = uri
        self._ready = workspace.ready
        self._spool_bytes = spool_bytes
        self._counts = counts
        self._changed = threading.Condition()
        self._waiting: deque[Complete] = deque()
        self._is_closing = False
        for path in workspace.left_over():
            size = path.stat().st_size
            relative = path.relative_to(self._ready).as_posix()
            self._waiting.append(Complete(path, relative, 0, size))
            counts.spooled_bytes += size
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """See `Delivery`."""
        return self._counts.spooled_bytes >= self._spool_bytes

    def deliver(self, file: Complete) -> None:
        """See `Delivery`."""
        target = self._ready / file.relative
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(file.path, target)
        with self._changed:
            self._waiting.append(file._replace(path=target))
            self._counts.spooled_bytes += file.bytes
            self._changed.notify()

    def close(self, deadline_ns: int) -> None:
        """See `Delivery`; what is left is uploaded after the next start."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(max(deadline_ns - now_ns(), 0) / NS_PER_S)

    def _run(self) -> None:
        failures = 0
        while True:
            with self._changed:
                while not self._waiting:
                    if self._is_closing:
                        return
                    self._changed.wait()
                file = self._waiting[0]
            try:
                self._upload(file)
            except (OSError, pa.ArrowException, IskanderError) as error:
                self._counts.on_failure(f"{file.relative} cannot be uploaded: {error}")
                failures += 1
                with self._changed:
                    if self._is_closing:
                        return
                    self._changed.wait(min(RETRY_FIRST_S * 2.0 ** (failures - 1), RETRY_MOST_S))
                continue
            failures = 0
            self._remove(file.path)
            with self._changed:
                self._waiting.popleft()
                self._counts.spooled_bytes -= file.bytes
            self._counts.on_delivered(file.samples, file.bytes)

    def _upload(self, file: Complete) -> None:
        place = locate(self._uri)
        path = f"{place.path}/{file.relative}"
        if place.filesystem.type_name not in WITHOUT_FOLDERS:
            place.filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        # Mapped: an error of a read would complete the upload of a part.
        with (
            pa.memory_map(str(file.path)) as source,
            place.filesystem.open_output_stream(path) as target,
        ):
            while piece := source.read_buffer(PIECE_BYTES):
                target.write(piece)
        found = place.filesystem.get_file_info(path).size
        if found != file.bytes:
            raise OSError(f"the object has {found} bytes, expected {file.bytes}")

    def _remove(self, path: Path) -> None:
        """Delete an uploaded file, and its folders that are empty."""
        path.unlink()
        for folder in path.relative_to(self._ready).parents:
            try:
                (self._ready / folder).rmdir()
            except OSError:
                return
