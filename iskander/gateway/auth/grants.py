"""Token authentication and per-model authorization.

Tokens are looked up by their hash, so timing reveals nothing of them. The token file is watched;
an invalid file leaves the previous tokens in force. A grant changes with the file, so revoking a
token also affects open calls.

Runs on: gateway loop. Source: RFC 6750 (bearer tokens), RFC 7617 (basic).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from iskander.config.auth import AccessConfig, TokenFile
from iskander.errors import ConfigError, IskanderError, PermissionDenied, Unauthenticated
from iskander.foundation.clock import NS_PER_S, wall_ns
from iskander.foundation.file_watcher import FileWatcher, ReloadStatus
from iskander.foundation.logs import network as log
from iskander.gateway.auth.audit import AuditLog
from iskander.gateway.auth.origin import UNKNOWN_ORIGIN, Origin
from iskander.gateway.auth.passwords import (
    PasswordUnverified,
    PasswordVerifier,
    read_credentials,
    session_token,
)
from iskander.gateway.auth.quota import NO_LIMITS, Quotas
from iskander.gateway.auth.tokens import PREFIX, credential, digest, read_tokens

HEADER: Final = "authorization"
ANONYMOUS: Final = "(anonymous)"
"""Grant name of callers without a token; not a valid token name."""
CREDENTIALS_MAX: Final = 4096
"""Characters of a header that are parsed."""
MODEL_NAME_MAX: Final = 128
CACHED_MODELS_MAX: Final = 1024
_EXPIRED: Final = "the token has expired or was revoked"
_HINT: Final = "send the header `authorization: Bearer TOKEN`"


class Grant:
    """Permissions of a caller, updated with the token file; unnamed on a server without tokens."""

    __slots__ = ("_cache", "_may_manage", "_models", "_refused", "_sources", "is_valid", "name")

    def __init__(
        self,
        name: str,
        models: tuple[str, ...],
        *,
        may_manage: bool,
        refused: Counter[str],
        sources: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.is_valid = True
        self._models = models
        self._sources = sources
        self._may_manage = may_manage
        self._refused = refused
        self._cache: dict[str, bool] = {}

    @property
    def scope(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Patterns of the models and sources that the caller may see."""
        return self._models, self._sources

    @property
    def is_operator(self) -> bool:
        """Whether the caller may manage all models."""
        return self._may_manage and "*" in self._models

    @property
    def is_anonymous(self) -> bool:
        return self.name == ANONYMOUS

    def may_call(self, model: str) -> bool:
        """Whether the caller may call a model and see that it exists."""
        may = self._cache.get(model)
        if may is None:
            if len(model) > MODEL_NAME_MAX:
                return "*" in self._models  # The caller receives "not found".
            if len(self._cache) >= CACHED_MODELS_MAX:
                self._cache.clear()
            may = any(fnmatchcase(model, pattern) for pattern in self._models)
            self._cache[model] = may
        return may

    def require_model(self, model: str) -> None:
        """Require permission to call a model; raise Unauthenticated or PermissionDenied."""
        self.require_valid()
        if not self.may_call(model):
            self._deny(f"is not for model `{model[:100]}`", f"model `{model[:100]}` requires")

    def require_manage(self, model: str) -> None:
        """Require permission to load and unload a model; raises as `require_model`."""
        self.require_model(model)
        if not self._may_manage:
            self._deny("may not load or unload models", "loading or unloading models requires")

    def require_operator(self, action: str) -> None:
        """Require permission to manage all models; raises as `require_model`."""
        self.require_valid()
        if not self.is_operator:
            needed = "manage = true for all models"
            self._deny(f"may not {action} the server, which needs {needed}", f"{action} requires")

    def may_read(self, source: str) -> bool:
        """Whether the caller may read a source and see that it exists."""
        name = source[:MODEL_NAME_MAX]
        return any(fnmatchcase(name, pattern) for pattern in self._sources)

    def require_source(self, source: str) -> None:
        """Require permission to read a source; raises as `require_model`."""
        self.require_valid()
        if not self.may_read(source):
            self._deny(f"is not for source `{source[:100]}`", f"source `{source[:100]}` requires")

    def require_name(self, name: str) -> None:
        """Require a grant of this name, for which a ticket was made; raise PermissionDenied."""
        if self.name != name:
            self._deny("is not the one that the ticket is for", "the ticket requires")

    def require_token(self) -> None:
        """Require a valid token if the server has tokens; raise Unauthenticated."""
        self.require_valid()
        if self.is_anonymous:
            self._deny("", "this call requires")

    def require_valid(self) -> None:
        """Raise Unauthenticated if the token was revoked or has expired."""
        if not self.is_valid:
            self._refused[Unauthenticated.code] += 1
            raise Unauthenticated(_EXPIRED)

    def copy_from(self, other: Grant) -> None:
        """Take the permissions of another grant of the same name."""
        self._models, self._may_manage = other._models, other._may_manage
        self._sources = other._sources
        self._cache.clear()

    def _deny(self, denial: str, requirement: str) -> None:
        error: IskanderError = PermissionDenied(f"the token of `{self.name}` {denial}")
        if self.is_anonymous:
            error = Unauthenticated(f"{requirement} a token: {_HINT}")
        self._refused[error.code] += 1
        raise error


class _FullGrant(Grant):
    """Permits everything but to operate the server, without a cache."""

    __slots__ = ()

    def require_operator(self, action: str) -> None:
        """Deny: every client that reaches the port could stop the server."""
        number = "SIGTERM" if action == "drain" else "SIGHUP"
        raise PermissionDenied(
            f"{action} needs a token, and this server has none (`access.tokens`): send {number} to "
            "the process instead"
        )

    def may_call(self, model: str) -> bool:
        del model
        return True

    def may_read(self, source: str) -> bool:
        del source
        return True


FULL_GRANT: Final = _FullGrant("", ("*",), may_manage=True, refused=Counter())
"""Grant of all callers of a server without tokens."""


class Authenticator:
    """Maps the credentials of a call to a grant; raises ConfigError for an invalid token file.

    Args:
        config: With the path of the token file.
        on_change: Called when grants of open calls may have changed.
        processes: Gateway processes, each of which enforces its part of the limits.
        audit: Records changes of the file and failed authentications.

    Attributes:
        quotas: Limits of the grants that have any.
        reloads: Reads of the token file; None on a server without tokens.
    """

    def __init__(
        self,
        config: AccessConfig,
        on_change: Callable[[], None],
        processes: int = 1,
        audit: AuditLog | None = None,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._audit = audit or AuditLog()
        self.quotas = Quotas(processes)
        self._path = Path(config.tokens)
        self._has_no_tokens = not config.tokens
        self.reloads = ReloadStatus() if config.tokens else None
        self._requires_token = not config.anonymous
        self._on_change = on_change
        self._grants: dict[str, Grant] = {}
        self._expiries: dict[str, float] = {}
        self._passwords = PasswordVerifier()
        self._watcher = FileWatcher([self._path], self._on_poll)
        self._reading: asyncio.Task[None] | None = None
        self.anonymous: Grant = FULL_GRANT
        if not self._has_no_tokens:
            models = config.anonymous
            self.anonymous = Grant(ANONYMOUS, models, may_manage=False, refused=self.refused)
            self._set(read_tokens(self._path))

    @property
    def tokens(self) -> int:
        return sum(grant.is_valid for grant in self._grants.values())

    async def authenticate(
        self,
        headers: Iterable[tuple[str, Any]],
        *,
        is_probe: bool = False,
        origin: Origin = UNKNOWN_ORIGIN,
    ) -> Grant:
        """Return the grant of a call: that of its token or password, else that of its certificate.

        Args:
            headers: Headers of the call, whose names are in lower case.
            is_probe: Whether the call is a health probe.
            origin: Origin of its connection.

        Raises:
            Unauthenticated: The token or password is not valid; or it is missing, the certificate
                has no grant, `access.anonymous` is empty, and the call is no health probe.
            Overloaded: Too many passwords wait for their verification.
        """
        try:
            return self.find(headers, is_probe=is_probe, origin=origin)
        except PasswordUnverified as unverified:
            credentials = unverified.credentials
        grant = self._of_password(await self._passwords.verify(credentials, origin))
        if grant is None:
            raise self._rejection("the user name or password is wrong", origin)
        return grant

    def grant(
        self,
        headers: Iterable[tuple[str, Any]],
        *,
        is_probe: bool = False,
        origin: Origin = UNKNOWN_ORIGIN,
    ) -> Grant:
        """Return the grant of a call as `authenticate`, without the verification of passwords."""
        try:
            return self.find(headers, is_probe=is_probe, origin=origin)
        except PasswordUnverified:
            raise self._rejection("passwords are not accepted for this call", origin) from None

    def find(
        self,
        headers: Iterable[tuple[str, Any]],
        *,
        is_probe: bool = False,
        origin: Origin = UNKNOWN_ORIGIN,
    ) -> Grant:
        """Return the grant of a call as `authenticate`, if no password has to be verified.

        Raises:
            PasswordUnverified: The call has a password that was not verified recently.
        """
        if self._has_no_tokens:
            return FULL_GRANT
        value = next((value for name, value in headers if name == HEADER), None)
        if value is None:
            if origin.certificate and (found := self._of_certificate(origin)) is not None:
                return found
            if self._requires_token and not is_probe:
                raise self._rejection(f"this server requires a token: {_HINT}", origin)
            return self.anonymous
        header = str(value)
        token = bearer_token(header)
        grant = self._grants.get(digest(token)) if token else None
        if grant is None and self._passwords.users:
            credentials = read_credentials(header[:CREDENTIALS_MAX])
            if credentials is not None:
                grant = self._of_password(self._passwords.remembered(credentials))
                if grant is None:
                    raise PasswordUnverified(credentials)
        if grant is None or not grant.is_valid:
            raise self._rejection("the token is unknown" if grant is None else _EXPIRED, origin)
        return grant

    def _of_password(self, encoded: str | None) -> Grant | None:
        """The valid grant of a password's hash."""
        grant = None if encoded is None else self._grants.get(encoded)
        return grant if grant is not None and grant.is_valid else None

    def _of_certificate(self, origin: Origin) -> Grant | None:
        """The grant of a certificate; None if no name has one."""
        found: list[Grant] = []
        for name in origin.certificate:
            grant = self._grants.get(name)
            if grant is not None and grant.is_valid and grant not in found:
                found.append(grant)
        if len(found) > 1:
            shown = ", ".join(f"`{grant.name}`" for grant in found[:4])
            text = f"the client certificate has names of several grants: {shown}"
            raise self._rejection(text, origin)
        return found[0] if found else None

    def start(self) -> None:
        """Watch the token file."""
        if not self._has_no_tokens:
            self._watcher.start()

    def stop(self) -> None:
        """Stop watching."""
        self._watcher.stop()
        self._passwords.stop()
        if self._reading is not None:
            self._reading.cancel()

    def stats(self) -> dict[str, Any]:
        """Return the valid tokens and rejections; empty on a server without tokens."""
        if self._has_no_tokens:
            return {}
        return {"tokens": self.tokens, "refused": dict(self.refused)}

    def _rejection(self, message: str, origin: Origin) -> Unauthenticated:
        self.refused[Unauthenticated.code] += 1
        self._audit.on_unauthenticated(origin)
        return Unauthenticated(message)

    def _on_poll(self, has_changed: bool) -> None:
        if has_changed:
            if self._reading is not None:
                self._reading.cancel()
            self._reading = asyncio.get_running_loop().create_task(self._read())
        self._audit.poll()
        if self._expire():
            self._on_change()

    async def _read(self) -> None:
        assert self.reloads is not None
        try:
            file = await asyncio.to_thread(read_tokens, self._path)
        except ConfigError as error:
            self.reloads.record(is_valid=False)
            self._audit.record("reload tokens", self._path.name, error.code)
            log.tokens_rejected(reason=error.message)
        else:
            self.reloads.record(is_valid=True)
            self._set(file)
            self._audit.record("reload tokens", self._path.name, tokens=self.tokens)
            log.tokens_reloaded(file=self._path.name, tokens=self.tokens)
            self._on_change()

    def _set(self, file: TokenFile) -> None:
        found = {credential(token): token for token in file.tokens}
        limits = {token.name: token.limits for token in file.tokens}
        limits[ANONYMOUS] = file.anonymous
        self.quotas.configure({name: each for name, each in limits.items() if each != NO_LIMITS})
        for key, grant in self._grants.items():
            # A new name has other limits, so it revokes.
            grant.is_valid = key in found and found[key].name == grant.name
        self._grants = {key: grant for key, grant in self._grants.items() if grant.is_valid}
        for key, token in found.items():
            grant = Grant(
                token.name,
                token.models,
                may_manage=token.manage,
                refused=self.refused,
                sources=token.sources,
            )
            self._grants.setdefault(key, grant).copy_from(grant)
        self._passwords.set_users({t.name: t.password for t in found.values() if t.password})
        self._expiries = {key: t.expires.timestamp() for key, t in found.items() if t.expires}
        self._expire()

    def _expire(self) -> bool:
        """Invalidate expired grants; return whether there are any."""
        now = wall_ns() / NS_PER_S
        expired = [key for key, expiry in self._expiries.items() if expiry <= now]
        for key in expired:
            self._grants[key].is_valid = False
            del self._expiries[key]
        return bool(expired)


def bearer_token(header: str) -> str:
    """Return the token of an authorization header: Bearer, or the password of Basic; else empty."""
    header = header[:CREDENTIALS_MAX]
    credentials = read_credentials(header)
    if credentials is not None:
        return credentials.password
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def handshake_header(header: str) -> str:
    """Return the header with which a Flight client calls after a handshake; empty for none.

    It is the token that was the password of Basic, or stands for the user name and password.
    """
    credentials = read_credentials(header[:CREDENTIALS_MAX])
    if credentials is not None and not credentials.password.startswith(PREFIX):
        return f"Bearer {session_token(credentials)}"
    token = bearer_token(header)
    return f"Bearer {token}" if token else ""
