"""Cores, NUMA policy and OOM score of this process, and thread limits of its libraries.

Runs on: worker main, before any import that starts threads or touches much memory. Source:
sched_setaffinity(2).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from iskander.interprocess.memory.numa import prefer_node

OOM_SCORE: Final = 500
"""OOM score of a worker, in thousandths of the machine's memory: more than the gateway's score."""


def set_library_environment() -> None:
    """Disable the telemetry of ONNX Runtime, and limit BLAS to one thread.

    Libraries read the variables at import.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"


def pin_process(cpus: tuple[int, ...], node: int | None) -> list[str]:
    """Pin the process to `cpus` and prefer memory of `node`; return notices of what failed."""
    notices = []
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        notices.append(f"not pinned to the cpus {sorted(cpus)}: {error.strerror}")
    else:
        # The kernel silently ignores cpus outside of the process's cpuset.
        missing = sorted(set(cpus) - os.sched_getaffinity(0))
        if missing:
            notices.append(f"not pinned to the cpus {missing}: they are not in its cpuset")
    notice = prefer_node(node) if node is not None else ""
    return [*notices, notice] if notice else notices


def raise_oom_score() -> None:
    """Let the kernel end this process before the gateway if memory runs out.

    The gateway maps the arenas of all workers, so it may have the highest score otherwise. No
    privilege is needed to raise one's own score. Source: proc(5), `/proc/PID/oom_score_adj`.
    """
    file = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):
        if int(file.read_text()) < OOM_SCORE:
            file.write_text(str(OOM_SCORE))
