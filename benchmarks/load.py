"""The load: client processes that keep Flight streams, or a session without any server, busy.

Runs in processes of its own. The driver (`harness`) says when the measured time begins and ends on
the machine's monotonic clock; load runs from before its beginning, which is the warm-up, and only
what falls inside is counted. Three ways to send:

    lock-step   closed loop, one batch in flight: write, read, again; one thread a stream
    window      closed loop, a few batches in flight: a thread writes, the stream's own thread reads
    arrivals    open loop: a thread writes at fixed times whatever is still unanswered; a latency
                counts from the time when the batch should have been sent, so a late client or
                server cannot hide in it

Every system is driven by the same code. Reading never waits for writing, except in lock-step,
where no more than one small batch is under way: otherwise both ends stop on flow control.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import flight
from workloads import Workload

NS_PER_S = 1_000_000_000
GRACE_S = 10.0
"""After the end, how long answers are waited for; then the stream is cancelled, an error."""

_PR_SET_TIMERSLACK = 29

FAILURES = (flight.FlightError, pa.ArrowException, OSError)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one client process does.

    Attributes:
        address: `host:port` of a Flight server; empty runs the model in this process.
        streams: Streams of this process, each a thread.
        window: Batches of a stream in flight, in a closed loop.
        arrivals_per_s: Of each stream, for an open loop; 0 is a closed loop.
        first_stream: Index of this process's first stream among all, to spread the arrivals.
        streams_total: Of all client processes.
    """

    workload: Workload
    rows: int
    address: str = ""
    streams: int = 1
    window: int = 1
    arrivals_per_s: float = 0.0
    first_stream: int = 0
    streams_total: int = 1


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
        late_ns: How late each batch of an open loop was sent: the client's share of its latency.
        drops: Batches of an open loop that were due and had no answer.
        errors: Streams that failed; each ends with its first error.
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


def run_client(load: Load, driver: Connection) -> None:
    """Main function of a client process: say when ready, take the span, give back the tally."""
    _wake_in_time()
    callers = _sessions(load) if not load.address else _streams(load)
    gc.collect()
    gc.freeze()
    driver.send(None)
    span: Span = driver.recv()
    with ThreadPoolExecutor(load.streams) as pool:
        tallies = list(pool.map(lambda caller: caller(span), callers))
    driver.send(merge(tallies))


class _Stream:
    """One DoExchange stream over a connection of its own."""

    def __init__(self, load: Load, index: int, batches: list[pa.RecordBatch]) -> None:
        # Without a pool of its own, gRPC would put all streams of this process on one connection.
        self._client = flight.FlightClient(
            f"grpc://{load.address}", generic_options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self._load = load
        self._index = index
        self._batches = itertools.islice(itertools.cycle(batches), index % len(batches), None)
        descriptor = flight.FlightDescriptor.for_path(load.workload.model)
        self._writer, self._reader = self._client.do_exchange(descriptor)
        self._writer.begin(batches[0].schema)
        self._writer.write_batch(next(self._batches))
        answer = self._reader.read_chunk().data
        assert answer.num_rows == load.rows, f"{answer.num_rows} rows came back of {load.rows}"

    def run(self, span: Span) -> Tally:
        """Send and receive until the span has ended."""
        left_s = (span.end_ns - time.monotonic_ns()) / NS_PER_S
        limit = threading.Timer(left_s + GRACE_S, self._reader.cancel)
        limit.start()
        try:
            if self._load.arrivals_per_s:
                return self._open_loop(span)
            return self._lock_step(span) if self._load.window == 1 else self._windowed(span)
        finally:
            limit.cancel()
            self._client.close()

    def _lock_step(self, span: Span) -> Tally:
        latencies_ns: list[int] = []
        write, read, batches = self._writer.write_batch, self._reader.read_chunk, self._batches
        begin_ns, end_ns, now_ns = span.begin_ns, span.end_ns, time.monotonic_ns
        try:
            while True:
                sent_ns = now_ns()
                write(next(batches))
                read()
                answered_ns = now_ns()
                if answered_ns >= end_ns:
                    break
                if answered_ns >= begin_ns:
                    latencies_ns.append(answered_ns - sent_ns)
            self._end()
        except (*FAILURES, StopIteration) as error:
            return Tally(np.array(latencies_ns, np.int64), errors=1, words=_words(error))
        return Tally(np.array(latencies_ns, np.int64))

    def _windowed(self, span: Span) -> Tally:
        room = threading.Semaphore(self._load.window)
        sent_ns: deque[int] = deque()

        def write() -> None:
            for batch in self._batches:
                room.acquire()
                if time.monotonic_ns() >= span.end_ns:
                    break
                sent_ns.append(time.monotonic_ns())
                self._writer.write_batch(batch)

        latencies_ns: list[int] = []

        def read() -> None:
            since_ns = sent_ns.popleft()
            now_ns = time.monotonic_ns()
            room.release()
            if span.begin_ns <= now_ns < span.end_ns:
                latencies_ns.append(now_ns - since_ns)

        words = self._run_both(write, read, lambda: room.release(1 << 20))
        return Tally(np.array(latencies_ns, np.int64), errors=bool(words), words=words)

    def _open_loop(self, span: Span) -> Tally:
        load = self._load
        interval_ns = round(NS_PER_S / load.arrivals_per_s)
        # Streams take turns, so that the arrivals of all of them together are evenly spaced too.
        first_ns = span.begin_ns + interval_ns * (load.first_stream + self._index) // (
            load.streams_total
        )
        first_ns -= (first_ns - time.monotonic_ns()) // interval_ns * interval_ns
        due_ns: deque[int] = deque()
        late_ns: list[int] = []
        latencies_ns: list[int] = []
        has_failed = threading.Event()

        def write() -> None:
            for intended_ns in range(first_ns, span.end_ns, interval_ns):
                wait_ns = intended_ns - time.monotonic_ns()
                if wait_ns > 0:
                    time.sleep(wait_ns / NS_PER_S)
                if has_failed.is_set():
                    return
                due_ns.append(intended_ns)
                if intended_ns >= span.begin_ns:
                    late_ns.append(time.monotonic_ns() - intended_ns)
                self._writer.write_batch(next(self._batches))

        def read() -> None:
            intended_ns = due_ns.popleft()
            if intended_ns >= span.begin_ns:
                latencies_ns.append(time.monotonic_ns() - intended_ns)

        words = self._run_both(write, read, has_failed.set)
        due = sum(at_ns >= span.begin_ns for at_ns in range(first_ns, span.end_ns, interval_ns))
        return Tally(
            np.array(latencies_ns, np.int64),
            np.array(late_ns, np.int64),
            drops=due - len(latencies_ns),
            errors=bool(words),
            words=words,
        )

    def _run_both(
        self, write: Callable[[], None], read: Callable[[], None], release: Callable[[], None]
    ) -> str:
        """Write in a thread while reading in this one; the words of an error, or none."""
        failures: list[str] = []
        has_written = threading.Event()

        def write_all() -> None:
            try:
                write()
                has_written.set()
                self._writer.done_writing()
            except FAILURES as error:
                failures.append(_words(error))
                self._reader.cancel()

        writing = threading.Thread(target=write_all)
        writing.start()
        try:
            while True:
                self._reader.read_chunk()
                read()
        except StopIteration:
            if not has_written.is_set():
                failures.append("the server ended the stream")
        except FAILURES as error:
            failures.append(_words(error))
        release()
        writing.join()
        return failures[0] if failures else ""

    def _end(self) -> None:
        self._writer.done_writing()
        while True:
            try:
                self._reader.read_chunk()
            except StopIteration:
                return


def _streams(load: Load) -> list[Callable[[Span], Tally]]:
    batches = load.workload.batches(load.rows)
    return [_Stream(load, index, batches).run for index in range(load.streams)]


def _sessions(load: Load) -> list[Callable[[Span], Tally]]:
    """One session that all threads share, and a binding for each, used again and again."""
    session = load.workload.open_session()
    return [_direct(load.workload.bind(session, load.rows)) for _ in range(load.streams)]


def _direct(run: Callable[[], None]) -> Callable[[Span], Tally]:
    def call(span: Span) -> Tally:
        latencies_ns: list[int] = []
        begin_ns, end_ns, now_ns = span.begin_ns, span.end_ns, time.monotonic_ns
        while True:
            sent_ns = now_ns()
            run()
            answered_ns = now_ns()
            if answered_ns >= end_ns:
                return Tally(np.array(latencies_ns, np.int64))
            if answered_ns >= begin_ns:
                latencies_ns.append(answered_ns - sent_ns)

    return call


def _wake_in_time() -> None:
    """Let sleeps end when they should: the kernel may stretch each by 50 us by default."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]
