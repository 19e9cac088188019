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
    root, before, followed = Path(settings.path), seen, seen
    async for _ in changes(root, settings.rescan_s):
        is_moving = True
        while is_moving:
            try:
                now = await asyncio.to_thread(list_models, root, settings.marker)
            except IskanderError as error:
                log.error("%s", error.message)
                break
            earlier, followed = followed, settled(before, now, followed)
            for name in {*followed, *earlier}:
                if followed.get(name) != earlier.get(name):
                    on_model(name, followed.get(name, NOTHING))
            is_moving = before != now
            before = now
            if is_moving:
                await asyncio.sleep(settings.settle_ms / 1000)
