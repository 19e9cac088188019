"""Throughput of large batches, next to bare Flight: `python -m benchmarks.batch_throughput`."""

from __future__ import annotations

import sys

from benchmarks.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["run", "large", *sys.argv[1:]]))
