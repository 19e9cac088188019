"""Cache of optimized models: validation, eviction, and locking."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from iskander_worker.loading.weight_cache import FORMAT, MODEL, RECORD, WEIGHTS, WeightStore

from iskander.errors import ConfigError, ManifestError
from iskander.foundation import clock


def add_entry(store: WeightStore, key: str, length: int = 1000, **notes: str) -> None:
    with store.locked(key, clock.now_ns(), is_exclusive=True):
        folder = store.prepare(key)
        for name in (MODEL, WEIGHTS):
            (folder / name).write_bytes(key.encode() * (length // len(key)))
            (folder / name).chmod(0o600)
        store.add(key, **notes)


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "cache", 1 << 20)


def test_added_entry_is_found(store: WeightStore, tmp_path: Path) -> None:
    assert store.find("k") is None
    add_entry(store, "k")
    entry = store.find("k")

    assert entry is not None and entry.model == tmp_path / "cache" / "k" / MODEL
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("notes", [{"note": "why"}, {"refusal": "how"}])
def test_entry_with_a_note_or_refusal_has_no_model_files(
    store: WeightStore, tmp_path: Path, notes: dict[str, str]
) -> None:
    add_entry(store, "k", **notes)
    entry = store.find("k")

    assert entry is not None and entry.model is None
    assert (entry.record.note, entry.record.refusal) == (
        notes.get("note", ""),
        notes.get("refusal", ""),
    )
    assert os.listdir(tmp_path / "cache" / "k") == [RECORD]


@pytest.mark.parametrize("name", [RECORD, MODEL, WEIGHTS])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "writable", "link", "twice"])
def test_damaged_entry_is_not_found(
    store: WeightStore, tmp_path: Path, name: str, damage: str
) -> None:
    add_entry(store, "k")
    file = tmp_path / "cache" / "k" / name
    raw = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(raw[:-1])
    elif damage == "flip":
        raw[len(raw) // 2] ^= 0xFF
        file.write_bytes(raw)
    elif damage == "remove":
        file.unlink()
    elif damage == "writable":
        file.chmod(0o620)
    elif damage == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        os.link(file, tmp_path / "twice")

    assert store.find("k") is None


def test_record_of_other_files_or_format_is_not_found(store: WeightStore, tmp_path: Path) -> None:
    add_entry(store, "k")
    record = tmp_path / "cache" / "k" / RECORD
    text = record.read_text()
    for changed in (
        text.replace(f'"format":{FORMAT}', f'"format":{FORMAT + 1}'),
        text.replace(WEIGHTS, "../../other"),
        "[" * 10_000,
    ):
        record.write_text(changed)
        assert store.find("k") is None


def test_least_recently_used_unlocked_entry_is_evicted(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "cache", 7000)
    for key in ("a", "b", "c"):
        add_entry(store, key)
        os.utime(tmp_path / "cache" / key / RECORD, ns=(0, ord(key)))
    store.find("a")
    with store.locked("b", clock.now_ns()):
        add_entry(store, "d")
        assert store.find("b") is not None and store.find("c") is None
    add_entry(store, "e")

    kept = {path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()}
    assert kept == {"b", "d", "e"}
    assert {path.name for path in (tmp_path / "cache").glob("*.lock")} >= {"d.lock", "e.lock"}


def test_incomplete_entry_is_removed(store: WeightStore, tmp_path: Path) -> None:
    with store.locked("dead", clock.now_ns(), is_exclusive=True):
        (store.prepare("dead") / MODEL).write_bytes(b"half")
    add_entry(store, "k")

    assert not (tmp_path / "cache" / ".new-dead").exists()
    assert store.find("k") is not None


def test_entry_whose_removal_was_interrupted_is_removed(tmp_path: Path) -> None:
    """A folder that is no entry is left alone."""
    cache = tmp_path / "cache"
    store = WeightStore(cache, 1 << 20)
    add_entry(store, "half")
    (cache / "half" / RECORD).unlink()
    (cache / "other").mkdir()
    add_entry(store, "k")

    assert {path.name for path in cache.iterdir()} == {"k", "k.lock", "other"}


def test_one_worker_creates_an_entry_and_others_wait_until_their_deadline(
    store: WeightStore,
) -> None:
    created: list[str] = []

    def find_or_create(name: str) -> None:
        with store.locked("k", clock.now_ns() + 20 * clock.NS_PER_S, is_exclusive=True):
            if store.find("k") is None:
                created.append(name)
                store.prepare("k")
                store.add("k")

    threads = [threading.Thread(target=find_or_create, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(created) == 1
    with (
        store.locked("k", clock.now_ns()),
        store.locked("k", clock.now_ns()),
        pytest.raises(ManifestError, match="another worker"),
        store.locked("k", clock.now_ns(), is_exclusive=True),
    ):
        pass


def test_folder_writable_by_others_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for folder in (tmp_path / "open", tmp_path / "open" / "below"):
        with pytest.raises(ConfigError, match="`open` in its path can be written by others"):
            WeightStore(folder, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        WeightStore(tmp_path / "file", 1)


def test_copy_above_the_cache_limit_is_not_kept(tmp_path: Path) -> None:
    """The entry keeps only a note, so that the copy is not created again."""
    store = WeightStore(tmp_path / "cache", 1500)
    add_entry(store, "k")
    entry = store.find("k")

    assert entry is not None and entry.model is None
    assert "its entry has 2000 bytes, limit 1500 (loading.cache_bytes)" in entry.record.note
    assert os.listdir(tmp_path / "cache" / "k") == [RECORD]
