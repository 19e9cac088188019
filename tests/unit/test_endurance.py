"""Verdict of an endurance run on synthetic series; checked answers; pauses of clients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.endurance.latencies import STEP, Latencies
from benchmarks.endurance.recorder import Recorder
from benchmarks.endurance.report import PROCESS_METRICS, draw, judge, render
from benchmarks.endurance.requests import (
    FRAGILE,
    NUMERIC,
    SIZES,
    STRINGS,
    VERSIONED,
    Checker,
    Numbers,
    Request,
)
from benchmarks.endurance.verdict import (
    LIMITS,
    MIB,
    Point,
    Quarters,
    judge_count,
    judge_growth,
    judge_latency,
    slope_per_h,
)

RUN_S = 7200.0
QUARTERS = Quarters.of(RUN_S)
BASE = 100.0 * MIB
TIMES_S = np.arange(20.0, RUN_S + 1, 20.0)


def points(value: Callable[[float], float], life_s: float = RUN_S + 1) -> list[Point]:
    """A series of processes that live for `life_s` each."""
    found = []
    for at_s in TIMES_S.tolist():
        number, age_s = divmod(at_s, life_s)
        found.append(Point(at_s, age_s, str(number), value(at_s)))
    return found


def word(series: list[Point], metric: str = "private_bytes") -> str:
    return judge_growth("process", metric, series, QUARTERS).word


def test_quarters_follow_the_warm_up() -> None:
    assert QUARTERS.first == (720.0, 720.0 + 1620.0)
    assert QUARTERS.last == (RUN_S - 1620.0, float("inf"))
    assert Quarters.of(600.0).first == (120.0, 240.0)
    assert Quarters.of(180.0).first == (60.0, 90.0)


def test_flat_series_with_noise_is_met() -> None:
    random = np.random.default_rng(3)
    assert word(points(lambda _: BASE * (1 + random.normal(0, 0.05)))) == "met"


def test_outliers_are_ignored() -> None:
    late = set(TIMES_S[-20::4].tolist())
    assert word(points(lambda at_s: BASE * (2 if at_s in late else 1))) == "met"


def test_warm_up_is_excluded() -> None:
    """A third of a short run: with it, the first quarter would have a lower median."""
    series = [Point(at_s, at_s, "0", BASE if at_s >= 60 else BASE / 2) for at_s in range(0, 180, 5)]
    assert judge_growth("process", "private_bytes", series, Quarters.of(180.0)).word == "met"


@pytest.mark.parametrize(("mib_per_h", "expected"), [(1, "met"), (3, "broken")])
def test_slow_leak_above_two_percent_is_broken(mib_per_h: float, expected: str) -> None:
    random = np.random.default_rng(5)
    finding = judge_growth(
        "process",
        "private_bytes",
        points(lambda at_s: BASE + mib_per_h * MIB * at_s / 3600 + random.normal(0, MIB)),
        QUARTERS,
    )
    assert finding.word == expected
    assert finding.slope_per_h == pytest.approx(mib_per_h * MIB, abs=0.3 * MIB)


@pytest.mark.parametrize(("share", "expected"), [(0.01, "met"), (0.03, "broken")])
def test_step_above_two_percent_is_broken(share: float, expected: str) -> None:
    assert word(points(lambda at_s: BASE * (1 + share * (at_s > RUN_S / 2)))) == expected


def test_decrease_is_met() -> None:
    assert word(points(lambda at_s: BASE - 1000 * at_s)) == "met"


@pytest.mark.parametrize(("count", "expected"), [(1, "met"), (2, "broken")])
def test_small_counts_may_grow_by_one(count: int, expected: str) -> None:
    assert word(points(lambda at_s: 20 + count * (at_s > RUN_S / 2)), "memfds") == expected


def test_regions_may_not_grow() -> None:
    assert word(points(lambda at_s: float(at_s > RUN_S / 2)), "regions") == "broken"


def test_replaced_processes_are_compared_at_equal_ages() -> None:
    """Each grows with its age: that is no growth of the series."""
    life_s = 900.0
    assert word(points(lambda at_s: BASE + (at_s % life_s) * 0.1 * MIB, life_s)) == "met"
    assert word(points(lambda at_s: BASE * (1 + 0.05 * (at_s // life_s)), life_s)) == "broken"


def test_old_and_young_processes_are_not_compared() -> None:
    """The first quarter has only a process that the last quarter's is younger than."""
    old = [Point(at_s, 5000 + at_s, "old", BASE) for at_s in TIMES_S[:90].tolist()]
    young = [Point(at_s, at_s - 7100, "young", BASE) for at_s in TIMES_S[-5:].tolist()]
    assert word(old + young) == "not measured"


def test_short_quarters_are_not_measured() -> None:
    assert word(points(lambda _: BASE)[::90]) == "not measured"


def test_every_metric_has_a_limit_that_growth_breaks() -> None:
    for metric in LIMITS:
        assert word(points(lambda at_s: BASE * (1 + at_s / RUN_S)), metric) == "broken", metric


def test_slope_is_within_a_process() -> None:
    series = [Point(0, 0, "a", 0.0), Point(3600, 3600, "a", 5.0), Point(7200, 0, "b", 99.0)]
    assert slope_per_h(series) == 5.0
    assert slope_per_h(series[1:]) is None


def windows(late_factor: float, count: int = 100) -> list[tuple[float, Latencies]]:
    random = np.random.default_rng(7)
    found = []
    for at_s in TIMES_S.tolist():
        latencies = Latencies()
        factor = late_factor if at_s > RUN_S / 2 else 1.0
        for latency_us in random.lognormal(7, 0.5, count):
            latencies.record(factor * latency_us)
        found.append((at_s, latencies))
    return found


@pytest.mark.parametrize(
    ("factor", "expected"), [(1.0, "met"), (1.1, "met"), (1.3, "broken"), (0.5, "met")]
)
def test_p99_may_grow_by_a_fifth(factor: float, expected: str) -> None:
    assert judge_latency("grpc", windows(factor), QUARTERS).word == expected


def test_p99_of_few_requests_is_not_measured() -> None:
    assert judge_latency("grpc", windows(1.0, count=2), QUARTERS).word == "not measured"


def test_histogram_is_exact_to_a_bucket_also_after_encoding() -> None:
    values = np.random.default_rng(9).lognormal(8, 1, 5000)
    latencies, rest = Latencies(), Latencies()
    for value in values[:2500]:
        latencies.record(value)
    for value in values[2500:]:
        rest.record(value)
    latencies.add(Latencies(rest.encode()))
    assert len(latencies) == 5000
    found = latencies.percentile_us(99)
    assert found is not None
    exact = np.quantile(values, 0.99, method="inverted_cdf")
    assert exact <= found <= exact * STEP * 1.0001
    assert Latencies().percentile_us(99) is None


def test_counts_must_be_zero() -> None:
    assert judge_count("clients", "wrong answers", 0).word == "met"
    assert judge_count("clients", "wrong answers", 1).word == "broken"


@pytest.fixture
def checker(tmp_path: Path) -> Checker:
    for version in (5, 6):
        (tmp_path / str(version)).mkdir()
    (tmp_path / ".hidden").mkdir()
    return Checker(tmp_path)


@pytest.mark.parametrize(
    ("model", "answer"),
    [
        (NUMERIC, lambda x: 3 * x + 1),
        (FRAGILE, lambda x: -x),
        (STRINGS, lambda x: [f"{value}!" for value in x.tolist()]),
        (VERSIONED, lambda x: 6 * x),
        (VERSIONED, lambda x: 5 * x),
    ],
)
def test_right_and_wrong_answers(
    checker: Checker, model: str, answer: Callable[[Any], Any]
) -> None:
    mine, others = Numbers(1).take(3), Numbers(2).take(3)
    request, newest = Request(model, mine), checker.newest()
    assert newest == 6
    assert checker.find_fault(request, answer(mine), newest) == ""
    assert checker.find_fault(request, answer(others), newest) != ""
    assert checker.find_fault(request, answer(mine)[:2], newest) == f"{model}: 2 rows for 3"
    assert checker.find_fault(request, answer(mine[::-1]), newest) != ""


@pytest.mark.parametrize("factor", [2, 7])
def test_answer_of_a_removed_or_unknown_version_is_wrong(checker: Checker, factor: int) -> None:
    mine = Numbers(1).take(3)
    fault = checker.find_fault(Request(VERSIONED, mine), factor * mine, 6)
    assert fault == f"scaled: version {factor} answered, 6 was the newest"


def test_numbers_of_owners_never_meet() -> None:
    one, other = Numbers(1), Numbers(2)
    for rows in SIZES:
        assert one.take(rows).max() < other.take(rows).min()
    one._used = (1 << 32) - 5
    assert one.take(10).max() < other.take(1)[0]


def test_pause_waits_for_open_requests_and_reports_them() -> None:
    recorder = Recorder()
    recorder.resume()
    begun_ns = recorder.begin("grpc")
    recorder.begin("http")
    assert recorder.pause(0.01)["unanswered"] == {"grpc": 1, "http": 1}
    recorder.failed("http", "late", expected=frozenset(("late",)), text="")
    threading.Timer(0.05, recorder.answered, ("grpc", begun_ns, "wrong row")).start()
    report = recorder.pause(10.0)
    assert report["unanswered"] == {}
    assert report["counts"] == {"http: error late": 1, "grpc: wrong": 1}
    assert report["faults"] == ["grpc: wrong answer: wrong row"]
    assert list(report["latencies"]) == ["grpc"]
    assert recorder.pause(0.0)["counts"] == {}


def test_closed_gate_stops_new_requests() -> None:
    recorder = Recorder()
    begun = threading.Event()

    def send() -> None:
        recorder.begin("grpc")
        begun.set()

    thread = threading.Thread(target=send)
    thread.start()
    assert not begun.wait(0.05)
    assert recorder.pause(0.0)["counts"] == {}
    recorder.resume()
    assert begun.wait(10.0)
    thread.join()


def test_unexpected_errors_and_those_left_are_counted() -> None:
    recorder = Recorder()
    recorder.resume()
    for _ in range(3):
        recorder.begin("grpc")
    recorder.failed("grpc", "internal", expected=frozenset(), text="why")
    recorder.left("grpc", 2)
    report = recorder.pause(0.0)
    assert report["counts"] == {"grpc: sent": 3, "grpc: unexpected internal": 1, "grpc: left": 2}
    assert report["faults"] == ["grpc: unexpected internal: why"]


def records(leased: int = 0, **counts: int) -> list[dict[str, Any]]:
    """Records of a short run."""
    found: list[dict[str, Any]] = []
    for number in range(1, 41):
        at_s = 15.0 * number
        process = {
            "name": "isk-gateway", "pid": 7, "started_s": 1.0, "age_s": at_s, "pss_bytes": 2 * MIB,
            "private_bytes": MIB, "descriptors": 9, "sockets": 3, "memfds": 2, "threads": 4,
        }  # fmt: skip
        gateway = {
            "process": 0, "pid": 7, "uptime_s": at_s, "leases": leased, "leased_bytes": 64 * leased,
            "output_leased_bytes": 0, "regions": 1, "requests": 10, "ended": 9, "rejected": 1,
        }  # fmt: skip
        latencies = Latencies()
        for _ in range(100):
            latencies.record(1000.0)
        found += [
            {"kind": "window", "at_s": at_s, "unanswered": {}, "faults": [],
             "counts": {"grpc: sent": 100, "grpc: right": 99, **counts},
             "latencies": {"grpc": latencies.encode()}},
            {"kind": "sample", "at_s": at_s, "is_quiet": True, "is_idle": True,
             "processes": [process],
             "gateways": [gateway | {"requests": 10 + (number == 40) * leased}]},
        ]  # fmt: skip
    return [*found, {"kind": "log", "tracebacks": 0, "tail": ""}]


def broken(run: list[dict[str, Any]]) -> set[str]:
    return {f"{each.subject}: {each.metric}" for each in judge(run) if each.word == "broken"}


def test_run_without_faults_is_met_and_rendered(tmp_path: Path) -> None:
    run = records()
    findings = judge(run)
    assert {each.word for each in findings} == {"met"}
    text = render(run, findings)
    assert "isk-gateway: private_bytes" in text and "4,000" in text
    pytest.importorskip("matplotlib")
    for path in draw(run, tmp_path):
        assert 0 < path.stat().st_size < 150_000


def test_plots_of_a_long_run_are_small(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    random = np.random.default_rng(11)
    kinds = {f"kind {number}": windows(1.0, count=20) for number in range(10)}
    run: list[dict[str, Any]] = []
    for number, at_s in enumerate(TIMES_S.tolist()):
        processes = [
            {"name": f"isk-worker-{index}", "pid": index, "started_s": 0.0, "age_s": at_s,
             "pss_bytes": MIB, **dict.fromkeys(PROCESS_METRICS, float(random.normal(50, 3) * MIB))}
            for index in range(6)
        ]  # fmt: skip
        reports = {kind: found[number][1].encode() for kind, found in kinds.items()}
        run += [
            {"kind": "window", "at_s": at_s, "latencies": reports},
            {"kind": "sample", "at_s": at_s, "is_quiet": True, "processes": processes,
             "gateways": []},
        ]  # fmt: skip
    for path in draw(run, tmp_path):
        assert path.stat().st_size < 150_000


def test_faults_of_clients_and_server_break_a_run() -> None:
    assert broken(records(**{"grpc: wrong": 1})) == {"clients: wrong answers"}
    assert broken(records(**{"grpc: unexpected internal": 1})) == {"clients: unexpected errors"}
    assert broken(records(leased=2)) == {
        "quiet points: accepted requests not ended",
        "quiet points: leased_bytes",
        "quiet points: leases",
    }
    run = records()
    run[-1]["tracebacks"] = 1
    run[0]["unanswered"] = {"grpc": 1}
    run[1]["is_idle"] = False
    assert broken(run) == {
        "clients: requests without an answer",
        "quiet points: no idle server, or not all workers",
        "server: tracebacks in the log",
    }
