"""Key that signs tickets: of the operator, or a random one of the gateway."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from pathlib import Path
from typing import Final

from iskander.errors import ConfigError

KEY_BYTES_MIN: Final = 32
KEY_BYTES_MAX: Final = 4096
KEY_FILE: Final = "tickets.key"


def operators_key(path: Path) -> bytes:
    """Read the key of `source_reads.key_file`.

    Raises:
        ConfigError: It cannot be read, or it is too short or too long.
    """
    where = f"source_reads.key_file {path.name}"
    try:
        with path.open("rb") as file:
            key = file.read(KEY_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from None
    if not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
        allowed = f"{KEY_BYTES_MIN} to {KEY_BYTES_MAX}"
        raise ConfigError(f"{where} has {len(key)} bytes, expected {allowed} random bytes")
    return hashlib.sha256(key.removesuffix(b"\n")).digest()


def shared_key(folder: Path) -> bytes:
    """Return the random key of a gateway; the first of its processes creates it.

    Args:
        folder: Runtime directory that all processes of the gateway share.

    Raises:
        ConfigError: The file cannot be created or read.
    """
    path = folder / KEY_FILE
    temporary = path.with_name(f".{KEY_FILE}.{secrets.token_hex(4)}")
    try:
        if not path.exists():
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w") as file:
                file.write(secrets.token_hex(KEY_BYTES_MIN))
            try:
                # Another process may have created it since.
                with contextlib.suppress(FileExistsError):
                    os.link(temporary, path)
            finally:
                temporary.unlink()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be created: {error.strerror}") from None
    return operators_key(path)
