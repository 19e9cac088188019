"""Rejected rows: search, policies, bounds and quarantine files."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_examples import up_to
from support.scoring_sinks import a_plan

from iskander.errors import (
    ConfigError,
    ContractError,
    ExecutionFailed,
    IskanderError,
    LimitExceeded,
    ModelQuarantined,
    PermissionDenied,
    PoisonedRequest,
    QueueFull,
    RemoteFailed,
)
from iskander.lake.rows import (
    ErrorBudget,
    Quarantine,
    RowPolicy,
    TooManyErrors,
    find_rejected_rows,
    is_row_error,
)

RESULTS = pa.schema([pa.field("score", pa.float32(), nullable=False)])
ERROR = ContractError("of the batch")


def a_batch(count: int) -> pa.RecordBatch:
    return pa.record_batch({"a": pa.array(range(count), pa.int64())})


class Server:
    """Rejects batches with bad rows, and counts the calls."""

    def __init__(self, bad: set[int], error: type[IskanderError] = ContractError) -> None:
        self.bad = bad
        self.calls = 0
        self.error = error

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        self.calls += 1
        values = batch.column("a").to_pylist()
        assert values, "an empty batch is never sent"
        found = self.bad & set(values)
        if found:
            raise self.error(f"row {min(found)} is bad")
        return pa.record_batch([pa.array(values, pa.float32())], schema=RESULTS)


@settings(max_examples=up_to(200), deadline=None)
@given(st.integers(2, 200).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_exactly_the_bad_rows_are_found_with_few_calls(case: tuple[int, set[int]]) -> None:
    count, bad = case
    server = Server(bad)
    results, rejected = find_rejected_rows(a_batch(count), ERROR, server, ErrorBudget())
    good = [value for each in results for value in each.column("score").to_pylist()]
    assert good == [i for i in range(count) if i not in bad]
    assert [each.offset for each in rejected] == sorted(bad)
    assert all(each.message == f"row {each.offset} is bad" for each in rejected)
    worst = 2 * max(len(bad), 1) * (math.ceil(math.log2(count)) + 1)
    assert server.calls <= worst


def test_rejected_batch_of_one_row_is_not_sent_again() -> None:
    server = Server({0})
    results, rejected = find_rejected_rows(a_batch(1), ERROR, server, ErrorBudget())
    assert server.calls == 0 and results == []
    assert [(each.offset, each.code, each.message) for each in rejected] == [
        (0, "contract", "of the batch")
    ]


def test_null_keeps_all_rows_with_null_results() -> None:
    policy = RowPolicy("null", RESULTS, ErrorBudget())
    outcome = policy.handle(a_batch(5), ERROR, Server({1, 4}))
    assert outcome.kept.equals(a_batch(5))
    assert outcome.results.column("score").to_pylist() == [0, None, 2, 3, None]
    assert outcome.rejected is None and outcome.rejected_rows == 2


def test_quarantine_separates_rows_and_keeps_their_order() -> None:
    policy = RowPolicy("quarantine=q", RESULTS, ErrorBudget())
    outcome = policy.handle(a_batch(5), ERROR, Server({1, 4}))
    assert outcome.kept.column("a").to_pylist() == [0, 2, 3]
    assert outcome.results.column("score").to_pylist() == [0, 2, 3]
    assert outcome.rejected is not None
    assert outcome.rejected.to_pylist() == [
        {"a": 1, "error_code": "contract", "error_message": "row 1 is bad"},
        {"a": 4, "error_code": "contract", "error_message": "row 4 is bad"},
    ]


@pytest.mark.parametrize("on_error", ["null", "quarantine=q"])
def test_batch_without_good_rows_has_results_of_the_right_types(on_error: str) -> None:
    policy = RowPolicy(on_error, RESULTS, ErrorBudget())
    outcome = policy.handle(a_batch(3), ERROR, Server({0, 1, 2}))
    assert outcome.results.schema.names == ["score"]
    assert outcome.results.schema.field("score").type == pa.float32()
    assert outcome.results.num_rows == (3 if on_error == "null" else 0)
    assert outcome.kept.num_rows == outcome.results.num_rows


def test_rows_that_are_too_many_for_one_call_are_scored_in_parts() -> None:
    """A limit of the server is an error of the batch, and of none of its rows."""

    def score(batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.num_rows > 10:
            raise LimitExceeded("too many rows")
        return Server(set())(batch)

    policy = RowPolicy("quarantine=q", RESULTS, ErrorBudget())
    outcome = policy.handle(a_batch(35), LimitExceeded("too many rows"), score)
    assert outcome.results.num_rows == 35 and outcome.rejected_rows == 0
    assert outcome.rejected is not None and outcome.rejected.num_rows == 0


def test_fail_raises_the_error_without_a_call() -> None:
    server = Server({1})
    policy = RowPolicy("fail", RESULTS, ErrorBudget())
    assert not policy.can_handle(ERROR)
    with pytest.raises(ContractError, match="of the batch"):
        policy.handle(a_batch(5), ERROR, server)
    assert server.calls == 0


@pytest.mark.parametrize(
    ("error", "is_row"),
    [
        (ContractError("x"), True),
        (LimitExceeded("x"), True),
        (PermissionDenied("x"), False),
        (QueueFull("x"), False),
        (ExecutionFailed("x"), True),
        (PoisonedRequest("x"), True),
        (RemoteFailed("x"), False),
        (ModelQuarantined("x"), False),
        (IskanderError("x"), False),
    ],
)
def test_only_errors_of_values_are_errors_of_rows(error: IskanderError, is_row: bool) -> None:
    assert is_row_error(error) is is_row


@pytest.mark.parametrize("error", [PermissionDenied, QueueFull, ModelQuarantined])
def test_other_error_during_the_search_ends_it(error: type[IskanderError]) -> None:
    policy = RowPolicy("null", RESULTS, ErrorBudget())
    with pytest.raises(error):
        policy.handle(a_batch(8), ERROR, Server({3}, error))


class Crashing(Server):
    """A model whose runtime ends with the bad rows."""

    def __init__(self, bad: set[int]) -> None:
        super().__init__(bad, PoisonedRequest)
        self.crashes = 0

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        try:
            return super().__call__(batch)
        except PoisonedRequest:
            self.crashes += 1
            raise


@pytest.mark.parametrize("bad", [{0}, {8191}, {4711}, {1, 2}, {63, 64, 8000}])
def test_rows_that_end_workers_are_found_with_few_such_calls(bad: set[int]) -> None:
    server = Crashing(bad)
    policy = RowPolicy("quarantine=q", RESULTS, ErrorBudget())
    outcome = policy.handle(a_batch(8192), PoisonedRequest("crashed"), server)
    assert outcome.rejected is not None
    assert set(outcome.rejected["a"].to_pylist()) == bad
    assert outcome.rejected["error_code"].to_pylist() == ["poisoned"] * len(bad)
    # Of 128, 2 and 1 rows.
    assert server.crashes <= 3 * len(bad)
    assert outcome.kept.num_rows == 8192 - len(bad)


def test_calls_that_end_workers_are_limited() -> None:
    budget = ErrorBudget(poisoned_max=10)
    server = Crashing(set(range(8192)))
    policy = RowPolicy("null", RESULTS, pickle.loads(pickle.dumps(budget)))  # noqa: S301
    with pytest.raises(TooManyErrors, match="data of 11 calls ended workers; limit 10"):
        policy.handle(a_batch(8192), PoisonedRequest("crashed"), server)
    assert server.crashes == 10


def test_budget_is_shared_and_names_its_limit() -> None:
    budget = ErrorBudget(4, count=1)
    policy = RowPolicy("null", RESULTS, budget)
    policy.handle(a_batch(8), ERROR, Server({3, 4}))
    with pytest.raises(TooManyErrors, match="5 rows; limit 4") as caught:
        policy.handle(a_batch(8), ERROR, Server({1, 2}))
    assert "row 2 is bad" in caught.value.message


def test_budget_counts_rows_of_other_processes() -> None:
    budget = ErrorBudget(4, count=1)
    copy = pickle.loads(pickle.dumps(budget))  # noqa: S301
    RowPolicy("null", RESULTS, copy).handle(a_batch(8), ERROR, Server({3, 4}))
    budget.add(2)
    with pytest.raises(TooManyErrors, match="more than 4 rows"):
        budget.add(2)


def quarantined(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def rejected_rows(bad: set[int]) -> pa.RecordBatch:
    policy = RowPolicy("quarantine=q", RESULTS, ErrorBudget())
    rejected = policy.handle(a_batch(100), ERROR, Server(bad)).rejected
    assert rejected is not None
    return rejected


def test_quarantine_has_one_file_for_a_unit_with_rejected_rows(tmp_path: Path) -> None:
    plan = a_plan(2)
    quarantine = Quarantine(str(tmp_path / "q"), plan, a_batch(1).schema)
    contents = []
    for _ in range(2):
        writer = quarantine.open(plan.units[0])
        writer.write(rejected_rows({1, 2}))
        writer.write(rejected_rows({50}))
        assert writer.finish() == 3
        assert quarantine.open(plan.units[1]).finish() == 0
        (found,) = quarantined(tmp_path / "q")
        contents.append(found.read_bytes())
    assert contents[0] == contents[1]
    assert found.name == f"{plan.units[0].name}-{plan.fingerprint[:8]}.parquet"
    assert pq.read_table(found).column("a").to_pylist() == [1, 2, 50]
    assert pq.read_schema(found).metadata[b"iskander.model"] == b"churn"


def test_unit_that_is_scored_again_without_rejected_rows_has_no_file(tmp_path: Path) -> None:
    plan = a_plan(1)
    quarantine = Quarantine(str(tmp_path / "q"), plan, a_batch(1).schema)
    writer = quarantine.open(plan.units[0])
    writer.write(rejected_rows({1}))
    writer.finish()
    quarantine.open(plan.units[0]).finish()
    assert quarantined(tmp_path / "q") == []


def test_aborted_unit_leaves_no_file(tmp_path: Path) -> None:
    plan = a_plan(1)
    writer = Quarantine(str(tmp_path / "q"), plan, a_batch(1).schema).open(plan.units[0])
    writer.write(rejected_rows({1}))
    writer.abort()
    assert quarantined(tmp_path / "q") == []


@pytest.mark.parametrize("name", ["error_code", "error_message"])
def test_input_with_a_column_of_the_quarantine_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Quarantine(str(tmp_path / "q"), a_plan(1), pa.schema([(name, pa.string())]))


def test_dictionary_column_is_quarantined_as_values(tmp_path: Path) -> None:
    batch = a_batch(4).append_column("d", pa.array(["x", "y", "x", "z"]).dictionary_encode())
    policy = RowPolicy("quarantine=q", RESULTS, ErrorBudget())
    score: Callable[[pa.RecordBatch], pa.RecordBatch] = Server({3})
    rejected = policy.handle(batch, ERROR, score).rejected
    assert rejected is not None and rejected.column("d").to_pylist() == ["z"]
    plan = a_plan(1)
    writer = Quarantine(str(tmp_path / "q"), plan, batch.schema).open(plan.units[0])
    writer.write(rejected)
    assert writer.finish() == 1
