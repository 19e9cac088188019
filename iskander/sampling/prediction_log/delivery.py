"""Delivery of complete files: a rename in a local folder, or an upload to an object store.

Readers see complete files only. An object appears when its upload ends; it is not sent again only
after the store has confirmed its size.

Runs on: the writer thread, and a thread for uploads, of the observer process.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import pyarrow as pa

from iskander.errors import IskanderError
from iskander.foundation.backoff import backoff
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.lake.sinks.storage import sync_folder
from iskander.lake.sources.places import locate
from iskander.sampling.prediction_log.counts import WRITE_FAILED, Counts
from iskander.sampling.prediction_log.workspace import Workspace

PAUSE_FIRST_S: Final = 1.0
PAUSE_MAX_S: Final = 60.0
"""Pauses after failed writes in a row."""
ADOPT_S: Final = 60.0
"""Time after which files of ended processes are looked for again."""
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
        workspace: Where the files wait; those of ended processes are uploaded too.
        spool_bytes: Limit of waiting files.
        counts: Counters of the log.
    """

    def __init__(self, uri: str, workspace: Workspace, spool_bytes: int, counts: Counts) -> None:
        self._uri = uri
        self._workspace = workspace
        self._ready = workspace.ready
        self._spool_bytes = spool_bytes
        self._counts = counts
        self._changed = threading.Condition()
        self._waiting: deque[Complete] = deque()
        self._is_closing = False
        self._failures = 0
        self._adopt_ns = now_ns() + int(ADOPT_S * NS_PER_S)
        self._add(workspace.left_over())
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """See `Delivery`."""
        return self._counts.spooled_bytes >= self._spool_bytes

    def deliver(self, file: Complete) -> None:
        """See `Delivery`."""
        target = self._ready / file.relative
        with self._changed:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(file.path, target)
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
        while (file := self._next()) is not None:
            try:
                is_uploaded = self._upload(file)
            except (OSError, pa.ArrowException, IskanderError) as error:
                self._counts.on_failure(f"{file.relative} cannot be uploaded: {error}")
                self._failures += 1
                with self._changed:
                    if self._is_closing:
                        return
                    self._changed.wait_for(
                        lambda: self._is_closing,
                        backoff(self._failures, PAUSE_FIRST_S, PAUSE_MAX_S),
                    )
                continue
            self._failures = 0
            with self._changed:
                self._waiting.popleft()
                self._counts.spooled_bytes -= file.bytes
            if is_uploaded:
                self._counts.on_delivered(file.samples, file.bytes)
            else:
                self._counts.on_dropped(WRITE_FAILED, file.samples)

    def _next(self) -> Complete | None:
        """Wait for a file, and adopt those of ended processes when it is time; None to end."""
        while True:
            with self._changed:
                left_s = max(self._adopt_ns - now_ns(), 0) / NS_PER_S
                self._changed.wait_for(lambda: self._waiting or self._is_closing, left_s)
                if self._is_closing and not self._waiting:
                    return None
                # While uploads fail, more files would only fill the spool.
                is_due = not self._failures and now_ns() >= self._adopt_ns
                if self._waiting and (self._is_closing or not is_due):
                    return self._waiting[0]
            self._adopt()

    def _adopt(self) -> None:
        """Take over the files of ended processes, and set the time of the next adoption."""
        try:
            self._add(self._workspace.adopt())
        except OSError as error:
            self._counts.on_failure(f"files of ended processes cannot be uploaded: {error}")
        self._adopt_ns = now_ns() + int(ADOPT_S * NS_PER_S)

    def _add(self, paths: Iterable[Path]) -> None:
        """Add complete files of ended processes, whose samples were counted there."""
        for path in paths:
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                continue  # Somebody has deleted it.
            relative = path.relative_to(self._ready).as_posix()
            with self._changed:
                self._waiting.append(Complete(path, relative, 0, size))
                self._counts.spooled_bytes += size

    def _upload(self, file: Complete) -> bool:
        """Upload a file and delete it here; False if it was deleted before."""
        if not file.path.exists():
            return False
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
        self._remove(file.path)
        return True

    def _remove(self, path: Path) -> None:
        """Delete an uploaded file, and its folders that are empty.

        The lock keeps a folder that `deliver` is moving a file into.
        """
        with self._changed:
            path.unlink(missing_ok=True)
            for folder in path.relative_to(self._ready).parents:
                try:
                    (self._ready / folder).rmdir()
                except OSError:
                    return
