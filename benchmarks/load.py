"""Load generator: client processes with one thread for each connection.

    closed loop   a client sends its next batch after the last response
    open loop     batches are due at times that do not depend on responses; any idle connection
                  sends the next one. A latency counts from the due time, so it includes the delay
                  of a late client or server.

The same code drives every system.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from benchmarks.arrivals import NS_PER_S, Pattern, arrivals_ns
from benchmarks.sessions import Session, Target, environment, opener
from benchmarks.workloads import BATCHES_COUNT, Workload

GRACE_S = 5.0
"""Time to wait for responses after the end; a batch without a response is then dropped."""

_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load of all clients together.

    Attributes:
        clients: Connections.
        processes: Client processes; each has an equal share of the connections.
        arrivals_per_s: Of all clients together, for an open loop; 0 is a closed loop.
    """

    workload: Workload
    rows: int
    clients: int = 1
    processes: int = 1
    arrivals_per_s: float = 0.0
    pattern: Pattern = "poisson"


@dataclass(frozen=True)
class Span:
    """The measured time, in monotonic nanoseconds."""

    begin_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """Duration."""
        return (self.end_ns - self.begin_ns) / NS_PER_S


@dataclass
class Tally:
    """Results of the load inside the span.

    Attributes:
        latencies_ns: Of every response.
        late_ns: Delay of each sent batch of an open loop: no connection was idle, or the client
            itself was late.
        drops: Due batches of an open loop without a response.
        errors: Failed calls; each ends its client.
        error: First line of an error.
    """

    latencies_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    late_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    drops: int = 0
    errors: int = 0
    error: str = ""


def merge(tallies: list[Tally]) -> Tally:
    """All tallies as one."""
    return Tally(
        np.concatenate([tally.latencies_ns for tally in tallies]),
        np.concatenate([tally.late_ns for tally in tallies]),
        sum(tally.drops for tally in tallies),
        sum(tally.errors for tally in tallies),
        next((tally.error for tally in tallies if tally.error), ""),
    )


def run_client(kind: str, port: int, load: Load, number: int, driver: Connection) -> None:
    """Main function of a client process: report readiness, receive the span, send the tally."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # Exact sleeps.
    os.environ.update(environment(kind))
    open_session = opener(kind, Target(port, load.workload, load.rows))
    clients_count = len(range(number, load.clients, load.processes))
    clients = [_Client(open_session()) for _ in range(clients_count)]
    gc.collect()
    gc.freeze()
    driver.send(None)
    span: Span = driver.recv()
    driver.send(_run(clients, load, span, number))
    # A hanging call must not keep this process alive.
    os._exit(0)


def _run(clients: list[_Client], load: Load, span: Span, number: int) -> Tally:
    loop: Callable[[_Client], None]
    due_count = 0
    if load.arrivals_per_s:
        started_ns = time.monotonic_ns()
        seconds = (span.end_ns - started_ns) / NS_PER_S
        rate = load.arrivals_per_s / load.processes
        due_ns = started_ns + arrivals_ns(load.pattern, rate, seconds, number)
        due_count = int(np.count_nonzero(due_ns >= span.begin_ns))
        due_times = iter(due_ns.tolist())

        def loop(client: _Client) -> None:
            client.open_loop(due_times, span)
    else:

        def loop(client: _Client) -> None:
            client.closed_loop(span)

    threads = [threading.Thread(target=loop, args=(each,), daemon=True) for each in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(span.end_ns - time.monotonic_ns(), 0) / NS_PER_S + GRACE_S)
    tallies = [client.tally(has_ended=not thread.is_alive())
               for client, thread in zip(clients, threads, strict=True)]  # fmt: skip
    total = merge(tallies)
    if load.arrivals_per_s:
        total.drops = due_count - len(total.latencies_ns)
    return total


class _Client:
    """One connection and its thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._latencies_ns: list[int] = []
        self._late_ns: list[int] = []
        self._error = ""
        for index in range(BATCHES_COUNT):
            session.call(index)

    def closed_loop(self, span: Span) -> None:
        """Send and receive until the span ends."""
        call, now_ns, record = self._session.call, time.monotonic_ns, self._latencies_ns.append
        begin_ns, end_ns = span.begin_ns, span.end_ns
        with self._recorded_error():
            for index in itertools.cycle(range(BATCHES_COUNT)):
                sent_ns = now_ns()
                call(index)
                answered_ns = now_ns()
                if answered_ns >= end_ns:
                    break
                if answered_ns >= begin_ns:
                    record(answered_ns - sent_ns)

    def open_loop(self, due_times: Iterator[int], span: Span) -> None:
        """Take the next due batch, wait for its time, send and receive."""
        call, now_ns = self._session.call, time.monotonic_ns
        last_ns = span.end_ns + int(GRACE_S * NS_PER_S)
        with self._recorded_error():
            for index, due_ns in enumerate(due_times):
                wait_ns = due_ns - now_ns()
                if wait_ns > 0:
                    time.sleep(wait_ns / NS_PER_S)
                sent_ns = now_ns()
                if sent_ns >= last_ns:
                    break
                call(index % BATCHES_COUNT)
                if due_ns >= span.begin_ns:
                    self._late_ns.append(sent_ns - due_ns)
                    self._latencies_ns.append(now_ns() - due_ns)

    def tally(self, *, has_ended: bool) -> Tally:
        """Results so far."""
        error = self._error or ("" if has_ended else "no response in time")
        return Tally(
            np.array(self._latencies_ns, np.int64),
            np.array(self._late_ns, np.int64),
            errors=bool(error),
            error=error,
        )

    @contextlib.contextmanager
    def _recorded_error(self) -> Iterator[None]:
        try:
            yield
            self._session.close()
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]
