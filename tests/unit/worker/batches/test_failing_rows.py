"""Search for the row and the column with which a run fails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from iskander_worker.backends import Run
from iskander_worker.batches import failing_rows
from iskander_worker.batches.failing_rows import FailingRows, Finding, column_of, first_failing
from iskander_worker.executor import Executor
from iskander_worker.session import Session
from iskander_worker.warm_up import to_body
from support import models

from iskander.contract.column_types import ColumnType
from iskander.contract.tensors import TensorSpec
from iskander.errors import ExecutionFailed
from iskander.interprocess.control.messages import Execute, ModelSpec, Slice
from iskander.interprocess.memory.segment import Segment


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 100, 1000])
def test_first_failing_row_is_found_with_few_runs(rows: int) -> None:
    """At most the logarithm of the rows, and with at most one row more than the batch."""
    for bad in {0, 1, rows // 2, rows - 1} & set(range(rows)):
        sizes: list[int] = []

        def fails(first: int, count: int, bad: int = bad, sizes: list[int] = sizes) -> bool:
            sizes.append(count)
            return first <= bad < first + count

        row, _ = first_failing(rows, fails)
        assert row == bad
        assert len(sizes) <= rows.bit_length() + 1
        assert sum(sizes) <= rows + 1


def test_first_of_several_rows_is_found() -> None:
    bad = {3, 4, 9}
    row, has_others = first_failing(10, lambda first, n: bool(bad & set(range(first, first + n))))
    assert (row, has_others) == (3, True)


def test_rows_that_fail_only_together_are_not_named() -> None:
    """Such as a batch that needs too much memory."""
    assert first_failing(10, lambda first, n: n > 5) == (None, True)


def test_search_ends_without_time() -> None:
    assert first_failing(10, lambda first, n: None) == (None, False)


STRINGS = tuple(TensorSpec(name, name, ColumnType("utf8"), ()) for name in "ab")
FLOATS = TensorSpec("x", "x", ColumnType("float32"), ())
STOF = "Non-zero status code returned while running Cast node. Name:'' Status Message: stof"


@pytest.mark.parametrize(
    ("a", "b", "text", "column"),
    [
        ("one", "2", STOF, "a"),
        ("1", "", STOF, "b"),
        ("one", "two", STOF, ""),
        ("one", "2", "indices element out of data bounds", ""),
        ("1" + 70_000 * " ", "2", STOF, "a"),
    ],
)
def test_column_is_the_only_one_with_a_string_that_is_no_number(
    a: str, b: str, text: str, column: str
) -> None:
    specs = (*STRINGS, FLOATS)
    arrays = {
        "a": np.array(["5", a, "6"], object),
        "b": np.array(["7", b, "8"], object),
        "x": np.zeros(3, np.float32),
    }
    body = to_body(specs, 3, arrays).data
    assert column_of(specs, body, 3, 1, text) == column
    assert column_of((STRINGS[0], FLOATS), body, 3, 1, STOF) == "a"
    assert column_of((FLOATS,), body, 3, 1, "any") == "x"


class Batch:
    """An executor with a model, and a request of it in its arena."""

    def __init__(self, folder: Path, texts: list[str]) -> None:
        path = str(models.parsing(folder))
        limits = ("level3", False, True, 64, 256, "")
        self.session = Session(ModelSpec(0, "m", "1", "onnx", path, ("cpu",), 1, 1, *limits), 1)
        self.session.measure(is_confined=False)
        assert not self.session.relation.is_whole, self.session.relation
        rows = len(texts)
        arrays = {
            "a": np.array(texts, object),
            "b": np.array(["1"] * rows, object),
            "x": np.ones(rows, np.float32),
        }
        body = to_body(self.session.contract.inputs, rows, arrays)
        self.input = Segment.create("iskander-test-input", 1 << 20)
        self.output = Segment.create("iskander-test-output", 1 << 20)
        self.input.view[: len(body)] = body.data
        self.executor = Executor(self.input, self.output)
        self.executor.sessions[0] = self.session
        self.message = Execute(1, 0, rows, (Slice(0, rows, 0, rows, 0),), 0, 0, 0)

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.clear()
        self.session.close()
        self.input.close()
        self.output.close()

    def find(self, search: FailingRows, error: ExecutionFailed | None = None) -> Finding:
        """Run the batch, which fails, and search; or search after `error`."""
        if error is None:
            with pytest.raises(ExecutionFailed) as caught:
                self.executor.execute(self.message, Run())
            error = caught.value
        return search.find(self.executor, self.message, Run(), error)


def test_string_that_is_no_number_is_found_with_its_row_and_column(tmp_path: Path) -> None:
    search = FailingRows()
    with Batch(tmp_path, ["1", "2", "x", "4", "y"]) as batch:
        assert batch.find(search) == Finding(True, 2, "a")
        assert batch.find(search, ExecutionFailed("bad_alloc")) == Finding()


def test_only_row_of_a_request_is_the_cause_if_the_model_has_run_before(tmp_path: Path) -> None:
    search = FailingRows()
    with Batch(tmp_path, ["x"]) as batch:
        assert batch.find(search) == Finding(False, 0, "a")
        search.ran.add(0)
        assert batch.find(search) == Finding(True, 0, "a")


def test_searches_take_a_small_share_of_the_time_of_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reading of the clock here is 10 ms after the last one."""
    now = iter(range(0, 1 << 60, 10_000_000))
    monkeypatch.setattr(failing_rows, "now_ns", lambda: next(now))
    search = FailingRows()
    with Batch(tmp_path, ["1", "2", "x", "4"]) as batch:
        found = [batch.find(search).row for _ in range(40)]
    assert found[0] == 2
    assert 1 <= found.count(2) <= 3
