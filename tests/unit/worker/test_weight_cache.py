"""What a folder of optimised models believes, keeps, and gives up."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from iskander_worker.loading.weight_cache import MODEL, RECORD, WEIGHTS, WeightStore

from iskander import clock
from iskander.errors import ConfigError, ManifestError


def make(store: WeightStore, key: str, length: int = 1000, **notes: str) -> None:
    with store.locked(key, clock.now_ns(), alone=True):
        folder = store.prepare(key)
        for name in (MODEL, WEIGHTS):
            (folder / name).write_bytes(key.encode() * (length // len(key)))
            (folder / name).chmod(0o600)
        store.add(key, **notes)


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "cache", 1 << 20)


def test_an_entry_is_found_as_it_was_added(store: WeightStore, tmp_path: Path) -> None:
    assert store.find("k") is None
    make(store, "k")
    entry = store.find("k")

    assert entry is not None and entry.model == tmp_path / "cache" / "k" / MODEL
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("notes", [{"note": "why"}, {"refusal": "how"}])
def test_an_entry_that_is_no_copy_keeps_no_files(
    store: WeightStore, tmp_path: Path, notes: dict[str, str]
) -> None:
    make(store, "k", **notes)
    entry = store.find("k")

    assert entry is not None and entry.model is None
    assert (entry.record.note, entry.record.refusal) == (
        notes.get("note", ""),
        notes.get("refusal", ""),
    )
    assert os.listdir(tmp_path / "cache" / "k") == [RECORD]


@pytest.mark.parametrize("name", [RECORD, MODEL, WEIGHTS])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "writable", "link", "twice"])
def test_a_damaged_entry_is_none(
    store: WeightStore, tmp_path: Path, name: str, damage: str
) -> None:
    make(store, "k")
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


def test_a_record_of_other_files_or_another_format_is_none(
    store: WeightStore, tmp_path: Path
) -> None:
    make(store, "k")
    record = tmp_path / "cache" / "k" / RECORD
    text = record.read_text()
    for changed in (
        text.replace('"format":1', '"format":2'),
        text.replace(WEIGHTS, "../../other"),
        "[" * 10_000,
    ):
        record.write_text(changed)
        assert store.find("k") is None


def test_the_least_recently_used_go_first_and_never_one_that_is_held(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "cache", 7000)
    for key in ("a", "b", "c"):
        make(store, key)
        os.utime(tmp_path / "cache" / key / RECORD, ns=(0, ord(key)))
    store.find("a")
    with store.locked("b", clock.now_ns()):
        make(store, "d")
        assert store.find("b") is not None and store.find("c") is None
    make(store, "e")

    kept = {path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()}
    assert kept == {"b", "d", "e"}
    assert {path.name for path in (tmp_path / "cache").glob("*.lock")} >= {"d.lock", "e.lock"}


def test_what_was_left_half_made_is_cleared(store: WeightStore, tmp_path: Path) -> None:
    with store.locked("dead", clock.now_ns(), alone=True):
        (store.prepare("dead") / MODEL).write_bytes(b"half")
    make(store, "k")

    assert not (tmp_path / "cache" / ".new-dead").exists()
    assert store.find("k") is not None


def test_one_makes_and_the_others_wait_until_their_deadline(store: WeightStore) -> None:
    made: list[str] = []

    def take(name: str) -> None:
        with store.locked("k", clock.now_ns() + 20 * clock.NS_PER_S, alone=True):
            if store.find("k") is None:
                made.append(name)
                store.prepare("k")
                store.add("k")

    threads = [threading.Thread(target=take, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    with (
        store.locked("k", clock.now_ns()),
        store.locked("k", clock.now_ns()),
        pytest.raises(ManifestError, match="another worker"),
        store.locked("k", clock.now_ns(), alone=True),
    ):
        pass


def test_a_folder_that_others_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for folder in (tmp_path / "open", tmp_path / "open" / "below"):
        with pytest.raises(ConfigError, match="`open` in its path can be written by others"):
            WeightStore(folder, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        WeightStore(tmp_path / "file", 1)


def test_a_copy_that_is_larger_than_the_folder_may_be_is_not_kept(tmp_path: Path) -> None:
    """Only that it was made and is too large, so that it is not made again."""
    store = WeightStore(tmp_path / "cache", 1500)
    make(store, "k")
    entry = store.find("k")

    assert entry is not None and entry.model is None
    assert "its copy has 2000 bytes, limit 1500 (loading.cache_bytes)" in entry.record.note
    assert os.listdir(tmp_path / "cache" / "k") == [RECORD]
