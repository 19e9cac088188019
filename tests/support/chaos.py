"""Streams that check every answer, whatever happens to workers and clients meanwhile; seeded.

A stream knows what each of its batches must come back as, since `y = 3 * x + 1` on numbers that are
hardly ever drawn twice: an answer is right, or an error by name, or it is noted as wrong.
"""

from __future__ import annotations

import select
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import flight

from iskander.client import Client
from iskander.errors import IskanderError
from support.processes import Gateway, eventually

ROWS_MAX = 64
VALUE_MAX = 1 << 50
"""The model `picky` fails with this and more."""
BAD_SHARE = 0.05
SIZES = (1, 2, 7, 63, 64, 65, 128, 300, 2000)
"""Rows of batches: on both sides of what the model takes at once, and several times as much."""
CODES = frozenset(
    (
        "arena_full",
        "client_over_share",
        "deadline_exceeded",
        "deadline_unreachable",
        "dropped",
        "not_ready",
        "poisoned",
        "queue_full",
        "superseded",
    )
)
"""Errors that a batch may be answered with; beside `draining`, once the gateway was told to."""
SCORED_WITHIN_S = 60.0
REFUSED_S = 0.003
"""How long a client thinks after an error."""
CLIENTS = str(Path(__file__).parent.parent)


class Habit(NamedTuple):
    """How a stream behaves.

    Attributes:
        depth: Batches that it sends ahead of the answers.
        terms: Of the whole stream.
        mixed_terms: Each batch has terms of its own, any.
        in_band: Goes on after an error.
        period_s: Between two batches; 0: as soon as may be.
        pause_s: Now and then it reads nothing for so long.
        leaves: How often it goes away in the middle.
        timeout_s: Of a call, at most; 0: none.
    """

    models: tuple[str, ...]
    depth: int = 1
    terms: tuple[tuple[str, Any], ...] = ()
    mixed_terms: bool = False
    in_band: bool = True
    period_s: float = 0.0
    pause_s: float = 0.0
    leaves: float = 0.0
    timeout_s: float = 0.0


HABITS = (
    Habit(("ids",), depth=40),
    Habit(("ids",), in_band=False, terms=(("priority", 0),)),
    Habit(("priced",), depth=8, terms=(("deadline_ms", 80), ("client", "due"))),
    Habit(("priced", "ids"), depth=12, in_band=False, leaves=0.3),
    Habit(("ids", "priced"), depth=6, mixed_terms=True),
    Habit(("priced", "picky"), depth=4, terms=(("client", "camera"), ("newest_wins", True))),
    Habit(("ids", "priced", "picky"), depth=20, timeout_s=0.6, leaves=0.1),
    Habit(("priced", "ids", "picky"), depth=40, pause_s=0.5),
    Habit(("picky",), depth=20, leaves=0.3),
    Habit(("picky", "ids"), depth=3, mixed_terms=True),
    Habit(("priced",), period_s=0.02, depth=3, terms=(("client", "robot"), ("deadline_ms", 60))),
)


class Ledger:
    """What came of every batch and stream."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"{dict(sorted(self.counts.items()))}, wrong: {self.wrong}"

    def note(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def accuse(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what)


class Feed:
    """The batches of one stream, drawn by the client's own thread, no more ahead than it may."""

    def __init__(self, habit: Habit, random: np.random.Generator, count: int) -> None:
        self._habit, self._random, self._count = habit, random, count
        self._permits = threading.Semaphore(habit.depth)
        self._is_over = threading.Event()
        self.sent: list[np.ndarray] = []
        self.is_picky = False

    def is_bad(self, index: int) -> bool:
        """Whether the model must refuse a batch, and no other."""
        return self.is_picky and bool(self.sent[index].max() >= VALUE_MAX)

    def answered(self) -> None:
        self._permits.release()

    def end(self) -> None:
        self._is_over.set()
        self.answered()

    def __iter__(self) -> Iterator[Any]:
        habit, random = self._habit, self._random
        for _ in range(self._count):
            if habit.period_s:
                self._is_over.wait(habit.period_s)
            self._permits.acquire()
            if self._is_over.is_set():
                return
            values = random.integers(0, VALUE_MAX, random.choice(SIZES))
            if random.random() < BAD_SHARE:
                values[random.integers(len(values))] += VALUE_MAX
            self.sent.append(values)
            batch = pa.record_batch({"x": values})
            yield (batch, mixed_terms(random)) if habit.mixed_terms else batch


def mixed_terms(random: np.random.Generator) -> dict[str, Any]:
    every = {
        "priority": int(random.integers(0, 10)),
        "urgency": float(random.random()),
        "deadline_ms": float(random.choice([1, 20, 100, 5000])),
        "ttl_ms": float(random.choice([5, 50, 5000])),
        "steps_remaining": int(random.integers(0, 8)),
    }
    return {name: value for name, value in every.items() if random.random() < 0.5}


class Streams:
    """One client that opens streams of a habit until it is told to stop."""

    def __init__(self, address: str, habit: Habit, seed: list[int], ledger: Ledger) -> None:
        self._address, self._habit, self._ledger = address, habit, ledger
        self._random = np.random.default_rng(seed)
        self._name = f"{habit.models[0]} depth {habit.depth} seed {seed}"
        self.may_drain = False

    def run(self, is_over: Callable[[], bool], on_right: Callable[[], None] = lambda: None) -> None:
        """Streams over connections that last for a few of them."""
        while not is_over():
            with Client(self._address) as client:
                for _ in range(int(self._random.integers(1, 6))):
                    if is_over():
                        return
                    if not self._stream(client, on_right):
                        if self.may_drain:
                            return
                        break

    def _stream(self, client: Client, on_right: Callable[[], None]) -> bool:
        """One stream; False where the server cannot be reached."""
        habit, random, ledger = self._habit, self._random, self._ledger
        feed = Feed(habit, random, int(random.integers(1, 60)))
        call = client.outcomes if habit.in_band else client.stream
        timeout_s = habit.timeout_s * random.random() + 0.01 if habit.timeout_s else SCORED_WITHIN_S
        model = str(random.choice(habit.models))
        feed.is_picky = model == "picky"
        outcomes = call(model, feed, terms=dict(habit.terms), timeout_s=timeout_s)
        ledger.note("streams")
        answered = 0
        leaves = random.random() < habit.leaves
        try:
            for outcome in outcomes:
                self._check(outcome, feed, answered, on_right)
                answered += 1
                if isinstance(outcome, IskanderError):
                    threading.Event().wait(REFUSED_S)
                feed.answered()
                if leaves and random.random() < 0.2:
                    ledger.note("streams left")
                    return True
                if habit.pause_s and random.random() < 0.05:
                    threading.Event().wait(habit.pause_s)
            if answered != len(feed.sent):
                ledger.accuse(f"{self._name}: {answered} answers to {len(feed.sent)} batches")
        except Exception as error:
            return self._ended(error, feed, answered)
        finally:
            feed.end()
            outcomes.close()
        return True

    def _check(self, outcome: Any, feed: Feed, index: int, on_right: Callable[[], None]) -> None:
        if index >= len(feed.sent):
            self._ledger.accuse(f"{self._name}: answer {index} to nothing")
        elif isinstance(outcome, IskanderError):
            self._error(outcome, "answered", is_bad=feed.is_bad(index))
        elif feed.is_bad(index):
            self._ledger.accuse(f"{self._name}: answer {index} should have failed")
        elif np.array_equal(outcome["y"].to_numpy(), 3 * feed.sent[index] + 1):
            self._ledger.note("right")
            if self._habit.terms:
                self._ledger.note(f"right of {dict(self._habit.terms)}")
            on_right()
        else:
            self._ledger.accuse(f"{self._name}: answer {index} is wrong")

    def _error(self, error: IskanderError, how: str, *, is_bad: bool) -> None:
        self._ledger.note(f"{how} {error.code}")
        expected = CODES | {"draining"} if self.may_drain else CODES
        if error.code not in expected and not (is_bad and error.code == "execution_failed"):
            self._ledger.accuse(f"{self._name}: {how} {error!r}")

    def _ended(self, error: Exception, feed: Feed, answered: int) -> bool:
        if isinstance(error, IskanderError):
            is_bad = answered < len(feed.sent) and feed.is_bad(answered)
            self._error(error, "ended with", is_bad=is_bad)
            return error.code != "draining"
        if self.may_drain and not answered and isinstance(error, flight.FlightUnavailableError):
            self._ledger.note("nobody there")
            return False
        self._ledger.accuse(f"{self._name}: after {answered} answers {error!r}")
        return False


class Load:
    """All streams, each from a thread of its own."""

    def __init__(self, gateway: Gateway, seed: int, ledger: Ledger) -> None:
        self._is_over = threading.Event()
        self._is_drain = False
        self._streams = [
            Streams(gateway.address, habit, [seed, number], ledger)
            for number, habit in enumerate(HABITS)
        ]
        self._threads = [
            threading.Thread(target=streams.run, args=(self._is_over.is_set,))
            for streams in self._streams
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind or not self._is_drain:
            self._is_over.set()
        for thread in self._threads:
            thread.join()

    def expect_drain(self) -> None:
        """From now on the server may stop; a stream that finds it stopping is the last one."""
        self._is_drain = True
        for streams in self._streams:
            streams.may_drain = True


class Vanisher:
    """A client in a process of its own, which is killed in the middle of its streams."""

    def __init__(self, address: str, seed: int, ledger: Ledger) -> None:
        self._ledger = ledger
        program = f"import sys; sys.path.insert(0, {CLIENTS!r}); from support import chaos; "
        program += f"chaos.run_vanishing({address!r}, {seed})"
        self._process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)

    def has_begun(self) -> bool:
        """Whether it has had its first answer."""
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def kill(self) -> None:
        self._process.kill()
        said = self._process.communicate()[0].decode().splitlines()
        self._ledger.note("clients killed")
        for line in said:
            if line != "begun":
                self._ledger.accuse(f"a client that vanished: {line}")


def run_vanishing(address: str, seed: int) -> None:
    """Main function of a client that is to be killed."""
    ledger = Ledger()
    told: list[str] = []

    def tell() -> None:
        for line in [*([] if told else ["begun"]), *ledger.wrong]:
            told.append(line)
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
        ledger.wrong.clear()

    habit = Habit(("ids", "priced", "picky"), depth=30)
    deadline = time.monotonic() + SCORED_WITHIN_S
    Streams(address, habit, [seed, 99], ledger).run(lambda: time.monotonic() > deadline, tell)


def quiet(gateway: Gateway) -> dict[str, Any]:
    """The stats, once nothing waits, runs or is leased and every worker is there."""

    def is_quiet() -> dict[str, Any] | None:
        stats = gateway.stats()
        busy: list[Any] = [stats["input_arena"]["leases"], stats["input_arena"]["leased_bytes"]]
        busy += [stats["streams"], *(sum(lane["queue"].values()) for lane in lanes_of(stats))]
        busy += [w["in_flight"] + w["output_leased_bytes"] for w in stats["workers"]]
        busy += [w["state"] != "ready" or w["credits"] != 2 for w in stats["workers"]]
        busy += [not lane["ready"] for lane in lanes_of(stats)]
        return None if any(busy) else stats

    try:
        found: dict[str, Any] = eventually(is_quiet, within_s=40.0, what="quiet")
    except AssertionError as error:
        raise AssertionError(f"{error}: {gateway.stats()}") from None
    return found


def lanes_of(stats: dict[str, Any]) -> list[dict[str, Any]]:
    return list(stats["lanes"].values())
