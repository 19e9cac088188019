"""Facts that only an attempt shows: system calls, folders, ONNX Runtime's libraries, GPUs.

Nothing is changed: the segment of the attempt is a page that is closed at once.

Runs on: the operator's tool. Source: memfd_create(2), fcntl(2) (file sealing), pidfd_open(2),
madvise(2), mbind(2).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from iskander.cli.doctor.cgroup import Mount
from iskander.cli.doctor.runtimes import Runtimes, read_runtimes
from iskander.errors import SegmentError
from iskander.interprocess.memory.numa import prefer_node_for
from iskander.interprocess.memory.segment import Segment


class Folder(NamedTuple):
    """A folder, or its nearest existing parent.

    Attributes:
        is_there: The folder exists.
        kind: File system, such as `ext4`.
    """

    path: str
    is_there: bool = False
    uid: int = 0
    mode: int = 0o700
    kind: str = ""
    free_bytes: int = 0


class Probes(NamedTuple):
    """Outcomes of the attempts; an empty text is a success."""

    segment: str = ""
    pidfd: str = ""
    memory_policy: str = ""
    runtime: Folder = Folder("")
    cache: Folder = Folder("")
    runtimes: Runtimes = Runtimes()


def probe(
    runtime: Path,
    cache: str,
    providers: Sequence[str],
    mounts: Sequence[Mount],
    preload: Callable[[], None],
) -> Probes:
    """Make all attempts; `preload` loads the libraries of TensorRT, as workers do."""
    return Probes(
        segment=_probe_segment(),
        pidfd=_attempt(lambda: os.close(os.pidfd_open(os.getpid()))),
        memory_policy=_probe_memory_policy(),
        runtime=read_folder(runtime, mounts),
        cache=read_folder(Path(cache), mounts) if cache else Folder(""),
        runtimes=read_runtimes(providers, preload),
    )


def read_folder(path: Path, mounts: Sequence[Mount]) -> Folder:
    """Owner, mode and file system of a folder, of its nearest existing parent if it is missing."""
    found = next(each for each in (path, *path.parents) if each.exists())
    status, space = found.stat(), os.statvfs(found)
    resolved = found.resolve()
    # The last of several mounts at a point is the visible one.
    below = [each for each in mounts if resolved.is_relative_to(each.point)]
    mount = max(enumerate(below), key=lambda at: (len(at[1].point), at[0]), default=None)
    return Folder(
        path=str(path),
        is_there=found == path,
        uid=status.st_uid,
        mode=stat.S_IMODE(status.st_mode),
        kind=mount[1].kind if mount else "",
        free_bytes=space.f_bavail * space.f_frsize,
    )


def _probe_segment() -> str:
    """Create, seal and populate a segment of one page."""
    try:
        Segment.create("iskander-doctor", 1, is_read_only=True).close()
    except SegmentError as error:
        return error.message
    except OSError as error:
        return f"sealing a segment failed: {error.strerror}"
    return ""


def _probe_memory_policy() -> str:
    """Call mbind on an empty range: the kernel checks the permission and changes nothing."""
    notice = prefer_node_for(0, 0, 0)
    is_denied = any(errno.errorcode[code] in notice for code in (errno.EPERM, errno.ENOSYS))
    return notice if is_denied else ""


def _attempt(call: Callable[[], object]) -> str:
    try:
        call()
    except OSError as error:
        return str(error.strerror)
    return ""
