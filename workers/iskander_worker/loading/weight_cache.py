"""Optimised models on disk, their weights as the processor reads them, mapped by every worker.

What lies there was made by a process that tried the model out (`tryout`), and is named by all that
it depends on, so it is never stale. It is believed only where nobody else can write, and where
every byte has the hash that was noted when it was made.

Layout: `KEY/entry.json` (a `Record`), `KEY/model.onnx` and `KEY/weights.bin` where weights are
shared; `KEY.lock` is held shared by who opens the model and alone by who makes or removes it;
`.new-KEY` is being made.

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

from iskander import clock
from iskander.decoders import thread_safe
from iskander.errors import ConfigError, ManifestError

FORMAT = 1
ENTRIES_MAX = 4096
RECORD_BYTES_MAX = 1 << 16
TURN_S = 0.02
RECORD, MODEL, WEIGHTS = "entry.json", "model.onnx", "weights.bin"


@thread_safe
class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a model that was tried out.

    Attributes:
        digests: SHA-256 of the files beside the record; none where weights are not shared.
        note: Why they are not, where that is not as it should be.
        refusal: How the model ended the process that tried it out; empty where it did not.
        refused_ns: When, by this machine's clock since it started.
    """

    format: int
    digests: dict[str, str]
    note: str = ""
    refusal: str = ""
    refused_ns: int = 0


class Entry(NamedTuple):
    """A record and the optimised model, None where weights are not shared."""

    record: Record
    model: Path | None


class WeightStore:
    """A folder of optimised models.

    Args:
        folder: Made where it is missing.
        bytes_max: Of all entries; the least recently used go first.

    Raises:
        ConfigError: The folder cannot be had, or others than this user could change what is in it.
    """

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = folder.resolve(strict=True)
            _require_own(self._folder)
        except OSError as error:
            raise ConfigError(f"loading.cache cannot be used: {error.strerror}") from None

    def find(self, key: str) -> Entry | None:
        """The entry of a model; one that is broken or not ours is taken for none.

        The caller holds its lock.
        """
        folder = self._folder / key
        try:
            raw = (folder / RECORD).read_bytes()
            _require_private(folder / RECORD)
            if len(raw) > RECORD_BYTES_MAX:
                return None
            record = msgspec.json.decode(raw, type=Record)
            if record.format != FORMAT or set(record.digests) - {MODEL, WEIGHTS}:
                return None
            for name, digest in record.digests.items():
                _require_private(folder / name)
                if _digest(folder / name) != digest:
                    return None
            os.utime(folder / RECORD)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return Entry(record, folder / MODEL if record.digests else None)

    def prepare(self, key: str) -> Path:
        """An empty folder to make an entry in; the caller holds its lock alone.

        Raises:
            ConfigError: There is no room, or no right.
        """
        folder = self._folder / f".new-{key}"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(f"loading.cache cannot be written: {error.strerror}") from None
        return folder

    def add(self, key: str, note: str = "", refusal: str = "") -> None:
        """Make what was prepared the entry of a model, in one step, and make room for it.

        The caller holds its lock alone.

        Raises:
            ConfigError: There is no room, or no right.
        """
        new, folder = self._folder / f".new-{key}", self._folder / key
        try:
            copied = sum((new / n).stat().st_size for n in (MODEL, WEIGHTS) if (new / n).exists())
            if not note and not refusal and copied > self._bytes_max:
                note = f"its copy has {copied} bytes, and loading.cache_bytes is {self._bytes_max}"
            names = [] if note or refusal else [n for n in (MODEL, WEIGHTS) if (new / n).exists()]
            for name in (MODEL, WEIGHTS):
                if name not in names:
                    (new / name).unlink(missing_ok=True)
            digests = {name: _digest(new / name) for name in names}
            record = Record(FORMAT, digests, note, refusal, clock.now_ns() if refusal else 0)
            with (new / RECORD).open("wb") as stream:
                os.fchmod(stream.fileno(), 0o600)
                stream.write(msgspec.json.encode(record))
                stream.flush()
                os.fsync(stream.fileno())
            shutil.rmtree(folder, ignore_errors=True)
            new.rename(folder)
        except OSError as error:
            shutil.rmtree(new, ignore_errors=True)
            raise ConfigError(f"loading.cache cannot be written: {error.strerror}") from None
        self._make_room(key)

    def discard(self, key: str) -> None:
        """Give up what was prepared; the caller holds its lock alone."""
        shutil.rmtree(self._folder / f".new-{key}", ignore_errors=True)

    @contextlib.contextmanager
    def locked(self, key: str, deadline_ns: int, *, alone: bool = False) -> Iterator[None]:
        """Hold a model's entry: shared with others who open it, or alone.

        Raises:
            ManifestError: Another process held it until the deadline.
        """
        path = self._folder / f"{key}.lock"
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise ConfigError(f"loading.cache cannot be written: {error.strerror}") from None
            if _take(fd, fcntl.LOCK_EX if alone else fcntl.LOCK_SH) and _is_at(fd, path):
                break
            os.close(fd)
            if clock.now_ns() > deadline_ns:
                raise ManifestError(
                    "another worker was still making the copy of its weights that all are to share"
                )
            clock.pause_s(TURN_S)
        try:
            yield
        finally:
            os.close(fd)

    def _make_room(self, kept: str) -> None:
        """Remove the least recently used entries that nobody holds, until all fit."""
        used = []
        for folder in self._folder.iterdir():
            if folder.is_dir() and folder.name != kept:
                with contextlib.suppress(OSError):
                    is_left = folder.name.startswith(".new-")
                    used_ns = 0 if is_left else (folder / RECORD).stat().st_mtime_ns
                    used.append((used_ns, _bytes_in(folder), folder))
        total = sum(length for _, length, _ in used) + _bytes_in(self._folder / kept)
        count = len(used) + 1
        for used_ns, length, folder in sorted(used):
            if used_ns and total <= self._bytes_max and count <= ENTRIES_MAX:
                break
            if self._remove(folder):
                total, count = total - length, count - 1

    def _remove(self, folder: Path) -> bool:
        path = self._folder / f"{folder.name.removeprefix('.new-')}.lock"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return False
        try:
            if not _take(fd, fcntl.LOCK_EX) or not _is_at(fd, path):
                return False
            shutil.rmtree(folder, ignore_errors=True)
            path.unlink()
            return True
        finally:
            os.close(fd)


def _take(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: Path) -> bool:
    """Whether the file that was locked is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _require_own(folder: Path) -> None:
    """A folder that only this user writes, below folders that no third user can exchange."""
    for each in (folder, *folder.parents):
        status = each.stat()
        is_writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        owners = (os.geteuid(),) if each == folder else (os.geteuid(), 0)
        is_sticky = each != folder and status.st_mode & stat.S_ISVTX
        if (is_writable and not is_sticky) or status.st_uid not in owners:
            raise ConfigError(
                f"loading.cache is not used: `{each.name or '/'}` in its path can be written by "
                "others, who could exchange a model"
            )


def _require_private(path: Path) -> None:
    status = path.lstat()
    is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    is_writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not is_plain or is_writable or status.st_uid != os.geteuid():
        raise OSError("not a file of this user's alone")


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _bytes_in(folder: Path) -> int:
    with os.scandir(folder) as entries:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
