"""One point of a run: threads that send requests, and their answers.

A thread has a client, and so a connection, of its own. A run ends early if a thread has its part of
`ANSWERS_MAX`. Requests that were due before the end are sent until `GRACE_S` after it; then those
without an answer are cancelled and counted.

Runs on: the operator's tool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

import pyarrow as pa

from iskander.cli.load_generator.figures import Answer, Figures, figures_of
from iskander.cli.load_generator.schedule import Load, due_times_ns
from iskander.client import Client
from iskander.errors import Cancelled, IskanderError
from iskander.foundation.clock import NS_PER_S, now_ns, process_cpu_ns

ANSWERS_MAX = 10_000_000
"""200 bytes each, and nearly as many again for the figures: 4 GB."""
GRACE_S = 5.0
TURN_S = 0.05
SEED = 7


class Run:
    """One point.

    Args:
        connect: Makes the client of a thread, without retries.
        model: Name of the model.
        version: Its version; None: the server's routing decides.
        batches: What the requests send, in turn.
    """

    def __init__(
        self,
        connect: Callable[[], Client],
        model: str,
        version: str | None,
        batches: Sequence[pa.RecordBatch],
        load: Load,
    ) -> None:
        self._model, self._version = model, version
        self._batches, self._load = batches, load
        self._clients = [connect() for _ in range(load.clients)]
        self._answers: list[list[Answer]] = [[] for _ in range(load.clients)]
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._due: Iterator[int] | None = None
        if load.rate:
            self._due = due_times_ns(load.rate, load.arrivals, SEED)
        self._begin_ns = self._end_ns = 0
        self._started_ns = 0
        self._cpu = 0.0

    def measure(self, warm_up_s: float, duration_s: float) -> Figures:
        """Send requests, first without measuring them; return the figures.

        A KeyboardInterrupt ends the run, and its figures are those until then.
        """
        self._started_ns = now_ns()
        self._begin_ns = self._started_ns + int(warm_up_s * NS_PER_S)
        self._end_ns = self._begin_ns + int(duration_s * NS_PER_S)
        threads = [
            threading.Thread(target=self._send, args=(number,), daemon=True)
            for number in range(self._load.clients)
        ]
        for thread in threads:
            thread.start()
        try:
            self._wait(threads, self._begin_ns)
            self._wait_measuring(threads)
            self._wait(threads, self._end_ns + int(GRACE_S * NS_PER_S))
        except KeyboardInterrupt:
            self._end_early()
            raise
        finally:
            self._close(threads)
        return self.figures()

    def figures(self) -> Figures:
        """Return the figures of the requests that were due until now, or until the end."""
        duration_ns = self._end_ns - self._begin_ns
        answers = [a for each in self._answers for a in each if a.due_ns < duration_ns]
        kept = [each for each in answers if each.code != Cancelled.code]
        unanswered = len(answers) - len(kept) + self._count_unsent()
        return figures_of(
            self._load,
            self._batches[0].num_rows,
            kept,
            duration_ns / NS_PER_S,
            unanswered=unanswered,
            cpu=self._cpu,
        )

    def _count_unsent(self) -> int:
        """Count the requests that were due, and that no client sent."""
        if self._due is None:
            return 0
        rest = takewhile(lambda due_ns: due_ns < self._end_ns, iter(self._take, None))
        return sum(due_ns >= self._begin_ns for due_ns in rest)

    def _wait(self, threads: Sequence[threading.Thread], deadline_ns: int) -> None:
        # Short joins, so that a signal is handled.
        for thread in threads:
            while thread.is_alive() and now_ns() < deadline_ns:
                thread.join(TURN_S)

    def _wait_measuring(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for the end of the measurement, and measure the CPU time of this process."""
        cpu_ns, since_ns = process_cpu_ns(), now_ns()
        try:
            self._wait(threads, self._end_ns)
        finally:
            self._cpu = (process_cpu_ns() - cpu_ns) / max(now_ns() - since_ns, 1)

    def _end_early(self) -> None:
        """End the measurement now, if it has not ended."""
        with self._lock:
            self._end_ns = max(min(self._end_ns, now_ns()), self._begin_ns + 1)

    def _close(self, threads: Sequence[threading.Thread]) -> None:
        """Cancel open requests, and wait for the threads."""
        self._stop.set()
        for client in self._clients:
            client.close()
        self._wait(threads, now_ns() + int(GRACE_S * NS_PER_S))

    def _send(self, number: int) -> None:
        """Send requests until the end: in a closed loop at once, in an open loop when due."""
        client, answers = self._clients[number], self._answers[number]
        begin_ns, limit = self._begin_ns, ANSWERS_MAX // len(self._clients)
        count = number
        while not self._stop.is_set():
            due_ns = now_ns() if self._due is None else self._take()
            if due_ns >= self._end_ns:
                return
            wait_ns = due_ns - now_ns()
            if wait_ns > 0:
                self._stop.wait(wait_ns / NS_PER_S)
            sent_ns, code = now_ns(), ""
            try:
                batch = self._batches[count % len(self._batches)]
                client.score(self._model, batch, version=self._version)
            except IskanderError as error:
                code = error.code
            times_ns = due_ns - begin_ns, sent_ns - begin_ns, now_ns() - begin_ns
            if due_ns >= begin_ns:
                answers.append(Answer(*times_ns, code, was_busy=wait_ns <= 0))
                if len(answers) == limit:
                    self._end_early()
                    return
            count += len(self._clients)

    def _take(self) -> int:
        """Take the next due time of the open loop."""
        assert self._due is not None
        with self._lock:
            return self._started_ns + next(self._due)
