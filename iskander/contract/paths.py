"""Safe access to files of a model folder whose names come from untrusted input.

The folder itself may be a link: who can write beside the folder decides where it is.

Runs on: the gateway's loads, the worker that loads the model, and the operator's tool.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path, PurePosixPath

from iskander.contract.validation import require
from iskander.errors import ManifestError


def path_inside(folder: Path, name: str, *, is_folder_allowed: bool = False) -> Path:
    """Return the path of a file, or of a folder if allowed, in a model folder.

    Raises:
        ManifestError: The file is outside the folder, directly or through a link, has several hard
            links, is neither a file nor an allowed folder, is the model folder itself, or does not
            exist.
    """
    pure = PurePosixPath(name)
    shown = name[:100]
    is_outside = not name or "\0" in name or pure.is_absolute() or ".." in pure.parts
    require(not is_outside, f"the file name `{shown}` leads out of the model's folder")
    path = folder / pure
    try:
        home, real, status = folder.resolve(), path.resolve(strict=True), path.stat()
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its links form a loop"
        raise ManifestError(f"`{shown}` beside the model cannot be read: {reason}") from None
    is_inside = real.is_relative_to(home)
    require(is_inside, f"`{shown}` is a link that leads out of the model's folder")
    if is_folder_allowed and stat.S_ISDIR(status.st_mode):
        require(real != home, f"`{shown}` is the model's own folder, and has to be below it")
        return path
    require(stat.S_ISREG(status.st_mode), f"`{shown}` beside the model is not a file")
    problem = f"{status.st_nlink} names (hard links), so it may belong to another user"
    require(status.st_nlink <= 1, f"`{shown}` has {problem}; copy it into the model's folder")
    return path


def existing_inside(folder: Path, name: str) -> Path | None:
    """Return the path of a file in a model folder, as `path_inside`.

    None if no such file exists.
    """
    try:
        os.lstat(folder / name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ManifestError(f"`{name[:100]}` cannot be read: {error.strerror}") from None
    return path_inside(folder, name)


def read_plain(file: Path, bytes_max: int) -> bytes:
    """Return the first `bytes_max` bytes of a regular file; a read of a FIFO could block for ever.

    Raises:
        OSError: The file cannot be read, or is not regular.
    """
    # Check the opened descriptor: the path could be replaced between a check and the open. With
    # O_NONBLOCK the open of a FIFO does not wait for the other end.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            return stream.read(bytes_max)
    finally:
        os.close(descriptor)
