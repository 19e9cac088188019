"""Changes that calls ask for, made in every process of a gateway.

    a call  ->  this process makes the change; where it cannot, nothing is changed anywhere
            ->  it is kept for processes that come later (`wishes`)
            ->  the others are asked, each over a socket of its own, and make it too

A process that does not answer is one that is being started, and will find what was kept.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

import msgspec

from iskander.control.runtime_directory import Member
from iskander.decoders import thread_safe
from iskander.errors import Draining, IskanderError, ModelNotFound, NotReady, Overloaded
from iskander.repository.load_intents import RETRY_MS, LoadIntent, LoadIntents
from iskander.repository.repository import Repository

SOCKET = "peers.sock"
LINE_BYTES_MAX = 65_536
CHANGES_MAX = 64
"""At once; each waits for a load at most."""
SLACK_S = 5.0
"""Beyond what a load may take, for a process to answer."""

log = logging.getLogger("iskander.repository")


@thread_safe
class Change(msgspec.Struct, frozen=True):
    """One change.

    Attributes:
        action: `load` or `unload`.
        version: None: all of them.
    """

    action: str
    model: str
    version: str | None = None


@thread_safe
class Outcome(msgspec.Struct, frozen=True):
    """What came of it in one process: the versions, or the error as `to_wire` tells it."""

    versions: list[str] = []
    error: dict[str, Any] | None = None


class Peers:
    """What makes changes here and there.

    Args:
        repository: Of this process.
        member: Which process this is, and which others there are.
        folder: This process's runtime directory.
        load_s: What a load may take.
    """

    def __init__(self, repository: Repository, member: Member, folder: Path, load_s: float) -> None:
        self._repository = repository
        self._others = [Path(each).with_name(SOCKET) for each in member.siblings]
        self._path = folder / SOCKET
        self._wishes = LoadIntents(folder.parent)
        self._load_s = load_s
        self._server: asyncio.Server | None = None
        self._changes: set[asyncio.Task[list[str]]] = set()
        self._is_closed = False

    async def start(self) -> list[LoadIntent]:
        """Be there for the others' changes; what was asked of them before."""
        if not self._others:
            return []
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(
            self._answer, self._path, limit=LINE_BYTES_MAX
        )
        return list(self._wishes)

    def close(self) -> None:
        """Make no more changes."""
        self._is_closed = True
        for task in list(self._changes):
            task.cancel()
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def load(self, model: str) -> list[str]:
        """As `Repository.load`, everywhere.

        Raises:
            IskanderError: As `Repository.load`; it may be another process that cannot.
        """
        return await self._make(Change("load", model))

    async def unload(self, model: str, version: str | None = None) -> list[str]:
        """As `Repository.unload`, everywhere.

        Raises:
            IskanderError: As `Repository.unload`; it may be another process that cannot.
        """
        return await self._make(Change("unload", model, version))

    async def _make(self, change: Change) -> list[str]:
        if len(self._changes) >= CHANGES_MAX:
            raise Overloaded("as many changes as may be are being made", retry_after_ms=RETRY_MS)
        making = self._everywhere(change) if self._others else self._here(change)
        task = asyncio.get_running_loop().create_task(making)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        try:
            # A caller that leaves half way would leave what is served half changed.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._is_closed:
                raise Draining("the server is stopping", retry_after_ms=0) from None
            raise

    async def _everywhere(self, change: Change) -> list[str]:
        async with self._wishes.held(change.model, self._load_s):
            with self._keeping(change):
                versions = await self._here(change)
            found = await asyncio.gather(
                *(self._there(path, change) for path in self._others), return_exceptions=True
            )
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return versions

    def _keeping(self, change: Change) -> contextlib.AbstractContextManager[None]:
        """Keep it for processes that come later, if it can be made here."""
        if not self._repository.is_for_calls(change.model):
            return contextlib.nullcontext()
        wish = self._wishes.of(change.model)
        is_load = change.action == "load"
        return self._wishes.keeping(
            LoadIntent(wish.model) if is_load else wish.without(change.version)
        )

    async def _here(self, change: Change) -> list[str]:
        if change.action == "load":
            return await self._repository.load(change.model)
        return self._repository.unload(change.model, change.version)

    async def _there(self, path: Path, change: Change) -> None:
        """Have another process make a change.

        Raises:
            IskanderError: Why it does not.
        """
        which = path.parent.name
        try:
            async with asyncio.timeout(self._load_s + SLACK_S):
                reader, writer = await asyncio.open_unix_connection(path, limit=LINE_BYTES_MAX)
                try:
                    writer.write(msgspec.json.encode(change) + b"\n")
                    line = await reader.readline()
                finally:
                    writer.close()
        except TimeoutError:
            raise NotReady(f"{which} does not answer", retry_after_ms=RETRY_MS) from None
        except OSError:
            return  # It is being started.
        if not line:
            return  # It has ended.
        outcome = msgspec.json.decode(line, type=Outcome)
        if outcome.error is not None:
            error = IskanderError.from_wire(outcome.error)
            raise type(error)(
                f"{which}: {error.message}", retry_after_ms=error.retry_after_ms, **error.fields
            )

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Make the change that another process has made."""
        try:
            async with asyncio.timeout(SLACK_S):
                line = await reader.readline()
            change = msgspec.json.decode(line, type=Change)
            async with asyncio.timeout(self._load_s):
                await self._repository.beginning.until(change.model)
            outcome = await self._outcome_of(change)
            writer.write(msgspec.json.encode(outcome) + b"\n")
        except (OSError, TimeoutError, ValueError) as error:
            log.warning("another process of this gateway was not understood: %s", error)
        finally:
            with contextlib.suppress(OSError):
                writer.close()

    async def _outcome_of(self, change: Change) -> Outcome:
        try:
            return Outcome(await self._here(change))
        except ModelNotFound as error:
            # What is to go and is not there is gone.
            return Outcome() if change.action == "unload" else Outcome(error=error.to_wire())
        except IskanderError as error:
            return Outcome(error=error.to_wire())
