"""Where this process runs: cores, NUMA memory policy, and what libraries may start by themselves.

Runs on: worker main, before any import that starts threads or touches much memory.

Source: sched_setaffinity(2).
"""

from __future__ import annotations

import os

from iskander.memory.numa import prefer_node


def set_library_environment() -> None:
    """Keep libraries from threads and network calls of their own.

    ONNX Runtime uploads usage data unless this is set before it is imported; NumPy's BLAS starts
    a thread a core.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"


def pin_process(cpus: tuple[int, ...], node: int | None) -> list[str]:
    """Pin the process to `cpus`, and prefer memory of `node`, as far as it may.

    Args:
        cpus: Of the plan.
        node: NUMA node, or None for no preference.

    Returns:
        What was refused, and why: a worker that runs elsewhere is slower, and better than none.
    """
    complaints = []
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        complaints.append(f"not pinned to the cpus {sorted(cpus)}: {error.strerror}")
    else:
        # The kernel leaves out what lies outside of the process's cpuset.
        missing = sorted(set(cpus) - os.sched_getaffinity(0))
        if missing:
            complaints.append(f"not pinned to the cpus {missing}: they are not in its cpuset")
    complaint = prefer_node(node) if node is not None else ""
    return [*complaints, complaint] if complaint else complaints
