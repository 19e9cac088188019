"""Persistent record of load and unload calls, shared by the processes of a gateway.

A process that starts later, or replaces another, applies the calls made since the gateway started.
A lock per model gives concurrent calls to two processes the same order everywhere.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from pathlib import Path

import msgspec

from iskander.errors import NotReady, Overloaded
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.foundation.decoders import DECODE_ERRORS, thread_safe
from iskander.interprocess.control.attach import LockFile

FOLDER = "intents"
LOCK_DIGITS = 2
"""Leading hex digits of a model's hash that select its lock: at most 256 locks."""
TURN_S = 0.02
RETRY_MS = 1000


@thread_safe
class LoadIntent(msgspec.Struct, frozen=True):
    """Requested state of a model: whether to serve it, and the versions to exclude."""

    model: str
    is_loaded: bool = True
    excluded: tuple[str, ...] = ()

    def without(self, version: str | None) -> LoadIntent:
        """Return the intent after the unload of a version; None: all versions."""
        if version is None:
            return LoadIntent(self.model, is_loaded=False)
        return LoadIntent(self.model, self.is_loaded, (*self.excluded, version))


class LoadIntents:
    """Files with the load intents of one gateway, in its runtime directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER

    def clear(self) -> None:
        """Delete the intents of an earlier gateway."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def __iter__(self) -> Iterator[LoadIntent]:
        """All intents; unreadable files are skipped."""
        for path in sorted(self._folder.glob("*.json")):
            with contextlib.suppress(OSError, *DECODE_ERRORS):
                yield msgspec.json.decode(path.read_bytes(), type=LoadIntent)

    def get(self, model: str) -> LoadIntent:
        """Return the intent of a model; by default, all its versions are to be served."""
        with contextlib.suppress(OSError, *DECODE_ERRORS):
            return msgspec.json.decode(self._path(model).read_bytes(), type=LoadIntent)
        return LoadIntent(model)

    @contextlib.contextmanager
    def recording(self, intent: LoadIntent) -> Iterator[None]:
        """Write an intent that takes effect if the body succeeds; raise NotReady if that fails."""
        path = self._path(intent.model)
        temporary = path.with_suffix(".new")
        try:
            temporary.write_bytes(msgspec.json.encode(intent))
        except OSError as error:
            raise _not_recorded(error) from None
        try:
            yield
            try:
                temporary.replace(path)
            except OSError as error:
                raise _not_recorded(error) from None
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    @contextlib.asynccontextmanager
    async def locked(self, model: str, wait_s: float) -> AsyncIterator[None]:
        """Lock a model against changes by other processes; raise Overloaded after `wait_s`."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            lock = LockFile(self._folder / f"{_digest(model)[:LOCK_DIGITS]}.lock")
        except OSError as error:
            raise _not_recorded(error) from None
        deadline_ns = now_ns() + int(wait_s * NS_PER_S)
        while not lock.acquire():
            if now_ns() > deadline_ns:
                text = f"lock timeout: another call has been changing models for {wait_s:g} s"
                raise Overloaded(text, retry_after_ms=RETRY_MS)
            await asyncio.sleep(TURN_S)
        try:
            yield
        finally:
            lock.release()

    def _path(self, model: str) -> Path:
        return self._folder / f"{_digest(model)}.json"


def _not_recorded(error: OSError) -> NotReady:
    return NotReady(
        f"the call cannot be recorded for all processes: {error.strerror}", retry_after_ms=RETRY_MS
    )


def _digest(model: str) -> str:
    """Hash a model name to a valid file name of fixed length."""
    return sha256(model.encode("utf-8", "backslashreplace")).hexdigest()
