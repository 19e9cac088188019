"""Cache of optimised models on disk, whose prepacked weights every worker maps.

An entry is created by a sandboxed load, and its name is a hash of everything that it depends on, so
it is never stale. It is used only if no other user can write it and every file has its recorded
hash.

Layout: `KEY/entry.json` (a `Record`); `KEY/model.onnx` and `KEY/weights.bin` if weights are shared,
or TensorRT's engines (`engines`); `KEY.lock`, locked shared to open the model and exclusively to
create or evict it; `.new-KEY`, an entry under construction.

Runs on: worker main and the operator's tool.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from iskander.errors import ConfigError, ManifestError
from iskander.foundation import clock
from iskander.foundation.decoders import thread_safe
from iskander_worker.loading.measurement import Measurement

FORMAT = 5
ENTRIES_MAX = 4096
FILES_MAX = 256
RECORD_BYTES_MAX = 1 << 16
POLL_S = 0.02
RECORD, MODEL, WEIGHTS = "entry.json", "model.onnx", "weights.bin"


@thread_safe
class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of the sandboxed load of a model, as in `Verdict`.

    Attributes:
        digests: SHA-256 of the files beside the record; empty if no weights are shared.
        note: Why no weights are shared.
        refusal: How the model crashed or hung its sandbox.
        refused_ns: Time of the refusal, on the monotonic clock.
        measurement: None if the load ended before the measurement.
    """

    format: int
    digests: dict[str, str]
    note: str = ""
    refusal: str = ""
    refused_ns: int = 0
    measurement: Measurement | None = None


class Entry(NamedTuple):
    """A record, its folder, and the optimised model, which is None if weights are not shared."""

    record: Record
    folder: Path
    model: Path | None


class WeightStore:
    """A folder of optimised models, created if it is missing; evicts the least recently used.

    Raises a `ConfigError` if the folder cannot be used, or another user could change its files.
    """

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = folder.resolve(strict=True)
            _require_trusted_folder(self._folder)
        except OSError as error:
            raise ConfigError(f"loading.cache cannot be used: {error.strerror}") from None

    def find(self, key: str) -> Entry | None:
        """Return the entry with this key if it is valid, else None. The caller holds its lock."""
        folder = self._folder / key
        try:
            raw = (folder / RECORD).read_bytes()
            _require_private(folder / RECORD)
            if len(raw) > RECORD_BYTES_MAX:
                return None
            record = msgspec.json.decode(raw, type=Record)
            if record.format != FORMAT or any("/" in name for name in record.digests):
                return None
            for name, digest in record.digests.items():
                _require_private(folder / name)
                if _digest(folder / name) != digest:
                    return None
            os.utime(folder / RECORD)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return Entry(record, folder, folder / MODEL if MODEL in record.digests else None)

    def prepare(self, key: str) -> Path:
        """Create an empty folder for a new entry. The caller holds its lock exclusively."""
        folder = self._folder / f".new-{key}"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise _unwritable(error) from None
        return folder

    def add(
        self,
        key: str,
        note: str = "",
        refusal: str = "",
        measurement: Measurement | None = None,
    ) -> None:
        """Publish the prepared entry atomically. The caller holds its lock exclusively."""
        new, folder = self._folder / f".new-{key}", self._folder / key
        try:
            names = sorted(file.name for file in new.iterdir())
            if len(names) > FILES_MAX:
                raise ConfigError(f"its entry has {len(names)} files, limit {FILES_MAX}")
            size = sum((new / name).stat().st_size for name in names)
            if not note and not refusal and size > self._bytes_max:
                note = f"its entry has {size} bytes, limit {self._bytes_max} (loading.cache_bytes)"
            if note or refusal:
                for name in names:
                    (new / name).unlink()
                names = []
            digests = {name: _digest(new / name) for name in names}
            refused_ns = clock.now_ns() if refusal else 0
            record = Record(FORMAT, digests, note, refusal, refused_ns, measurement)
            with (new / RECORD).open("wb") as stream:
                os.fchmod(stream.fileno(), 0o600)
                stream.write(msgspec.json.encode(record))
                stream.flush()
                os.fsync(stream.fileno())
            shutil.rmtree(folder, ignore_errors=True)
            new.rename(folder)
        except OSError as error:
            shutil.rmtree(new, ignore_errors=True)
            raise _unwritable(error) from None
        self._evict(key)

    def discard(self, key: str) -> None:
        """Remove a prepared entry. The caller holds its lock exclusively."""
        shutil.rmtree(self._folder / f".new-{key}", ignore_errors=True)

    @contextlib.contextmanager
    def locked(self, key: str, deadline_ns: int, *, is_exclusive: bool = False) -> Iterator[None]:
        """Hold the lock of an entry during the block, shared or exclusively."""
        path = self._lock_path(key)
        while True:
            try:
                fd = _lock(path, fcntl.LOCK_EX if is_exclusive else fcntl.LOCK_SH)
            except OSError as error:
                raise _unwritable(error) from None
            if fd is not None:
                break
            if clock.now_ns() > deadline_ns:
                raise ManifestError("timeout: another worker is still loading it in a sandbox")
            clock.pause_s(POLL_S)
        try:
            yield
        finally:
            os.close(fd)

    def _lock_path(self, key: str) -> Path:
        return self._folder / f"{key}.lock"

    def _evict(self, kept: str) -> None:
        """Remove the least recently used entries that are not locked, until the others fit."""
        used = []
        for folder in self._folder.iterdir():
            if folder.is_dir() and folder.name != kept:
                with contextlib.suppress(OSError):
                    used.append((self._used_ns(folder), _bytes_in(folder), folder))
        total = sum(length for _, length, _ in used) + _bytes_in(self._folder / kept)
        count = len(used) + 1
        for used_ns, length, folder in sorted(used):
            if used_ns and total <= self._bytes_max and count <= ENTRIES_MAX:
                break
            if self._remove(folder):
                total, count = total - length, count - 1

    def _used_ns(self, folder: Path) -> int:
        """Return the time of an entry's last use; 0 if its creation or removal was interrupted."""
        if folder.name.startswith(".new-"):
            return 0
        record = folder / RECORD
        # A folder without a lock is no entry.
        if self._lock_path(folder.name).exists() and not record.exists():
            return 0
        return record.stat().st_mtime_ns

    def _remove(self, folder: Path) -> bool:
        path = self._lock_path(folder.name.removeprefix(".new-"))
        try:
            fd = _lock(path, fcntl.LOCK_EX)
        except OSError:
            return False
        if fd is None:
            return False
        try:
            shutil.rmtree(folder, ignore_errors=True)
            path.unlink()
            return True
        finally:
            os.close(fd)


def _lock(path: Path, kind: int) -> int | None:
    """Lock a file without waiting; return None if another process has locked or replaced it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), path.stat()):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


def _unwritable(error: OSError) -> ConfigError:
    return ConfigError(f"loading.cache cannot be written: {error.strerror}")


def _require_trusted_folder(folder: Path) -> None:
    """Require that only this user can write a folder, and only this user or root its parents."""
    for parent in (folder, *folder.parents):
        status = parent.stat()
        is_writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        owners = (os.geteuid(),) if parent == folder else (os.geteuid(), 0)
        is_sticky = parent != folder and status.st_mode & stat.S_ISVTX
        if (is_writable and not is_sticky) or status.st_uid not in owners:
            raise ConfigError(
                f"loading.cache is not used: `{parent.name or '/'}` in its path can be written by "
                "others, who could replace a model"
            )


def _require_private(path: Path) -> None:
    status = path.lstat()
    is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    is_writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not is_plain or is_writable or status.st_uid != os.geteuid():
        raise OSError("not a private file of this user")


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _bytes_in(folder: Path) -> int:
    with os.scandir(folder) as entries:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
