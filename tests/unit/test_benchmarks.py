"""Benchmark logic: arrivals, verdicts, comparisons, pages, and saturation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import compare, page, probes, ramp
from benchmarks.arrivals import NS_PER_S, Pattern, arrivals_ns
from benchmarks.cases import GOALS, SUITES, Goal, with_processes
from benchmarks.load import Load, Span, Tally, merge
from benchmarks.results import Results, check_goals, read, write
from benchmarks.runner import QUANTILES, _sum_up
from benchmarks.sessions import require_outputs
from benchmarks.systems import SYSTEMS
from benchmarks.workloads import TWO_TOWER

CASE = "two-tower, 128 rows, 4 clients"
RUN = {
    "kind": "run",
    "machine": {"cpu": "some", "cores": 2, "memory_gib": 24, "system": "Linux"},
    "versions": {"python": "3.11", "commit": "abc"},
    "effort": {"rounds": 3, "seconds": 5.0, "warm_up_seconds": 1.0},
}


def measurement(system: str, round_: int, **figures: Any) -> dict[str, Any]:
    base = {
        "kind": "measurement",
        "case": CASE,
        "system": system,
        "round": round_,
        "seconds": 5.0,
        "arrivals_per_s": 0.0,
        **dict.fromkeys(("p50_us", "p95_us", "p99_us", "p999_us"), 100.0),
        **dict.fromkeys(("requests_per_s", "rows_per_s"), 1000.0),
        **dict.fromkeys(("server_cpu_us", "front_cpu_us", "client_cpu_us"), 50.0),
        "late_p99_us": None,
        "drops": 0,
        "errors": 0,
        "error_words": "",
        "processes_cpu_us": {"isk-gateway": 30.0, "isk-worker-0": 20.0},
        "quantiles": list(QUANTILES),
        "latencies_us": [100.0 + 10 * index for index in range(len(QUANTILES))],
    }
    return base | figures


def results(*measurements: dict[str, Any]) -> Results:
    return Results(json.loads(json.dumps(RUN)), list(measurements), [])


@pytest.mark.parametrize("pattern", ["poisson", "fixed"])
def test_arrivals_have_the_rate_and_are_sorted(pattern: Pattern) -> None:
    due = arrivals_ns(pattern, 1000.0, 20.0, seed=3)
    assert due.dtype == np.int64
    assert 0 <= due[0] <= due[-1] < 20 * NS_PER_S
    assert np.all(np.diff(due) >= 0)
    assert len(due) == pytest.approx(20_000, rel=0.03)
    assert np.array_equal(due, arrivals_ns(pattern, 1000.0, 20.0, seed=3))
    assert not np.array_equal(due, arrivals_ns(pattern, 1000.0, 20.0, seed=4))


def test_poisson_gaps_are_exponential_and_fixed_gaps_are_even() -> None:
    gaps = np.diff(arrivals_ns("poisson", 500.0, 60.0, seed=1)) / NS_PER_S
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.05)
    assert np.mean(gaps > 2 / 500) == pytest.approx(np.exp(-2), rel=0.1)
    even = np.diff(arrivals_ns("fixed", 500.0, 2.0, seed=1))
    assert np.ptp(even) <= 1


def test_verdict_is_the_median_of_ratios_per_round() -> None:
    run = results(
        *(measurement("iskander", n, requests_per_s=value) for n, value in enumerate((10, 40, 90))),
        *(measurement("mosec", n, requests_per_s=value) for n, value in enumerate((10, 20, 30))),
    )
    goal = Goal(case=CASE, metric="requests_per_s", baseline="mosec", bound=2.0)
    (verdict,) = check_goals(run, [goal])
    assert verdict.rounds == [1.0, 2.0, 3.0]
    assert (verdict.value, verdict.word) == (2.0, "met")
    (missed,) = check_goals(
        run, [Goal(case=CASE, metric="requests_per_s", baseline="mosec", bound=2.01)]
    )
    assert missed.word == "missed"
    (most,) = check_goals(
        run,
        [Goal(case=CASE, metric="requests_per_s", baseline="mosec", sense="most", bound=1.9)],
    )
    assert most.word == "missed"


def test_missing_measurements_are_reported_as_not_measured() -> None:
    run = results(measurement("iskander", 1), measurement("echo", 1, p99_us=None))
    goals = [
        Goal(case=CASE, metric="p99_us", baseline="echo", sense="most", bound=9.0),
        Goal(case=CASE, metric="requests_per_s", baseline="triton", bound=0.0),
        Goal(case="another", metric="requests_per_s", baseline="echo", bound=0.0),
    ]
    assert [verdict.word for verdict in check_goals(run, goals)] == ["not measured", "not measured"]


def test_goals_refer_to_measured_cases_systems_and_metrics() -> None:
    cases = {case.name: case for case in SUITES["goals"]}
    for goal in GOALS:
        assert goal.system in cases[goal.case].systems
        assert not goal.baseline or goal.baseline in cases[goal.case].systems
        assert goal.metric in measurement("iskander", 1)
    for suite in SUITES.values():
        assert len({case.name for case in suite}) == len(suite)
        assert all(set(case.systems) <= set(SYSTEMS) for case in suite)


def test_change_is_relative_to_the_yardstick() -> None:
    before = results(
        *(measurement("echo", n, requests_per_s=1000.0) for n in range(3)),
        *(measurement("iskander", n, requests_per_s=300.0) for n in range(3)),
    )
    faster_machine = results(
        *(measurement("echo", n, requests_per_s=2000.0) for n in range(3)),
        *(measurement("iskander", n, requests_per_s=900.0) for n in range(3)),
    )
    changes = {(each.system, each.metric): each for each in compare.compare(before, faster_machine)}
    change = changes["iskander", "requests_per_s"]
    assert (round(change.factor, 3), change.word, change.yardstick) == (1.5, "better", "echo")
    assert changes["iskander", "p50_us"].word == "same"
    assert changes["echo", "requests_per_s"].yardstick == ""
    assert "1.50" in compare.render(list(changes.values()))


def test_change_within_the_spread_of_rounds_is_the_same() -> None:
    def noisy(*rates: float) -> Results:
        return results(
            *(measurement("echo", n) for n in range(3)),
            *(measurement("iskander", n, requests_per_s=r) for n, r in enumerate(rates)),
        )

    changes = compare.compare(noisy(300, 400, 500), noisy(390, 480, 500))
    assert {change.word for change in changes} == {"same"}
    worse = compare.compare(noisy(400, 402, 404), noisy(300, 301, 302))
    assert "worse" in {change.word for change in worse}


def test_records_are_written_immediately_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.jsonl"
    records = write(path, [RUN, measurement("echo", 1), {"kind": "probe", "name": "start"}])
    next(records)
    next(records)
    assert len(path.read_text().splitlines()) == 2
    assert len(list(records)) == 1
    run = read([path])
    assert (run.cases, run.systems(CASE), len(run.probes)) == ([CASE], ["echo"], 1)


def test_files_of_different_machines_are_not_merged(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    paths[0].write_text(json.dumps(RUN) + "\n")
    paths[1].write_text(json.dumps(RUN | {"machine": {"cpu": "other"}}) + "\n")
    with pytest.raises(ValueError, match="machine differ"):
        read(paths)
    paths[1].write_text(json.dumps(RUN | {"versions": {"python": "3.11", "commit": "def"}}) + "\n")
    assert read(paths).run["versions"]["commit"] == "abc, def"


def test_rounds_of_two_files_are_merged(tmp_path: Path) -> None:
    """A ratio uses the values of one round of one file."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, factor in zip(paths, (2, 3), strict=True):
        rounds = [
            measurement(system, number, requests_per_s=1000.0 * rate)
            for number in (1, 2)
            for system, rate in (("iskander", factor * number), ("triton", number))
        ]
        list(write(path, [RUN, *rounds]))
    goal = Goal(case=CASE, metric="requests_per_s", baseline="triton", sense="least", bound=2.5)
    (verdict,) = check_goals(read(paths), [goal])
    assert (verdict.rounds, verdict.value) == ([2, 2, 3, 3], 2.5)


def test_page_shows_the_measured_rounds() -> None:
    assert results(measurement("echo", 1), measurement("echo", 2)).rounds == "2"
    measurements = [measurement("echo", 1), measurement("mosec", 1), measurement("mosec", 2)]
    assert (results(*measurements).rounds, results().rounds) == ("1 to 2", "no")


@pytest.mark.parametrize("text", ["", "[]", "{}", "no json"])
def test_invalid_file_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"not a record|no run"):
        read([path])


def test_page_shows_goals_cases_and_probes(tmp_path: Path) -> None:
    run = results(measurement("iskander", 1), measurement("mosec", 1, error_words="it broke"))
    run.probes += [
        {"kind": "probe", "name": "start", "seconds": 1.2},
        {"kind": "probe", "name": "ramp", "system": "iskander", "sustained_per_s": 4000.0},
    ]
    page.write_page(run, tmp_path / "README.md", images=None)
    text = (tmp_path / "README.md").read_text()
    for words in (CASE, "missed |", "1.20", "4,000", "mosec: it broke", "isk-gateway 30"):
        assert words in text


def test_summary_of_tallies_with_and_without_requests() -> None:
    load = Load(workload=TWO_TOWER, rows=128, clients=4)
    no_requests = _sum_up(Tally(errors=4, error="x"), Span(0, NS_PER_S), load, {"client": 1.0}, 0.0)
    assert (no_requests["requests_per_s"], no_requests["p50_us"], no_requests["errors"]) == (
        0.0,
        None,
        4,
    )
    tallies = [Tally(np.array([1000, 3000])), Tally(np.array([2000]), drops=2)]
    figures = _sum_up(
        merge(tallies), Span(0, 2 * NS_PER_S), load, {"client": 3e-6, "gateway": 6e-6}, 6e-6
    )
    assert (figures["requests"], figures["requests_per_s"]) == (3, 1.5)
    assert (figures["p50_us"], figures["latencies_us"][-1], figures["drops"]) == (2.0, 3.0, 2)
    assert figures["server_cpu_us"] == pytest.approx(2.0)
    assert figures["client_cpu_us"] == pytest.approx(1.0)


def test_load_is_sustained_while_responses_are_on_time() -> None:
    sustained = {"requests": 990, "drops": 10, "errors": 0, "p99_us": 2000.0}
    assert ramp.is_sustained(sustained)
    for overload in ({"drops": 100}, {"errors": 1}, {"p99_us": 60_000.0}, {"p99_us": None},
                {"requests": 0, "drops": 0}):  # fmt: skip
        assert not ramp.is_sustained(sustained | overload)


def test_probe_above_its_bound_is_missed() -> None:
    run = results()
    run.probes += [{"name": "start", "seconds": 1.6}]
    assert "missed" in probes.render(run)
    assert ramp.render(run) == ""


def test_wrong_outputs_stop_a_measurement() -> None:
    class WrongModel:
        def call(self, index: int) -> int:
            return index

        def output(self, answer: int) -> np.ndarray:
            return np.array([float(answer)])

        def close(self) -> None: ...

    require_outputs(WrongModel(), [np.array([0.0]), np.array([1.0])])
    with pytest.raises(ValueError, match="batch 1"):
        require_outputs(WrongModel(), [np.array([0.0]), np.array([0.5])])


def test_processes_are_limited_to_clients() -> None:
    case = SUITES["small"][0]
    assert with_processes(case, 4).load.processes == case.load.clients == 1
