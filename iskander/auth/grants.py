"""Token authentication and per-model authorization.

Tokens are looked up by their hash, so timing reveals nothing of them. The token file is watched;
an invalid file leaves the previous tokens in force. A grant changes with the file, so revoking a
token also affects open calls.

Runs on: gateway loop. Source: RFC 6750 (bearer tokens), RFC 7617 (basic).
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from iskander.auth.tokens import digest, read_tokens
from iskander.clock import NS_PER_S, wall_ns
from iskander.config.auth import AccessConfig, Token
from iskander.errors import ConfigError, IskanderError, PermissionDenied, Unauthenticated
from iskander.file_watcher import FileWatcher, ReloadStatus

HEADER: Final = "authorization"
ANONYMOUS: Final = "(anonymous)"
"""Grant name of callers without a token; not a valid token name."""
CREDENTIALS_MAX: Final = 4096
"""Characters of a header that are parsed."""
MODEL_NAME_MAX: Final = 128
CACHED_MODELS_MAX: Final = 1024
_EXPIRED: Final = "the token has expired or was revoked"
_HINT: Final = "send the header `authorization: Bearer TOKEN`"

log: Final = logging.getLogger("iskander.access")


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
    def is_anonymous(self) -> bool:
        """Whether the server requires tokens and the caller has none."""
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
        if not self._may_manage or "*" not in self._models:
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
        """Take the permissions of another grant."""
        self.name, self.is_valid = other.name, other.is_valid
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

    Attributes:
        reloads: Reads of the token file; None on a server without tokens.
    """

    def __init__(self, config: AccessConfig, on_change: Callable[[], None]) -> None:
        self.refused: Counter[str] = Counter()
        self._path = Path(config.tokens)
        self._has_no_tokens = not config.tokens
        self.reloads = ReloadStatus() if config.tokens else None
        self._requires_token = not config.anonymous
        self._on_change = on_change
        self._grants: dict[str, Grant] = {}
        self._expiries: dict[str, float] = {}
        self._watcher = FileWatcher([self._path], self._on_poll)
        self._reading: asyncio.Task[None] | None = None
        self.anonymous: Grant = FULL_GRANT
        if not self._has_no_tokens:
            models = config.anonymous
            self.anonymous = Grant(ANONYMOUS, models, may_manage=False, refused=self.refused)
            self._set(read_tokens(self._path))

    @property
    def tokens(self) -> int:
        """Number of valid tokens."""
        return sum(grant.is_valid for grant in self._grants.values())

    def grant(self, headers: Iterable[tuple[str, Any]], *, is_probe: bool = False) -> Grant:
        """Return the grant for the headers of a call, whose names are in lower case.

        Raises:
            Unauthenticated: The token is not valid; or it is missing, `access.anonymous` is empty,
                and the call is no health probe.
        """
        if self._has_no_tokens:
            return FULL_GRANT
        value = next((value for name, value in headers if name == HEADER), None)
        if value is None:
            if self._requires_token and not is_probe:
                raise self._rejection(f"this server requires a token: {_HINT}")
            return self.anonymous
        token = bearer_token(str(value))
        grant = self._grants.get(digest(token)) if token else None
        if grant is None or not grant.is_valid:
            raise self._rejection("the token is unknown" if grant is None else _EXPIRED)
        return grant

    def start(self) -> None:
        """Watch the token file."""
        if not self._has_no_tokens:
            self._watcher.start()

    def stop(self) -> None:
        """Stop watching."""
        self._watcher.stop()
        if self._reading is not None:
            self._reading.cancel()

    def stats(self) -> dict[str, Any]:
        """Return the valid tokens and rejections; empty on a server without tokens."""
        if self._has_no_tokens:
            return {}
        return {"tokens": self.tokens, "refused": dict(self.refused)}

    def _rejection(self, message: str) -> Unauthenticated:
        self.refused[Unauthenticated.code] += 1
        return Unauthenticated(message)

    def _on_poll(self, has_changed: bool) -> None:
        if has_changed:
            if self._reading is not None:
                self._reading.cancel()
            self._reading = asyncio.get_running_loop().create_task(self._read())
        if self._expire():
            self._on_change()

    async def _read(self) -> None:
        assert self.reloads is not None
        try:
            tokens = await asyncio.to_thread(read_tokens, self._path)
        except ConfigError as error:
            self.reloads.record(is_valid=False)
            log.error("access.tokens: %s; the previous tokens stay in force", error.message)
        else:
            self.reloads.record(is_valid=True)
            self._set(tokens)
            log.info("%s was reloaded: %d tokens", self._path.name, self.tokens)
            self._on_change()

    def _set(self, tokens: Iterable[Token]) -> None:
        found = {token.sha256: token for token in tokens}
        for key, grant in self._grants.items():
            grant.is_valid = key in found
        for key, token in found.items():
            grant = Grant(
                token.name,
                token.models,
                may_manage=token.manage,
                refused=self.refused,
                sources=token.sources,
            )
            self._grants.setdefault(key, grant).copy_from(grant)
        self._grants = {key: grant for key, grant in self._grants.items() if grant.is_valid}
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
    scheme, _, credentials = header[:CREDENTIALS_MAX].partition(" ")
    if scheme.lower() == "basic":
        try:
            decoded = base64.b64decode(credentials.strip(), validate=True).decode()
        except ValueError:
            return ""
        return decoded.partition(":")[2]
    return credentials.strip() if scheme.lower() == "bearer" else ""
