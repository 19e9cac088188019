"""An endurance run: windows of load and disturbances, each followed by a quiet point.

    go ... load, disturbances, samples every 5 s ... pause -> no open requests -> samples -> go

Writes JSON lines: `run`, `sample` (of the server's processes and its statistics), `window` (the
clients' reports), `deed` (a disturbance) and `verdict`.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from benchmarks.endurance.disturbances import Disturbances
from benchmarks.endurance.processes import sample_processes
from benchmarks.endurance.server import Server
from benchmarks.machine import ROOT, describe_machine, describe_versions
from benchmarks.runner import log_progress

FAMILIES = ("flight", "grpc", "http", "inferential")
WINDOWS_LEAST, WINDOW_MAX_S = 40, 20.0
"""Quiet points of a run, so that each quarter has several; and the time between two of them."""
REPORT_WITHIN_S = 120.0
"""Longer than the wait of a client process for its open requests."""
SAMPLE_S = 5.0
TURN_S = 0.1
RECYCLE_BATCHES_PER_MINUTE = 2000
"""Some six recycled workers of each slot in a run, at some 200 batches/s of each."""
RECYCLE_BATCHES_LEAST = 2000


@dataclass(frozen=True)
class Plan:
    """A run.

    Attributes:
        minutes: Duration of the load.
        processes: Gateway processes.
        is_leaking: A client keeps shared-memory regions, so that the verdict must fail.
    """

    minutes: float
    processes: int = 1
    is_leaking: bool = False
    seed: int = 0

    @property
    def window_s(self) -> float:
        """Time between two quiet points."""
        return min(60 * self.minutes / WINDOWS_LEAST, WINDOW_MAX_S)


class ClientProcess:
    """One client process."""

    def __init__(self, family: str, number: int, server: Server) -> None:
        self.family = family
        addresses = (server.address, server.http_address, server.zmq_address, server.token)
        arguments = (family, number, json.dumps(addresses), server.versions, server.processes)
        command = [sys.executable, "-m", "benchmarks.endurance.client", *map(str, arguments)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def send(self, command: str) -> None:
        """Send `go`, `pause` or `stop`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()

    def report(self) -> dict[str, Any]:
        """The report after a pause.

        Raises:
            RuntimeError: The process ended or hangs.
        """
        assert self._process.stdout is not None
        is_readable = select.select([self._process.stdout], [], [], REPORT_WITHIN_S)[0]
        line = self._process.stdout.readline() if is_readable else ""
        if not line:
            code = self._process.poll()
            raise RuntimeError(f"no report of the client process `{self.family}`, exit code {code}")
        report: dict[str, Any] = json.loads(line)
        return report

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Session:
    """A run of a plan, and its records in a file."""

    def __init__(self, plan: Plan, out: TextIO) -> None:
        self._plan, self._out = plan, out
        self._started_s = 0.0
        self._clients: list[ClientProcess] = []
        self._victims: list[ClientProcess] = []
        self._numbers = 0
        self._server: Server

    def run(self) -> list[dict[str, Any]]:
        """Run it.

        Returns:
            All records that were written.
        """
        plan = self._plan
        recycle_batches = max(int(RECYCLE_BATCHES_PER_MINUTE * plan.minutes), RECYCLE_BATCHES_LEAST)
        records = [
            {"kind": "run", "machine": describe_machine(), "versions": describe_versions(),
             "minutes": plan.minutes, "processes": plan.processes, "is_leaking": plan.is_leaking}
        ]  # fmt: skip
        self._write(records[0])
        with tempfile.TemporaryDirectory(prefix="isk-endure-") as folder:
            self._server = Server(
                Path(folder), processes=plan.processes, recycle_batches=recycle_batches
            )
            try:
                with self._server.running():
                    for record in self._windows():
                        records.append(record)
                        self._write(record)
            finally:
                for each in (*self._clients, *self._victims):
                    each.kill()
            log = self._server.log()
            records.append(
                {"kind": "log", "tracebacks": log.count("Traceback"), "tail": log[-2000:]}
            )
            self._write(records[-1])
        return records

    def _windows(self) -> Iterator[dict[str, Any]]:
        families = (*FAMILIES, "leaking") if self._plan.is_leaking else FAMILIES
        self._clients = [self._start(family) for family in families]
        self._started_s = time.monotonic()
        end_s = self._started_s + 60 * self._plan.minutes
        disturbances = Disturbances(self._server, self._victim, self._plan.seed)
        while time.monotonic() < end_s:
            window_end_s = min(time.monotonic() + self._plan.window_s, end_s)
            for client in self._clients:
                client.send("go")
            yield from self._load(disturbances, window_end_s)
            disturbances.close()
            yield from self._quiet_point()

    def _load(self, disturbances: Disturbances, end_s: float) -> Iterator[dict[str, Any]]:
        sampled_s = time.monotonic()
        while time.monotonic() < end_s:
            for text in disturbances.act():
                yield self._record("deed", text=text)
            if time.monotonic() - sampled_s > SAMPLE_S:
                sampled_s = time.monotonic()
                yield self._sample(is_quiet=False, stats=[])
            time.sleep(TURN_S)

    def _quiet_point(self) -> Iterator[dict[str, Any]]:
        """Pause all clients, and sample the idle server."""
        for client in self._clients:
            client.send("pause")
        while self._victims:
            self._victims.pop().kill()
        reports = [client.report() for client in self._clients]
        stats, is_idle = self._server.wait_quiet()
        for client, report in zip(self._clients, reports, strict=True):
            yield self._record("window", family=client.family, **report)
        sample = self._sample(is_quiet=True, stats=stats) | {"is_idle": is_idle}
        log_progress(_progress(sample, reports))
        yield sample

    def _victim(self) -> str:
        """Kill the victim that sends, or start one."""
        if self._victims:
            self._victims.pop().kill()
            return "killed"
        self._victims.append(self._start("victim"))
        self._victims[0].send("go")
        return "started"

    def _start(self, family: str) -> ClientProcess:
        self._numbers += 1
        return ClientProcess(family, self._numbers, self._server)

    def _sample(self, *, is_quiet: bool, stats: list[dict[str, Any]]) -> dict[str, Any]:
        return self._record(
            "sample",
            is_quiet=is_quiet,
            processes=sample_processes(self._server.folder),
            gateways=[_gateway(each) for each in stats],
        )

    def _record(self, kind: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
        return {"kind": kind, "at_s": round(time.monotonic() - self._started_s, 2), **fields}

    def _write(self, record: dict[str, Any]) -> None:
        self._out.write(json.dumps(record) + "\n")
        self._out.flush()


def _gateway(stats: dict[str, Any]) -> dict[str, Any]:
    """The part of a gateway process' statistics that is judged."""
    lanes = [lane for lane in stats["lanes"].values() if "requests" in lane]
    ended = sum(
        lane.get("completed", 0) + lane.get("withdrawn", 0) + sum(lane["failed"].values())
        for lane in lanes
    )
    return {
        "process": stats.get("process") or 0,
        "pid": stats["pid"],
        "uptime_s": stats["uptime_s"],
        "leases": stats["input_arena"]["leases"],
        "leased_bytes": stats["input_arena"]["leased_bytes"],
        "output_leased_bytes": sum(each["output_leased_bytes"] for each in stats["workers"]),
        "regions": stats["shared_memory"]["regions"],
        "streams": stats["streams"],
        "calls": stats["calls"],
        "requests": sum(lane["requests"] for lane in lanes),
        "ended": ended,
        "rejected": sum(sum(lane["refused"].values()) for lane in lanes),
        "workers": [
            [each["index"], each["pid"], each["state"], each["batches"]]
            for each in stats["workers"]
        ],
        "ends": [each["ends"] for each in stats["workers"]],
    }


def _progress(sample: dict[str, Any], reports: list[dict[str, Any]]) -> str:
    sent = sum(
        count
        for report in reports
        for name, count in report["counts"].items()
        if name.endswith(": right")
    )
    faults = [fault for report in reports for fault in report["faults"]]
    unanswered = [report["unanswered"] for report in reports if report["unanswered"]]
    total = sum(each["pss_bytes"] for each in sample["processes"]) >> 20
    text = f"{sample['at_s']:6.0f} s: {sent} right answers, {total} MiB"
    if faults or unanswered:
        text += f", {len(faults)} faults, {unanswered} unanswered: {faults[:3]}"
    return text
