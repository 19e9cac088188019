"""Thread that writes rows into files, and completes them by size and age.

Rows in memory are bounded: those that wait for the thread, and those in the unwritten row groups.
After an error, the rows of the file are lost and counted, and the thread pauses; meanwhile the
bound drops further rows.

Runs on: the observer process.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from typing import Final, NamedTuple

import pyarrow as pa

from iskander.config.observation import PredictionLogConfig
from iskander.foundation.backoff import backoff
from iskander.foundation.clock import NS_PER_S, now_ns, wall_ns
from iskander.sampling.prediction_log.counts import BUFFER_FULL, SPOOL_FULL, WRITE_FAILED, Counts
from iskander.sampling.prediction_log.delivery import PAUSE_FIRST_S, PAUSE_MAX_S, Complete, Delivery
from iskander.sampling.prediction_log.files import LogFile
from iskander.sampling.prediction_log.layout import file_name, is_complete
from iskander.sampling.prediction_log.workspace import Workspace

OPEN_FILES_MAX: Final = 64
WAIT_S: Final = 0.5

ERRORS: Final = (OSError, pa.ArrowException)
"""Errors of the filesystem; those of Arrow name an error of the system too."""

Key = tuple[str, pa.Schema]
"""Partition and schema of a file."""


class Rows(NamedTuple):
    """Rows of one sample, and the partition that they belong to."""

    partition: str
    batch: pa.RecordBatch


class Writer:
    """The thread and its queue.

    Args:
        config: Limits and form of the files.
        workspace: Where incomplete files are.
        delivery: Receives complete files.
        counts: Counters of the log.
    """

    def __init__(
        self,
        config: PredictionLogConfig,
        workspace: Workspace,
        delivery: Delivery,
        counts: Counts,
    ) -> None:
        self._config = config
        self._workspace = workspace
        self._delivery = delivery
        self._counts = counts
        self._changed = threading.Condition()
        self._queue: deque[Rows] = deque()
        self._queued_bytes = self._unwritten_bytes = 0
        self._files: dict[Key, LogFile] = {}  # Oldest first.
        self._failures = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="write", daemon=True)
        self._thread.start()

    @property
    def buffered_bytes(self) -> int:
        """Bytes of rows in memory."""
        return self._queued_bytes + self._unwritten_bytes

    def put(self, rows: Rows) -> None:
        """Queue rows, or drop them if the memory is full."""
        with self._changed:
            if self.buffered_bytes + rows.batch.nbytes > self._config.buffer_bytes:
                self._counts.on_dropped(BUFFER_FULL)
                return
            self._queued_bytes += rows.batch.nbytes
            self._queue.append(rows)
            self._changed.notify()

    def close(self, deadline_ns: int) -> None:
        """Write all rows, complete all files, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(max(deadline_ns - now_ns(), 0) / NS_PER_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._queue and not self._is_closing:
                    self._changed.wait(WAIT_S)
                is_last = self._is_closing and not self._queue
                rows = self._queue.popleft() if self._queue else None
                if rows is not None:
                    self._queued_bytes -= rows.batch.nbytes
                    self._unwritten_bytes += rows.batch.nbytes
            if rows is not None:
                self._write(rows)
            self._complete_due(is_all=is_last)
            self._write_largest()
            if is_last:
                return

    def _write(self, rows: Rows) -> None:
        if self._delivery.is_full:
            self._counts.on_dropped(SPOOL_FULL)
            return
        key = (rows.partition, rows.batch.schema)
        try:
            file = self._files.get(key) or self._open(key)
            file.add(rows.batch)
        except ERRORS as error:
            self._lose(key, error)

    def _open(self, key: Key) -> LogFile:
        if len(self._files) >= OPEN_FILES_MAX:
            self._finish(next(iter(self._files)))
        path = self._workspace.writing / f"{secrets.token_hex(8)}.tmp"
        file = self._files[key] = LogFile(path, key[1], self._config.compression, now_ns())
        return file

    def _complete_due(self, *, is_all: bool) -> None:
        config, now = self._config, now_ns()
        for key, file in list(self._files.items()):
            age_ns = now - file.opened_ns
            if is_all or is_complete(file.written_bytes, age_ns, config.file_bytes, config.file_s):
                self._finish(key)

    def _write_largest(self) -> None:
        """Write row groups early while many files fill the memory with a few rows each."""
        while True:
            unwritten = {key: file.buffered_bytes for key, file in self._files.items()}
            self._unwritten_bytes = sum(unwritten.values())
            if self._unwritten_bytes <= self._config.buffer_bytes // 2:
                return
            key = max(unwritten, key=unwritten.__getitem__)
            try:
                self._files[key].write_group()
            except ERRORS as error:
                self._lose(key, error)

    def _finish(self, key: Key) -> None:
        """Complete a file, and hand it over."""
        file = self._files[key]
        try:
            size = file.finish()
            relative = f"{key[0]}/{file_name(wall_ns(), secrets.token_hex(4))}"
            self._delivery.deliver(Complete(file.path, relative, file.samples, size))
        except ERRORS as error:
            self._lose(key, error)
        else:
            del self._files[key]
            self._failures = 0

    def _lose(self, key: Key, error: Exception) -> None:
        """Count the samples of a file that cannot be written, delete it, and pause."""
        file = self._files.pop(key, None)
        self._counts.on_dropped(WRITE_FAILED, 1 if file is None else file.samples)
        self._counts.on_failure(f"{key[0]} cannot be written: {error}")
        if file is not None:
            file.abandon()
        self._failures += 1
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closing, backoff(self._failures, PAUSE_FIRST_S, PAUSE_MAX_S)
            )
