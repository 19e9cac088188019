"""Identity of a gateway, by which it recognizes remote models that refer to itself.

Source: proc_sys_kernel(5), `random/boot_id`.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

LOCK: Final = "gateway.lock"
"""Lock file in the runtime directory of a process.

With several processes, their directories are in that of their parent, which has a lock file too."""
ORIGIN: Final = "iskander-origin"
"""Header by which a worker sends its `gateway_id` to the server of a remote model."""


def gateway_id(folder: Path) -> str:
    """Return the same text in all processes of one gateway, and in no other gateway.

    `folder` is the runtime directory of a process; with several processes, that of their parent
    identifies them. Device and inode tell containers and directories
    apart, and `boot_id` machines.
    """
    is_of_parent = (folder.parent / LOCK).exists()
    found = os.stat(folder.parent if is_of_parent else folder)
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    place = f"{boot_id} {found.st_dev} {found.st_ino}"
    return hashlib.blake2b(place.encode(), digest_size=16).hexdigest()
