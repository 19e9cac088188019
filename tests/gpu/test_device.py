"""The CUDA driver through its wrapper: page-locking, copies, signals and errors."""

from __future__ import annotations

import os
import select

import numpy as np
import pytest
from iskander_worker.batches.tensors import memory_at
from iskander_worker.devices.arenas import PageLockedArenas
from iskander_worker.devices.cuda import DriverError, open_device

from iskander.interprocess.memory.segment import Segment

BYTES = 1 << 20


def test_read_only_and_writable_arena_are_page_locked_and_copied() -> None:
    """The mappings are those of a worker: a sealed input arena, read-only, and an output arena."""
    device = open_device(0)
    created = Segment.create("in", BYTES, is_read_only=True), Segment.create("out", BYTES)
    rng = np.random.default_rng(0)
    created[0].view[:] = rng.bytes(BYTES)
    inputs = Segment.attach(os.dup(created[0].fd), BYTES, is_writable=False)
    outputs = Segment.attach(os.dup(created[1].fd), BYTES, is_writable=True)
    arenas = PageLockedArenas(device, inputs, outputs)
    assert arenas.notices == [] and arenas.is_input_locked and arenas.is_output_locked
    up, down, event = device.create_stream(), device.create_stream(), device.create_event()
    fd = os.eventfd(0, os.EFD_CLOEXEC)
    address = device.allocate(BYTES)
    before = device.copied_in, device.copied_out
    device.copy_in(address, inputs.address, BYTES, up)
    device.copy_within(address + BYTES // 2, address, BYTES // 2, up)
    device.record(event, up)
    device.wait(down, event)
    device.copy_out(outputs.address, address, BYTES, down)
    device.signal(down, fd)
    assert select.select([fd], [], [], 20)[0]
    assert os.eventfd_read(fd) == 1
    half = bytes(created[0].view[: BYTES // 2])
    assert bytes(created[1].view) == half * 2
    assert (device.copied_in - before[0], device.copied_out - before[1]) == (BYTES, BYTES)
    device.free(address)
    arenas.release()
    # Registered once more: the release was complete.
    again = PageLockedArenas(device, inputs, outputs)
    assert again.notices == []
    again.release()
    os.close(fd)
    for segment in (inputs, outputs, *created):
        segment.close()


def test_refused_page_locking_is_a_notice() -> None:
    """The same memory cannot be registered twice."""
    device = open_device(0)
    inputs, outputs = Segment.create("in", BYTES), Segment.create("out", BYTES)
    first = PageLockedArenas(device, inputs, outputs)
    second = PageLockedArenas(device, inputs, outputs)
    starts = [text.split(" (")[0] for text in second.notices]
    assert starts == ["the input arena", "the output arena"]
    assert "CUDA error 712" in second.notices[0]
    assert not second.is_input_locked
    first.release()
    inputs.close()
    outputs.close()


def test_failed_allocation_is_no_fault_of_the_device() -> None:
    device = open_device(0)
    with pytest.raises(DriverError, match="CUDA error 2") as caught:
        device.allocate(1 << 50)
    assert not caught.value.is_fatal
    stream = device.create_stream()
    device.require_healthy(stream)
    address = device.allocate_host(64)
    memory_at(address, 64)[:] = 1
    device.free_host(address)
    device.destroy_stream(stream)
