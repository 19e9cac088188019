"""Client process of the endurance test.

    python -m benchmarks.endurance.client FAMILY NUMBER ADDRESSES VERSIONS PROCESSES

It reads `go`, `pause` and `stop` from standard input, one a line, and prints a report as JSON after
each pause. It begins paused.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.endurance import callers
from benchmarks.endurance.callers import Addresses, Ask, Refused
from benchmarks.endurance.recorder import Recorder
from benchmarks.endurance.requests import (
    FRAGILE,
    NUMERIC,
    PYTHON,
    ROWS_MAX,
    SIZES,
    STRINGS,
    VERSIONED,
    Checker,
    Numbers,
    Request,
)

PAUSE_WITHIN_S = 75.0
"""Longer than a request's timeout, so that an open request is one without an answer."""
OWNERS = 64
"""Ranges of numbers of a process."""
THINK_S = 0.02
"""Mean pause between two requests of a thread."""
ALL = (NUMERIC, NUMERIC, STRINGS, VERSIONED, VERSIONED, PYTHON)
NUMBERS_ONLY = (NUMERIC, PYTHON)
STREAM_BATCHES = (20, 400)
STREAM_DEPTH = 4
SHARED_BYTES = 1 << 20
SLOW_READ_S = 0.4
QUARANTINED = frozenset(("poisoned", "model_quarantined", "not_ready"))
UNKNOWN = frozenset(("unauthenticated",))
LATE = frozenset(("deadline_exceeded", "deadline_unreachable"))
REPLACED = frozenset(("draining", "connection_failed", "unavailable", "unanswered"))
"""Expected without retries if gateway processes are replaced."""

Opened = Callable[[], contextlib.AbstractContextManager[Ask]]


class Habit(NamedTuple):
    """Single requests of one thread.

    Attributes:
        requests: On one connection; 0: all.
        expected: Codes of errors, besides those of replaced processes.
    """

    kind: str
    opened: Opened
    models: tuple[str, ...] = ALL
    requests: int = 0
    expected: frozenset[str] = frozenset()
    think_s: float = THINK_S


class Client:
    """The threads of a process."""

    def __init__(self, number: int, addresses: Addresses, versions: Path, processes: int) -> None:
        self._number, self._addresses = number, addresses
        self._replaced = REPLACED if processes > 1 else frozenset()
        self._checker = Checker(versions)
        self._threads: list[threading.Thread] = []
        self.recorder = Recorder()

    def start(self, family: str) -> None:
        """Start the threads of a family."""
        by_name = {
            "flight": self._flight,
            "grpc": self._grpc,
            "http": self._http,
            "inferential": self._inferential,
            "victim": self._victim,
            "leaking": self._leaking,
        }
        for run in by_name[family]():
            numbers = Numbers(self._number * OWNERS + len(self._threads) + 1)
            seed = [self._number, len(self._threads)]
            args = (numbers, np.random.default_rng(seed))
            self._threads.append(threading.Thread(target=run, args=args, daemon=True))
            self._threads[-1].start()

    def _flight(self) -> list[Callable[..., None]]:
        opened = partial(callers.by_flight, self._addresses)
        stranger = partial(callers.by_flight, self._addresses._replace(token="isk_stranger"))
        # A retry would wait for the end of the quarantine, and so would a pause.
        once = partial(callers.by_flight, self._addresses, has_retries=False)
        late = partial(callers.by_flight, self._addresses, terms={"deadline_ms": 15})
        habits = (
            Habit("flight score", opened),
            Habit("flight new client", opened, requests=1, think_s=0.1),
            Habit("flight fragile", once, (FRAGILE,), expected=QUARANTINED, think_s=0.2),
            Habit("flight deadline", late, (NUMERIC, PYTHON), expected=LATE),
            Habit("flight stranger", stranger, (NUMERIC,), expected=UNKNOWN, think_s=0.5),
        )  # fmt: skip
        return [
            *(partial(self._ask, habit) for habit in habits),
            partial(self._streams, "flight stream"),
            partial(self._streams, "flight shared memory", shared_bytes=SHARED_BYTES),
            partial(self._streams, "flight left stream", leaves=True),
            partial(self._streams, "flight slow reader", pause_s=SLOW_READ_S),
        ]

    def _grpc(self) -> list[Callable[..., None]]:
        opened = partial(callers.by_grpc, self._addresses)
        late = partial(callers.by_grpc, self._addresses, timeout_s=callers.SHORT_S)
        cancelled = partial(callers.by_grpc, self._addresses, is_cancelled=True)
        habits = (
            Habit("grpc", opened),
            Habit("grpc new channel", opened, requests=1, think_s=0.1),
            Habit("grpc deadline", late, expected=LATE),
            Habit("grpc cancelled", cancelled, expected=frozenset(("cancelled",))),
        )
        return [partial(self._ask, habit) for habit in habits]

    def _http(self) -> list[Callable[..., None]]:
        opened = partial(callers.by_http, self._addresses)
        habits = (
            Habit("http", opened),
            Habit("http new connection", opened, requests=1, think_s=0.1),
        )
        return [partial(self._ask, habit) for habit in habits]

    def _inferential(self) -> list[Callable[..., None]]:
        opened = partial(callers.by_inferential, self._addresses)
        habits = (
            Habit("inferential", partial(opened, name="steady"), NUMBERS_ONLY),
            Habit("inferential new client", partial(opened, name="new"), NUMBERS_ONLY, requests=20),
        )
        return [partial(self._ask, habit) for habit in habits]

    def _victim(self) -> list[Callable[..., None]]:
        """Streams of a process that is killed."""
        return [
            partial(self._streams, "victim"),
            partial(self._streams, "victim", shared_bytes=SHARED_BYTES),
        ]

    def _leaking(self) -> list[Callable[..., None]]:
        return [self._leak]

    def _ask(self, habit: Habit, numbers: Numbers, random: np.random.Generator) -> None:
        """Send single requests over one connection after the other."""
        while not self.recorder.is_over.is_set():
            with habit.opened() as ask:
                count = 0
                while not self.recorder.is_over.wait(random.exponential(habit.think_s)):
                    self._ask_once(habit, ask, numbers, random)
                    count += 1
                    if count == habit.requests:
                        break

    def _ask_once(
        self, habit: Habit, ask: Ask, numbers: Numbers, random: np.random.Generator
    ) -> None:
        model, rows = str(random.choice(habit.models)), int(random.choice(SIZES))
        begun_ns = self.recorder.begin(habit.kind)
        request, newest = Request(model, numbers.take(rows)), self._checker.newest()
        try:
            answer = ask(request)
        except Refused as error:
            expected = habit.expected | self._replaced
            self.recorder.failed(habit.kind, error.code, expected=expected, text=str(error))
        except Exception as error:
            self.recorder.failed(
                habit.kind, type(error).__name__, expected=frozenset(), text=repr(error)
            )
        else:
            fault = self._checker.find_fault(request, answer, newest)
            self.recorder.answered(habit.kind, begun_ns, fault)

    def _streams(
        self,
        kind: str,
        numbers: Numbers,
        random: np.random.Generator,
        *,
        shared_bytes: int = 0,
        leaves: bool = False,
        pause_s: float = 0.0,
    ) -> None:
        """Run one stream after the other, on one connection for some of them."""
        from iskander.client import Client as FlightClient

        while not self.recorder.is_over.is_set():
            with FlightClient(
                self._addresses.grpc, token=self._addresses.token, shared_bytes=shared_bytes
            ) as client:
                for _ in range(int(random.integers(1, 8))):
                    stream = _Stream(
                        self.recorder, self._checker, kind, numbers, random,
                        rows=ROWS_MAX if shared_bytes else 0,
                    )  # fmt: skip
                    stream.run(client, leaves=leaves, pause_s=pause_s, expected=self._replaced)
                    if self.recorder.is_over.is_set():
                        return

    def _leak(self, numbers: Numbers, _: np.random.Generator) -> None:
        """Open a stream with a shared-memory region in each turn, and keep all of them."""
        import pyarrow as pa

        from iskander.client import Client as FlightClient

        kept: list[Any] = []
        with FlightClient(
            self._addresses.grpc, token=self._addresses.token, shared_bytes=SHARED_BYTES
        ) as client:
            while not self.recorder.is_over.wait(1.0):
                begun_ns = self.recorder.begin("leaking")
                values = numbers.take(ROWS_MAX)

                def batches(values: Any = values) -> Iterator[Any]:  # noqa: ANN401
                    yield pa.record_batch({"x": values})
                    self.recorder.is_over.wait()

                results = client.stream(NUMERIC, batches())
                next(results)
                kept.append(results)
                self.recorder.answered("leaking", begun_ns, "")


class _Stream:
    """One stream: batches ahead of the results, each result checked."""

    def __init__(
        self,
        recorder: Recorder,
        checker: Checker,
        kind: str,
        numbers: Numbers,
        random: np.random.Generator,
        *,
        rows: int,
    ) -> None:
        self._recorder, self._checker, self._kind = recorder, checker, kind
        self._numbers, self._random, self._rows = numbers, random, rows
        self._model = str(random.choice((NUMERIC, VERSIONED, PYTHON)))
        self._batches = int(random.integers(*STREAM_BATCHES))
        self._permits = threading.Semaphore(STREAM_DEPTH)
        self._is_ended = threading.Event()
        self._lock = threading.Lock()
        self._sent: deque[tuple[int, int, Request]] = deque()

    def run(self, client: Any, *, leaves: bool, pause_s: float, expected: frozenset[str]) -> None:  # noqa: ANN401
        """Run the stream, until it is left, fails or ends."""
        results = client.stream(self._model, self._feed(), timeout_s=None)
        answered = 0
        try:
            for result in results:
                answered += 1
                if pause_s and self._random.random() < 0.1:
                    self._recorder.is_over.wait(pause_s)
                with self._lock:
                    found = self._sent.popleft() if self._sent else None
                if found is None:
                    self._recorder.accuse(self._kind, f"result {answered} of no batch")
                    return
                begun_ns, newest, request = found
                fault = self._checker.find_fault(request, result["y"].to_numpy(), newest)
                self._recorder.answered(self._kind, begun_ns, fault)
                self._permits.release()
                if leaves and self._random.random() < 0.05:
                    return
            self._end_open("no_result", frozenset(), f"{answered} results")
        except Exception as error:
            self._end_open(getattr(error, "code", type(error).__name__), expected, repr(error))
        finally:
            self._end_open("", frozenset(), "")
            results.close()

    def _feed(self) -> Iterator[Any]:
        import pyarrow as pa

        for _ in range(self._batches):
            self._permits.acquire()
            if self._is_ended.wait(self._random.exponential(THINK_S)):
                return
            begun_ns = self._recorder.begin(self._kind)
            rows = self._rows or int(self._random.choice(SIZES))
            request = Request(self._model, self._numbers.take(rows))
            with self._lock:
                if self._is_ended.is_set():
                    self._recorder.left(self._kind)
                    return
                self._sent.append((begun_ns, self._checker.newest(), request))
            yield pa.record_batch({"x": request.values})

    def _end_open(self, code: str, expected: frozenset[str], text: str) -> None:
        """End the batches without a result: by an error, or left by the client."""
        with self._lock:
            self._is_ended.set()
            count = len(self._sent)
            self._sent.clear()
        self._permits.release()
        if count and code:
            self._recorder.failed(self._kind, code, expected=expected, text=text, count=count)
        elif count:
            self._recorder.left(self._kind, count)


def main() -> None:
    """Run a family until the end of the input."""
    family, number, addresses, versions, processes = sys.argv[1:]
    client = Client(int(number), Addresses(*json.loads(addresses)), Path(versions), int(processes))
    client.start(family)
    for line in sys.stdin:
        command = line.strip()
        if command == "go":
            client.recorder.resume()
        elif command == "pause":
            print(json.dumps(client.recorder.pause(PAUSE_WITHIN_S)), flush=True)
        else:
            break
    client.recorder.stop()
    time.sleep(0.2)
    # grpcio may wait for the lock of an ended thread at a regular exit.
    os._exit(0)


if __name__ == "__main__":
    main()
