"""Scoring jobs: results, rejected rows and the plan."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from support.scoring_bench import (
    Bench,
    description,
    rejecting,
)

from iskander.errors import (
    ConfigError,
    ContractError,
    QueueFull,
)
from iskander.lake.errors import JobConflict


@pytest.mark.parametrize("concurrency", [1, 3])
def test_rows_keep_their_order_and_kept_columns(tmp_path: Path, concurrency: int) -> None:
    bench = Bench(tmp_path, concurrency=concurrency, keep=("id",))
    report = bench.run()
    assert bench.sink.committed == [{"id": f"r{x}", "y": 3 * x + 1} for x in range(30)]
    assert (report.rows_in, report.rows_out, report.units, report.state) == (30, 30, 3, "done")
    assert bench.sink.calls == ["prepare False", "commit", "finish"]
    assert not bench.state.exists()


def test_only_inputs_of_the_model_are_sent_to_the_pinned_version(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run()
    assert bench.client.columns == {"x"}
    (model, version, terms) = bench.client.calls[0]
    assert (model, version) == ("m", "3")
    assert terms["run_alone"] is True
    assert terms["client"] == f"score-{bench.planned().plan.fingerprint[:8]}"


def test_batches_are_cut_to_the_limits_of_the_server(tmp_path: Path) -> None:
    bench = Bench(tmp_path, units=1, batch_rows=8)
    limits = {"rows": 3, "bytes": 1 << 20, "string_bytes": 1 << 20}
    bench.client.description = description(limits=limits)
    bench.run()
    assert max(map(len, bench.client.sent)) == 3
    assert [row["y"] for row in bench.sink.committed or []] == [3 * x + 1 for x in range(10)]


def test_dry_run_sends_a_batch_within_the_limits_of_the_server(tmp_path: Path) -> None:
    bench = Bench(tmp_path, batch_rows=10)
    half = pa.record_batch({"x": list(range(5))})
    limits = {"rows": 1000, "bytes": pa.ipc.get_record_batch_size(half), "string_bytes": 1 << 20}
    bench.client.description = description(limits=limits)
    estimate = bench.dry_run().estimate
    assert bench.client.sent == [[0, 1, 2, 3, 4]]
    assert estimate is not None and estimate.rows == 5


def test_dry_run_counts_finished_units_and_rejects_a_damaged_journal(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.client.answer = rejecting(25)
    with pytest.raises(ContractError):
        bench.run()
    assert (bench.dry_run().earlier.state, bench.dry_run().earlier.units_finished) == ("same", 2)
    with (bench.state / "journal.jsonl").open("ab") as file:
        file.write(b"\0\0\n")
    with pytest.raises(JobConflict, match="line 3 is damaged"):
        bench.dry_run()


def test_limit_scores_the_first_units_only(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limit=12)
    assert [each.rows_max for each in bench.planned().plan.units] == [None, 2]


def test_rejected_rows_become_null(tmp_path: Path) -> None:
    bench = Bench(tmp_path, on_error="null")
    bench.client.answer = rejecting(0, 13, 29)
    report = bench.run()
    expected = [None if x in (0, 13, 29) else 3 * x + 1 for x in range(30)]
    assert [row["y"] for row in bench.sink.committed or []] == expected
    assert (report.rejected, report.quarantined) == (3, 0)


def test_rejected_rows_are_quarantined(tmp_path: Path) -> None:
    bench = Bench(tmp_path, on_error=f"quarantine={tmp_path / 'bad'}")
    bench.client.answer = rejecting(5, 6)
    report = bench.run()
    assert [row["x"] for row in bench.sink.committed or []] == [
        x for x in range(30) if x not in (5, 6)
    ]
    assert (report.rows_in, report.rows_out, report.quarantined) == (30, 28, 2)


def test_rows_that_cannot_be_sent_are_rejected_rows(tmp_path: Path) -> None:
    """Three batches in a row cannot be matched, and the first stream has nothing to send."""
    bench = Bench(tmp_path, units=1, on_error="null", batch_rows=2)
    bench.client.description = description(
        input_schema=pa.schema([("x", pa.int8())]), input_types={"x": "int8"}
    )
    bench.source._rows = 260
    bench.run()
    expected = [3 * x + 1 if x < 128 else None for x in range(260)]
    assert [row["y"] for row in bench.sink.committed or []] == expected


def test_rejected_row_fails_a_strict_job(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.client.answer = rejecting(15)
    with pytest.raises(ContractError, match="bad row"):
        bench.run()
    assert bench.sink.committed is None
    assert bench.finished() == {0}


def test_retryable_error_of_a_batch_is_scored_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, on_error="null")
    errors: list[Exception] = [QueueFull("full")]
    bench.client.answer = lambda x: errors.pop() if errors else None
    report = bench.run()
    assert report.rejected == 0
    assert [row["y"] for row in bench.sink.committed or []] == [3 * x + 1 for x in range(30)]


def test_rows_that_are_rejected_after_a_retryable_error_do_not_end_the_job(tmp_path: Path) -> None:
    bench = Bench(tmp_path, on_error="null")
    errors: list[Exception] = [QueueFull("full")]
    reject = rejecting(2)
    bench.client.answer = lambda x: errors.pop() if errors else reject(x)
    assert bench.run().rejected == 1
    expected = [None if x == 2 else 3 * x + 1 for x in range(30)]
    assert [row["y"] for row in bench.sink.committed or []] == expected


def test_column_that_is_also_a_result_is_rejected_by_name(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.client.description = description(output_schema=pa.schema([("id", pa.int64())]))
    with pytest.raises(ContractError, match=r"'id'.*--keep"):
        bench.planned()


def test_unknown_kept_column_is_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keep has 'idd'.*'id'"):
        Bench(tmp_path, keep=("idd",)).planned()


def test_mapped_column_is_sent_under_the_name_of_the_input(tmp_path: Path) -> None:
    bench = Bench(tmp_path, columns={"n": "x"})
    bench.client.description = description(
        input_schema=pa.schema([("n", pa.int64())]), input_types={"n": "int64"}
    )
    planned = bench.planned()
    assert (planned.sent, planned.matching.schema.names) == (("x",), ["n"])


def test_batches_fit_a_batch_of_a_worker(tmp_path: Path) -> None:
    """A server cuts larger ones by its load, which changes the last bits."""
    bench = Bench(tmp_path, units=1, batch_rows=10)
    bench.client.description = description(max_batch_rows=4)
    bench.run()
    assert max(map(len, bench.client.sent)) <= 4 and sum(map(len, bench.client.sent)) == 10
    ranked = Bench(tmp_path / "ranked", units=1, batch_rows=10)
    ranked.client.description = description(max_batch_rows=4, ranked_within=("",))
    ranked.run()
    assert ranked.client.sent == [list(range(10))]


@pytest.mark.parametrize("how", ["null", "quarantine=bad"])
def test_rejected_rows_of_a_ranked_batch_cannot_be_taken_out(tmp_path: Path, how: str) -> None:
    bench = Bench(tmp_path, on_error=how)
    bench.client.description = description(ranked_within=("",))
    with pytest.raises(ConfigError, match="ranks the rows of a batch"):
        bench.planned()
