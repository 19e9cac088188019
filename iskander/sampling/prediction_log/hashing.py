"""Keyed hashes of the values of a column.

Equal values have equal hashes in all columns, models and files with one key, so that rows can be
joined; without the key, a value cannot be found by hashing guesses.

Source: RFC 7693 (BLAKE2b with a key).
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from iskander.arrow.types import is_string, storage_of
from iskander.errors import ConfigError

KEY_BYTES_MIN: Final = 32
KEY_BYTES_MAX: Final = 4096
DIGEST_BYTES: Final = 16


def read_key(path: Path) -> bytes:
    """Read the key of hashed columns, after creating it if the file does not exist.

    Raises:
        ConfigError: The file cannot be created or read, or is too short or too long.
    """
    where = f"prediction_log.key_file {path.name}"
    try:
        if not path.exists():
            _create_key(path)
        with path.open("rb") as file:
            key = file.read(KEY_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from None
    if not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
        allowed = f"{KEY_BYTES_MIN} to {KEY_BYTES_MAX}"
        raise ConfigError(f"{where} has {len(key)} bytes, expected {allowed} random bytes")
    return blake2b(key).digest()


def _create_key(path: Path) -> None:
    """Create a key as a whole; another process may create it at the same time."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES_MIN))
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()


def hash_column(column: pa.Array, key: bytes) -> pa.Array:
    """Return the hash of each row as 32 hexadecimal digits."""
    digests = [
        blake2b(value, digest_size=DIGEST_BYTES, key=key).hexdigest()
        for value in _rows_as_bytes(column)
    ]
    return pa.array(digests, pa.utf8())


def _rows_as_bytes(column: pa.Array) -> Iterator[bytes]:
    """Yield the value of each row: little-endian numbers, or text.

    Several texts of a row are told apart by their lengths.
    """
    rows, leaf = len(column), column
    while isinstance(leaf.type, pa.BaseExtensionType) or pa.types.is_fixed_size_list(leaf.type):
        is_list = pa.types.is_fixed_size_list(leaf.type)
        leaf = leaf.flatten() if is_list else leaf.storage
    elements = len(leaf) // rows if rows else 0
    if is_string(storage_of(leaf.type)):
        texts = leaf.cast(pa.binary()).to_pylist()
        if elements == 1:
            yield from texts
            return
        for start in range(0, len(texts), max(elements, 1)):
            row = texts[start : start + elements]
            yield b"".join(len(text).to_bytes(4, "little") + text for text in row)
        return
    numbers = np.ascontiguousarray(leaf.to_numpy(zero_copy_only=False))
    for row in numbers.reshape(rows, elements):
        yield row.tobytes()
