"""The fleet against a real gateway, over Flight: a stream for each robot, two policies.

The robots send the traces of `fleet` in real time. A batch costs the model some milliseconds, and
some more for each row. Missed deadlines are counted twice: by the clients, from the write of a
batch to its response, and by the server's `stats`, from a batch's arrival to its results. The
benchmark needs idle cores: a client, the gateway and a worker run concurrently, and a run of twice
its normal time misses as many deadlines as a bad decision.

    python -m benchmarks.scheduling.fleet_flight --json build/fleet_flight.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime as ort
import pyarrow as pa

from benchmarks.machine import describe_machine, describe_versions
from benchmarks.scheduling.fleet import fleet
from benchmarks.scheduling.simulation import Arrival
from benchmarks.systems import start
from benchmarks.tables import render_table
from benchmarks.workloads import FOLDER, Workload
from iskander.client import Client
from iskander.errors import IskanderError
from iskander.foundation.clock import NS_PER_MS, NS_PER_S

MODEL = "robot-policy"
CASES = ((10, 6.0), (20, 5.0))
"""Robots, and milliseconds of a batch; a row costs a thirtieth of that."""
ROW_SHARE = 30
WARM_UP_S = 1.5
STRETCH_MOST = 1.25
"""Limit of the run time in a valid round, relative to a quiet machine."""
SCHEMA = pa.schema([("x", pa.int64())])
MANIFEST = """
format = 1
[[inputs]]
column = "x"
type = "int64"
tensor = "x"
[[outputs]]
tensor = "y"
column = "y"
type = "int64"
"""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="A fleet of robots against a real gateway.")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; medians are reported")
    parser.add_argument("--attempts", type=int, default=9, help="maximum number of rounds")
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds of each run")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results to this file")
    arguments = parser.parse_args()
    # Forty threads wait for their due times: none may delay another for long.
    sys.setswitchinterval(0.0002)
    runs: list[dict[str, Any]] = []
    for robots, base_ms in CASES:
        runs += measure(robots, base_ms, arguments)
    print(render(runs))
    if arguments.json is not None:
        results = {"machine": describe_machine(), "versions": describe_versions(), "runs": runs}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


def measure(robots: int, base_ms: float, effort: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a gateway for each policy in turn, with and without client names.

    Both gateways run all the time; one of them is idle. A round is marked and repeated if its runs
    took longer than the model on a quiet machine.
    """
    runs: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isk-fleet-")))
        iteration_ms = _iteration_ms(folder)
        gateways: dict[str, Client] = {}
        addresses: dict[str, str] = {}
        for policy in ("fifo", "deadline_aware"):
            workload = _serve(folder / policy, policy, base_ms, iteration_ms)
            addresses[policy] = stack.enter_context(start("iskander", workload)).address
            gateways[policy] = stack.enter_context(Client(addresses[policy]))
            # Runs of several sizes, so that the cost model is known.
            for rows in (1, 2, 4, 8, 16) * 4:
                gateways[policy].score(MODEL, _batch(rows))
        turn = quiet = 0
        while quiet < effort.rounds and turn < effort.attempts:
            turn += 1
            trace = fleet(robots, effort.seconds, turn)
            round_runs: list[dict[str, Any]] = []
            for rhythm in ("unnamed", "named"):
                for policy, client in gateways.items():
                    before = client.stats()["lanes"][f"{MODEL}/1"]
                    figures = play(addresses[policy], trace, is_named=rhythm == "named")
                    after = client.stats()["lanes"][f"{MODEL}/1"]
                    run = {"policy": policy, "clients": rhythm, "robots": robots}
                    run |= {
                        "base_ms": base_ms,
                        "round": turn,
                        "saw": figures,
                        "cost": after["cost"],
                    }
                    model_ms = (base_ms, base_ms / ROW_SHARE)
                    round_runs.append(run | {"stats": _difference(before, after, model_ms)})
            is_quiet = max(run["stats"]["stretch"] for run in round_runs) <= STRETCH_MOST
            quiet += is_quiet
            runs += [run | {"is_quiet": is_quiet} for run in round_runs]
    return runs


def play(address: str, trace: Sequence[Arrival], *, is_named: bool) -> dict[str, float]:
    """Send a trace in real time, with a stream for each client; return the clients' figures."""
    by_client: dict[str, list[Arrival]] = {}
    for arrival in trace:
        by_client.setdefault(arrival.terms.client, []).append(arrival)
    begin_ns = time.monotonic_ns() + NS_PER_S // 2
    robots = [_Robot(address, arrivals, begin_ns, is_named) for arrivals in by_client.values()]
    for robot in robots:
        robot.start()
    for robot in robots:
        robot.join()
    failures = [robot.failure for robot in robots if robot.failure]
    if failures:
        raise RuntimeError(f"{len(failures)} streams failed; the first: {failures[0]}")
    responses = [response for robot in robots for response in robot.responses]
    rejections = Counter(code for _, code, _, _ in responses if code)
    latencies_ms = [latency_ms for latency_ms, code, _, _ in responses if not code]
    missed = sum(bool(code) or latency_ms > due for latency_ms, code, due, _ in responses)
    return {
        "requests": len(responses),
        "missed": 100 * missed / len(responses),
        "refused": 100 * sum(rejections.values()) / len(responses),
        "p50_ms": float(np.percentile(latencies_ms, 50)),
        "p99_ms": float(np.percentile(latencies_ms, 99)),
        "sent_late_p99_ms": float(np.percentile([late_ms for _, _, _, late_ms in responses], 99)),
        **{f"refused.{code}": count for code, count in rejections.items()},
    }


def render(runs: Sequence[dict[str, Any]]) -> str:
    """A table of the medians of the quiet rounds; of all rounds if none was quiet."""
    headings = {
        "missed": "missed %",
        "refused": "rejected %",
        "p50_ms": "p50 ms",
        "p99_ms": "p99 ms",
        "sent_late_p99_ms": "sent late p99 ms",
        "counted": "stats: missed %",
        "batch_rows": "rows a batch",
        "stretch": "runs / model",
    }
    groups: dict[tuple[str, ...], list[dict[str, float]]] = {}
    quiet = {run["robots"] for run in runs if run["is_quiet"]}
    for run in runs:
        if run["robots"] in quiet and not run["is_quiet"]:
            continue
        key = (f"{run['robots']} robots, {run['base_ms']:g} ms", run["policy"], run["clients"])
        stats = run["stats"]
        figures = dict(run["saw"])
        figures["counted"] = 100 * stats["missed"] / max(stats["hit"] + stats["missed"], 1)
        figures["batch_rows"] = stats["batch_rows"]
        figures["stretch"] = stats["stretch"]
        groups.setdefault(key, []).append(figures)
    rows = [
        [*key, *(f"{median([figures[name] for figures in group]):.1f}" for name in headings)]
        for key, group in groups.items()
    ]
    table = render_table(["load", "policy", "clients", *headings.values()], rows)
    rounds = {(run["robots"], run["round"]): run["is_quiet"] for run in runs}
    return f"{table}\n\n{sum(rounds.values())} of {len(rounds)} rounds were quiet"


class _Robot(threading.Thread):
    """A client thread that sends its part of the trace on its own stream.

    Attributes:
        responses: After the warm-up: latency, error code or empty, budget, and delay of the send.
        failure: Cause of an early end of the stream.
    """

    def __init__(
        self, address: str, arrivals: Sequence[Arrival], begin_ns: int, is_named: bool
    ) -> None:
        super().__init__()
        self.responses: list[tuple[float, str, float, float]] = []
        self.failure = ""
        self._address = address
        self._arrivals = arrivals
        self._begin_ns = begin_ns
        self._is_named = is_named
        self._sent: deque[tuple[Arrival, int]] = deque()

    def run(self) -> None:
        sent = self._arrivals[0].terms
        terms: dict[str, Any] = {
            "deadline_ms": sent.budget_ms,
            "priority": sent.priority,
            "urgency": sent.urgency,
        }
        if self._is_named:
            terms["client"] = sent.client
        try:
            with Client(self._address) as client:
                for outcome in client.outcomes(MODEL, self._feed(), terms=terms):
                    self._record(outcome)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"

    def _feed(self) -> Iterator[pa.RecordBatch]:
        batch = _batch(1)
        for arrival in self._arrivals:
            wait_ns = self._begin_ns + arrival.at_ns - time.monotonic_ns()
            if wait_ns > 0:
                time.sleep(wait_ns / NS_PER_S)
            self._sent.append((arrival, time.monotonic_ns()))
            yield batch

    def _record(self, outcome: pa.RecordBatch | IskanderError) -> None:
        now_ns = time.monotonic_ns()
        arrival, sent_ns = self._sent.popleft()
        if arrival.at_ns < WARM_UP_S * NS_PER_S:
            return
        code = outcome.code if isinstance(outcome, IskanderError) else ""
        budget_ms = arrival.terms.budget_ms
        assert budget_ms is not None
        late_ms = (sent_ns - self._begin_ns - arrival.at_ns) / NS_PER_MS
        self.responses.append(((now_ns - sent_ns) / NS_PER_MS, code, budget_ms, late_ms))


def _batch(rows: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(np.arange(rows))], schema=SCHEMA)


def _difference(
    before: dict[str, Any], after: dict[str, Any], model_ms: tuple[float, float]
) -> dict[str, float]:
    """Growth of a lane's counters, and the ratio of its run times to the model's."""

    def growth(group: str, name: str) -> float:
        return float(after[group].get(name, 0) - before[group].get(name, 0))

    batches = growth("batch_rows", "count")
    rows = [lane["batch_rows"]["mean"] * lane["batch_rows"]["count"] for lane in (before, after)]
    expected_ms = model_ms[0] * batches + model_ms[1] * (rows[1] - rows[0])
    rejected = {f"refused.{name}": growth("refused", name) for name in after["refused"]}
    return {
        "hit": growth("deadlines", "hit"),
        "missed": growth("deadlines", "missed"),
        "stretch": (after["run_ms"] - before["run_ms"]) / max(expected_ms, 1.0),
        "batch_rows": (rows[1] - rows[0]) / max(batches, 1),
        **rejected,
        **{f"closed.{name}": growth("closed", name) for name in after["closed"]},
    }


def _serve(folder: Path, policy: str, base_ms: float, iteration_ms: float) -> Workload:
    """Write a model and a configuration with the given policy."""
    models = _test_models()
    model = folder / MODEL / "1"
    model.mkdir(parents=True)
    (model / "manifest.toml").write_text(MANIFEST, "utf-8")
    base = max(round(base_ms / iteration_ms), 1)
    models.looping(model, base, max(round(base / ROW_SHARE), 1))
    config = folder / "gateway.toml"
    config.write_text(
        "\n".join(
            [
                "[server]",
                'address = "127.0.0.1:0"',
                "[admin]",
                'address = "127.0.0.1:0"',
                'log_level = "warning"',
                "[lanes]",
                f'policy = "{policy}"',
                "[[models]]",
                f'name = "{MODEL}"',
                f'path = "{model}"',
                "intra_threads = 1",
                "max_batch_rows = 16",
                "",
            ]
        ),
        "utf-8",
    )
    return Workload(MODEL, config, model, lambda _, rows: {"x": pa.array(np.arange(rows))}, "y")


def _iteration_ms(folder: Path) -> float:
    """Time of one iteration of the model's loop on this machine, when quiet."""
    models = _test_models()
    iterations = 200
    models.looping(folder / "probe", iterations, 0)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(
        folder / "probe" / "model.onnx", options, providers=["CPUExecutionProvider"]
    )
    times_ms = []
    for _ in range(30):
        begin_ns = time.monotonic_ns()
        session.run(None, {"x": np.zeros(1, np.int64)})
        times_ms.append((time.monotonic_ns() - begin_ns) / NS_PER_MS)
    return float(np.percentile(times_ms, 25)) / iterations


def _test_models() -> ModuleType:
    """The tests' generators of small models."""
    sys.path.append(str(FOLDER.parent / "tests"))
    from support import models

    return models


if __name__ == "__main__":
    main()
