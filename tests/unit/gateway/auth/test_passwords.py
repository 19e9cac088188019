"""Passwords: hashes, verification beside the loop, what is remembered, limits of a flood."""

from __future__ import annotations

import asyncio
import base64
import threading
from pathlib import Path

import argon2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iskander.config.auth import AccessConfig
from iskander.errors import ConfigError, Overloaded, Unauthenticated
from iskander.gateway.auth import passwords
from iskander.gateway.auth.grants import Authenticator, bearer_token, handshake_header
from iskander.gateway.auth.origin import Origin
from iskander.gateway.auth.passwords import (
    WAITING_MAX,
    WAITING_OF_HOST_MAX,
    Credentials,
    PasswordVerifier,
    hash_error,
    hash_password,
    read_credentials,
    session_token,
)
from iskander.gateway.auth.tokens import add_token, digest, read_tokens

ENCODED = argon2.PasswordHasher(1, 64, 1).hash("secret")
OTHER = argon2.PasswordHasher(1, 64, 1).hash("other")
RIGHT, WRONG = Credentials("robot", "secret"), Credentials("robot", "wrong")


def verifier() -> PasswordVerifier:
    made = PasswordVerifier()
    made.set_users({"robot": ENCODED})
    return made


def basic(user: str, password: str) -> list[tuple[str, str]]:
    encoded = base64.b64encode(f"{user}:{password}".encode()).decode()
    return [("authorization", f"Basic {encoded}")]


def authenticator(path: Path) -> Authenticator:
    path.write_text(
        f"[[tokens]]\nname = 'robot'\npassword = '{ENCODED}'\n"
        f"[[tokens]]\nname = 'other'\nsha256 = '{digest('plain')}'\n"
    )
    return Authenticator(AccessConfig(tokens=str(path)), lambda: None)


def test_hash_is_argon2id_with_a_salt() -> None:
    first, second = hash_password("secret"), hash_password("secret")
    assert first != second and first.startswith("$argon2id$v=19$m=19456,t=2,p=1$")
    assert not hash_error(first)
    for invalid in ("", "x" * 1025):
        with pytest.raises(ConfigError, match="1 to 1024 characters"):
            hash_password(invalid)


@pytest.mark.parametrize(
    ("encoded", "problem"),
    [
        ("plain", "not an Argon2 hash"),
        (argon2.PasswordHasher(1, 64, 1, type=argon2.Type.I).hash("x"), "not an Argon2id hash"),
        (ENCODED.replace("m=64", "m=99999999"), "memory cost 99999999, limit 262144"),
        (ENCODED.replace("t=1", "t=999"), "time cost 999, limit 16"),
        (ENCODED.replace("p=1", "p=99"), "parallelism 99, limit 8"),
    ],
    ids=["plain", "argon2i", "memory", "time", "lanes"],
)
def test_expensive_and_other_hashes_are_rejected(
    tmp_path: Path, encoded: str, problem: str
) -> None:
    assert hash_error(encoded) == problem
    path = tmp_path / "tokens.toml"
    path.write_text(f"[[tokens]]\nname = 'robot'\npassword = '{encoded}'\n")
    with pytest.raises(ConfigError, match=f"password of `robot`: {problem}"):
        read_tokens(path)


@pytest.mark.long
@given(st.text(), st.text(min_size=1))
def test_session_token_stands_for_its_credentials(user: str, password: str) -> None:
    user = user.replace(":", "").encode("utf-8", "replace").decode()
    password = password.encode("utf-8", "replace").decode()
    token = session_token(Credentials(user, password))
    assert read_credentials(f"Bearer {token}") == (user, password)


def test_handshake_returns_the_token_or_the_credentials() -> None:
    ((_, header),) = basic("robot", "secret")
    shown = handshake_header(header)
    assert shown.startswith("Bearer isk_basic_") and handshake_header(shown) == shown
    assert read_credentials(shown) == RIGHT and bearer_token(shown) == "secret"
    ((_, header),) = basic("anybody", "isk_token")
    assert handshake_header(header) == "Bearer isk_token"
    assert not handshake_header("Digest x") and not handshake_header("Basic !")


def test_password_authenticates_after_its_verification(tmp_path: Path) -> None:
    async def run() -> None:
        access = authenticator(tmp_path / "tokens.toml")
        with pytest.raises(passwords.PasswordUnverified):
            access.find(basic("robot", "secret"))
        grant = await access.authenticate(basic("robot", "secret"))
        assert grant.name == "robot" and access.find(basic("robot", "secret")) is grant
        for user, password in (("robot", "wrong"), ("nobody", "secret"), ("other", "secret")):
            with pytest.raises(Unauthenticated, match="user name or password is wrong"):
                await access.authenticate(basic(user, password))
        assert (await access.authenticate(basic("anybody", "plain"))).name == "other"
        with pytest.raises(Unauthenticated, match="not accepted for this call"):
            access.grant(basic("robot", "unverified"))
        access.stop()

    asyncio.run(run())


def test_changed_hash_ends_the_grant_and_what_is_remembered(tmp_path: Path) -> None:
    async def run() -> None:
        path = tmp_path / "tokens.toml"
        access = authenticator(path)
        grant = await access.authenticate(basic("robot", "secret"))
        path.write_text(f"[[tokens]]\nname = 'robot'\npassword = '{OTHER}'\n")
        access._set(read_tokens(path))
        assert not grant.is_valid
        with pytest.raises(Unauthenticated):
            await access.authenticate(basic("robot", "secret"))
        assert (await access.authenticate(basic("robot", "other"))).name == "robot"
        access.stop()

    asyncio.run(run())


def test_verified_password_is_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        checked, now = verifier(), 5
        monkeypatch.setattr(passwords, "now_ns", lambda: now)
        assert checked.remembered(RIGHT) is None
        assert await checked.verify(RIGHT) == ENCODED
        assert await checked.verify(WRONG) is None
        assert checked.remembered(RIGHT) == ENCODED and checked.remembered(WRONG) is None
        assert len(checked._remembered) == 1, "failures are not remembered"
        assert b"secret" not in b"".join(checked._remembered), "nor the password itself"
        now += passwords.REMEMBERED_S * 10**9
        assert checked.remembered(RIGHT) is None
        checked.stop()

    asyncio.run(run())


def test_number_of_remembered_passwords_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr(passwords, "REMEMBERED_MAX", 4)
        checked = PasswordVerifier()
        checked.set_users({f"user{n}": ENCODED for n in range(20)})
        for number in range(20):
            assert await checked.verify(Credentials(f"user{number}", "secret"))
        assert len(checked._remembered) == 4
        assert checked.remembered(Credentials("user19", "secret"))
        checked.stop()

    asyncio.run(run())


def test_flood_of_one_host_leaves_room_for_others_and_does_not_block_the_loop() -> None:
    """The thread is held; the loop continues and rejects at once what exceeds the limits."""

    async def run() -> None:
        checked, held = verifier(), threading.Event()
        matches, threads = checked._matches, set()

        def wait(encoded: str, password: str) -> bool:
            threads.add(threading.get_native_id())
            assert held.wait(20)
            return matches(encoded, password)

        checked._matches = wait  # type: ignore[method-assign]
        attacker = [
            asyncio.create_task(checked.verify(WRONG, Origin(f"10.0.0.1:{port}")))
            for port in range(500)
        ]
        await asyncio.sleep(0)
        rejected = [task for task in attacker if task.done()]
        assert len(rejected) == 500 - WAITING_OF_HOST_MAX
        assert all(isinstance(task.exception(), Overloaded) for task in rejected)
        other = asyncio.create_task(checked.verify(RIGHT, Origin("10.0.0.2:1")))
        many = [
            asyncio.create_task(checked.verify(WRONG, Origin(f"10.0.1.{n}:1"))) for n in range(200)
        ]
        await asyncio.sleep(0)
        assert checked._waiting.total() == WAITING_MAX
        held.set()
        assert await other == ENCODED
        await asyncio.gather(*attacker, *many, return_exceptions=True)
        assert not checked._waiting and len(threads) == 1
        checked.stop()

    asyncio.run(run())


def test_unknown_user_costs_a_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        checked, seen = verifier(), []
        matches = checked._matches
        monkeypatch.setattr(
            checked, "_matches", lambda *args: seen.append(args[0]) or matches(*args)
        )
        assert await checked.verify(Credentials("nobody", "secret")) is None
        assert seen == [checked._decoy] and not hash_error(seen[0])
        checked.stop()

    asyncio.run(run())


def test_added_password_is_stored_as_a_hash(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    assert add_token(path, "robot", ("*",), password="secret") == ""
    (token,) = read_tokens(path).tokens
    assert not hash_error(token.password) and "secret" not in path.read_text()
    with pytest.raises(ConfigError, match="`robot` has several passwords"):
        add_token(path, "robot", ("*",), password="another")
