"""Loading of models on a background thread, one at a time.

The worker loop keeps running batches of loaded models meanwhile. The runtime releases the
interpreter lock for most of a load; otherwise the switch interval returns it to the loop.

Runs on: worker main, but for `_Load._run`, which runs on a thread of its own.
"""

from __future__ import annotations

import os
import threading
from collections import deque

from iskander.errors import IskanderError
from iskander.foundation.clock import NS_PER_MS, NS_PER_S, now_ns
from iskander.interprocess.control.messages import (
    Loaded,
    LoadFailed,
    LoadStep,
    ModelSpec,
    Notice,
    ToGateway,
)
from iskander_worker.attachments import Attachment
from iskander_worker.devices.cuda import DeviceLost
from iskander_worker.failures import load_error
from iskander_worker.loading.progress import progress
from iskander_worker.sandbox.client import sandbox_server
from iskander_worker.session import Session

REUSE_NS = 30 * NS_PER_S
"""Time without a load after which sessions that no gateway process uses are closed. A gateway that
is started again thus finds the models of its predecessor, and loads them one after the other."""
EXIT_WAIT_S = 5.0
"""Time that an exiting worker waits for a running load: libraries crash if they are interrupted."""


class LoadQueue:
    """Runs loads in the order of their requests; a gateway process requests one at a time.

    While a load is running, `is_busy` is set; when it is done, `wake_fd` is readable. Sessions that
    no gateway process uses are kept until `kept_until_ns`, which is 0 if there are none.
    """

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._waiting: deque[_Load] = deque()
        self._running: _Load | None = None
        self.sessions: dict[str, Session] = {}
        self.is_busy = False
        self.kept_until_ns = 0
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def put(self, attachment: Attachment, spec: ModelSpec) -> None:
        """Queue the load and warm-up of a model."""
        self.keep_unused()
        self._waiting.append(_Load(attachment, spec, self._cores, self.wake_fd))
        self._start_next()

    def finish_load(self) -> tuple[Attachment, list[ToGateway]] | None:
        """Complete a load that is done and start the next one.

        Returns the gateway process of the completed load and its answers; None if no load is done.
        """
        load = self._running
        if load is None:
            return None
        try:
            os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return None
        load.thread.join()
        self.keep_unused()
        self._running = None
        self.is_busy = False
        if load.session is not None:
            self.sessions[load.spec.fingerprint] = load.session
            load.attachment.executor.sessions[load.spec.key] = load.session
        self._start_next()
        return load.attachment, load.answer()

    def progress(self) -> tuple[Attachment, LoadStep] | None:
        """Return a report of the running load and its gateway process, if a report is due."""
        load = self._running
        report = progress.due(now_ns()) if load is not None else None
        if load is None or report is None:
            return None
        return load.attachment, LoadStep(load.spec.key, *report)

    def keep_unused(self) -> None:
        """Keep unused sessions for `REUSE_NS` from now, for the next loads of a gateway process."""
        self.kept_until_ns = now_ns() + REUSE_NS

    def close_unused(self, used: set[Session]) -> None:
        """Close the sessions that are not in `used`, if their time is over."""
        if self.is_busy or now_ns() < self.kept_until_ns:
            return
        self.kept_until_ns = 0
        for session in set(self.sessions.values()) - used:
            self.close(session)

    def close(self, session: Session) -> None:
        """Close a session that no gateway process uses."""
        self.sessions = {key: kept for key, kept in self.sessions.items() if kept is not session}
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
    """One load, which ends with a session or an error; the model may have a session already."""

    def __init__(self, attachment: Attachment, spec: ModelSpec, cores: int, wake_fd: int) -> None:
        self.attachment = attachment
        self.spec = spec
        self.session: Session | None = None
        self._failed: LoadFailed | None = None
        self._fatal: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="isk-load", daemon=True)
        self._cores = cores
        self._wake_fd = wake_fd
        self._begun_ns = now_ns()

    def answer(self) -> list[ToGateway]:
        """Return the messages for the gateway; raise `DeviceLost` or an assertion of ours."""
        session = self.session
        if self._fatal is not None:
            raise self._fatal
        if self._failed is not None:
            return [self._failed]
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
                session.relation,
                session.library,
            ),
        ]

    def _run(self) -> None:
        try:
            if self.session is None:
                self._open()
        except BaseException as error:
            self._fail(error)
        finally:
            os.eventfd_write(self._wake_fd, 1)

    def _open(self) -> None:
        session = Session(self.spec, self._cores)
        try:
            session.warm_up(self.spec.rows_max)
            session.measure(is_confined=False)
        except BaseException as error:
            self._fail(error)
        else:
            self.session = session
            return
        # Closed after the handler: the frames of the error refer to parts of the model.
        session.close()

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, DeviceLost):
            error = load_error(error)
        if isinstance(error, IskanderError):
            self._failed = LoadFailed(self.spec.key, error.code, error.message)
        else:
            self._fatal = error
