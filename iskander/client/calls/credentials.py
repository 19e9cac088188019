"""Token of a client's calls: a fixed one, or the current one of a function.

Runs on: the caller's threads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

from iskander.errors import ConfigError

Token: TypeAlias = str | Callable[[], str] | None
"""A token, or a function that returns the current one."""

_TOKEN = re.compile(r"[!-~]+")


class Credentials:
    """Tokens of all calls of a client.

    Args:
        token: The token. A function is called for each attempt of each call, on its thread, so it
            may be called by several threads at a time; calls raise its exceptions.

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
        """Whether the token was replaced since a call was made with this one."""
        return self._function is not None and self.current() != token


def _require_valid(token: str | None) -> str | None:
    if token is None or (isinstance(token, str) and _TOKEN.fullmatch(token)):
        return token
    # The token is not in the text, which logs may contain.
    raise ConfigError("invalid token: only printable ASCII without spaces is allowed")
