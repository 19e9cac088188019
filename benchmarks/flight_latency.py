"""Latency of small batches, next to bare Flight and ONNX Runtime.

Command: `python -m benchmarks.flight_latency`.
"""

from __future__ import annotations

import sys

from benchmarks.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["run", "small", *sys.argv[1:]]))
