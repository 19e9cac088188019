"""Small batches beside bare Flight and bare ONNX Runtime: `python -m benchmarks.flight_latency`."""

from __future__ import annotations

import sys

from benchmarks.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["run", "small", *sys.argv[1:]]))
