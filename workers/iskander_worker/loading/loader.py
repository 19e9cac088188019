"""Models loaded beside the work: one at a time, on a thread that lives as long as its load.

The working loop goes on with the batches of what it serves already. The runtime gives the
interpreter up for most of a load; where a load keeps it, the loop asks for it back.

Runs on: worker main, but for `_Load._run`, which runs on a thread of its own.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from iskander.clock import NS_PER_MS, now_ns
from iskander.control.messages import Loaded, LoadFailed, ModelSpec, Notice, ToGateway
from iskander.errors import IskanderError
from iskander_worker.attachments import Attachment
from iskander_worker.failures import load_error
from iskander_worker.sandbox.client import sandbox_server
from iskander_worker.session import Session

LEAVE_S = 5.0
"""How long a worker that ends waits for a load that it began: libraries end badly in its midst."""


class LoadQueue:
    """The loads that gateways asked for, in their order; each gateway waits for one at most.

    Args:
        cores: Physical cores that this process may use.

    Attributes:
        sessions: What is loaded, by fingerprint.
        is_busy: Something is being loaded.
        wake_fd: Readable when a load is done.
    """

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._waiting: deque[_Load] = deque()
        self._running: _Load | None = None
        self.sessions: dict[str, Session] = {}
        self.is_busy = False
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def ask(self, attachment: Attachment, spec: ModelSpec) -> None:
        """Begin to load and warm a model, or let it wait for the one before."""
        self._waiting.append(_Load(attachment, spec, self._cores, self._wake))
        self._begin()

    def take(self) -> tuple[Attachment, list[ToGateway]] | None:
        """The load that is done, if one is: who asked for it, and what to tell it."""
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
        self._begin()
        return load.attachment, load.answer()

    def keep(self, used: set[Session]) -> None:
        """Give up every session but these."""
        for fingerprint, session in list(self.sessions.items()):
            if session not in used:
                del self.sessions[fingerprint]
                session.close()

    def leave(self) -> bool:
        """Begin nothing more; whether what was begun has come to its end."""
        self._waiting.clear()
        if self._running is not None:
            self._running.thread.join(LEAVE_S)
            if self._running.thread.is_alive():
                return False
        sandbox_server.end()
        return True

    def _begin(self) -> None:
        if self._running is None and self._waiting:
            self._running = load = self._waiting.popleft()
            self.is_busy = True
            load.session = session = self.sessions.get(load.spec.fingerprint)
            if session is not None:
                load.attachment.executor.sessions[load.spec.key] = session
            load.thread.start()

    def _wake(self) -> None:
        os.eventfd_write(self.wake_fd, 1)


class _Load:
    """One load; what another gateway had loaded is there at once.

    Attributes:
        session: None until it is loaded, and where it cannot be.
        error: Why it cannot be.
    """

    def __init__(
        self, attachment: Attachment, spec: ModelSpec, cores: int, wake: Callable[[], None]
    ) -> None:
        self.attachment = attachment
        self.spec = spec
        self.session: Session | None = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="isk-load", daemon=True)
        self._cores = cores
        self._wake = wake
        self._begun_ns = now_ns()

    def answer(self) -> list[ToGateway]:
        """What came of it; an assertion of this program's own ends it."""
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
            Loaded(self.spec.key, session.contract, session.providers, session.threads, load_ms),
        ]

    def _run(self) -> None:
        try:
            if self.session is None:
                self.session = _loaded(self.spec, self._cores)
        except BaseException as error:
            self.error = load_error(error)
        finally:
            self._wake()


def _loaded(spec: ModelSpec, cores: int) -> Session:
    session = Session(spec, cores)
    session.warm_up(spec.rows_max)
    return session
