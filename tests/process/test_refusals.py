"""Refusals of the kernel, really provoked: in a process of its own, which keeps them for good."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support import sandbox

MIB = 1 << 20
SAY = """
from iskander.memory.backing import BackingOptions
from iskander.memory.segment import Segment

for length_bytes, options in {cases}:
    segment = Segment.create("test", length_bytes, BackingOptions(**options))
    segment.view[-1] = 1
    backing = segment.backing
    print(backing, backing.node, backing.is_locked, *backing.complaints, sep=" | ")
    segment.close()
"""


def backings(*cases: tuple[int, dict[str, object]], arguments: tuple[str, ...]) -> list[str]:
    """What segments of these lengths and options come to in a sandbox: a line for each."""
    command = [sys.executable, "-c", SAY.format(cases=cases)]
    done = subprocess.run(
        [sys.executable, sandbox.__file__, *arguments, *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=Path(__file__).parent,
    )
    return done.stdout.splitlines()


def test_memory_beyond_the_limit_is_not_locked() -> None:
    """The limit is of the process: a segment that it has room for is locked beside others."""
    options = {"is_locked": True}

    fits, exceeds = backings((MIB, options), (8 * MIB, options), arguments=("--lock", str(4 * MIB)))

    assert fits == "1 MiB, locked | None | True"
    assert exceeds.startswith("8 MiB | None | False | not locked, Cannot allocate memory: 8 MiB ")
    assert "this process may lock 4 MiB in all" in exceeds


def test_no_memory_may_be_locked_at_all() -> None:
    (line,) = backings((MIB, {"is_locked": True}), arguments=("--lock", "0"))

    assert line.startswith("1 MiB | None | False | not locked, Operation not permitted: ")


def test_a_sandbox_that_refuses_a_policy_costs_the_policy_only() -> None:
    (line,) = backings((MIB, {"node": 0}), arguments=("--refuse", "mbind"))

    assert line.startswith("1 MiB | None | False | no memory policy for node 0: mbind was refused ")
    assert "with EPERM: the sandbox does not allow it" in line
