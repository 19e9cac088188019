"""Authentication and authorization: tokens, model patterns, expiry, and token file reload."""

from __future__ import annotations

import asyncio
import base64
import datetime
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from iskander.config.auth import AccessConfig
from iskander.errors import ConfigError, PermissionDenied, Unauthenticated
from iskander.foundation import file_watcher
from iskander.gateway.auth import grants
from iskander.gateway.auth.grants import ANONYMOUS, FULL_GRANT, Authenticator, Grant, bearer_token
from iskander.gateway.auth.tokens import add_token, digest, read_tokens

HASH = "0" * 64


def headers(token: str, scheme: str = "Bearer") -> list[tuple[str, str]]:
    return [("x-other", "1"), ("authorization", f"{scheme} {token}")]


def basic(name: str, token: str) -> str:
    return base64.b64encode(f"{name}:{token}".encode()).decode()


def new_grant(*models: str, manage: bool = False, name: str = "a") -> Grant:
    return Grant(name, models, may_manage=manage, refused=Counter())


def open_authenticator(path: Path, *anonymous: str) -> Authenticator:
    return Authenticator(AccessConfig(tokens=str(path), anonymous=anonymous), lambda: None)


@pytest.mark.parametrize(
    ("patterns", "model", "is_allowed"),
    [
        (("*",), "anything", True),
        (("two-tower",), "two-tower", True),
        (("two-tower",), "two-tower-2", False),
        (("demo-*", "x?"), "demo-", True),
        (("demo-*", "x?"), "x1", True),
        (("demo-*", "x?"), "x12", False),
        (("DEMO",), "demo", False),
        ((), "demo", False),
    ],
)
def test_grant_allows_the_models_of_its_patterns(
    patterns: tuple[str, ...], model: str, is_allowed: bool
) -> None:
    grant = new_grant(*patterns)
    for _ in range(2):
        if is_allowed:
            grant.require_model(model)
        else:
            with pytest.raises(PermissionDenied, match=f"`a` is not for model `{model}`"):
                grant.require_model(model)


def test_anonymous_error_names_the_required_header() -> None:
    with pytest.raises(Unauthenticated, match=r"`m` requires a token: send the header"):
        new_grant(name=ANONYMOUS).require_model("m")
    with pytest.raises(Unauthenticated, match="this call requires a token"):
        new_grant("*", name=ANONYMOUS).require_token()
    new_grant().require_token()


def test_manage_permission_is_limited_to_the_models_of_the_grant() -> None:
    new_grant("a*", manage=True).require_manage("ab")
    with pytest.raises(PermissionDenied, match="not for model"):
        new_grant("a*", manage=True).require_manage("b")
    with pytest.raises(PermissionDenied, match="may not load or unload"):
        new_grant("a*").require_manage("ab")


def test_cache_of_a_grant_is_bounded() -> None:
    """Names longer than a model name can be are not cached: a client controls their length."""
    grant = new_grant("a*")
    for number in range(grants.CACHED_MODELS_MAX * 2):
        grant.require_model(f"a{number}")
    assert len(grant._cache) <= grants.CACHED_MODELS_MAX
    with pytest.raises(PermissionDenied):
        grant.require_model("a" * 1_000_000)
    new_grant("*").require_model("a" * 1_000_000)  # The model lookup rejects it later.
    FULL_GRANT.require_model("a" * 1_000_000)
    assert max(map(len, grant._cache)) < 10 and not FULL_GRANT._cache


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer abc", "abc"),
        ("bearer  abc ", "abc"),
        (f"Basic {basic('me', 'abc')}", "abc"),
        (f"basic {basic('me', 'a:c')}", "a:c"),
        (f"Basic {basic('', 'abc')}", "abc"),
        ("Basic !!!", ""),
        ("Basic \u00e9", ""),
        ("Basic YQ==\u00e9", ""),
        ("Basic /w==", ""),
        ("Digest abc", ""),
        ("Bearer", ""),
        ("", ""),
        ("Bearer " + "x" * 10_000, "x" * (grants.CREDENTIALS_MAX - 7)),
    ],
)
def test_token_is_read_from_the_header(header: str, token: str) -> None:
    assert bearer_token(header) == token


def test_without_tokens_every_call_has_the_full_grant() -> None:
    access = Authenticator(AccessConfig(), lambda: None)
    assert access.grant(()) is FULL_GRANT and access.grant(headers("x")) is FULL_GRANT
    access.start()
    assert access.stats() == {}
    FULL_GRANT.require_manage("any")


def test_tokens_are_stored_and_matched_as_hashes(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    token = add_token(path, "scoring", ("two-*",))
    assert token not in path.read_text() and digest(token) in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    access = open_authenticator(path)
    assert access.grant(headers(token)).name == "scoring"
    assert access.grant(headers(basic("me", token), "Basic")).name == "scoring"
    for wrong in (token + "x", token[:-1], "", digest(token)):
        with pytest.raises(Unauthenticated, match="the token is unknown"):
            access.grant(headers(wrong))
    with pytest.raises(Unauthenticated, match="this server requires a token"):
        access.grant([("x", "y")])
    assert access.stats() == {"tokens": 1, "refused": {"unauthenticated": 5}}


def test_call_without_a_token_has_the_anonymous_grant(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    add_token(path, "scoring", ("*",))
    access = open_authenticator(path, "demo-*")
    anonymous = access.grant(())
    assert anonymous is access.anonymous and anonymous.is_anonymous
    anonymous.require_model("demo-1")
    with pytest.raises(Unauthenticated):
        anonymous.require_model("other")
    with pytest.raises(Unauthenticated, match="loading or unloading models requires a token"):
        anonymous.require_manage("demo-1")
    with pytest.raises(Unauthenticated, match="is unknown"):
        # An unknown token does not fall back to the anonymous grant.
        access.grant(headers("wrong"))


def test_second_token_keeps_the_first_and_manual_edits(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    first = add_token(path, "a", ("*",))
    path.write_text("# Ours.\n" + path.read_text())
    path.chmod(0o640)
    second = add_token(path, "b", ("m",), manage=True)
    assert path.read_text().startswith("# Ours.\n")
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]
    access = open_authenticator(path)
    assert [access.grant(headers(token)).name for token in (first, second)] == ["a", "b"]
    access.grant(headers(second)).require_manage("m")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "tokens.toml: "),
        ("x = 1", "unknown field `x`"),
        ("[[tokens]]\nname = 'a'", "needs one of sha256, certificate and password"),
        (f"[[tokens]]\nname = 'a b'\nsha256 = '{HASH}'", "regex"),
        ("[[tokens]]\nname = 'a'\nsha256 = 'abc'", "regex"),
        (f"[[tokens]]\nname = 'a'\nsha256 = '{HASH}'\nmodels = ['']", "length >= 1"),
        (f"[[tokens]]\nname = 'a'\nsha256 = '{HASH}'\nexpires = 2027-01-01", "datetime"),
        (f"[[tokens]]\nname = 'a'\nsha256 = '{HASH}'\n" * 2, "is listed 2 times"),
    ],
)
def test_invalid_token_file_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_tokens(path)


def test_concurrently_added_tokens_are_all_stored(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    path = tmp_path / "tokens.toml"
    path.symlink_to(tmp_path / "real" / "tokens.toml")
    with ThreadPoolExecutor(8) as threads:
        tokens = list(threads.map(lambda n: add_token(path, f"a{n}", ("*",)), range(24)))
    assert path.is_symlink()
    stored = {token.sha256 for token in read_tokens(path).tokens}
    assert stored == {digest(token) for token in tokens}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can change file owners")
def test_file_owner_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    add_token(path, "a", ("*",))
    os.chown(path, 65534, 65534)
    add_token(path, "b", ("*",))
    assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65534)


def test_invalid_name_leaves_the_file_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    add_token(path, "a", ("*",))
    before = path.read_text()
    with pytest.raises(ConfigError, match="regex"):
        add_token(path, "a b", ("*",))
    assert path.read_text() == before
    with pytest.raises(ConfigError, match="cannot be written"):
        add_token(tmp_path / "nowhere" / "tokens.toml", "a", ("*",))
    with pytest.raises(ConfigError, match="cannot be read"):
        open_authenticator(tmp_path / "none.toml")


def test_changed_file_is_reloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(check_reload(tmp_path, monkeypatch))


async def check_reload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_watcher, "POLL_S", 0.01)
    path = tmp_path / "tokens.toml"
    first = add_token(path, "a", ("m",))
    changes: list[int] = []
    access = Authenticator(AccessConfig(tokens=str(path)), lambda: changes.append(len(changes)))
    grant = access.grant(headers(first))
    access.start()
    try:
        second = add_token(path, "b", ("*",))
        await until(lambda: access.tokens == 2)
        assert access.grant(headers(second)).name == "b" and access.grant(headers(first)) is grant
        path.write_text(path.read_text().replace('["m"]', '["n"]'))
        await until(lambda: len(changes) == 2)
        full = path.read_text()
        grant.require_model("n")  # The grant of an open call is updated.
        with pytest.raises(PermissionDenied):
            grant.require_model("m")
        path.write_text("[")
        await asyncio.sleep(0.1)
        grant.require_model("n")
        for _ in range(20):  # A partly written file is not loaded.
            path.write_text("")
            path.write_text(full)
        await asyncio.sleep(0.1)
        grant.require_model("n")
        path.write_text("")
        await until(lambda: access.tokens == 0)
        with pytest.raises(Unauthenticated, match="expired or was revoked"):
            grant.require_model("n")
        with pytest.raises(Unauthenticated, match="is unknown"):
            access.grant(headers(first))
        path.unlink()
        await asyncio.sleep(0.1)
        assert changes[-1] == len(changes) - 1
    finally:
        access.stop()


def test_token_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(check_expiry(tmp_path, monkeypatch))


async def check_expiry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_watcher, "POLL_S", 0.01)
    path = tmp_path / "tokens.toml"
    soon = datetime.datetime.fromtimestamp(time.time() + 0.3, datetime.UTC).isoformat()
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC).isoformat()
    path.write_text(
        "".join(
            f"[[tokens]]\nname = '{name}'\nsha256 = '{digest(name)}'\nexpires = {expires}\n"
            for name, expires in (("soon", soon), ("past", past))
        )
    )
    changes: list[int] = []
    access = Authenticator(AccessConfig(tokens=str(path)), lambda: changes.append(1))
    grant = access.grant(headers("soon"))
    with pytest.raises(Unauthenticated, match="expired or was revoked"):
        access.grant(headers("past"))
    access.start()
    try:
        await until(lambda: not grant.is_valid)
        assert changes == [1]
        with pytest.raises(Unauthenticated, match="expired or was revoked"):
            access.grant(headers("soon"))
    finally:
        access.stop()


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def test_sources_need_their_own_permission(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    plain = add_token(path, "plain", ("*",), manage=True)
    reader = add_token(path, "reader", ("*",), sources=("clicks", "demo-*"))
    authenticator = open_authenticator(path, "demo-*")
    grant = authenticator.grant(headers(reader))
    assert [grant.may_read(name) for name in ("clicks", "demo-1", "orders")] == [True, True, False]
    grant.require_source("clicks")
    with pytest.raises(PermissionDenied, match="`reader` is not for source `orders`"):
        grant.require_source("orders")
    with pytest.raises(PermissionDenied, match="`plain` is not for source `clicks`"):
        authenticator.grant(headers(plain)).require_source("clicks")
    with pytest.raises(Unauthenticated, match="source `demo-1` requires a token"):
        authenticator.anonymous.require_source("demo-1")
    FULL_GRANT.require_source("anything")


def test_ticket_is_for_the_grant_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    token = add_token(path, "reader", ("*",), sources=("*",))
    grant = open_authenticator(path).grant(headers(token))
    grant.require_name("reader")
    for other in ("", "other"):
        with pytest.raises(PermissionDenied, match="is not the one that the ticket is for"):
            grant.require_name(other)


def test_renamed_table_revokes_its_grants(tmp_path: Path) -> None:
    """Limits belong to a name: with the old one, an open stream would have none."""
    path = tmp_path / "tokens.toml"
    token = add_token(path, "a", ("*",))
    path.write_text(path.read_text() + "limits = { batch_rows = 8 }\n")
    access = open_authenticator(path)
    grant = access.grant(headers(token))
    path.write_text(path.read_text().replace('"a"', '"b"'))
    access._set(read_tokens(path))
    assert "a" not in access.quotas.by_name and not grant.is_valid
    renamed = access.grant(headers(token))
    assert renamed.name == "b" and renamed.is_valid
