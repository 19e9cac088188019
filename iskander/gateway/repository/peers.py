"""Load and unload calls, applied in every process of a gateway.

    a call  ->  this process applies it; on failure no process changes
            ->  `load_intents` records it for processes that start later
            ->  the peers receive it, each over its own socket, and apply it

A peer that cannot be reached is starting, and reads the record later.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec

from iskander.errors import Draining, IskanderError, ModelNotFound, NotReady, Overloaded
from iskander.foundation.decoders import thread_safe
from iskander.foundation.logs import models as log
from iskander.gateway.repository.load_intents import RETRY_MS, LoadIntent, LoadIntents
from iskander.gateway.repository.repository import Repository
from iskander.interprocess.control.runtime_directory import Member

SOCKET = "peers.sock"
LINE_BYTES_MAX = 65_536
CHANGES_MAX = 64
"""Concurrent changes; each waits for a load at most."""
SLACK_S = 5.0
"""Added to the timeout of a load for the peer's answer."""


@thread_safe
class Change(msgspec.Struct, frozen=True):
    """Request to a peer: `load` or `unload` a model, or unload one version."""

    action: str
    model: str
    version: str | None = None


@thread_safe
class Outcome(msgspec.Struct, frozen=True):
    """Answer of a peer: the versions, or the error as `to_wire` returns it."""

    versions: list[str] = []
    error: dict[str, Any] | None = None


class Peers:
    """Applies changes in this process and its peers; `load_s` is the timeout of a load."""

    def __init__(self, repository: Repository, member: Member, folder: Path, load_s: float) -> None:
        self._repository = repository
        self._others = [Path(each).with_name(SOCKET) for each in member.peers]
        self._path = folder / SOCKET
        self._intents = LoadIntents(folder.parent)
        self._load_s = load_s
        self._server: asyncio.Server | None = None
        self._changes: set[asyncio.Task[list[str]]] = set()
        self._is_closed = False

    async def start(self) -> list[LoadIntent]:
        """Listen for peers' changes; return the recorded intents."""
        if not self._others:
            return []
        self._path.unlink(missing_ok=True)
        listen = asyncio.start_unix_server
        self._server = await listen(self._answer, self._path, limit=LINE_BYTES_MAX)
        return list(self._intents)

    def close(self) -> None:
        """Cancel pending changes and stop listening."""
        self._is_closed = True
        for task in list(self._changes):
            task.cancel()
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def load(self, model: str) -> list[str]:
        """Run `Repository.load` in every process; raise the error of any."""
        return await self._apply(Change("load", model))

    async def unload(self, model: str, version: str | None = None) -> list[str]:
        """Run `Repository.unload` in every process; raise the error of any."""
        return await self._apply(Change("unload", model, version))

    async def _apply(self, change: Change) -> list[str]:
        if len(self._changes) >= CHANGES_MAX:
            text = f"{len(self._changes)} concurrent changes of models, limit {CHANGES_MAX}"
            raise Overloaded(text, retry_after_ms=RETRY_MS)
        work = self._apply_in_all(change) if self._others else self._apply_here(change)
        task = asyncio.get_running_loop().create_task(work)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        try:
            # The change completes in all processes even if the caller cancels.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._is_closed:
                raise Draining("the server is stopping", retry_after_ms=0) from None
            raise

    async def _apply_in_all(self, change: Change) -> list[str]:
        async with self._intents.locked(change.model, self._load_s):
            with self._recording(change):
                versions = await self._apply_here(change)
            sends = (self._send(path, change) for path in self._others)
            outcomes = await asyncio.gather(*sends, return_exceptions=True)
        for each in outcomes:
            if isinstance(each, BaseException):
                raise each
        return versions

    def _recording(self, change: Change) -> contextlib.AbstractContextManager[None]:
        if not self._repository.is_controlled_by_calls(change.model):
            return contextlib.nullcontext()
        if change.action == "load":
            return self._intents.recording(LoadIntent(change.model))
        return self._intents.recording(self._intents.get(change.model).without(change.version))

    async def _apply_here(self, change: Change) -> list[str]:
        if change.action == "load":
            return await self._repository.load(change.model)
        return self._repository.unload(change.model, change.version)

    async def _send(self, path: Path, change: Change) -> None:
        """Apply a change in a peer; raise the peer's error."""
        peer, wait_s = path.parent.name, self._load_s + SLACK_S
        try:
            async with asyncio.timeout(wait_s):
                reader, writer = await asyncio.open_unix_connection(path, limit=LINE_BYTES_MAX)
                try:
                    writer.write(msgspec.json.encode(change) + b"\n")
                    line = await reader.readline()
                finally:
                    writer.close()
        except TimeoutError:
            text = f"{peer} did not answer within {wait_s:g} s"
            raise NotReady(text, retry_after_ms=RETRY_MS) from None
        except OSError:
            return  # The peer is starting.
        if not line:
            return  # The peer has ended.
        outcome = msgspec.json.decode(line, type=Outcome)
        if outcome.error is not None:
            error = IskanderError.from_wire(outcome.error)
            text = f"{peer}: {error.message}"
            raise type(error)(text, retry_after_ms=error.retry_after_ms, **error.fields)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Apply the change of a peer in this process."""
        try:
            async with asyncio.timeout(SLACK_S):
                line = await reader.readline()
            change = msgspec.json.decode(line, type=Change)
            async with asyncio.timeout(self._load_s):
                await self._repository.startup.wait_for(change.model)
            writer.write(msgspec.json.encode(await self._outcome_of(change)) + b"\n")
        except (OSError, TimeoutError, ValueError) as error:
            log.peer_request_failed(reason=repr(error))
        finally:
            with contextlib.suppress(OSError):
                writer.close()

    async def _outcome_of(self, change: Change) -> Outcome:
        try:
            return Outcome(await self._apply_here(change))
        except IskanderError as error:
            # A model to unload that is not found is unloaded already.
            if change.action == "unload" and isinstance(error, ModelNotFound):
                return Outcome()
            return Outcome(error=error.to_wire())
