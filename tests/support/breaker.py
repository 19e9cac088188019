"""Fault injection: kills, stops and hangs workers, and kills clients; seeded.

The streams of `chaos` check the outcomes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np

from support.chaos import Ledger, Vanisher
from support.processes import Gateway


class Breaker(threading.Thread):
    """Kills and stops workers and kills clients, until it is stopped."""

    def __init__(self, gateway: Gateway, seed: int, hang_s: float, ledger: Ledger) -> None:
        super().__init__(name="breaker")
        self._gateway, self._hang_s, self._ledger = gateway, hang_s, ledger
        self._seed = seed
        self._random = np.random.default_rng([seed, 1000])
        self._is_over = threading.Event()
        self._vanishers: list[Vanisher] = []
        self.deeds: list[str] = []

    def __enter__(self) -> Breaker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()

    def run(self) -> None:
        begun = time.monotonic()
        deeds = (self._kill, self._kill, self._stop, self._hang, self._vanish, self._vanish)
        try:
            while not self._is_over.wait(self._random.uniform(0.02, 0.3)):
                deed = deeds[self._random.integers(len(deeds))]
                try:
                    done = deed()
                except Exception as error:
                    self._ledger.accuse(f"while it was broken: {error!r}")
                    return
                if done:
                    self.deeds.append(f"{time.monotonic() - begun:.2f} s: {done}")
        finally:
            for vanisher in self._vanishers:
                vanisher.kill()

    def _kill(self) -> str:
        return self._signalled("kill", lambda fd: signal.pidfd_send_signal(fd, signal.SIGKILL))

    def _stop(self) -> str:
        return self._signalled("stop", lambda fd: self._suspend(fd, self._hang_s / 3))

    def _hang(self) -> str:
        return self._signalled("hang", lambda fd: self._suspend(fd, self._hang_s * 1.5))

    def _vanish(self) -> str:
        if len(self._vanishers) < 2:
            number = len(self.deeds) + self._seed
            self._vanishers.append(Vanisher(self._gateway.address, number, self._ledger))
            return "a client comes"
        if not self._vanishers[0].has_begun():
            return ""
        self._vanishers.pop(0).kill()
        return "a client is killed"

    def _signalled(self, name: str, do: Callable[[int], None]) -> str:
        """Signal a worker; if one is down already, signal the other one only sometimes."""
        ready = [w for w in self._gateway.stats()["workers"] if w["state"] == "ready" and w["pid"]]
        if (len(ready) < 2 and self._random.random() < 0.8) or not ready:
            return ""
        worker = ready[self._random.integers(len(ready))]
        try:
            fd = os.pidfd_open(worker["pid"])
        except ProcessLookupError:
            return ""
        try:
            with contextlib.suppress(ProcessLookupError):
                do(fd)
        finally:
            os.close(fd)
        self._ledger.note(f"workers: {name}")
        return f"{name} worker {worker['index']}"

    def _suspend(self, fd: int, for_s: float) -> None:
        signal.pidfd_send_signal(fd, signal.SIGSTOP)
        try:
            self._is_over.wait(for_s * self._random.uniform(0.1, 1.0))
        finally:
            signal.pidfd_send_signal(fd, signal.SIGCONT)
