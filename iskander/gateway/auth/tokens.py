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

from iskander.config.auth import GrantLimits, Token, TokenFile
from iskander.errors import ConfigError
from iskander.foundation.clock import pause_s
from iskander.gateway.auth.origin import normalized
from iskander.gateway.auth.passwords import hash_error, hash_password

FILE_BYTES_MAX = 4 << 20
TOKEN_BYTES = 32
_ATTEMPTS, _PAUSE_S = 500, 0.02
"""Attempts to lock the folder, and the pause after each."""
PREFIX = "isk_"
"""Identifies a token to secret scanners."""


def digest(token: str) -> str:
    return sha256(token.encode()).hexdigest()


def credential(token: Token) -> str:
    """Return what authenticates the callers of a table: a hash, or a name in a certificate."""
    return token.sha256 or token.password or normalized(token.certificate)


def read_tokens(path: Path) -> TokenFile:
    """Read a token file; raise ConfigError if it is invalid."""
    return _parse(path, _read(path))


def add_token(
    path: Path,
    name: str,
    models: tuple[str, ...],
    *,
    manage: bool = False,
    sources: tuple[str, ...] = (),
    password: str | None = None,
) -> str:
    """Create a token, add it to a file, and return it; create the file if it is missing.

    With a password there is no token: the file gets its hash, and the result is empty. The file is
    replaced atomically and keeps its owner and mode. Concurrent calls are serialized.
    """
    path = path.resolve()
    token = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    known: dict[str, object] = {"sha256": digest(token)}
    if password is not None:
        token, known = "", {"password": hash_password(password)}
    fields = {"name": name, **known, "models": list(models), "manage": manage}
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


def _parse(path: Path, raw: bytes) -> TokenFile:
    try:
        file = msgspec.toml.decode(raw, type=TokenFile)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name}: {error}") from None
    for token in file.tokens:
        if sum(map(bool, (token.sha256, token.certificate, token.password))) != 1:
            kinds = "sha256, certificate and password"
            raise ConfigError(f"{path.name}: `{token.name}` needs one of {kinds}")
        if token.password and (problem := hash_error(token.password)):
            raise ConfigError(f"{path.name}: password of `{token.name}`: {problem}")
    users = Counter(token.name for token in file.tokens if token.password)
    if repeated := next((name for name, count in users.items() if count > 1), ""):
        raise ConfigError(f"{path.name}: `{repeated}` has several passwords")
    for key, count in Counter(map(credential, file.tokens)).items():
        if count > 1:
            shown = key if ":" in key else f"the hash {key[:12]}..."
            raise ConfigError(f"{path.name}: {shown} is listed {count} times")
    limits: dict[str, GrantLimits] = {}
    for token in file.tokens:
        if limits.setdefault(token.name, token.limits) != token.limits:
            raise ConfigError(f"{path.name}: the tables of `{token.name}` have different limits")
    return file
