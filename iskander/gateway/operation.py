"""Operator's actions on a running gateway: drain, and live reload of the configuration.

A reload applies the changes of the file if all of them are `Live`. Otherwise, or if the file is
invalid, it changes nothing, and its error names the settings. One process of several passes both
actions on to its parent, which drains all processes, or has all of them reload its settings.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from iskander.config.changes import Changes, compare
from iskander.config.schema import Config
from iskander.errors import Draining, IskanderError, Overloaded
from iskander.foundation.logs import gateway as log
from iskander.gateway.auth.audit import DONE
from iskander.gateway.secrets import require_secrets
from iskander.gateway.server import Server
from iskander.gateway.systemd import notify, notify_reloading

RETRY_MS = 1000


class Operation:
    """Reload and drain of a gateway process.

    Args:
        config: The running configuration.
        read_again: Reads the configuration again; runs on a thread.
        drain: Starts the drain; idempotent.
    """

    def __init__(
        self,
        server: Server,
        config: Config,
        read_again: Callable[[], Config],
        drain: Callable[[], None],
    ) -> None:
        self._server = server
        self._config = config
        self._read_again = read_again
        self._drain = drain
        self._reloading: asyncio.Task[Changes] | None = None

    async def operate(self, action: str) -> dict[str, Any]:
        """Run the action `drain` or `reload`.

        Raises:
            ConfigError: The file is invalid, or needs a restart; nothing changed.
            Draining: The server is stopping.
            Overloaded: Another reload is running.
        """
        if action == "drain":
            self._drain()
            return {"state": "draining"}
        changes = await asyncio.shield(self._start())
        return {"changed": changes.live}

    def on_signal(self) -> None:
        """Start a reload; the log has the outcome."""
        try:
            reload = self._start()
            reload.add_done_callback(_retrieve)
            reload.add_done_callback(self._record_signal)
        except IskanderError as error:
            log.reload_ignored(reason=error.message)

    def _record_signal(self, reload: asyncio.Task[Changes]) -> None:
        """Add a reload by a signal, which has no caller, to the audit log."""
        error = None if reload.cancelled() else reload.exception()
        outcome = DONE if error is None else getattr(error, "code", "internal")
        changed = list(reload.result().live) if outcome == DONE and not reload.cancelled() else []
        self._server.audit.record("reload", "SIGHUP", outcome, changed=changed)

    def _start(self) -> asyncio.Task[Changes]:
        """Start a reload, which finishes even if its caller is gone."""
        if not self._server.is_serving:
            raise Draining("the gateway is starting or stopping", retry_after_ms=RETRY_MS)
        if self._reloading is not None and not self._reloading.done():
            raise Overloaded("another reload is running", retry_after_ms=RETRY_MS)
        self._reloading = asyncio.get_running_loop().create_task(self._reload())
        return self._reloading

    async def _reload(self) -> Changes:
        """Read the file, and apply its changes."""
        is_valid, note = False, "reload did not finish"
        notify_reloading()
        try:
            wanted = await asyncio.to_thread(self._read)
            changes = compare(self._config, wanted)
            changes.require_live()
            self._server.configure(wanted)
            self._config, is_valid, note = wanted, True, changes.text
            log.reloaded(note=note)
        except IskanderError as error:
            note = f"reload rejected: {error.message}"
            log.reload_rejected(reason=error.message)
            raise
        finally:
            self._server.reloads.record(is_valid=is_valid)
            if self._server.is_serving:  # A drain may have begun meanwhile.
                where = ", ".join(self._server.addresses)
                notify(
                    READY="1",
                    STATUS=f"serving on {where}; {note}",
                    X_ISKANDER_RELOADED=str(int(is_valid)),
                )
        return changes

    def _read(self) -> Config:
        """Read the file and the files that it names; runs on a thread."""
        wanted = self._read_again()
        require_secrets(wanted)
        return wanted


async def ask_parent(action: str) -> dict[str, Any]:
    """Pass an action on to the parent of this process, which runs it for all processes."""
    notify(X_ISKANDER_ACTION=action)
    return {"state": "draining" if action == "drain" else "reloading"}


def _retrieve(task: asyncio.Task[Changes]) -> None:
    """Log the exception of a reload without a caller, unless the reload has logged it."""
    if not task.cancelled() and not isinstance(error := task.exception(), IskanderError | None):
        log.reload_failed(error=error)
