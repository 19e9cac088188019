"""The changes of a repository's folder, each told when what has changed was left alone for a while.

Runs on: gateway loop; the folder is read on threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from iskander.config_repository import RepositoryConfig
from iskander.errors import IskanderError
from iskander.gateway.repository.listing import Listed, list_models
from iskander.gateway.repository.wanted import settled
from iskander.gateway.repository.watching import changes

log = logging.getLogger("iskander.repository")

NOTHING = Listed("", {})


async def follow(
    settings: RepositoryConfig, seen: dict[str, Listed], on_model: Callable[[str, Listed], None]
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

    def __init__(self, before: dict[str, Listed], followed: dict[str, Listed]) -> None:
        self.before = before
        self.followed = followed


async def _follow_change(
    settings: RepositoryConfig, known: Known, on_model: Callable[[str, Listed], None]
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
