"""Load intents: records, locks, and the models that are loaded at startup."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from iskander.config.repository import RepositoryConfig
from iskander.errors import ModelNotFound, NotReady, Overloaded
from iskander.gateway.repository.load_intents import FOLDER, LoadIntent, LoadIntents
from iskander.gateway.repository.version_policy import names_at_start


def record(intents: LoadIntents, intent: LoadIntent) -> None:
    with intents.recording(intent):
        pass


def test_intent_is_recorded_and_replaced(tmp_path: Path) -> None:
    intents = LoadIntents(tmp_path)
    (tmp_path / FOLDER).mkdir()
    assert list(intents) == [] and intents.get("m") == LoadIntent("m")
    record(intents, intents.get("m").without("1"))
    record(intents, intents.get("m").without("2"))
    record(intents, LoadIntent("n" * 300 + "/../").without(None))
    assert intents.get("m") == LoadIntent("m", is_loaded=True, excluded=("1", "2"))
    assert {intent.model[:1]: intent.is_loaded for intent in intents} == {"m": True, "n": False}
    record(intents, LoadIntent("m"))
    assert intents.get("m") == LoadIntent("m")
    intents.clear()
    assert list(intents) == []


@pytest.mark.parametrize("text", [b"{", b'{"model": "\xff"}', b'{"model": ' + b"[" * 5000])
def test_damaged_intent_is_skipped(tmp_path: Path, text: bytes) -> None:
    intents = LoadIntents(tmp_path)
    (tmp_path / FOLDER).mkdir()
    record(intents, LoadIntent("m", is_loaded=False))
    (path,) = (tmp_path / FOLDER).glob("*.json")
    path.write_bytes(text)
    assert list(intents) == [] and intents.get("m") == LoadIntent("m")


def test_failed_change_keeps_the_previous_intent(tmp_path: Path) -> None:
    intents = LoadIntents(tmp_path)
    (tmp_path / FOLDER).mkdir()
    record(intents, LoadIntent("m", is_loaded=False))
    with pytest.raises(ModelNotFound), intents.recording(LoadIntent("m")):
        raise ModelNotFound("it is not there")
    assert intents.get("m") == LoadIntent("m", is_loaded=False)
    assert len(list((tmp_path / FOLDER).iterdir())) == 1


def test_unwritable_intent_prevents_the_change(tmp_path: Path) -> None:
    intents = LoadIntents(tmp_path / "away")
    with pytest.raises(NotReady, match="cannot be recorded"), intents.recording(LoadIntent("m")):
        pytest.fail("the change ran")

    async def acquire() -> None:
        async with intents.locked("m", 1.0):
            pytest.fail("the lock was acquired")

    with pytest.raises(NotReady, match="cannot be recorded"):
        asyncio.run(acquire())


def test_unreadable_intent_is_ignored(tmp_path: Path) -> None:
    intents = LoadIntents(tmp_path)
    (tmp_path / FOLDER).mkdir()
    record(intents, LoadIntent("m", is_loaded=False))
    (path,) = (tmp_path / FOLDER).iterdir()
    path.write_bytes(b"{")
    assert list(intents) == [] and intents.get("m") == LoadIntent("m")


def test_model_lock_is_exclusive(tmp_path: Path) -> None:
    async def contend() -> None:
        intents, other = LoadIntents(tmp_path), LoadIntents(tmp_path)
        async with intents.locked("m", 1.0):
            with pytest.raises(Overloaded) as caught:
                async with other.locked("m", 0.05):
                    raise AssertionError("both acquire the lock")
            assert caught.value.retryable
        async with other.locked("m", 0.0):
            pass

    asyncio.run(contend())


def test_lock_files_are_bounded_for_any_model_names(tmp_path: Path) -> None:
    async def lock_many() -> None:
        for number in range(1000):
            async with LoadIntents(tmp_path).locked(f"m{number}", 0.0):
                pass

    asyncio.run(lock_many())
    assert len(list((tmp_path / FOLDER).iterdir())) <= 256


@pytest.mark.parametrize(
    ("load", "intents", "names"),
    [
        ((), (LoadIntent("a"),), {"a"}),
        (("a", "b"), (LoadIntent("a", is_loaded=False),), {"b"}),
        (("*",), (LoadIntent("b", is_loaded=False), LoadIntent("gone")), {"a", "c", "gone"}),
        (("a",), (LoadIntent("b", excluded=("1",)),), {"a", "b"}),
    ],
)
def test_startup_loads_the_models_of_recorded_intents(
    load: tuple[str, ...], intents: tuple[LoadIntent, ...], names: set[str]
) -> None:
    settings = RepositoryConfig(path="models", control="explicit", load=load)
    assert names_at_start(settings, ["a", "b", "c"], intents) == names


def test_watched_repository_ignores_intents() -> None:
    settings = RepositoryConfig(path="models")
    assert names_at_start(settings, ["a"], (LoadIntent("a", is_loaded=False), LoadIntent("b"))) == {
        "a"
    }
