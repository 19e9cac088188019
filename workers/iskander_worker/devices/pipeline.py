"""Two batches in flight on a device: one is computed while the next one's inputs are copied.

    stream `up`      inputs of a batch, then an event
    model's stream   waits for the event, computes, then an event
    stream `down`    waits for that event, copies the results, then signals `wake_fd`

The worker loop only enqueues, and polls `wake_fd` beside its channels. Batches end in the order of
their launches, because `down` is one stream.

Runs on: worker main.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from iskander.contract.processing.rows import RowCopier
from iskander.errors import ExecutionFailed, IskanderError
from iskander.interprocess.control.messages import Copied, Execute
from iskander_worker.backends import Run
from iskander_worker.batches.slices import gather, scatter
from iskander_worker.batches.tensors import memory_at
from iskander_worker.devices.arenas import PageLockedArenas
from iskander_worker.devices.copies import input_copies, is_direct, output_copies, paddings
from iskander_worker.devices.cuda import Device, DeviceLost, DriverError, capture_lock
from iskander_worker.devices.workspace import SLOTS, Launcher

if TYPE_CHECKING:
    from iskander_worker.session import Session

CHECK_MS: Final = 100
"""Interval of checks for a fault of the device during a batch: after a fault, no batch ends."""


class Slot:
    """Events and page-locked memory of one batch in flight; `index` selects a workspace."""

    def __init__(self, device: Device, index: int) -> None:
        self.index = index
        self.copied, self.computed = device.create_event(), device.create_event()
        self._device = device
        self._stages = {"input": (0, 0), "output": (0, 0)}

    def stage(self, side: str, length_bytes: int) -> int:
        """Return the address of page-locked memory; the next call with the same side reuses it."""
        address, size = self._stages[side]
        if size < length_bytes:
            if size:
                self._device.free_host(address)
                self._stages[side] = (0, 0)
            size = 1 << max(length_bytes - 1, 0).bit_length()
            try:
                address = self._device.allocate_host(size)
            except DriverError as error:
                if error.is_fatal:
                    raise
                raise ExecutionFailed(f"no page-locked memory of {size} bytes: {error}") from None
            self._stages[side] = (address, size)
        return address


class Flight:
    """A launched batch.

    Attributes:
        stage: Page-locked body of the results, which `finish` scatters; None: not needed.
        copied: Bytes that were copied to the device and to the host.
        ended_ns: Time at which the results were copied.
    """

    __slots__ = ("arenas", "copied", "ended_ns", "message", "outputs", "slot", "stage")

    def __init__(
        self,
        slot: Slot,
        arenas: PageLockedArenas,
        message: Execute,
        outputs: RowCopier,
        stage: memoryview | None,
        copied: Copied,
    ) -> None:
        self.slot, self.arenas, self.message = slot, arenas, message
        self.outputs, self.stage = outputs, stage
        self.copied = copied
        self.ended_ns = 0


class Pipeline:
    """Enqueues batches on a device, and returns those that have ended.

    Attributes:
        wake_fd: Readable after the end of a batch.
        flights: Launched batches, oldest first.
    """

    def __init__(self, device: Device) -> None:
        device.use()
        self.device = device
        self.flights: deque[Flight] = deque()
        self._up, self._down = device.create_stream(), device.create_stream()
        self._free = [Slot(device, index) for index in reversed(range(SLOTS))]
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self.wake_fd, select.POLLIN)

    @property
    def is_full(self) -> bool:
        """Whether a batch must end before the next one is launched."""
        return not self._free

    def launch(
        self, session: Session, arenas: PageLockedArenas, message: Execute, run: Run
    ) -> Flight:
        """Enqueue a batch, or raise `ExecutionFailed` or `DeviceLost`.

        The caller has checked that the batch's ranges are inside the arenas. After an exception no
        copy of the batch is pending, so that its ranges can be leased again.
        """
        slot = self._free.pop()
        try:
            with capture_lock:
                flight = self._enqueue(session, slot, arenas, message, run)
        except (DriverError, IskanderError) as error:
            self._free.append(slot)
            self._drain(session.launcher)
            if isinstance(error, IskanderError):
                raise
            raise ExecutionFailed(str(error)) from None
        self.flights.append(flight)
        return flight

    def finish(self, *, is_waiting: bool = False) -> list[Flight]:
        """Return the batches that have ended, with their results in the arena; may be empty.

        `is_waiting` waits for at least one of them. Raises `DeviceLost` after a fault.
        """
        while self.flights and is_waiting and not self._poll.poll(CHECK_MS):
            self.check()
        try:
            count = os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return []
        ended = [self.flights.popleft() for _ in range(count)]
        for flight in ended:
            message, stage = flight.message, flight.stage
            flight.ended_ns = self.device.signalled_ns.popleft()
            if stage is not None:
                target = flight.arenas.outputs.view
                scatter(flight.outputs, stage, message.rows, target, message.slices)
            self._free.append(flight.slot)
        return ended

    def check(self) -> None:
        """Raise `DeviceLost` if the device has a fault; does nothing during a capture."""
        if not capture_lock.acquire(blocking=False):
            return
        try:
            self.device.require_healthy(self._down)
        except DriverError as error:
            raise DeviceLost(str(error)) from None
        finally:
            capture_lock.release()

    def _enqueue(
        self, session: Session, slot: Slot, arenas: PageLockedArenas, message: Execute, run: Run
    ) -> Flight:
        assert session.launcher is not None
        device, stream = self.device, session.launcher.stream
        before_in, before_out = device.copied_in, device.copied_out
        prepared = session.workspaces[slot.index].prepare(message.rows)
        self._copy_in(session.inputs, slot, arenas, message, prepared.input_address)
        device.record(slot.copied, self._up)
        device.wait(stream, slot.copied)
        addresses = prepared.launch.run(run)
        device.record(slot.computed, stream)
        device.wait(self._down, slot.computed)
        stage = self._copy_out(session.outputs, slot, arenas, message, addresses)
        device.signal(self._down, self.wake_fd)
        copied = Copied(device.copied_in - before_in, device.copied_out - before_out)
        return Flight(slot, arenas, message, session.outputs, stage, copied)

    def _copy_in(
        self,
        copier: RowCopier,
        slot: Slot,
        arenas: PageLockedArenas,
        message: Execute,
        body: int,
    ) -> None:
        """Enqueue the copies of a batch's inputs to the body on the device."""
        device, up, slices, rows = self.device, self._up, message.slices, message.rows
        copies = input_copies(copier, slices, rows)
        if not is_direct(copies, is_page_locked=arenas.is_input_locked):
            length = copier.layout(rows)[1]
            address = slot.stage("input", length)
            gather(copier, arenas.inputs.view, slices, memory_at(address, length).data, rows)
            device.copy_in(body, address, length, up)
            return
        base = arenas.inputs.address
        for arena_offset, offset, length in copies:
            device.copy_in(body + offset, base + arena_offset, length, up)
        for last_row, width, count in paddings(copier, sum(part.rows for part in slices), rows):
            done = 1
            while done <= count:
                doubled = min(done, count + 1 - done)
                start = body + last_row
                device.copy_within(start + done * width, start, doubled * width, up)
                done += doubled

    def _copy_out(
        self,
        copier: RowCopier,
        slot: Slot,
        arenas: PageLockedArenas,
        message: Execute,
        addresses: Sequence[int],
    ) -> memoryview | None:
        """Enqueue the copies of a batch's results; return their stage, None for direct copies."""
        device, down, rows = self.device, self._down, message.rows
        columns = output_copies(copier, message.slices, rows)
        copies = [copy for column in columns for copy in column]
        if is_direct(copies, is_page_locked=arenas.is_output_locked):
            base = arenas.outputs.address
            for source, column in zip(addresses, columns, strict=True):
                for arena_offset, offset, length in column:
                    device.copy_out(base + arena_offset, source + offset, length, down)
            return None
        offsets, length = copier.layout(rows)
        address = slot.stage("output", length)
        for source, spec, offset in zip(addresses, copier.specs, offsets, strict=True):
            device.copy_out(address + offset, source, spec.buffer_bytes(rows), down)
        return memory_at(address, length).data

    def _drain(self, launcher: Launcher | None) -> None:
        """Wait for all operations of a failed launch."""
        assert launcher is not None
        try:
            for stream in (self._up, launcher.stream, self._down):
                self.device.synchronize(stream)
        except DriverError as error:
            raise DeviceLost(str(error)) from None
