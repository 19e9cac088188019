"""Processes with denied system calls, or memory segments with limited locked memory."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support import sandbox

MIB = 1 << 20
PRINT_BACKINGS = """
from iskander.interprocess.memory.backing import BackingOptions
from iskander.interprocess.memory.segment import Segment

for length_bytes, options in {cases}:
    segment = Segment.create("test", length_bytes, BackingOptions(**options))
    segment.view[-1] = 1
    backing = segment.backing
    print(backing, backing.node, backing.is_locked, *backing.notices, sep=" | ")
    segment.close()
"""


def backings(*cases: tuple[int, dict[str, object]], arguments: tuple[str, ...]) -> list[str]:
    """Returns one line about the backing of each segment created in a sandboxed process."""
    command = [sys.executable, "-c", PRINT_BACKINGS.format(cases=cases)]
    process = subprocess.run(
        [sys.executable, sandbox.__file__, *arguments, *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=Path(__file__).parent,
    )
    return process.stdout.splitlines()


def test_memory_above_the_limit_is_not_locked() -> None:
    """The limit applies to the process; a smaller segment is locked."""
    options = {"is_locked": True}

    fits, exceeds = backings((MIB, options), (8 * MIB, options), arguments=("--lock", str(4 * MIB)))

    assert fits == "1 MiB, locked | None | True"
    assert exceeds.startswith("8 MiB | None | False | not locked, Cannot allocate memory: 8 MiB ")
    assert "this process may lock 4 MiB in all" in exceeds


def test_no_memory_is_locked_with_a_limit_of_0() -> None:
    (line,) = backings((MIB, {"is_locked": True}), arguments=("--lock", "0"))

    assert line.startswith("1 MiB | None | False | not locked, Operation not permitted: ")


def test_denied_memory_policy_is_reported_and_memory_is_used() -> None:
    (line,) = backings((MIB, {"node": 0}), arguments=("--refuse", "mbind"))

    assert line.startswith("1 MiB | None | False | no memory policy for node 0: mbind was refused ")
    assert "with EPERM: the sandbox does not allow it" in line


@pytest.mark.parametrize("module", ["sampling", "gateway.telemetry.tracing.exporter"])
def test_auxiliary_processes_run_on_the_cpus_that_they_have(module: str) -> None:
    """They end without an error after the gateway's end of their socket."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", f"iskander.{module}"]
    with ours, theirs:
        ours.shutdown(socket.SHUT_WR)
        subprocess.run(
            [sys.executable, sandbox.__file__, "--refuse", "sched_setaffinity", *command],
            stdin=theirs,
            timeout=60,
            check=True,
        )
