"""A device in host memory, whose streams run in any order that their events allow.

An operation reads and writes memory when it runs, not when it is enqueued; a missing wait thus
shows as wrong bytes. `step` runs one operation of a random stream, `start` a thread that does.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from iskander_worker.backends import Run
from iskander_worker.devices.cuda import Device, DriverError

from iskander.contract.tensors import Contract, body_layout
from iskander.errors import ExecutionFailed
from iskander.foundation.clock import now_ns

Ready = Callable[[], bool]
Act = Callable[[], None]
FAULT = 700


class FakeDevice(Device):
    """See the module.

    Attributes:
        refused: Access of the mappings whose page-locking fails: `ro`, `rw`; `all` is a fault.
        streams_max: Further streams cannot be created.
        log: Names of the operations that have run.
        blocked: Copies that waited for their stream, because the memory was not page-locked.
        free_bytes: Allocations beyond them fail.
        fault: Set by the test: the context's error, which every later call reports.
    """

    def __init__(self, seed: int = 0, refused: Sequence[str] = (), number: int = 0) -> None:
        self.number, self.name = number, "fake (0.0)"
        self.copied_in = self.copied_out = 0
        self.signalled_ns: deque[int] = deque()
        self.refused = set(refused)
        self.registered: dict[int, int] = {}
        self.memory: dict[int, Any] = {}
        self.log: list[str] = []
        self.free_bytes = 1 << 30
        self.streams_max = 1 << 10
        self.fault: DriverError | None = None
        self.blocked = 0
        self._random = random.Random(seed)
        self._streams: dict[int, deque[tuple[str, Ready, Act]]] = {}
        self._numbers = itertools.count(1)
        self._records: dict[int, int] = {}
        self._reached: dict[int, int] = {}
        self._lock = threading.RLock()

    def use(self) -> None:
        pass

    def register(self, address: int, length_bytes: int, *, is_read_only: bool) -> None:
        if "all" in self.refused:
            raise DriverError(FAULT, "cuMemHostRegister_v2 failed: fault (CUDA error 700)")
        if ("ro" if is_read_only else "rw") in self.refused:
            raise DriverError(801, "cuMemHostRegister_v2 failed: not supported (CUDA error 801)")
        assert address not in self.registered
        self.registered[address] = length_bytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def allocate(self, length_bytes: int) -> int:
        if length_bytes > self.free_bytes:
            raise DriverError(2, "cuMemAlloc_v2 failed: out of memory (CUDA error 2)")
        self.free_bytes -= length_bytes
        buffer = np.full(max(length_bytes, 1), 0xEE, np.uint8)
        self.memory[buffer.ctypes.data] = (buffer, length_bytes)
        return int(buffer.ctypes.data)

    def free(self, address: int) -> None:
        self.free_bytes += self.memory.pop(address)[1]

    def allocate_host(self, length_bytes: int) -> int:
        buffer = np.zeros(max(length_bytes, 1), np.uint8)
        self.memory[buffer.ctypes.data] = (buffer, 0)
        self.registered[buffer.ctypes.data] = length_bytes
        return int(buffer.ctypes.data)

    def free_host(self, address: int) -> None:
        del self.memory[address], self.registered[address]

    def copy_in(self, target: int, source: int, length_bytes: int, stream: int) -> None:
        self.copied_in += length_bytes
        self._copy("in", target, source, length_bytes, stream, host=source)

    def copy_out(self, target: int, source: int, length_bytes: int, stream: int) -> None:
        self.copied_out += length_bytes
        self._copy("out", target, source, length_bytes, stream, host=target)

    def copy_within(self, target: int, source: int, length_bytes: int, stream: int) -> None:
        self.enqueue("within", stream, lambda: _move(target, source, length_bytes))

    def create_stream(self) -> int:
        if len(self._streams) >= self.streams_max:
            raise DriverError(2, "cuStreamCreate failed: out of memory (CUDA error 2)")
        number = next(self._numbers)
        self._streams[number] = deque()
        return number

    def destroy_stream(self, stream: int) -> None:
        assert not self._streams.pop(stream)

    def create_event(self) -> int:
        return next(self._numbers)

    def record(self, event: int, stream: int) -> None:
        number = self._records[event] = self._records.get(event, 0) + 1

        def reach() -> None:
            self._reached[event] = number

        self.enqueue("record", stream, reach)

    def wait(self, stream: int, event: int) -> None:
        number = self._records.get(event, 0)
        self.enqueue("wait", stream, lambda: None, lambda: self._reached.get(event, 0) >= number)

    def signal(self, stream: int, fd: int) -> None:
        def act() -> None:
            self.signalled_ns.append(now_ns())
            os.eventfd_write(fd, 1)

        self.enqueue("signal", stream, act)

    def synchronize(self, stream: int) -> None:
        self._check()
        while self._streams[stream]:
            # The thread may have run the last operation in the meantime.
            is_stuck = not self.step() and self._streams[stream] and self.fault is None
            assert not is_stuck, "the streams wait for each other"
            self._check()

    @property
    def streams(self) -> int:
        """Number of streams that exist."""
        return len(self._streams)

    def synchronize_all(self) -> None:
        self._check()
        for stream in list(self._streams):
            self.synchronize(stream)

    def require_healthy(self, stream: int) -> None:
        self._check()

    def enqueue(self, name: str, stream: int, act: Act, ready: Ready = lambda: True) -> None:
        """Enqueue an operation, such as a computation."""
        self._check()
        with self._lock:
            self._streams[stream].append((name, ready, act))

    def step(self, only: int | None = None) -> bool:
        """Run one operation, of a stream if given; False if none can run."""
        with self._lock:
            ready = [
                queue
                for number, queue in list(self._streams.items())
                if queue and queue[0][1]() and only in (None, number) and self.fault is None
            ]
            if not ready:
                return False
            name, _, act = self._random.choice(ready).popleft()
            act()
            self.log.append(name)
            return True

    def start(self, pause_s: float = 0.0) -> None:
        """Run operations on a thread for the life of this process."""

        def work() -> None:
            while True:
                if not self.step():
                    time.sleep(0.001)
                elif pause_s:
                    time.sleep(pause_s)

        threading.Thread(target=work, daemon=True).start()

    def _copy(
        self, name: str, target: int, source: int, length_bytes: int, stream: int, host: int
    ) -> None:
        self.enqueue(name, stream, lambda: _move(target, source, length_bytes))
        locked = self.registered.items()
        if not any(at <= host and host + length_bytes <= at + size for at, size in locked):
            self.blocked += 1
            self.synchronize(stream)

    def _check(self) -> None:
        if self.fault is not None:
            raise self.fault


class FakeLauncher:
    """A model on the fake device: `compute` maps named input arrays to named output arrays.

    Attributes:
        prepared: Rows of the launches, in the order of their creation.
        failures: Errors of the next runs.
    """

    def __init__(
        self,
        device: FakeDevice,
        compute: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]],
        graph_rows: tuple[int, ...] = (),
    ) -> None:
        self.device, self.graph_rows = device, graph_rows
        self.stream = device.create_stream()
        self.compute = compute
        self.prepared: list[tuple[int, bool]] = []
        self.failures: list[Exception | None] = []

    def prepare(
        self,
        contract: Contract,
        rows: int,
        input_address: int,
        output_address: int,
        *,
        is_captured: bool,
    ) -> FakeLaunch:
        self.prepared.append((rows, is_captured))
        return FakeLaunch(self, contract, rows, input_address, output_address)

    def close(self) -> None:
        self.device.destroy_stream(self.stream)


class FakeLaunch:
    def __init__(
        self, launcher: FakeLauncher, contract: Contract, rows: int, source: int, target: int
    ) -> None:
        self._launcher = launcher
        self._inputs = _arrays(contract.inputs, rows, source)
        self._outputs = _arrays(contract.outputs, rows, target)

    def run(self, run: Run) -> Sequence[int]:
        launcher = self._launcher
        if run.is_aborted:
            raise ExecutionFailed("aborted")
        failure = launcher.failures.pop(0) if launcher.failures else None
        if failure is not None:
            raise failure

        def compute() -> None:
            results = launcher.compute(self._inputs)
            for name, array in self._outputs.items():
                array[...] = results[name]

        launcher.device.enqueue("compute", launcher.stream, compute)
        return [array.ctypes.data for array in self._outputs.values()]


def _arrays(specs: Any, rows: int, address: int) -> dict[str, np.ndarray]:
    offsets, _ = body_layout(specs, rows)
    return {
        spec.tensor: np.ctypeslib.as_array(
            (ctypes.c_uint8 * spec.buffer_bytes(rows)).from_address(address + offset)
        )
        .view(spec.type.dtype.numpy)
        .reshape(rows, *spec.shape)
        for spec, offset in zip(specs, offsets, strict=True)
    }


def _move(target: int, source: int, length_bytes: int) -> None:
    ctypes.memmove(target, source, length_bytes)
