"""The fleet against a real gateway, over Flight: a stream for each robot, two policies.

The traces of `fleet`, sent at their times on the real clock, and a model that takes some
milliseconds for a batch of any size and some more for each row. Misses are counted twice: as the
clients saw them, from writing a batch to having its answer, and as `stats` of the server has them,
from a batch's arrival to its results. It needs cores that nothing else uses: a client, the gateway
and a worker run at once, and a run that takes twice its time misses as much as a bad decision.

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
from iskander.clock import NS_PER_MS, NS_PER_S
from iskander.errors import IskanderError

MODEL = "robot-policy"
CASES = ((10, 6.0), (20, 5.0))
"""Robots, and milliseconds of a batch; a row takes a thirtieth of that."""
ROW_SHARE = 30
WARM_UP_S = 1.5
STRETCH_MOST = 1.25
"""How much longer than on a quiet machine runs may take in a round that counts."""
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
    parser.add_argument("--attempts", type=int, default=9, help="to have a quiet round")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each run")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    arguments = parser.parse_args()
    # Forty threads that wait for their time: none may keep another from it for long.
    sys.setswitchinterval(0.0002)
    runs: list[dict[str, Any]] = []
    for robots, base_ms in CASES:
        runs += measure(robots, base_ms, arguments)
    print(render(runs))
    if arguments.json is not None:
        results = {"machine": describe_machine(), "versions": describe_versions(), "runs": runs}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


def measure(robots: int, base_ms: float, effort: argparse.Namespace) -> list[dict[str, Any]]:
    """A gateway for each policy, asked in turns by clients without names and with them.

    Both are up all the time and the one that is not asked is idle. A round in which runs took
    longer than the model does on a quiet machine is noted as such and tried again.
    """
    runs: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isk-fleet-")))
        turn_ms = _turn_ms(folder)
        gateways: dict[str, Client] = {}
        addresses: dict[str, str] = {}
        for policy in ("fifo", "deadline_aware"):
            workload = _serve(folder / policy, policy, base_ms, turn_ms)
            addresses[policy] = stack.enter_context(start("iskander", workload)).address
            gateways[policy] = stack.enter_context(Client(addresses[policy]))
            # A few runs of several sizes, so that the cost is known.
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
                    saw = play(addresses[policy], trace, is_named=rhythm == "named")
                    after = client.stats()["lanes"][f"{MODEL}/1"]
                    run = {"policy": policy, "clients": rhythm, "robots": robots}
                    run |= {"base_ms": base_ms, "round": turn, "saw": saw, "cost": after["cost"]}
                    model_ms = (base_ms, base_ms / ROW_SHARE)
                    round_runs.append(run | {"stats": _difference(before, after, model_ms)})
            is_quiet = max(run["stats"]["stretch"] for run in round_runs) <= STRETCH_MOST
            quiet += is_quiet
            runs += [run | {"is_quiet": is_quiet} for run in round_runs]
    return runs


def play(address: str, trace: Sequence[Arrival], *, is_named: bool) -> dict[str, float]:
    """Send a trace at its times, each client on a stream of its own; what they saw."""
    by_client: dict[str, list[Arrival]] = {}
    for arrival in trace:
        by_client.setdefault(arrival.terms.client, []).append(arrival)
    begin_ns = time.monotonic_ns() + NS_PER_S // 2
    robots = [_Robot(address, arrivals, begin_ns, is_named) for arrivals in by_client.values()]
    for robot in robots:
        robot.start()
    for robot in robots:
        robot.join()
    broken = [robot.broken for robot in robots if robot.broken]
    if broken:
        raise RuntimeError(f"{len(broken)} streams broke, the first: {broken[0]}")
    seen = [seen for robot in robots for seen in robot.seen]
    refusals = Counter(code for _, code, _, _ in seen if code)
    latencies_ms = [latency_ms for latency_ms, code, _, _ in seen if not code]
    missed = sum(bool(code) or latency_ms > due for latency_ms, code, due, _ in seen)
    return {
        "requests": len(seen),
        "missed": 100 * missed / len(seen),
        "refused": 100 * sum(refusals.values()) / len(seen),
        "p50_ms": float(np.percentile(latencies_ms, 50)),
        "p99_ms": float(np.percentile(latencies_ms, 99)),
        "sent_late_p99_ms": float(np.percentile([late_ms for _, _, _, late_ms in seen], 99)),
        **{f"refused.{code}": count for code, count in refusals.items()},
    }


def render(runs: Sequence[dict[str, Any]]) -> str:
    """A table of the medians of the quiet rounds; of all, where there was none."""
    headings = {
        "missed": "missed %",
        "refused": "refused %",
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
        told = dict(run["saw"])
        told["counted"] = 100 * stats["missed"] / max(stats["hit"] + stats["missed"], 1)
        told["batch_rows"] = stats["batch_rows"]
        told["stretch"] = stats["stretch"]
        groups.setdefault(key, []).append(told)
    rows = [
        [*key, *(f"{median([told[name] for told in group]):.1f}" for name in headings)]
        for key, group in groups.items()
    ]
    table = render_table(["load", "policy", "clients", *headings.values()], rows)
    rounds = {(run["robots"], run["round"]): run["is_quiet"] for run in runs}
    return f"{table}\n\n{sum(rounds.values())} of {len(rounds)} rounds were quiet"


class _Robot(threading.Thread):
    """One client: sends its part of the trace on a stream of its own, in its own thread.

    Attributes:
        seen: After the warm-up: latency, error code or nothing, budget, and how late it was sent.
        broken: Why the stream ended early.
    """

    def __init__(
        self, address: str, arrivals: Sequence[Arrival], begin_ns: int, is_named: bool
    ) -> None:
        super().__init__()
        self.seen: list[tuple[float, str, float, float]] = []
        self.broken = ""
        self._address = address
        self._arrivals = arrivals
        self._begin_ns = begin_ns
        self._is_named = is_named
        self._sent: deque[tuple[Arrival, int]] = deque()

    def run(self) -> None:
        said = self._arrivals[0].terms
        terms: dict[str, Any] = {
            "deadline_ms": said.budget_ms,
            "priority": said.priority,
            "urgency": said.urgency,
        }
        if self._is_named:
            terms["client"] = said.client
        try:
            with Client(self._address) as client:
                for outcome in client.outcomes(MODEL, self._feed(), terms=terms):
                    self._note(outcome)
        except Exception as error:
            self.broken = f"{type(error).__name__}: {error}"

    def _feed(self) -> Iterator[pa.RecordBatch]:
        batch = _batch(1)
        for arrival in self._arrivals:
            wait_ns = self._begin_ns + arrival.at_ns - time.monotonic_ns()
            if wait_ns > 0:
                time.sleep(wait_ns / NS_PER_S)
            self._sent.append((arrival, time.monotonic_ns()))
            yield batch

    def _note(self, outcome: pa.RecordBatch | IskanderError) -> None:
        now_ns = time.monotonic_ns()
        arrival, sent_ns = self._sent.popleft()
        if arrival.at_ns < WARM_UP_S * NS_PER_S:
            return
        code = outcome.code if isinstance(outcome, IskanderError) else ""
        budget_ms = arrival.terms.budget_ms
        assert budget_ms is not None
        late_ms = (sent_ns - self._begin_ns - arrival.at_ns) / NS_PER_MS
        self.seen.append(((now_ns - sent_ns) / NS_PER_MS, code, budget_ms, late_ms))


def _batch(rows: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(np.arange(rows))], schema=SCHEMA)


def _difference(
    before: dict[str, Any], after: dict[str, Any], model_ms: tuple[float, float]
) -> dict[str, float]:
    """What a lane's counters grew by, and how much longer its runs were than the model is."""

    def grown(group: str, name: str) -> float:
        return float(after[group].get(name, 0) - before[group].get(name, 0))

    batches = grown("batch_rows", "count")
    rows = [lane["batch_rows"]["mean"] * lane["batch_rows"]["count"] for lane in (before, after)]
    expected_ms = model_ms[0] * batches + model_ms[1] * (rows[1] - rows[0])
    refused = {f"refused.{name}": grown("refused", name) for name in after["refused"]}
    return {
        "hit": grown("deadlines", "hit"),
        "missed": grown("deadlines", "missed"),
        "stretch": (after["run_ms"] - before["run_ms"]) / max(expected_ms, 1.0),
        "batch_rows": (rows[1] - rows[0]) / max(batches, 1),
        **refused,
        **{f"closed.{name}": grown("closed", name) for name in after["closed"]},
    }


def _serve(folder: Path, policy: str, base_ms: float, turn_ms: float) -> Workload:
    """A model and a configuration that serves it with that policy."""
    models = _test_models()
    model = folder / MODEL / "1"
    model.mkdir(parents=True)
    (model / "manifest.toml").write_text(MANIFEST, "utf-8")
    base = max(round(base_ms / turn_ms), 1)
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


def _turn_ms(folder: Path) -> float:
    """What a turn of the model's loop takes on this machine, at its quietest."""
    models = _test_models()
    turns = 200
    models.looping(folder / "probe", turns, 0)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(
        folder / "probe" / "model.onnx", options, providers=["CPUExecutionProvider"]
    )
    taken_ms = []
    for _ in range(30):
        begin_ns = time.monotonic_ns()
        session.run(None, {"x": np.zeros(1, np.int64)})
        taken_ms.append((time.monotonic_ns() - begin_ns) / NS_PER_MS)
    return float(np.percentile(taken_ms, 25)) / turns


def _test_models() -> ModuleType:
    """The tests' makers of small models."""
    sys.path.append(str(FOLDER.parent / "tests"))
    from support import models

    return models


if __name__ == "__main__":
    main()
