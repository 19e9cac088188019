"""Tokens of calls: fixed, of a function, replaced, and invalid ones."""

from __future__ import annotations

from typing import Any

import pytest

from iskander.client.calls.credentials import Credentials
from iskander.errors import ConfigError


def test_fixed_token_is_that_of_every_call() -> None:
    credentials = Credentials("secret")
    assert [credentials.current() for _ in range(2)] == ["secret"] * 2
    assert not credentials.has_other_than("old")
    assert Credentials(None).current() is None


def test_function_is_called_for_each_call() -> None:
    tokens = iter(["first", "first", "second"])
    credentials = Credentials(lambda: next(tokens))
    assert credentials.current() == "first"
    assert not credentials.has_other_than("first")
    assert credentials.has_other_than("first")


@pytest.mark.parametrize("token", ["", "a b", "a\nb", "\xe9", 7, b"bytes"])
def test_invalid_tokens_are_config_errors_without_the_token(token: Any) -> None:
    credentials = Credentials(lambda: token)
    with pytest.raises(ConfigError, match="invalid token: only printable ASCII"):
        credentials.current()
    with pytest.raises(ConfigError):
        Credentials(token)


def test_error_of_the_function_is_raised() -> None:
    def fail() -> str:
        raise TimeoutError("no token")

    with pytest.raises(TimeoutError, match="no token"):
        Credentials(fail).current()
