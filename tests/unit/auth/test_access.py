"""Who may ask what: tokens, patterns of models, expiry, and a file that changes."""

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

from iskander import file_watcher as following
from iskander.auth import grants
from iskander.auth.grants import ANONYMOUS, FULL_GRANT, Authenticator, Grant, bearer_token
from iskander.auth.tokens import add_token, digest, read_tokens
from iskander.config.auth import AccessConfig
from iskander.errors import ConfigError, PermissionDenied, Unauthenticated

HASH = "0" * 64


def shown(token: str, scheme: str = "Bearer") -> list[tuple[str, str]]:
    return [("x-other", "1"), ("authorization", f"{scheme} {token}")]


def basic(name: str, token: str) -> str:
    return base64.b64encode(f"{name}:{token}".encode()).decode()


def granted(*models: str, manage: bool = False, name: str = "a") -> Grant:
    return Grant(name, models, may_manage=manage, refused=Counter())


def opened(path: Path, *anonymous: str) -> Authenticator:
    return Authenticator(AccessConfig(tokens=str(path), anonymous=anonymous), lambda: None)


@pytest.mark.parametrize(
    ("patterns", "model", "may"),
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
def test_a_grant_is_for_the_models_of_its_patterns(
    patterns: tuple[str, ...], model: str, may: bool
) -> None:
    grant = granted(*patterns)
    for _ in range(2):
        if may:
            grant.require_model(model)
        else:
            with pytest.raises(PermissionDenied, match=f"`a` is not for model `{model}`"):
                grant.require_model(model)


def test_who_shows_nothing_is_told_to() -> None:
    with pytest.raises(Unauthenticated, match=r"`m` requires a token: send the header"):
        granted(name=ANONYMOUS).require_model("m")
    with pytest.raises(Unauthenticated, match="this call requires a token"):
        granted("*", name=ANONYMOUS).require_token()
    granted().require_token()


def test_what_may_be_loaded_is_what_may_be_asked() -> None:
    granted("a*", manage=True).require_manage("ab")
    with pytest.raises(PermissionDenied, match="not for model"):
        granted("a*", manage=True).require_manage("b")
    with pytest.raises(PermissionDenied, match="may not load or unload"):
        granted("a*").require_manage("ab")


def test_a_grant_remembers_a_bounded_number_of_names() -> None:
    """And none that is longer than a model's can be: a message may be full of one."""
    grant = granted("a*")
    for number in range(grants.CACHED_MODELS_MAX * 2):
        grant.require_model(f"a{number}")
    assert len(grant._cache) <= grants.CACHED_MODELS_MAX
    with pytest.raises(PermissionDenied):
        grant.require_model("a" * 1_000_000)
    granted("*").require_model("a" * 1_000_000)  # It will hear that there is no such model.
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
def test_the_token_of_a_header(header: str, token: str) -> None:
    assert bearer_token(header) == token


def test_without_tokens_everybody_may_everything() -> None:
    access = Authenticator(AccessConfig(), lambda: None)
    assert access.grant(()) is FULL_GRANT and access.grant(shown("x")) is FULL_GRANT
    access.start()
    assert access.stats() == {}
    FULL_GRANT.require_manage("any")


def test_a_token_is_known_by_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    token = add_token(path, "scoring", ("two-*",))
    assert token not in path.read_text() and digest(token) in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    access = opened(path)
    assert access.grant(shown(token)).name == "scoring"
    assert access.grant(shown(basic("me", token), "Basic")).name == "scoring"
    for wrong in (token + "x", token[:-1], "", digest(token)):
        with pytest.raises(Unauthenticated, match="the token is unknown"):
            access.grant(shown(wrong))
    with pytest.raises(Unauthenticated, match="this server requires a token"):
        access.grant([("x", "y")])
    assert access.stats() == {"tokens": 1, "refused": {"unauthenticated": 5}}


def test_who_shows_no_token_has_the_models_of_everybody(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    add_token(path, "scoring", ("*",))
    access = opened(path, "demo-*")
    nobody = access.grant(())
    assert nobody is access.anonymous and nobody.is_anonymous
    nobody.require_model("demo-1")
    with pytest.raises(Unauthenticated):
        nobody.require_model("other")
    with pytest.raises(Unauthenticated, match="loading or unloading models requires a token"):
        nobody.require_manage("demo-1")
    with pytest.raises(Unauthenticated, match="is unknown"):
        access.grant(shown("wrong"))  # Who shows one that is not known is not taken for nobody.


def test_a_second_token_leaves_the_first_and_what_was_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    first = add_token(path, "a", ("*",))
    path.write_text("# Ours.\n" + path.read_text())
    path.chmod(0o640)
    second = add_token(path, "b", ("m",), manage=True)
    assert path.read_text().startswith("# Ours.\n")
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]
    access = opened(path)
    assert [access.grant(shown(token)).name for token in (first, second)] == ["a", "b"]
    access.grant(shown(second)).require_manage("m")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[", "tokens.toml: "),
        ("x = 1", "unknown field `x`"),
        ("[[tokens]]\nname = 'a'", "missing required field `sha256`"),
        (f"[[tokens]]\nname = 'a b'\nsha256 = '{HASH}'", "regex"),
        ("[[tokens]]\nname = 'a'\nsha256 = 'abc'", "regex"),
        (f"[[tokens]]\nname = 'a'\nsha256 = '{HASH}'\nmodels = ['']", "length >= 1"),
        (f"[[tokens]]\nname = 'a'\nsha256 = '{HASH}'\nexpires = 2027-01-01", "datetime"),
        (f"[[tokens]]\nname = 'a'\nsha256 = '{HASH}'\n" * 2, "is listed 2 times"),
    ],
)
def test_a_file_that_says_what_it_may_not_is_refused(tmp_path: Path, text: str, rule: str) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rule):
        read_tokens(path)


def test_tokens_that_are_added_at_once_are_all_there(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    path = tmp_path / "tokens.toml"
    path.symlink_to(tmp_path / "real" / "tokens.toml")
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda n: add_token(path, f"a{n}", ("*",)), range(24)))
    assert path.is_symlink()
    assert {token.sha256 for token in read_tokens(path)} == {digest(token) for token in made}


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_file_stays_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    add_token(path, "a", ("*",))
    os.chown(path, 65534, 65534)
    add_token(path, "b", ("*",))
    assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65534)


def test_a_name_that_may_not_be_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    add_token(path, "a", ("*",))
    before = path.read_text()
    with pytest.raises(ConfigError, match="regex"):
        add_token(path, "a b", ("*",))
    assert path.read_text() == before
    with pytest.raises(ConfigError, match="cannot be written"):
        add_token(tmp_path / "nowhere" / "tokens.toml", "a", ("*",))
    with pytest.raises(ConfigError, match="cannot be read"):
        opened(tmp_path / "none.toml")


def test_the_file_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(follow(tmp_path, monkeypatch))


async def follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "POLL_S", 0.01)
    path = tmp_path / "tokens.toml"
    first = add_token(path, "a", ("m",))
    changes: list[int] = []
    access = Authenticator(AccessConfig(tokens=str(path)), lambda: changes.append(len(changes)))
    held = access.grant(shown(first))
    access.start()
    try:
        second = add_token(path, "b", ("*",))
        await until(lambda: access.tokens == 2)
        assert access.grant(shown(second)).name == "b" and access.grant(shown(first)) is held
        path.write_text(path.read_text().replace('["m"]', '["n"]'))
        await until(lambda: len(changes) == 2)
        full = path.read_text()
        held.require_model("n")  # A call that holds it has what the file says now.
        with pytest.raises(PermissionDenied):
            held.require_model("m")
        path.write_text("[")
        await asyncio.sleep(0.1)
        held.require_model("n")
        for _ in range(20):  # What is still being written is not half read.
            path.write_text("")
            path.write_text(full)
        await asyncio.sleep(0.1)
        held.require_model("n")
        path.write_text("")
        await until(lambda: access.tokens == 0)
        with pytest.raises(Unauthenticated, match="expired or was revoked"):
            held.require_model("n")
        with pytest.raises(Unauthenticated, match="is unknown"):
            access.grant(shown(first))
        path.unlink()
        await asyncio.sleep(0.1)
        assert changes[-1] == len(changes) - 1
    finally:
        access.stop()


def test_a_token_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(expire(tmp_path, monkeypatch))


async def expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "POLL_S", 0.01)
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
    held = access.grant(shown("soon"))
    with pytest.raises(Unauthenticated, match="expired or was revoked"):
        access.grant(shown("past"))
    access.start()
    try:
        await until(lambda: not held.is_valid)
        assert changes == [1]
        with pytest.raises(Unauthenticated, match="expired or was revoked"):
            access.grant(shown("soon"))
    finally:
        access.stop()


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)
