"""`iskander-worker` inside PyTorch's profiler, which records copies and kernels of its GPU.

    python -P traced_worker.py TRACE -P .../foreign_interpreter.py FOLDERS MODULE its-arguments...

The arguments after TRACE are those that the supervisor gives to a model's own interpreter. Once the
file TRACE.stop exists, the trace is written to TRACE; the worker serves until it is stopped.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

POLL_S = 0.05
MODULE = "iskander_worker.__main__"


def main() -> None:
    """Start the profiler on a thread of its own, and run the worker."""
    started = threading.Event()
    trace = Path(sys.argv[1])
    threading.Thread(target=_profile, args=(trace, started), daemon=True).start()
    started.wait()
    sys.argv = [sys.argv[0], *sys.argv[sys.argv.index(MODULE) + 1 :]]
    from iskander_worker.__main__ import main as work

    work()


def _profile(trace: Path, started: threading.Event) -> None:
    """Record the device's activity; one thread starts and stops the profiler."""
    try:
        from torch.profiler import ProfilerActivity, profile

        profiler = profile(activities=[ProfilerActivity.CUDA])
        profiler.start()
    finally:
        started.set()
    while not trace.with_suffix(".stop").exists():
        time.sleep(POLL_S)
    profiler.stop()
    unfinished = trace.with_suffix(".new")
    profiler.export_chrome_trace(str(unfinished))
    unfinished.replace(trace)


if __name__ == "__main__":
    main()
