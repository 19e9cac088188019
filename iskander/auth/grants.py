"""Who calls, and what that caller may ask.

Tokens are looked up by their hash, so that the time that it takes tells nothing of them. The file
is followed; where what it says is wrong, what it said before stays in force. A grant that a call
holds changes with the file, so that a token that is taken back is so for what is open too.

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
from iskander.errors import ConfigError, PermissionDenied, Unauthenticated
from iskander.file_watcher import FileWatcher

HEADER: Final = "authorization"
ANONYMOUS: Final = "(anonymous)"
"""Under this the clients of callers are counted who show no token; no token can be called so."""
CREDENTIALS_MAX: Final = 4096
"""Letters of a header that are looked at."""
NAME_MAX: Final = 128
"""Letters of a model's name; a longer one is no model's."""
REMEMBERED_MAX: Final = 1024
_EXPIRED: Final = "the token is not valid any more"
_WANTED: Final = "send the header `authorization: Bearer TOKEN`"

log: Final = logging.getLogger("iskander.access")


class Grant:
    """What a caller may ask, as the file says it now.

    Args:
        name: Whose it is; empty where nobody needs one.
        models: Patterns of the models that may be asked.
        may_manage: They may be loaded and unloaded too.
        refused: Where refusals are counted.

    Attributes:
        name: Whose it is.
        is_valid: It has not been taken back, and has not expired.
    """

    __slots__ = ("_may_manage", "_models", "_refused", "_remembered", "is_valid", "name")

    def __init__(
        self, name: str, models: tuple[str, ...], *, may_manage: bool, refused: Counter[str]
    ) -> None:
        self.name = name
        self.is_valid = True
        self._models = models
        self._may_manage = may_manage
        self._refused = refused
        self._remembered: dict[str, bool] = {}

    @property
    def is_anonymous(self) -> bool:
        """Whether it is that of callers who should show a token and do not."""
        return self.name == ANONYMOUS

    def may_ask(self, model: str) -> bool:
        """Whether a model may be asked, and its caller be told of it."""
        may = self._remembered.get(model)
        if may is None:
            if len(model) > NAME_MAX:
                return "*" in self._models  # To hear that it is not there.
            if len(self._remembered) >= REMEMBERED_MAX:
                self._remembered.clear()
            may = any(fnmatchcase(model, pattern) for pattern in self._models)
            self._remembered[model] = may
        return may

    def require_model(self, model: str) -> None:
        """See to it that a model may be asked.

        Raises:
            Unauthenticated: The token is not valid any more, or none was shown.
            PermissionDenied: It is for other models.
        """
        self.require_valid()
        if not self.may_ask(model):
            self._refuse(f"is not for model `{model[:100]}`", f"model `{model[:100]}` wants")

    def require_manage(self, model: str) -> None:
        """See to it that a model may be loaded and unloaded.

        Raises:
            Unauthenticated: As `require_model`.
            PermissionDenied: The token is for other models, or not for that.
        """
        self.require_model(model)
        if not self._may_manage:
            self._refuse("may not load or unload models", "to load or unload models wants")

    def require_token(self) -> None:
        """See to it that a token was shown where one is wanted, whatever it is for.

        Raises:
            Unauthenticated: None was, or it is not valid any more.
        """
        self.require_valid()
        if self.is_anonymous:
            self._refuse("", "this wants")

    def require_valid(self) -> None:
        """See to it that the token is still one.

        Raises:
            Unauthenticated: It was taken back, or has expired.
        """
        if not self.is_valid:
            self._refused[Unauthenticated.code] += 1
            raise Unauthenticated(_EXPIRED)

    def take_over(self, other: Grant) -> None:
        """Say from now on what another says."""
        self.name, self.is_valid = other.name, other.is_valid
        self._models, self._may_manage = other._models, other._may_manage
        self._remembered.clear()

    def _refuse(self, what: str, who_wants: str) -> None:
        error = (
            Unauthenticated(f"{who_wants} a token: {_WANTED}")
            if self.is_anonymous
            else PermissionDenied(f"the token of `{self.name}` {what}")
        )
        self._refused[error.code] += 1
        raise error


class _FullGrant(Grant):
    """Nothing is refused, and nothing remembered of what is asked."""

    __slots__ = ()

    def may_ask(self, model: str) -> bool:
        del model
        return True


EVERYTHING: Final = _FullGrant("", ("*",), may_manage=True, refused=Counter())
"""Of callers of a server without tokens."""


class Authenticator:
    """The tokens of one server.

    Args:
        config: Where they are.
        on_change: Called when a call may have been granted something else than it has.

    Attributes:
        anonymous: The grant of who shows no token.
        refused: Refusals by their errors' codes.

    Raises:
        ConfigError: The file is not what it may be; says where.
    """

    def __init__(self, config: AccessConfig, on_change: Callable[[], None]) -> None:
        self.refused: Counter[str] = Counter()
        self._path = Path(config.tokens)
        self._is_open = not config.tokens
        self._is_closed = not config.anonymous
        self._on_change = on_change
        self._grants: dict[str, Grant] = {}
        self._expiries: dict[str, float] = {}
        self._following = FileWatcher([self._path], self._look)
        self._reading: asyncio.Task[None] | None = None
        self.anonymous: Grant = EVERYTHING
        if not self._is_open:
            self.anonymous = Grant(
                ANONYMOUS, config.anonymous, may_manage=False, refused=self.refused
            )
            self._set(read_tokens(self._path))

    @property
    def tokens(self) -> int:
        """Those that are valid."""
        return sum(grant.is_valid for grant in self._grants.values())

    def grant(self, headers: Iterable[tuple[str, Any]], *, is_probe: bool = False) -> Grant:
        """What a caller with these headers may ask.

        Args:
            headers: Of the call, by names in lower case.
            is_probe: It asks whether the server is well, for which no token is needed.

        Raises:
            Unauthenticated: The token is not known, or not valid any more; or there is none, and
                nothing for those who show none.
        """
        if self._is_open:
            return EVERYTHING
        shown = next((value for name, value in headers if name == HEADER), None)
        if shown is None:
            if self._is_closed and not is_probe:
                raise self._counted(f"this server wants a token: {_WANTED}")
            return self.anonymous
        token = bearer_token(str(shown))
        grant = self._grants.get(digest(token)) if token else None
        if grant is None or not grant.is_valid:
            raise self._counted("the token is not known" if grant is None else _EXPIRED)
        return grant

    def start(self) -> None:
        """Follow the file."""
        if not self._is_open:
            self._following.start()

    def stop(self) -> None:
        """Follow it no more."""
        self._following.stop()
        if self._reading is not None:
            self._reading.cancel()

    def stats(self) -> dict[str, Any]:
        """How many tokens are valid, and what was refused; empty where nobody needs one."""
        if self._is_open:
            return {}
        return {"tokens": self.tokens, "refused": dict(self.refused)}

    def _counted(self, message: str) -> Unauthenticated:
        self.refused[Unauthenticated.code] += 1
        return Unauthenticated(message)

    def _look(self, has_changed: bool) -> None:
        if has_changed:
            if self._reading is not None:
                self._reading.cancel()
            self._reading = asyncio.get_running_loop().create_task(self._read())
        if self._expire():
            self._on_change()

    async def _read(self) -> None:
        try:
            tokens = await asyncio.to_thread(read_tokens, self._path)
        except ConfigError as error:
            log.error("access.tokens: %s; what was said before stays in force", error.message)
        else:
            self._set(tokens)
            log.info("%s was read again: %d tokens", self._path.name, self.tokens)
            self._on_change()

    def _set(self, tokens: Iterable[Token]) -> None:
        found = {token.sha256: token for token in tokens}
        for key, grant in self._grants.items():
            grant.is_valid = key in found
        for key, token in found.items():
            grant = Grant(token.name, token.models, may_manage=token.manage, refused=self.refused)
            self._grants.setdefault(key, grant).take_over(grant)
        self._grants = {key: grant for key, grant in self._grants.items() if grant.is_valid}
        self._expiries = {
            key: token.expires.timestamp() for key, token in found.items() if token.expires
        }
        self._expire()

    def _expire(self) -> bool:
        """Take back what has expired; whether there was any."""
        now = wall_ns() / NS_PER_S
        over = [key for key, expiry in self._expiries.items() if expiry <= now]
        for key in over:
            self._grants[key].is_valid = False
            del self._expiries[key]
        return bool(over)


def bearer_token(shown: str) -> str:
    """The token of a header: a bearer's, or the password of whatever name; empty where none is."""
    scheme, _, credentials = shown[:CREDENTIALS_MAX].partition(" ")
    if scheme.lower() == "basic":
        try:
            named = base64.b64decode(credentials.strip(), validate=True).decode()
        except ValueError:
            return ""
        return named.partition(":")[2]
    return credentials.strip() if scheme.lower() == "bearer" else ""
