"""Token of a client's calls: a fixed token, or the current result of a function.

Runs on: the caller's threads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

from iskander.errors import ConfigError

Token: TypeAlias = str | Callable[[], str] | None
"""A token, or a function that returns the current token."""

_TOKEN = re.compile(r"[!-~]+")


class Credentials:
    """Tokens of all calls of a client.

    Args:
        token: The token. A function is called for every attempt of a call, on the thread of the
            call, so several threads may call it at a time. A call raises the exceptions of the
            function.

    Raises:
        ConfigError: The token cannot be sent in a header.
    """

    def __init__(self, token: Token) -> None:
        self._function = token if callable(token) else None
        self._fixed = None if callable(token) else _require_valid(token)

    def current(self) -> str | None:
        """Return the token of a call that begins now.

        Raises:
            ConfigError: The function's token cannot be sent in a header.
        """
        return self._fixed if self._function is None else _require_valid(self._function())

    def has_other_than(self, token: str | None) -> bool:
        """Whether `token`, with which a call was made, has been replaced since."""
        return self._function is not None and self.current() != token


def _require_valid(token: str | None) -> str | None:
    if token is None or (isinstance(token, str) and _TOKEN.fullmatch(token)):
        return token
    # The text does not contain the token, because the text may be logged.
    raise ConfigError("invalid token: only printable ASCII without spaces is allowed")
