"""What calls want served, for the processes of a gateway that come later: kept in a folder.

A process that is started again, or takes another's place, serves what the others were asked for
since the gateway was started. A lock is held while a model is changed, so that two calls at two
processes have one order everywhere.

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

from iskander.clock import NS_PER_S, now_ns
from iskander.control.attach import LockFile
from iskander.decoders import thread_safe
from iskander.errors import NotReady, Overloaded

FOLDER = "wishes"
LOCK_DIGITS = 2
"""Models whose hashes begin alike share a lock, so that there are no more locks than 256."""
TURN_S = 0.02
RETRY_MS = 1000


@thread_safe
class LoadIntent(msgspec.Struct, frozen=True):
    """What is wanted of a model.

    Attributes:
        model: Its name.
        is_loaded: What is there of it is to be served.
        but: Versions that are not.
    """

    model: str
    is_loaded: bool = True
    but: tuple[str, ...] = ()

    def without(self, version: str | None) -> LoadIntent:
        """The same when a version, or all of them, have been given up."""
        if version is None:
            return LoadIntent(self.model, is_loaded=False)
        return LoadIntent(self.model, self.is_loaded, (*self.but, version))


class LoadIntents:
    """Those of one gateway.

    Args:
        folder: Of all its processes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER

    def clear(self) -> None:
        """Forget those of a gateway that was here before."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def __iter__(self) -> Iterator[LoadIntent]:
        """All of them; one that cannot be read is none."""
        for path in sorted(self._folder.glob("*.json")):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                yield msgspec.json.decode(path.read_bytes(), type=LoadIntent)

    def of(self, model: str) -> LoadIntent:
        """What is wanted of a model, where nobody said: that it is served."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(self._path(model).read_bytes(), type=LoadIntent)
        return LoadIntent(model)

    @contextlib.contextmanager
    def keeping(self, wish: LoadIntent) -> Iterator[None]:
        """Keep a wish in the place of the one before, where what is done meanwhile succeeds.

        Raises:
            NotReady: It cannot be written, and nothing was done.
        """
        path = self._path(wish.model)
        beside = path.with_suffix(".new")
        try:
            beside.write_bytes(msgspec.json.encode(wish))
        except OSError as error:
            raise _not_kept(error) from None
        try:
            yield
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise

    @contextlib.asynccontextmanager
    async def held(self, model: str, wait_s: float) -> AsyncIterator[None]:
        """Keep other processes from changing a model.

        Raises:
            Overloaded: One of them did for as long as is waited.
            NotReady: The folder cannot be written to.
        """
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            lock = LockFile(self._folder / f"{_digest(model)[:LOCK_DIGITS]}.lock")
        except OSError as error:
            raise _not_kept(error) from None
        deadline_ns = now_ns() + int(wait_s * NS_PER_S)
        while not lock.take():
            if now_ns() > deadline_ns:
                raise Overloaded(
                    "another call is changing models and does not come to its end",
                    retry_after_ms=RETRY_MS,
                )
            await asyncio.sleep(TURN_S)
        try:
            yield
        finally:
            lock.release()

    def _path(self, model: str) -> Path:
        return self._folder / f"{_digest(model)}.json"


def _not_kept(error: OSError) -> NotReady:
    return NotReady(
        f"what is asked for cannot be kept for all processes: {error.strerror}",
        retry_after_ms=RETRY_MS,
    )


def _digest(model: str) -> str:
    """Of a name, which may be longer than a file's, and have letters that a file's may not."""
    return sha256(model.encode("utf-8", "backslashreplace")).hexdigest()
