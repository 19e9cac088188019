"""Audit log of administrative actions and failed authentications.

A thread appends the records as JSON lines to `access.audit_file`, so that a slow or full disk does
not block the event loop. A record that cannot be written there goes to the log with the reason, and
the action proceeds. The file is opened again when another program has renamed or removed it.

The first denied action of a caller in a minute has a record; further ones are only counted, as all
failed authentications are, so that their number is no means to displace records.

Runs on: gateway loop, and the thread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from iskander.errors import ConfigError, IskanderError, PermissionDenied, Unauthenticated
from iskander.foundation.clock import NS_PER_S, wall_ns
from iskander.foundation.logs import network as log
from iskander.gateway.auth.origin import UNKNOWN_ORIGIN, Origin

QUEUE_MAX: Final = 4096
"""Records that wait for the thread."""
REFUSALS_MAX: Final = QUEUE_MAX // 2
"""Waiting records above which those of refused callers are dropped; the rest is for actions."""
SUMMARY_S: Final = 60.0
HOSTS_MAX: Final = 64
"""Hosts whose refusals the summary of an action counts separately."""
STOP_S: Final = 5.0
OTHER: Final = "(other)"
SERVER: Final = "(server)"
"""Actor of changes without a caller: files, signals, start and stop."""
DONE: Final = "ok"
AUTHENTICATE: Final = "authenticate"
_REFUSED: Final = frozenset((PermissionDenied.code, Unauthenticated.code))
_FLAGS: Final = (
    os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
)
_MODE: Final = 0o600


class AuditLog:
    """Records of one gateway process.

    Args:
        path: File of the records; empty: the records go to the log.

    Attributes:
        counts: Records by what happened to them: `written` to the file, `logged` or `dropped`.
    """

    def __init__(self, path: str = "", process: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        self._file = _File(Path(path)) if path else None
        self._process = process
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # By action: outcome, actor, host and certificate.
        self._refusals: dict[str, Counter[tuple[str, str, str, str]]] = {}
        self._summary_ns = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Open the file and start the thread; raise ConfigError if the file cannot be opened."""
        if self._file is None:
            return
        try:
            self._file.open()
        except OSError as error:
            raise ConfigError(f"access.audit_file: cannot be opened: {error.strerror}") from None
        self._thread = threading.Thread(target=self._write, name="audit", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write the records so far, for at most `STOP_S`."""
        self.summarize()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(STOP_S)

    @contextlib.contextmanager
    def action(self, name: str, target: str, actor: str, origin: Origin) -> Iterator[None]:
        """Record an action of a caller with its outcome when the block ends.

        A repeated denial is only counted; `summarize` records the number.
        """
        outcome = "failed"
        try:
            yield
            outcome = DONE
        except IskanderError as error:
            outcome = error.code
            raise
        finally:
            if outcome not in _REFUSED or self._count(name, outcome, actor, origin) == 1:
                self.record(name, target, outcome, actor=actor, origin=origin)

    def record(
        self,
        action: str,
        target: str = "",
        outcome: str = DONE,
        *,
        actor: str = SERVER,
        origin: Origin = UNKNOWN_ORIGIN,
        **details: Any,  # noqa: ANN401
    ) -> None:
        """Record an action; `details` are values for JSON."""
        stamp = datetime.fromtimestamp(wall_ns() / NS_PER_S, UTC)
        fields = {
            "time": stamp.isoformat(timespec="milliseconds"),
            "action": action,
            "target": target[:256],
            "outcome": outcome,
            "actor": actor,
            "peer": origin.peer,
            "certificate": list(origin.certificate[:4]),
            "process": self._process,
            **details,
        }
        known = {key: value for key, value in fields.items() if value not in ("", [])}
        line = msgspec.json.encode(known)
        if self._thread is None:
            self._log(line)
        elif self._queue.qsize() >= (REFUSALS_MAX if outcome in _REFUSED else QUEUE_MAX):
            self.counts["dropped"] += 1
        else:
            self._queue.put(line + b"\n")

    def on_unauthenticated(self, origin: Origin) -> None:
        """Count a failed authentication; `summarize` records the numbers."""
        self._count(AUTHENTICATE, Unauthenticated.code, "", origin)

    def poll(self) -> None:
        """Record the numbers of the last minute, if it is over."""
        if wall_ns() - self._summary_ns >= SUMMARY_S * NS_PER_S:
            self.summarize()

    def summarize(self) -> None:
        """Record the numbers of refusals since the last summary, by action, actor and host."""
        self._summary_ns = wall_ns()
        refusals, self._refusals = self._refusals, {}
        for action, counts in refusals.items():
            for (outcome, actor, host, certificate), total in counts.items():
                # The first denied action has a record of its own.
                if count := total - (action != AUTHENTICATE):
                    origin = Origin(host, (certificate,) if certificate else ())
                    self.record(action, "", outcome, actor=actor, origin=origin, count=count)

    def _count(self, action: str, outcome: str, actor: str, origin: Origin) -> int:
        """Count a refusal, after a summary that is due.

        Returns the number of such refusals since the last summary.
        """
        self.poll()
        counts = self._refusals.setdefault(action, Counter())
        key = (outcome, actor, origin.host or OTHER, ",".join(origin.certificate[:1])[:256])
        if key not in counts and len(counts) >= HOSTS_MAX:
            key = (outcome, actor and OTHER, OTHER, "")
        counts[key] += 1
        return counts[key]

    def _log(self, line: bytes, event: Callable[..., None] = log.audit_record) -> None:
        self.counts["logged"] += 1
        event(record=line.decode())

    def _write(self) -> None:
        """Append records until `stop`; runs on the thread."""
        assert self._file is not None
        has_failed = False
        while (line := self._queue.get()) is not None:
            try:
                self._file.append(line)
                self.counts["written"] += 1
                has_failed = False
            except OSError as error:
                if not has_failed:
                    log.audit_write_failed(file=self._file.path.name, reason=str(error.strerror))
                has_failed = True
                self._log(line.rstrip(), log.audit_record_not_written)
        self._file.close()


class _File:
    """An append-only file that may be rotated by rename."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._is_torn = False  # The last line is incomplete.

    def open(self) -> None:
        fd = os.open(self.path, _FLAGS, _MODE)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)
            raise OSError(0, "not a regular file")
        self._fd = fd
        self._is_torn = _ends_within_a_line(self.path, found.st_size)

    def append(self, line: bytes) -> None:
        """Write a line to the file that the path names now, through to the disk."""
        if self._fd < 0 or not self._is_current():
            self.close()
            self.open()
        raw = (b"\n" if self._is_torn else b"") + line
        written = os.write(self._fd, raw)
        self._is_torn = written > 0 and not raw[:written].endswith(b"\n")
        if written < len(raw):
            raise OSError(0, f"{written} of {len(raw)} bytes written")
        os.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _is_current(self) -> bool:
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        own = os.fstat(self._fd)
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)


def _ends_within_a_line(path: Path, size: int) -> bool:
    """Whether the last line of a file is incomplete; no if the file cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(size - 1, 0))
        return file.read(1) not in (b"", b"\n")
    return False
