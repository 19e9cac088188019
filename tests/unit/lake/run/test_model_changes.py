"""Fingerprint of a scored model: runtimes and files that change before and during a job."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.scoring_bench import (
    WITHIN_S,
    Bench,
    ScriptedClient,
    description,
    rejecting,
)

from iskander.client import ModelDescription
from iskander.errors import (
    ContractError,
    ModelNotFound,
    NotReady,
    RuntimeDiffers,
)
from iskander.foundation import clock
from iskander.lake.errors import JobConflict
from iskander.lake.plan import JobPlan
from iskander.lake.planning import describe, plan_job

RUNTIME = {
    "library": "ONNX Runtime 1.31.1",
    "providers": ["CPUExecutionProvider"],
    "threads": 2,
    "name": "ONNX Runtime 1.31.1, CPUExecutionProvider, threads 2",
}

LATER = {**RUNTIME, "library": "ONNX Runtime 1.32.0"}


def described(*runtimes: dict[str, Any], files: str = "f", **changes: Any) -> ModelDescription:
    metadata = {"inputs": ["x"], "files_sha256": files, "runtimes": list(runtimes)}
    return description(**{"metadata": metadata, **changes})


def test_fingerprint_has_the_model_files_and_what_runs_it(tmp_path: Path) -> None:
    def plan(given: ModelDescription, **options: Any) -> JobPlan:
        bench = Bench(tmp_path, **options)
        return plan_job(bench.job, bench.source, given).plan

    first = plan(described(RUNTIME))
    for same in (described(RUNTIME), described(RUNTIME, ready=False, aliases={"a": "3"})):
        assert plan(same).fingerprint == first.fingerprint
    limits = {"rows": 10, "bytes": 1 << 20, "string_bytes": 1 << 20}
    others = [
        plan(described(RUNTIME, files="g")),
        plan(described(RUNTIME), keep=("id",)),
        plan(described(RUNTIME), batch_rows=7),
        plan(described(LATER)),
        plan(described({**RUNTIME, "providers": ["CUDAExecutionProvider"]})),
        plan(described({**RUNTIME, "threads": 3})),
        plan(described(RUNTIME, {**RUNTIME, "threads": 3})),
        plan(described(RUNTIME, max_batch_rows=50)),
        plan(described(RUNTIME, limits=limits)),
    ]
    assert len({first.fingerprint, *(each.fingerprint for each in others)}) == 10
    assert first.values["runtime"] == "ONNX Runtime 1.31.1"
    assert first.values["providers"] == "CPUExecutionProvider"
    assert first.values["threads"] == "2"


def test_calls_are_for_servers_with_the_planned_runtimes(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.client.description = described(RUNTIME)
    bench.run()
    assert {terms["runtimes"] for _, _, terms in bench.client.calls} == {RUNTIME["name"]}


def test_runtime_that_changes_during_the_job_ends_it_by_name(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.client.description = described(RUNTIME)

    def restart(x: list[int]) -> None:
        bench.client.description = described(LATER)

    bench.client.answer = restart
    text = "runtime was ONNX Runtime 1.31.1, is ONNX Runtime 1.32.0"
    with pytest.raises(RuntimeDiffers, match=text):
        bench.run()
    bench.client.description = described(RUNTIME)
    assert bench.finished() == set()


def test_resume_with_another_runtime_is_rejected_by_name(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.client.description = described(RUNTIME)
    bench.client.answer = rejecting(14)
    with pytest.raises(ContractError):
        bench.run()
    again = Bench(tmp_path, resume=True, batch_rows=5)
    again.client.description = described(LATER)
    text = r"batch_rows was 4, is 5; runtime was ONNX Runtime 1.31.1, is ONNX Runtime 1.32.0\)"
    with pytest.raises(JobConflict, match=text):
        again.run()


def test_description_waits_for_the_runtimes_of_all_workers() -> None:
    partial: Any = described(RUNTIME)
    partial.metadata["all_runtimes"] = False
    found = [partial, partial, described(RUNTIME, LATER)]

    def model(name: str, *, version: str | None = None) -> Any:
        return SimpleNamespace(description=found.pop(0))

    client: Any = SimpleNamespace(model=model)
    assert len(describe(client, "m", None).metadata["runtimes"]) == 1
    assert len(describe(client, "m", None, workers_s=WITHIN_S).metadata["runtimes"]) == 2


def test_description_waits_for_a_server_that_starts() -> None:
    errors: list[Exception] = [NotReady("starting"), NotReady("starting")]
    client = ScriptedClient()

    def model(name: str, *, version: str | None = None) -> Any:
        if errors:
            raise errors.pop()
        return SimpleNamespace(description=client.description)

    client.model = model  # type: ignore[method-assign]
    started_ns = clock.now_ns()
    assert describe(client, "m", None) is client.description
    assert clock.now_ns() > started_ns
    errors.append(ModelNotFound("none"))
    with pytest.raises(ModelNotFound):
        describe(client, "m", None)
