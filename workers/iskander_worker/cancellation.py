"""Runs that nobody waits for any more, given up while they run.

The worker's one working thread is inside the runtime then, so another one listens: it sleeps in a
read on a pipe and wakes only for a batch id. ONNX Runtime looks at the flag between two nodes.

Runs on: worker main, and a thread of its own.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Final

from iskander_worker.backends import Run

_ID_BYTES: Final = 8
EARLY_MAX: Final = 16
"""Batches given up before their turn that are remembered; a worker has two at most."""


class RunCanceller:
    """Knows what runs, and ends it when the gateway names it.

    Args:
        fd: The pipe's end to read from; its end-of-file ends the thread. Owns it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._batch_id = 0
        self._run = Run()
        self._is_aborted = False
        self._early: deque[int] = deque(maxlen=EARLY_MAX)
        threading.Thread(target=self._listen, name="isk-abort", daemon=True).start()

    def begin(self, batch_id: int) -> Run:
        """A run begins."""
        with self._lock:
            self._batch_id = batch_id
            if batch_id in self._early:
                self._abort()
            return self._run

    def end(self) -> bool:
        """The run is over; whether it was given up."""
        with self._lock:
            self._batch_id = 0
            was_aborted, self._is_aborted = self._is_aborted, False
            if was_aborted:
                self._run = Run()
            return was_aborted

    def _listen(self) -> None:
        while raw := os.read(self._fd, _ID_BYTES):
            batch_id = int.from_bytes(raw, "little")
            with self._lock:
                if batch_id == self._batch_id:
                    self._abort()
                else:
                    self._early.append(batch_id)
        os.close(self._fd)

    def _abort(self) -> None:
        self._is_aborted = True
        self._run.abort()
