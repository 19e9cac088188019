"""Cancellation of running batches whose callers are gone.

The worker's main thread is inside the runtime during a batch, so a second thread reads batch ids
from a pipe and sets the flag that ONNX Runtime checks between two nodes.

Runs on: worker main, and a thread of its own.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Final

from iskander_worker.backends import Run

_ID_BYTES: Final = 8
EARLY_IDS_MAX: Final = 16
"""Limit of the ids that are kept because they arrived outside their run. A worker has at most two
batches in flight."""


class RunCanceller:
    """Aborts the current run when its batch id arrives on a pipe. Owns: the pipe's read end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._batch_id = 0
        self._run = Run()
        self._is_aborted = False
        self._early_ids: deque[int] = deque(maxlen=EARLY_IDS_MAX)
        threading.Thread(target=self._read_ids, name="isk-abort", daemon=True).start()

    def begin(self, batch_id: int) -> Run:
        """Mark the start of a run; abort it if its id arrived earlier."""
        with self._lock:
            self._batch_id = batch_id
            if batch_id in self._early_ids:
                self._abort()
            return self._run

    def end(self) -> bool:
        """Mark the end of the run; return whether it was aborted."""
        with self._lock:
            self._batch_id = 0
            was_aborted, self._is_aborted = self._is_aborted, False
            if was_aborted:
                self._run = Run()
            return was_aborted

    def _read_ids(self) -> None:
        while raw := os.read(self._fd, _ID_BYTES):
            batch_id = int.from_bytes(raw, "little")
            with self._lock:
                if batch_id == self._batch_id:
                    self._abort()
                else:
                    self._early_ids.append(batch_id)
        os.close(self._fd)

    def _abort(self) -> None:
        self._is_aborted = True
        self._run.abort()
