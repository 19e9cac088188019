"""Files of the prediction log: complete ones only, rolled by size and age, in bounded memory."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.processes import eventually

from iskander.config.observation import PredictionLogConfig
from iskander.foundation.backoff import backoff
from iskander.foundation.clock import now_ns
from iskander.sampling.prediction_log import files, writer
from iskander.sampling.prediction_log.counts import Counts
from iskander.sampling.prediction_log.delivery import Complete, LocalFolder
from iskander.sampling.prediction_log.workspace import Workspace
from iskander.sampling.prediction_log.writer import Rows, Writer

NS_PER_S = 1_000_000_000
CONFIG = PredictionLogConfig(path="x", compression="none", file_s=3600.0)


def batch(first: int, rows: int = 100, name: str = "x") -> pa.RecordBatch:
    """Rows that do not compress."""
    values = np.random.default_rng(first).integers(0, 1 << 62, rows)
    return pa.record_batch({name: pa.array(values), "n": [first] * rows})


class Log:
    """A writer with a local folder."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        self.counts = Counts()
        self.workspace = Workspace(root / ".writing")
        self.delivery = LocalFolder(root, self.counts)
        config = msgspec.structs.replace(CONFIG, **settings)
        self.writer = Writer(config, self.workspace, self.delivery, self.counts)

    def put(self, first: int, partition: str = "model=m", **options: Any) -> None:
        self.writer.put(Rows(partition, batch(first, **options)))

    def files(self) -> list[Path]:
        return sorted(self.root.glob("model=*/**/*.parquet"))

    def read(self) -> list[int]:
        """The distinct values of `n` in all files."""
        return sorted({n for path in self.files() for n in pq.read_table(path)["n"].to_pylist()})

    def count(self, name: str) -> int:
        counts: dict[str, int] = self.counts.report()["counts"]
        return counts.get(name, 0)

    def close(self) -> None:
        self.writer.close(now_ns() + 20 * NS_PER_S)
        self.workspace.release()


MakeLog = Callable[..., Log]


@pytest.fixture
def make_log(tmp_path: Path) -> Iterator[MakeLog]:
    made: list[Log] = []

    def make(**settings: Any) -> Log:
        made.append(Log(tmp_path / "log", **settings))
        return made[-1]

    yield make
    for log in made:
        log.writer.close(now_ns() + 20 * NS_PER_S)
    assert not [each for each in threading.enumerate() if each.name == "write"]


def test_files_are_invisible_until_they_are_complete(make_log: MakeLog) -> None:
    log = make_log()
    log.put(1)
    eventually(lambda: list(log.workspace.writing.iterdir()), what="an incomplete file")
    assert not log.files()
    assert all(path.suffix == ".tmp" for path in log.workspace.writing.iterdir())
    log.close()
    assert log.read() == [1]
    assert (log.count("logged"), log.count("files")) == (1, 1)
    assert log.count("bytes") == log.files()[0].stat().st_size
    assert not list(log.workspace.writing.iterdir())


def test_file_is_complete_at_its_size(make_log: MakeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "GROUP_BYTES", 4000)
    log = make_log(file_bytes=20_000)
    for first in range(60):
        log.put(first, rows=300)
    eventually(lambda: len(log.files()) >= 3, what="three files")
    log.close()
    assert log.read() == list(range(60))
    sizes = sorted(path.stat().st_size for path in log.files())
    assert all(20_000 <= size < 40_000 for size in sizes[1:])
    assert pq.ParquetFile(log.files()[0]).num_row_groups > 1


def test_file_is_complete_at_its_age(make_log: MakeLog) -> None:
    log = make_log(file_s=0.2)
    log.put(1)
    eventually(log.files, what="a file")
    log.close()


def test_partitions_and_schemas_have_files_of_their_own(make_log: MakeLog) -> None:
    log = make_log()
    log.put(1, "model=a/hour=01")
    log.put(2, "model=a/hour=02")
    log.put(3, "model=a/hour=01", name="other")
    log.put(4, "model=a/hour=01")
    log.close()
    contents = {
        (
            path.parent.name,
            *pq.read_schema(path).names,
            *sorted(set(pq.read_table(path)["n"].to_pylist())),
        )
        for path in log.files()
    }
    assert contents == {
        ("hour=01", "x", "n", 1, 4),
        ("hour=02", "x", "n", 2),
        ("hour=01", "other", "n", 3),
    }


def test_rows_above_the_buffer_are_dropped_and_counted(make_log: MakeLog) -> None:
    size = batch(0).nbytes
    log = make_log(buffer_bytes=4 * size)
    release = threading.Event()
    log.delivery.deliver = lambda file: release.wait(20)  # type: ignore[method-assign]
    with log.writer._changed:
        for first in range(10):
            log.put(first)
    assert log.count("buffer_full") == 6
    assert log.writer.buffered_bytes <= 4 * size
    release.set()


def test_many_files_do_not_fill_the_memory(make_log: MakeLog) -> None:
    """Each has a few rows, far less than a row group."""
    size = batch(0).nbytes
    log = make_log(buffer_bytes=8 * size)
    for first in range(100):
        eventually(lambda: log.writer.buffered_bytes <= 6 * size, what="space")
        log.put(first, f"model={first % 20}")
    log.close()
    assert log.count("buffer_full") == 0
    assert log.read() == list(range(100))


def test_open_files_are_bounded(make_log: MakeLog) -> None:
    log = make_log()
    for first in range(writer.OPEN_FILES_MAX + 5):
        log.put(first, f"model={first:03}")
    eventually(lambda: len(log.files()) == 5, what="the oldest files")
    assert [path.parent.name for path in log.files()] == [f"model={n:03}" for n in range(5)]
    log.close()


def test_failed_writes_are_counted_and_end_by_themselves(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "backoff", lambda *_: 0.05)
    log = make_log(file_s=0.1)
    shutil.rmtree(log.workspace.writing)
    log.put(1)
    eventually(lambda: log.count("write_failed") == 1, what="a failed write")
    assert "model=m cannot be written: " in log.counts.report()["failure"]
    log.workspace.writing.mkdir()
    log.put(2)
    eventually(log.files, what="a file")
    assert log.read() == [2]
    eventually(lambda: log.counts.report()["failure"] == "", what="the end of the failure")
    log.close()


def test_writer_goes_on_after_a_day_of_failures(make_log: MakeLog) -> None:
    """2.0 ** 1024 is no float."""
    log = make_log(file_s=0.1)
    log.writer._failures = 2000
    shutil.rmtree(log.workspace.writing)
    log.put(1)
    eventually(lambda: log.count("write_failed") == 1, what="a failed write")
    log.close()
    assert [backoff(failures, 1.0, 60.0) for failures in (0, 1, 2, 2000)] == [1, 1, 2, 60]


def test_file_that_cannot_be_delivered_is_deleted_and_its_samples_are_counted(
    make_log: MakeLog,
) -> None:
    log = make_log()

    def fail(_: Complete) -> None:
        raise OSError("read-only file system")

    log.delivery.deliver = fail  # type: ignore[method-assign]
    for first in range(3):
        log.put(first)
    log.close()
    assert log.count("write_failed") == 3
    assert not list(log.workspace.writing.iterdir())


def test_slots_are_taken_one_by_one_and_incomplete_files_are_deleted(tmp_path: Path) -> None:
    first, second = Workspace(tmp_path), Workspace(tmp_path)
    assert (first.writing.parent.name, second.writing.parent.name) == ("slot-0", "slot-1")
    (first.writing / "a.tmp").write_bytes(b"half")
    (first.ready / "model=m").mkdir(parents=True)
    (first.ready / "model=m" / "b.parquet").write_bytes(b"whole")
    first.release()
    third = Workspace(tmp_path)
    assert third.writing == first.writing
    assert not list(third.writing.iterdir())
    assert [path.name for path in third.left_over()] == ["b.parquet"]
    second.release()
    third.release()
