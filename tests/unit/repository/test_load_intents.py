"""What calls want served, kept for processes that come later."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from iskander.config.repository import RepositoryConfig
from iskander.errors import ModelNotFound, NotReady, Overloaded
from iskander.repository.load_intents import FOLDER, LoadIntent, LoadIntents
from iskander.repository.version_policy import names_at_start


def keep(intents: LoadIntents, intent: LoadIntent) -> None:
    with intents.recording(intent):
        pass


def test_a_wish_is_kept_and_replaced(tmp_path: Path) -> None:
    intents = LoadIntents(tmp_path)
    (tmp_path / FOLDER).mkdir()
    assert list(intents) == [] and intents.get("m") == LoadIntent("m")
    keep(intents, intents.get("m").without("1"))
    keep(intents, intents.get("m").without("2"))
    keep(intents, LoadIntent("n" * 300 + "/../").without(None))
    assert intents.get("m") == LoadIntent("m", is_loaded=True, but=("1", "2"))
    assert {intent.model[:1]: intent.is_loaded for intent in intents} == {"m": True, "n": False}
    keep(intents, LoadIntent("m"))
    assert intents.get("m") == LoadIntent("m")
    intents.clear()
    assert list(intents) == []


def test_a_wish_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    intents = LoadIntents(tmp_path)
    (tmp_path / FOLDER).mkdir()
    keep(intents, LoadIntent("m", is_loaded=False))
    with pytest.raises(ModelNotFound), intents.recording(LoadIntent("m")):
        raise ModelNotFound("it is not there")
    assert intents.get("m") == LoadIntent("m", is_loaded=False)
    assert len(list((tmp_path / FOLDER).iterdir())) == 1


def test_where_a_wish_cannot_be_written_nothing_is_done(tmp_path: Path) -> None:
    intents = LoadIntents(tmp_path / "away")
    with pytest.raises(NotReady, match="cannot be recorded"), intents.recording(LoadIntent("m")):
        pytest.fail("it is done")

    async def hold() -> None:
        async with intents.locked("m", 1.0):
            pytest.fail("it is held")

    with pytest.raises(NotReady, match="cannot be recorded"):
        asyncio.run(hold())


def test_a_wish_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    intents = LoadIntents(tmp_path)
    (tmp_path / FOLDER).mkdir()
    keep(intents, LoadIntent("m", is_loaded=False))
    (path,) = (tmp_path / FOLDER).iterdir()
    path.write_bytes(b"{")
    assert list(intents) == [] and intents.get("m") == LoadIntent("m")


def test_who_changes_a_model_has_it_alone(tmp_path: Path) -> None:
    async def two() -> None:
        intents, other = LoadIntents(tmp_path), LoadIntents(tmp_path)
        async with intents.locked("m", 1.0):
            with pytest.raises(Overloaded) as refused:
                async with other.locked("m", 0.05):
                    raise AssertionError("both have it")
            assert refused.value.retryable
        async with other.locked("m", 0.0):
            pass

    asyncio.run(two())


def test_locks_are_bounded_whatever_models_are_called(tmp_path: Path) -> None:
    async def many() -> None:
        for number in range(1000):
            async with LoadIntents(tmp_path).locked(f"m{number}", 0.0):
                pass

    asyncio.run(many())
    assert len(list((tmp_path / FOLDER).iterdir())) <= 256


@pytest.mark.parametrize(
    ("load", "intents", "names"),
    [
        ((), (LoadIntent("a"),), {"a"}),
        (("a", "b"), (LoadIntent("a", is_loaded=False),), {"b"}),
        (("*",), (LoadIntent("b", is_loaded=False), LoadIntent("gone")), {"a", "c", "gone"}),
        (("a",), (LoadIntent("b", but=("1",)),), {"a", "b"}),
    ],
)
def test_a_start_loads_what_calls_wanted(
    load: tuple[str, ...], intents: tuple[LoadIntent, ...], names: set[str]
) -> None:
    settings = RepositoryConfig(path="models", control="explicit", load=load)
    assert names_at_start(settings, ["a", "b", "c"], intents) == names


def test_a_folder_that_is_watched_says_itself_what_is_loaded() -> None:
    settings = RepositoryConfig(path="models")
    assert names_at_start(settings, ["a"], (LoadIntent("a", is_loaded=False), LoadIntent("b"))) == {
        "a"
    }
