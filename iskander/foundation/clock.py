"""Clock access: monotonic nanoseconds; wall-clock time only for external timestamps.

Decision code takes `now_ns` as an argument, so that tests pass their own.
"""

from __future__ import annotations

import time
from typing import Final

NS_PER_US: Final = 1000
NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000

now_ns = time.monotonic_ns
thread_cpu_ns = time.thread_time_ns
process_cpu_ns = time.process_time_ns
wall_ns = time.time_ns
pause_s = time.sleep
