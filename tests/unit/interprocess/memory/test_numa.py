"""NUMA memory policy: system calls per machine, and messages for failures."""

from __future__ import annotations

import ctypes
import errno
import platform
from pathlib import Path
from typing import Any

import pytest

from iskander.interprocess.memory.numa import prefer_node, prefer_node_for
from iskander.interprocess.memory.segment import Segment

MPOL_PREFERRED = 1
MISSING_NODE = 1000
"""A node number above the limit of every kernel."""


class Kernel:
    """Fake system call: returns one error, or 0, and records the calls."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *call: Any) -> int:
        self.calls.append(tuple(getattr(each, "value", each) for each in call))
        return self.error


def nodes_in(mask: ctypes.Array[ctypes.c_ulong], bits: int) -> set[int]:
    """Return the nodes of a mask as the kernel reads it: the length is one larger."""
    assert bits - 1 <= 64 * len(mask)
    return {node for node in range(bits - 1) if mask[node // 64] >> node % 64 & 1}


@pytest.mark.parametrize(
    ("machine", "mbind", "set_mempolicy"), [("x86_64", 237, 238), ("aarch64", 235, 237)]
)
def test_system_call_numbers_per_machine(
    machine: str, mbind: int, set_mempolicy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    kernel = Kernel()

    assert prefer_node(1, kernel) == prefer_node_for(4096, 8192, 1, kernel) == ""

    assert [call[:2] for call in kernel.calls] == [(set_mempolicy, MPOL_PREFERRED), (mbind, 4096)]
    assert kernel.calls[1][2:4] == (8192, MPOL_PREFERRED)


@pytest.mark.parametrize("node", [0, 1, 63, 64, 72, 127, 128, 1023])
def test_mask_has_only_the_requested_node(node: int) -> None:
    kernel = Kernel()

    prefer_node(node, kernel)
    prefer_node_for(4096, 8192, node, kernel)

    assert nodes_in(*kernel.calls[0][2:4]) == nodes_in(*kernel.calls[1][4:6]) == {node}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errno.EPERM, "refused with EPERM: the sandbox does not allow it"),
        (errno.ENOSYS, "refused with ENOSYS: this kernel was built without NUMA"),
        (errno.EINVAL, "refused with EINVAL: the node has no memory, or not for this process"),
        (errno.EIO, "refused with EIO: Input/output error"),
    ],
)
def test_failure_message_has_node_call_and_meaning(error: int, message: str) -> None:
    kernel = Kernel(error)

    assert prefer_node(3, kernel).startswith(
        f"no memory policy for node 3: set_mempolicy was {message}"
    )
    assert prefer_node_for(4096, 8192, 3, kernel).startswith(
        f"no memory policy for node 3: mbind was {message}"
    )


def test_unknown_machine_makes_no_system_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    kernel = Kernel()

    assert prefer_node(1, kernel) == (
        "no memory policy for node 1: the number of set_mempolicy is not known on s390x"
    )
    assert "mbind is not known on s390x" in prefer_node_for(4096, 8192, 1, kernel)
    assert not kernel.calls


def test_kernel_applies_the_policy_of_a_mapping() -> None:
    """The policy is read back from the real kernel."""
    segment = Segment.create("test", 4096)
    try:
        error_text = prefer_node_for(segment.address, len(segment), 0)
        if "EPERM" in error_text or "ENOSYS" in error_text:
            pytest.skip(error_text)
        assert error_text == ""
        maps = Path("/proc/self/numa_maps").read_text().splitlines()
        (line,) = (line for line in maps if line.startswith(f"{segment.address:x} "))
        assert line.split()[1] == "prefer:0"
    finally:
        segment.close()


def test_kernel_rejects_a_missing_node() -> None:
    segment = Segment.create("test", 4096)
    try:
        error_text = prefer_node_for(segment.address, len(segment), MISSING_NODE)
        assert error_text.startswith(
            f"no memory policy for node {MISSING_NODE}: mbind was refused with E"
        )
        assert prefer_node(MISSING_NODE).startswith(
            f"no memory policy for node {MISSING_NODE}: set_mempolicy"
        )
    finally:
        segment.close()
