"""Memory policy: what the kernel is asked for on each machine, and what a refusal is called."""

from __future__ import annotations

import ctypes
import errno
import platform
from pathlib import Path
from typing import Any

import pytest

from iskander.memory.numa import prefer_node, prefer_node_for
from iskander.memory.segment import Segment

MPOL_PREFERRED = 1
BEYOND = 1000
"""More nodes than any kernel counts to."""


class Kernel:
    """Answers every call with one error, or 0, and remembers what it was asked."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.asked: list[tuple[Any, ...]] = []

    def __call__(self, *call: Any) -> int:
        self.asked.append(tuple(getattr(each, "value", each) for each in call))
        return self.error


def nodes_in(mask: ctypes.Array[ctypes.c_ulong], bits: int) -> set[int]:
    """As the kernel reads a mask; it takes a length that is larger by one."""
    assert bits - 1 <= 64 * len(mask)
    return {node for node in range(bits - 1) if mask[node // 64] >> node % 64 & 1}


@pytest.mark.parametrize(
    ("machine", "mbind", "set_mempolicy"), [("x86_64", 237, 238), ("aarch64", 235, 237)]
)
def test_each_machine_has_its_numbers(
    machine: str, mbind: int, set_mempolicy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    kernel = Kernel()

    assert prefer_node(1, kernel) == prefer_node_for(4096, 8192, 1, kernel) == ""

    assert [call[:2] for call in kernel.asked] == [(set_mempolicy, MPOL_PREFERRED), (mbind, 4096)]
    assert kernel.asked[1][2:4] == (8192, MPOL_PREFERRED)


@pytest.mark.parametrize("node", [0, 1, 63, 64, 72, 127, 128, 1023])
def test_the_mask_has_that_one_node(node: int) -> None:
    kernel = Kernel()

    prefer_node(node, kernel)
    prefer_node_for(4096, 8192, node, kernel)

    assert nodes_in(*kernel.asked[0][2:4]) == nodes_in(*kernel.asked[1][4:6]) == {node}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errno.EPERM, "refused with EPERM: the sandbox does not allow it"),
        (errno.ENOSYS, "refused with ENOSYS: this kernel was built without NUMA"),
        (errno.EINVAL, "refused with EINVAL: the node has no memory, or not for this process"),
        (errno.EIO, "refused with EIO: Input/output error"),
    ],
)
def test_a_refusal_is_told_with_node_call_and_meaning(error: int, words: str) -> None:
    kernel = Kernel(error)

    assert prefer_node(3, kernel).startswith(
        f"no memory policy for node 3: set_mempolicy was {words}"
    )
    assert prefer_node_for(4096, 8192, 3, kernel).startswith(
        f"no memory policy for node 3: mbind was {words}"
    )


def test_another_machine_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    kernel = Kernel()

    assert prefer_node(1, kernel) == (
        "no memory policy for node 1: the number of set_mempolicy is not known on s390x"
    )
    assert "mbind is not known on s390x" in prefer_node_for(4096, 8192, 1, kernel)
    assert not kernel.asked


def test_this_kernel_takes_the_policy_of_a_mapping() -> None:
    """Read back from the kernel, which no fake one can stand for."""
    segment = Segment.create("test", 4096)
    try:
        refusal = prefer_node_for(segment.address, len(segment), 0)
        if "EPERM" in refusal or "ENOSYS" in refusal:
            pytest.skip(refusal)
        assert refusal == ""
        maps = Path("/proc/self/numa_maps").read_text().splitlines()
        (line,) = (line for line in maps if line.startswith(f"{segment.address:x} "))
        assert line.split()[1] == "prefer:0"
    finally:
        segment.close()


def test_this_kernel_refuses_a_node_that_is_not_there() -> None:
    segment = Segment.create("test", 4096)
    try:
        refusal = prefer_node_for(segment.address, len(segment), BEYOND)
        assert refusal.startswith(f"no memory policy for node {BEYOND}: mbind was refused with E")
        assert prefer_node(BEYOND).startswith(f"no memory policy for node {BEYOND}: set_mempolicy")
    finally:
        segment.close()
