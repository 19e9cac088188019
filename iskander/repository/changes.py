"""The changes of a repository's folder, each told when what has changed was left alone for a while.

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
from iskander.repository.scan import ScannedModel, list_models
from iskander.repository.version_policy import settled

log = logging.getLogger("iskander.repository")

DEBOUNCE_MS = 50
logging.getLogger("watchfiles").setLevel(logging.WARNING)


async def changes(root: Path, rescan_s: float) -> AsyncGenerator[None, None]:
    """A turn for each change below a folder that is told of, and for each while without any.

    A folder that cannot be watched (there are no watches left, it is gone, or a name in it is no
    UTF-8) is looked at at once and every `rescan_s` seconds.
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
            log.warning("the repository cannot be watched: %s", "; ".join(map(str, causes)))
            yield
        await asyncio.sleep(rescan_s)
        yield


log = logging.getLogger("iskander.repository")

NOTHING = ScannedModel("", {})


async def follow(
    settings: RepositoryConfig,
    seen: dict[str, ScannedModel],
    on_model: Callable[[str, ScannedModel], None],
) -> None:
    """Tell of each model that has changed, for ever.

    Args:
        settings: Of the repository.
        seen: What was there at first, and is known.
        on_model: Told a model's name, and what is there of it now.
    """
    known = Known(seen, seen)
    async for _ in changes(Path(settings.path), settings.rescan_s):
        try:
            await _follow_change(settings, known, on_model)
        except IskanderError as error:
            log.error("%s", error.message)
        except Exception:
            # A folder can hold anything; the next change is another chance.
            log.exception("the repository was not looked at to the end")


class Known:
    """What was seen at the last look, and what is gone by."""

    def __init__(self, before: dict[str, ScannedModel], followed: dict[str, ScannedModel]) -> None:
        self.before = before
        self.followed = followed


async def _follow_change(
    settings: RepositoryConfig, known: Known, on_model: Callable[[str, ScannedModel], None]
) -> None:
    """Look until nothing moves any more, and tell of what has changed and was left alone."""
    is_moving = True
    while is_moving:
        now = await asyncio.to_thread(list_models, Path(settings.path), settings.marker)
        earlier, known.followed = known.followed, settled(known.before, now, known.followed)
        is_moving = known.before != now
        known.before = now
        for name in {*known.followed, *earlier}:
            if known.followed.get(name) != earlier.get(name):
                on_model(name, known.followed.get(name, NOTHING))
        if is_moving:
            await asyncio.sleep(settings.settle_ms / 1000)
