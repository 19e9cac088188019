"""Word of changes in a folder: from the kernel, and after a while without.

Runs on: gateway loop, and a thread of `watchfiles` that waits for the kernel.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from pathlib import Path

from watchfiles import awatch

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
