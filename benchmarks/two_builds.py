"""Rates of two builds of the gateway, in interleaved rounds.

    python -m benchmarks.two_builds OLD/bin/iskander-gateway NEW/bin/iskander-gateway

Both gateways run all the time, and each round loads one after the other, in alternating order. A
figure is the ratio of the second to the first in one round; the table has medians over the rounds.
CPU is that of the gateway and its workers for a request; other work of the machine changes it less
than the rate, and the least tenth of the rounds least.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles

import psutil
from pyarrow import flight

from benchmarks.machine import ROOT
from benchmarks.systems import child_processes, cpu_s, free_port, listen, stop, wait_ready
from benchmarks.tables import render_table
from benchmarks.workloads import TWO_TOWER

CASES = ((1, 1), (4, 1), (1, 128), (4, 128))
"""Streams, each on a connection of its own; and rows of a batch."""
WARM_UP_S = 0.3
Case = tuple[int, int]
Figures = tuple[list[float], list[float]]
"""Rates and CPU of both builds in one round."""


@contextmanager
def serving(command: str) -> Iterator[tuple[int, tuple[psutil.Process, ...]]]:
    """A gateway; yields its port and its processes."""
    with tempfile.TemporaryDirectory(prefix="isk-bench-") as name:
        folder, port = Path(name), free_port()
        settings = (f"server.address=127.0.0.1:{port}", f"server.runtime_directory={folder}")
        sets = [part for setting in settings for part in ("--set", setting)]
        notices = listen(folder / "notify")
        process = subprocess.Popen(
            [command, "--config", str(TWO_TOWER.config), *sets],
            env=os.environ | {"NOTIFY_SOCKET": str(folder / "notify")},
            cwd=folder,
        )
        workers: tuple[psutil.Process, ...] = ()
        try:
            if failure := wait_ready(process, notices):
                raise RuntimeError(f"{command} did not become ready: {failure}")
            front = psutil.Process(process.pid)
            workers = child_processes(front)
            yield port, (front, *workers)
        finally:
            stop(process, workers)


class Client:
    """A process with open streams to a gateway; sends on command."""

    def __init__(self, port: int, streams: int, rows: int) -> None:
        command = [sys.executable, "-m", "benchmarks.two_builds", "--client", str(port)]
        self._process = subprocess.Popen(
            [*command, str(streams), str(rows)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.load(WARM_UP_S)

    def load(self, seconds: float) -> int:
        """Send for a time; return the number of requests."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class _Stream:
    """An open stream, on a connection of its own."""

    def __init__(self, port: int, rows: int) -> None:
        self._batch = TWO_TOWER.batches(rows)[0]
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._client = flight.FlightClient(f"grpc://127.0.0.1:{port}", generic_options=options)
        descriptor = flight.FlightDescriptor.for_path(TWO_TOWER.model)
        self._writer, self._reader = self._client.do_exchange(descriptor)
        self._writer.begin(self._batch.schema)
        self.count = 0

    def send(self, seconds: float) -> None:
        """Send batches, each after the last response."""
        self.count = 0
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._writer.write_batch(self._batch)
            self._reader.read_chunk()
            self.count += 1


def serve(port: int, streams: int, rows: int) -> None:
    """The process of a client: reads times, prints numbers of requests."""
    opened = [_Stream(port, rows) for _ in range(streams)]
    for line in sys.stdin:
        threads = [threading.Thread(target=each.send, args=(float(line),)) for each in opened]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(sum(each.count for each in opened), flush=True)


def compare(commands: list[str], rounds: int, seconds: float) -> dict[Case, list[Figures]]:
    """Load both builds in turn."""
    found: dict[Case, list[Figures]] = {case: [] for case in CASES}
    with ExitStack() as stack:
        systems = [stack.enter_context(serving(command)) for command in commands]
        clients = {
            (at, case): Client(port, *case)
            for at, (port, _) in enumerate(systems)
            for case in CASES
        }
        for number in range(rounds):
            for case in CASES:
                rates, costs = [0.0, 0.0], [0.0, 0.0]
                for at in (0, 1) if number % 2 else (1, 0):
                    processes = systems[at][1]
                    before_s = cpu_s(processes)
                    count = clients[at, case].load(seconds)
                    costs[at] = (cpu_s(processes) - before_s) / count * 1e6
                    rates[at] = count / seconds
                found[case].append((rates, costs))
        for client in clients.values():
            client.close()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare two builds."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--client"]:
        serve(*map(int, given[1:]))
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_builds", description=__doc__)
    parser.add_argument("commands", nargs=2, metavar="GATEWAY")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each load")
    options = parser.parse_args(given)
    lines = []
    for (streams, rows), found in compare(
        options.commands, options.rounds, options.seconds
    ).items():
        cells = [str(streams), str(rows)]
        for at in (0, 1):
            pairs = [each[at] for each in found]
            ratios = [after / before for before, after in pairs]
            low, _, high = quantiles(ratios, n=4)
            old, new = map(median, zip(*pairs, strict=True))
            cells.append(f"{old:,.0f} to {new:,.0f}")
            cells.append(f"{median(ratios):.3f} ({low:.3f} to {high:.3f})")
        old, new = (sorted(each)[len(found) // 10] for each in zip(*pairs, strict=True))
        cells.append(f"{new / old:.3f}")
        lines.append(cells)
    headings = ["streams", "rows", "requests/s", "ratio (quartiles)", "CPU us", "ratio (quartiles)"]
    print(render_table([*headings, "ratio of the least tenths"], lines))


if __name__ == "__main__":
    main()
