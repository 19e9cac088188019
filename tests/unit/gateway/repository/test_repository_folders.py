"""Repository folders with unusual names, unreadable files, and concurrent changes."""

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
from iskander.gateway.repository import changes as changes_module
from iskander.gateway.repository import scan, specs
from iskander.gateway.repository.scan import (
    ScannedModel,
    list_model,
    list_models,
    read_settings,
    stamp_of,
)

NON_UTF8 = b"caf\xe9.txt"
"""A Latin-1 file name that is not valid UTF-8."""


def deny_access(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Makes system calls below a folder fail, as for users without permissions."""

    def denying(call: Any) -> Any:
        def denied(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if not isinstance(path, int) and Path(os.fsdecode(path)).is_relative_to(folder):
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *args, **kwargs)

        return denied

    for name in ("scandir", "stat"):
        monkeypatch.setattr(os, name, denying(getattr(os, name)))


def test_non_utf8_file_name_is_part_of_the_stamp(tmp_path: Path) -> None:
    folder = scaled(tmp_path / "1", 3)
    before = stamp_of(folder)
    extra = Path(os.fsdecode(os.fsencode(folder) + b"/" + NON_UTF8))
    extra.write_text("x")
    after = stamp_of(folder)
    assert before != after == stamp_of(folder)
    extra.write_text("longer")
    assert stamp_of(folder) not in (before, after)
    (folder / "manifest.toml").write_text("format = 1")
    spec = specs.model_spec(0, ModelConfig(name="m", path=str(folder)))
    assert spec.fingerprint.encode()


def test_unreadable_folder_stays_listed_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not count as removed, and other models are not affected."""
    folder = Folder(tmp_path / "models")
    for name in ("m", "n"):
        folder.put(name, 1, 3)
        (folder.root / name / "1" / ".complete").touch()
    readable = list_models(folder.root, ".complete")
    with monkeypatch.context() as patched:
        deny_access(patched, folder.root / "m" / "1")
        listed = list_models(folder.root, ".complete")
        assert listed["n"] == readable["n"]
        assert list(listed["m"].versions) == ["1"] and listed["m"] != readable["m"]
        assert list_model(folder.root, "m", "").versions["1"]
    with monkeypatch.context() as patched:
        deny_access(patched, folder.root / "m")
        listed = list_models(folder.root, ".complete")
        assert listed["n"] == readable["n"]
        assert "Permission denied" in listed["m"].error
    assert list_models(folder.root, ".complete") == readable


def test_deeply_nested_settings_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.toml").write_text("x = " + "[" * 30_000)
    with pytest.raises(ConfigError, match=r"model\.toml"):
        read_settings(tmp_path, "m", Config())


def test_settings_in_a_fifo_are_rejected_without_blocking(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    os.mkfifo(tmp_path / "m" / "model.toml")
    with pytest.raises(ConfigError, match=r"`model\.toml` beside the model is not a file"):
        read_settings(tmp_path, "m", Config())


def test_oversized_settings_are_rejected_without_a_full_read(tmp_path: Path) -> None:
    """The sparse file has no blocks on disk, but a full read would fill memory."""
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


@pytest.mark.parametrize("failing_call", ["listing", "stat"])
def test_files_that_vanish_during_inspection_are_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: str
) -> None:
    folder = scaled(tmp_path / "1", 3, TensorProto.INT64)
    (folder / "manifest.toml").write_text("format = 1")

    class VanishingPath(type(folder)):  # type: ignore[misc]
        def iterdir(self) -> Any:
            if failing_call == "listing":
                raise FileNotFoundError(2, "No such file or directory")
            yield from super().iterdir()

        def exists(self, **_: Any) -> bool:
            return True

        def stat(self, **_: Any) -> Any:
            raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(
        specs, "model_file", lambda path, backend: VanishingPath(folder / "model.onnx")
    )
    with pytest.raises(ConfigError, match="`m`"):
        specs.model_spec(0, ModelConfig(name="m", path=str(folder)))


def test_unexpected_scan_error_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is logged, and the next change is reported."""
    scans = [KeyError("unexpected error"), {"m": ScannedModel("", {"1": "a"})}]
    reported: list[str] = []

    async def two_changes(*_: Any) -> AsyncIterator[None]:
        yield
        yield

    def next_scan(*_: Any) -> Any:
        result = scans[0] if len(scans) == 1 else scans.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(changes_module, "changes", two_changes)
    monkeypatch.setattr(changes_module, "list_models", next_scan)
    settings = RepositoryConfig(path=str(tmp_path), settle_ms=10)
    asyncio.run(changes_module.follow(settings, {}, lambda name, _: reported.append(name)))
    assert reported == ["m"]
    assert "unexpected error" in caplog.text


def test_non_utf8_name_does_not_end_the_watch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The watcher library supports only UTF-8 names; the folder is still rescanned."""

    async def scenario() -> None:
        watch = changes_module.changes(tmp_path, 0.1)
        number = 0
        async with asyncio.timeout(20):
            while "cannot be watched" not in caplog.text:
                number += 1
                Path(os.fsdecode(os.fsencode(tmp_path) + b"/%d" % number + NON_UTF8)).touch()
                await anext(watch)
            await anext(watch)
            await anext(watch)
        await watch.aclose()

    asyncio.run(scenario())


def test_repository_with_unusual_entries_is_listed(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "models")
    folder.put("m", 1, 3)
    (folder.root / "loop").symlink_to(folder.root / "loop")
    os.mkdir(os.fsencode(folder.root) + b"/" + NON_UTF8)
    assert list(list_models(folder.root, "")) == ["m"]
    assert scan.list_model(folder.root, "loop", "").versions == {}
