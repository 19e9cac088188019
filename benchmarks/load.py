"""The load on one system: client processes, each with threads and a connection for each.

    closed loop   a client sends its next batch when the last one was answered
    open loop     batches are due at times that do not look at the answers; whichever connection is
                  free takes the next one. A latency counts from the moment at which the batch was
                  due, so a late client or server cannot hide in it.

Every system is driven by the same code.
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
"""After the end, how long answers are waited for; what is missing then is dropped."""

_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True, kw_only=True)
class Load:
    """What all clients together do.

    Attributes:
        clients: Connections.
        processes: Client processes that they are spread over.
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
        """Its length."""
        return (self.end_ns - self.begin_ns) / NS_PER_S


@dataclass
class Tally:
    """What came of the load inside the span.

    Attributes:
        latencies_ns: Of every answer.
        late_ns: How late each batch of an open loop was sent: none of the connections was free, or
            the client itself was not in time.
        drops: Batches of an open loop that were due and had no answer.
        errors: Calls that failed; each ends its client.
        words: The first words of an error, for people.
    """

    latencies_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    late_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    drops: int = 0
    errors: int = 0
    words: str = ""


def merge(tallies: list[Tally]) -> Tally:
    """All of them as one."""
    return Tally(
        np.concatenate([tally.latencies_ns for tally in tallies]),
        np.concatenate([tally.late_ns for tally in tallies]),
        sum(tally.drops for tally in tallies),
        sum(tally.errors for tally in tallies),
        next((tally.words for tally in tallies if tally.words), ""),
    )


def run_client(kind: str, port: int, load: Load, number: int, driver: Connection) -> None:
    """Main function of a client process: say when ready, take the span, give back the tally."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # Sleeps end when they should.
    os.environ.update(environment(kind))
    open_session = opener(kind, Target(port, load.workload, load.rows))
    mine = len(range(number, load.clients, load.processes))
    clients = [_Client(open_session()) for _ in range(mine)]
    gc.collect()
    gc.freeze()
    driver.send(None)
    span: Span = driver.recv()
    driver.send(_run(clients, load, span, number))
    # A call that hangs must not keep this process.
    os._exit(0)


def _run(clients: list[_Client], load: Load, span: Span, number: int) -> Tally:
    loop: Callable[[_Client], None]
    due_count = 0
    if load.arrivals_per_s:
        begun_ns = time.monotonic_ns()
        seconds = (span.end_ns - begun_ns) / NS_PER_S
        rate = load.arrivals_per_s / load.processes
        due_ns = begun_ns + arrivals_ns(load.pattern, rate, seconds, number)
        due_count = int(np.count_nonzero(due_ns >= span.begin_ns))
        turns = iter(due_ns.tolist())

        def loop(client: _Client) -> None:
            client.open_loop(turns, span)
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
        """Send and receive until the span has ended."""
        call, now_ns, took = self._session.call, time.monotonic_ns, self._latencies_ns.append
        begin_ns, end_ns = span.begin_ns, span.end_ns
        with self._watched():
            for index in itertools.cycle(range(BATCHES_COUNT)):
                sent_ns = now_ns()
                call(index)
                answered_ns = now_ns()
                if answered_ns >= end_ns:
                    break
                if answered_ns >= begin_ns:
                    took(answered_ns - sent_ns)

    def open_loop(self, turns: Iterator[int], span: Span) -> None:
        """Take the next batch that is due, wait for its time, send and receive."""
        call, now_ns = self._session.call, time.monotonic_ns
        last_ns = span.end_ns + int(GRACE_S * NS_PER_S)
        with self._watched():
            for index, due_ns in enumerate(turns):
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
        """What came of it."""
        error = self._error or ("" if has_ended else "no answer in time")
        return Tally(
            np.array(self._latencies_ns, np.int64),
            np.array(self._late_ns, np.int64),
            errors=bool(error),
            words=error,
        )

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
            self._session.close()
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]
