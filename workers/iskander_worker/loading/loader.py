"""Loading of models on a background thread, one at a time.

The worker loop keeps running batches of loaded models meanwhile. The runtime releases the
interpreter lock for most of a load; otherwise the switch interval returns it to the loop.

Runs on: worker main, but for `_Load._run`, which runs on a thread of its own.
"""

from __future__ import annotations

import os
import threading
from collections import deque

from iskander.clock import NS_PER_MS, now_ns
from iskander.control.messages import (
    Loaded,
    LoadFailed,
    LoadStep,
    ModelSpec,
    Notice,
    ToGateway,
)
from iskander.errors import IskanderError
from iskander_worker.attachments import Attachment
from iskander_worker.failures import load_error
from iskander_worker.loading.progress import progress
from iskander_worker.sandbox.client import sandbox_server
from iskander_worker.session import Session

EXIT_WAIT_S = 5.0
"""Time that an exiting worker waits for a running load: libraries crash if they are interrupted."""


class LoadQueue:
    """Loads in the order of their requests; each gateway has one at most.

    While a load is running, `is_busy` is set; when it is done, `wake_fd` is readable.
    """

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._waiting: deque[_Load] = deque()
        self._running: _Load | None = None
        self.sessions: dict[str, Session] = {}
        self.is_busy = False
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def put(self, attachment: Attachment, spec: ModelSpec) -> None:
        """Queue the load and warm-up of a model."""
        self._waiting.append(_Load(attachment, spec, self._cores, self.wake_fd))
        self._start_next()

    def get(self) -> tuple[Attachment, list[ToGateway]] | None:
        """Complete a finished load and start the next; return its gateway and answers, or None."""
        load = self._running
        if load is None:
            return None
        try:
            os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return None
        load.thread.join()
        self._running = None
        self.is_busy = False
        if load.session is not None:
            self.sessions[load.spec.fingerprint] = load.session
            load.attachment.executor.sessions[load.spec.key] = load.session
        self._start_next()
        return load.attachment, load.answer()

    def progress(self) -> tuple[Attachment, LoadStep] | None:
        """A report of the running load, if one is due."""
        load = self._running
        report = progress.due(now_ns()) if load is not None else None
        if load is None or report is None:
            return None
        return load.attachment, LoadStep(load.spec.key, *report)

    def keep(self, used: set[Session]) -> None:
        """Close the sessions that are not in `used`."""
        for fingerprint, session in list(self.sessions.items()):
            if session not in used:
                del self.sessions[fingerprint]
                session.close()

    def shut_down(self) -> bool:
        """Start no more loads; return False if the running one does not end in time."""
        self._waiting.clear()
        if self._running is not None:
            self._running.thread.join(EXIT_WAIT_S)
            if self._running.thread.is_alive():
                return False
        sandbox_server.end()
        return True

    def _start_next(self) -> None:
        if self._running is None and self._waiting:
            self._running = load = self._waiting.popleft()
            self.is_busy = True
            load.session = session = self.sessions.get(load.spec.fingerprint)
            if session is not None:
                load.attachment.executor.sessions[load.spec.key] = session
            load.thread.start()


class _Load:
    """One load, of a model that may be loaded already; ends with a session or an error."""

    def __init__(self, attachment: Attachment, spec: ModelSpec, cores: int, wake_fd: int) -> None:
        self.attachment = attachment
        self.spec = spec
        self.session: Session | None = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="isk-load", daemon=True)
        self._cores = cores
        self._wake_fd = wake_fd
        self._begun_ns = now_ns()

    def answer(self) -> list[ToGateway]:
        """The messages for the gateway; raises an assertion of this program."""
        error, session = self.error, self.session
        if isinstance(error, IskanderError):
            return [LoadFailed(self.spec.key, error.code, error.message)]
        if error is not None:
            raise error
        assert session is not None
        load_ms = round((now_ns() - self._begun_ns) / NS_PER_MS, 1)
        name = f"{self.spec.name}/{self.spec.version}"
        return [
            *(Notice(f"{name}: {text}") for text in session.notices),
            Loaded(
                self.spec.key,
                session.contract,
                session.providers,
                session.threads,
                load_ms,
                session.files_sha256,
            ),
        ]

    def _run(self) -> None:
        try:
            if self.session is None:
                session = Session(self.spec, self._cores)
                session.warm_up(self.spec.rows_max)
                self.session = session
        except BaseException as error:
            self.error = load_error(error)
        finally:
            os.eventfd_write(self._wake_fd, 1)
