"""Where this process runs: cores, NUMA memory policy, and what libraries may start by themselves.

Runs on: worker main, before any import that starts threads or touches much memory.

Source: sched_setaffinity(2), set_mempolicy(2).
"""

from __future__ import annotations

import ctypes
import os
import platform

_SYS_SET_MEMPOLICY = 238
_MPOL_PREFERRED = 1


def set_library_environment() -> None:
    """Keep libraries from threads and network calls of their own.

    ONNX Runtime uploads usage data unless this is set before it is imported; NumPy's BLAS starts
    a thread a core.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"


def place(cpus: tuple[int, ...], node: int | None) -> tuple[int, ...]:
    """Pin the process to `cpus`, and prefer memory of `node`.

    Args:
        cpus: Cores; empty keeps the affinity that the process was started with, which is how a
            service manager places it.
        node: NUMA node, or None where there is one only.

    Returns:
        `cpus` as given: what the gateway has to repeat for this process to stay.

    Raises:
        OSError: None of the cores may be used by this process.
    """
    if cpus:
        os.sched_setaffinity(0, cpus)
    if node is not None and platform.machine() == "x86_64":
        mask = (ctypes.c_ulong * (node // 64 + 1))()
        mask[node // 64] = 1 << (node % 64)
        # Preferred, not bound: a full node must not end the process. Refusals (no NUMA in the
        # kernel, a sandbox) leave the kernel's default, which is local allocation.
        ctypes.CDLL(None).syscall(_SYS_SET_MEMPOLICY, _MPOL_PREFERRED, mask, len(mask) * 64 + 1)
    return cpus
