"""What a folder can do to those who read it: odd names, files that nobody may read or that move."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto
from support.repositories import Folder, scaled

from iskander.config.models import ModelConfig
from iskander.config.repository import RepositoryConfig
from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.repository import changes as following
from iskander.repository import changes as watching
from iskander.repository import scan as listing
from iskander.repository import specs
from iskander.repository.scan import ScannedModel, list_model, list_models, read_settings, stamp_of

ODD = b"caf\xe9.txt"
"""A name in Latin-1, which is no UTF-8."""


def forbid(monkeypatch: pytest.MonkeyPatch, where: Path) -> None:
    """Let the system refuse everything below a folder, as it does to others than its owner."""

    def refusing(call: Any) -> Any:
        def refused(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if not isinstance(path, int) and Path(os.fsdecode(path)).is_relative_to(where):
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *args, **kwargs)

        return refused

    for name in ("scandir", "stat"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))


def test_a_name_that_is_no_utf8_is_a_name_like_others(tmp_path: Path) -> None:
    folder = scaled(tmp_path / "1", 3)
    before = stamp_of(folder)
    odd = Path(os.fsdecode(os.fsencode(folder) + b"/" + ODD))
    odd.write_text("x")
    after = stamp_of(folder)
    assert before != after == stamp_of(folder)
    odd.write_text("longer")
    assert stamp_of(folder) not in (before, after)
    (folder / "manifest.toml").write_text("format = 1")
    spec = specs.model_spec(0, ModelConfig(name="m", path=str(folder)))
    assert spec.fingerprint.encode()


def test_what_may_not_be_read_is_there_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken for gone, and costs the others nothing."""
    folder = Folder(tmp_path / "models")
    for name in ("m", "n"):
        folder.put(name, 1, 3)
        (folder.root / name / "1" / ".complete").touch()
    whole = list_models(folder.root, ".complete")
    with monkeypatch.context() as patched:
        forbid(patched, folder.root / "m" / "1")
        listed = list_models(folder.root, ".complete")
        assert listed["n"] == whole["n"]
        assert list(listed["m"].versions) == ["1"] and listed["m"] != whole["m"]
        assert list_model(folder.root, "m", "").versions["1"]
    with monkeypatch.context() as patched:
        forbid(patched, folder.root / "m")
        listed = list_models(folder.root, ".complete")
        assert listed["n"] == whole["n"]
        assert "Permission denied" in listed["m"].error
    assert list_models(folder.root, ".complete") == whole


def test_settings_that_are_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.toml").write_text("x = " + "[" * 30_000)
    with pytest.raises(ConfigError, match=r"model\.toml"):
        read_settings(tmp_path, "m", Config())


def test_settings_that_are_no_plain_file_are_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    os.mkfifo(tmp_path / "m" / "model.toml")
    with pytest.raises(ConfigError, match=r"model\.toml cannot be read: it is not a file"):
        read_settings(tmp_path, "m", Config())


def test_settings_that_are_too_large_are_not_read_whole(tmp_path: Path) -> None:
    """A sparse file takes no room on a disk, and all of it in memory."""
    (tmp_path / "m").mkdir()
    with (tmp_path / "m" / "model.toml").open("wb") as file:
        file.truncate(3 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"model\.toml is larger than"):
            read_settings(tmp_path, "m", Config())
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("gone", ["listing", "stat"])
def test_files_that_move_while_they_are_looked_at_are_a_named_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    folder = scaled(tmp_path / "1", 3, TensorProto.INT64)
    (folder / "manifest.toml").write_text("format = 1")

    class Moving(type(folder)):  # type: ignore[misc]
        def iterdir(self) -> Any:
            if gone == "listing":
                raise FileNotFoundError(2, "No such file or directory")
            yield from super().iterdir()

        def exists(self, **_: Any) -> bool:
            return True

        def stat(self, **_: Any) -> Any:
            raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(specs, "model_file", lambda path, backend: Moving(folder / "model.onnx"))
    with pytest.raises(ConfigError, match="`m`"):
        specs.model_spec(0, ModelConfig(name="m", path=str(folder)))


def test_a_look_that_fails_in_an_unknown_way_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next change is followed, and the log has what happened."""
    seen = [KeyError("nobody thought of this"), {"m": ScannedModel("", {"1": "a"})}]
    told: list[str] = []

    async def two(*_: Any) -> AsyncIterator[None]:
        yield
        yield

    def look(*_: Any) -> Any:
        found = seen[0] if len(seen) == 1 else seen.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(following, "changes", two)
    monkeypatch.setattr(following, "list_models", look)
    settings = RepositoryConfig(path=str(tmp_path), settle_ms=10)
    asyncio.run(following.follow(settings, {}, lambda name, _: told.append(name)))
    assert told == ["m"]
    assert "nobody thought of this" in caplog.text


def test_a_name_that_the_watch_does_not_understand_does_not_end_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What tells of changes knows UTF-8 only; the folder is looked at all the same."""

    async def scenario() -> None:
        turns = watching.changes(tmp_path, 0.1)
        number = 0
        async with asyncio.timeout(20):
            while "cannot be watched" not in caplog.text:
                number += 1
                Path(os.fsdecode(os.fsencode(tmp_path) + b"/%d" % number + ODD)).touch()
                await anext(turns)
            await anext(turns)
            await anext(turns)
        await turns.aclose()

    asyncio.run(scenario())


def test_a_folder_of_models_with_an_odd_entry_is_read(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "models")
    folder.put("m", 1, 3)
    (folder.root / "loop").symlink_to(folder.root / "loop")
    os.mkdir(os.fsencode(folder.root) + b"/" + ODD)
    assert list(list_models(folder.root, "")) == ["m"]
    assert listing.list_model(folder.root, "loop", "").versions == {}
