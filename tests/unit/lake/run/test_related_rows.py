"""Scoring jobs with models whose rows depend on each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.scoring_bench import (
    Bench,
    description,
)

from iskander.client import ModelDescription
from iskander.errors import (
    ConfigError,
    ContractError,
    LimitExceeded,
    ModelMoved,
)
from iskander.lake.plan import JobPlan
from iskander.lake.planning import plan_job


def related(rows: int = 1000, **changes: Any) -> ModelDescription:
    metadata = {"inputs": ["x"], "rows": {"verdict": "dependent"}}
    limits = {"rows": rows, "bytes": 1 << 20, "string_bytes": 1 << 20}
    return description(
        limits=limits,
        metadata=metadata,
        row_relation="dependent",
        is_whole=True,
        whole_reason="its rows are dependent: row 3",
        **changes,
    )


@pytest.mark.parametrize(("limit", "rows"), [(None, 30), (30, 30), (17, 17), (3, 3)])
def test_table_of_related_rows_is_one_request(tmp_path: Path, limit: int | None, rows: int) -> None:
    bench = Bench(tmp_path, limit=limit, keep=("id",))
    bench.client.description = related()
    report = bench.run()
    assert bench.client.sent == [list(range(rows))]
    assert bench.sink.committed == [{"id": f"r{x}", "y": 3 * x + 1} for x in range(rows)]
    assert (report.rows_in, report.units) == (rows, 1)
    (_, _, terms) = bench.client.calls[0]
    assert "cut" not in terms


def test_table_of_related_rows_above_the_limit_is_an_error_of_the_plan(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.client.description = related(29)
    with pytest.raises(LimitExceeded) as caught:
        bench.planned()
    for part in ("30 rows", "limit 29 (`limits.rows`)", "row 3", "combine = true"):
        assert part in caught.value.message
    # With a filter, only reading tells.
    bench = Bench(tmp_path, filter="x >= 0")
    bench.client.description = related(29)
    with pytest.raises(LimitExceeded, match="at least 30 rows"):
        bench.run()
    assert bench.client.sent == []


def test_related_rows_are_not_separated(tmp_path: Path) -> None:
    bench = Bench(tmp_path, on_error="null")
    bench.client.description = related()
    with pytest.raises(ConfigError, match=r"'null'.*row 3.*use `fail`"):
        bench.planned()


def test_parts_of_related_rows_are_rejected(tmp_path: Path) -> None:
    """As a reader of a source would send them."""
    bench = Bench(tmp_path)
    with pytest.raises(ContractError, match=r"all rows of a table in one request.*row 3"):
        plan_job(bench.job, bench.source, related())


def test_verdict_that_changes_during_the_job_ends_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    metadata = {"inputs": ["x"], "rows": {"verdict": "independent"}}
    bench.client.description = description(metadata=metadata)

    def answer(x: list[int]) -> Exception | None:
        bench.client.description = related()
        return None

    bench.client.answer = answer
    with pytest.raises(ModelMoved, match="replaced during the job"):
        bench.run()
    (_, _, terms) = bench.client.calls[0]
    assert terms["cut"] == "true"


def test_evidence_is_not_in_the_fingerprint_but_the_rule_is(tmp_path: Path) -> None:
    def plan(rows: dict[str, str], **changes: Any) -> JobPlan:
        bench = Bench(tmp_path)
        bench.client.description = description(metadata={"inputs": ["x"], "rows": rows}, **changes)
        return bench.planned().plan

    first = plan({"verdict": "independent", "evidence": "a"})
    assert plan({"verdict": "independent", "evidence": "b"}).fingerprint == first.fingerprint
    assert plan({}, is_whole=True).fingerprint != first.fingerprint
