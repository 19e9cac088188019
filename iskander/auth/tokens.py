"""Token file: parsed by the gateway, extended by the operator's tool.

The file holds the SHA-256 of each token, never the token. Tokens are random keys, so a plain hash
is sufficient.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import msgspec

from iskander.clock import pause_s
from iskander.config.auth import Token, TokenFile
from iskander.errors import ConfigError

FILE_BYTES_MAX = 4 << 20
TOKEN_BYTES = 32
_ATTEMPTS, _PAUSE_S = 500, 0.02
"""Attempts to lock the folder, and the pause after each."""
PREFIX = "isk_"
"""Identifies a token to secret scanners."""


def digest(token: str) -> str:
    """Return the SHA-256 of a token in hex."""
    return sha256(token.encode()).hexdigest()


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Read a token file; raise ConfigError if it is invalid."""
    return _parse(path, _read(path))


def add_token(
    path: Path,
    name: str,
    models: tuple[str, ...],
    *,
    manage: bool = False,
    sources: tuple[str, ...] = (),
) -> str:
    """Create a token, add it to a file, and return it; create the file if it is missing.

    The file is replaced atomically and keeps its owner and mode. Concurrent calls are serialized.
    """
    path = path.resolve()
    token = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    fields = {"name": name, "sha256": digest(token), "models": list(models), "manage": manage}
    if sources:
        fields["sources"] = list(sources)
    try:
        with _locked(path.parent):
            _append_token(path, fields)
            return token
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be written: {error.strerror}") from None


def _append_token(path: Path, fields: dict[str, object]) -> None:
    lines = [f"{key} = ".encode() + msgspec.json.encode(value) for key, value in fields.items()]
    old = _read(path) if path.exists() else b""
    text = old + (b"\n" if old else b"") + b"\n".join([b"[[tokens]]", *lines, b""])
    _parse(path, text)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            if path.exists():
                stat = path.stat()
                os.fchown(file.fileno(), stat.st_uid, stat.st_gid)
                os.fchmod(file.fileno(), stat.st_mode & 0o777)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            pause_s(_PAUSE_S)
        else:
            waited_s = _ATTEMPTS * _PAUSE_S
            raise ConfigError(f"{folder.name}: another process held its lock for {waited_s:g} s")
        yield
    finally:
        os.close(fd)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}") from None
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(f"{path.name} is larger than {FILE_BYTES_MAX} bytes")
    return raw


def _parse(path: Path, raw: bytes) -> tuple[Token, ...]:
    try:
        tokens = msgspec.toml.decode(raw, type=TokenFile).tokens
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name}: {error}") from None
    for key, count in Counter(token.sha256 for token in tokens).items():
        if count > 1:
            raise ConfigError(f"{path.name}: sha256 {key[:12]}... is listed {count} times")
    return tokens
