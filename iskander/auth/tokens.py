"""The file of tokens: read, and written by the operator's tool.

A token is known by its SHA-256; the token itself is nowhere but with who shows it. It is as random
as a key, so that nothing slower than a hash is needed.
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
TURNS, TURN_S = 500, 0.02
"""How often, and how long each time, it is waited for another who adds one."""
PREFIX = "isk_"
"""By which those who look for secrets in texts know one of ours."""


def digest(token: str) -> str:
    """By which a token is known."""
    return sha256(token.encode()).hexdigest()


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Read a file of tokens.

    Raises:
        ConfigError: It cannot be read, or says what it may not.
    """
    return _parse(path, _read(path))


def add_token(path: Path, name: str, models: tuple[str, ...], *, manage: bool = False) -> str:
    """Make a token and add it to a file, which is made where there is none; the token.

    The file is replaced as a whole and stays its owner's: who reads it meanwhile reads one state or
    the other. Who adds another meanwhile waits.

    Raises:
        ConfigError: The file cannot be read or written, or would say what it may not.
    """
    path = path.resolve()
    try:
        with _alone_in(path.parent):
            return _added(path, name, models, manage=manage)
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be written: {error.strerror}") from None


def _added(path: Path, name: str, models: tuple[str, ...], *, manage: bool) -> str:
    token = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    said = {"name": name, "sha256": digest(token), "models": list(models), "manage": manage}
    entry = b"\n".join(f"{key} = ".encode() + msgspec.json.encode(said[key]) for key in said)
    before = _read(path) if path.exists() else b""
    text = before + (b"\n" if before else b"") + b"[[tokens]]\n" + entry + b"\n"
    _parse(path, text)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            if path.exists():
                was = path.stat()
                os.fchown(file.fileno(), was.st_uid, was.st_gid)
                os.fchmod(file.fileno(), was.st_mode & 0o777)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
    return token


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep others out who add tokens to files of a folder."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(TURNS):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            pause_s(TURN_S)
        else:
            raise ConfigError(f"{folder.name}: another adds tokens and does not come to its end")
        yield
    finally:
        os.close(held)


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
            raise ConfigError(f"{path.name}: sha256 {key[:12]}... is there twice")
    return tokens
