"""Files in a model's folder by names that somebody else chose: inside of it, and nobody else's.

Read by the worker that loads the model and by the operator's tool.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path, PurePosixPath

from iskander.errors import ManifestError


def path_inside(folder: Path, name: str, *, is_folder_allowed: bool = False) -> Path:
    """A file in a folder.

    Args:
        folder: Of the model.
        name: Relative to it.
        is_folder_allowed: A folder below is one too, as that of a package.

    Raises:
        ManifestError: It is outside, reached by a link that leads outside, has another name
            elsewhere (a hard link), is not a file, is the folder itself, or is not there.
    """
    pure = PurePosixPath(name)
    shown = name[:100]
    if not name or "\0" in name or pure.is_absolute() or ".." in pure.parts:
        raise ManifestError(f"the file name `{shown}` leads out of the model's folder")
    path = folder / pure
    try:
        home, real, status = folder.resolve(), path.resolve(strict=True), path.stat()
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its links go in a circle"
        raise ManifestError(f"`{shown}` beside the model cannot be read: {reason}") from None
    if not real.is_relative_to(home):
        raise ManifestError(f"`{shown}` is a link that leads out of the model's folder")
    if is_folder_allowed and stat.S_ISDIR(status.st_mode):
        if real == home:
            raise ManifestError(f"`{shown}` is the model's own folder, and has to be below it")
        return path
    if not stat.S_ISREG(status.st_mode):
        raise ManifestError(f"`{shown}` beside the model is not a file")
    if status.st_nlink > 1:
        raise ManifestError(
            f"`{shown}` has {status.st_nlink} names (hard links), so it may be a file of somebody "
            "else's; copy it into the model's folder"
        )
    return path


def read_plain(file: Path, bytes_max: int) -> bytes:
    """The first bytes of a plain file; reading anything else could wait for ever.

    Raises:
        OSError: It cannot be read, or is no plain file.
    """
    # Opened first and looked at then, so that it cannot be replaced in between; a FIFO is opened
    # without waiting for its other end.
    opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        with os.fdopen(opened, "rb", closefd=False) as file_read:
            return file_read.read(bytes_max)
    finally:
        os.close(opened)
