"""Repository folder watcher: reports a model after its files stop changing.

Runs on: gateway loop; the folder is read on threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from watchfiles import awatch

from iskander.config.repository import RepositoryConfig
from iskander.errors import IskanderError
from iskander.foundation.logs import models as log
from iskander.gateway.repository.scan import ABSENT, ScannedModel, list_models
from iskander.gateway.repository.version_policy import settled

DEBOUNCE_MS = 50
logging.getLogger("watchfiles").setLevel(logging.WARNING)


async def changes(root: Path, rescan_s: float) -> AsyncGenerator[None, None]:
    """Yield after each change below a folder, and every `rescan_s` seconds without one.

    If the folder cannot be watched (no inotify watches left, folder missing, or a name that is not
    UTF-8), yields at once and every `rescan_s` seconds.
    """
    while True:
        try:
            async for _ in awatch(
                root,
                watch_filter=None,
                debounce=DEBOUNCE_MS,
                step=DEBOUNCE_MS // 2,
                rust_timeout=int(rescan_s * 1000),
                yield_on_timeout=True,
                ignore_permission_denied=True,
            ):
                yield
        except (OSError, RuntimeError, ExceptionGroup) as error:
            causes = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
            log.repository_unwatched(reason="; ".join(map(str, causes)))
            yield
        await asyncio.sleep(rescan_s)
        yield


async def follow(
    settings: RepositoryConfig,
    initial: dict[str, ScannedModel],
    on_model: Callable[[str, ScannedModel], None],
) -> None:
    """Call `on_model` for each model whose files changed and settled, until cancelled."""
    last = applied = initial
    async for _ in changes(Path(settings.path), settings.rescan_s):
        try:
            is_changing = True
            while is_changing:
                now = await asyncio.to_thread(list_models, Path(settings.path), settings.marker)
                before, applied = applied, settled(last, now, applied)
                is_changing, last = last != now, now
                for name in {*applied, *before}:
                    if applied.get(name) != before.get(name):
                        on_model(name, applied.get(name, ABSENT))
                if is_changing:
                    await asyncio.sleep(settings.settle_ms / 1000)
        except IskanderError as error:
            log.repository_scan_rejected(reason=error.message)
        except Exception as failure:
            # The folder's content is arbitrary; the next change scans again.
            log.repository_scan_failed(error=failure)
