"""A client without errors: `python -m benchmarks.hostile.innocent PORT SECONDS`.

Four streams of batches of 128 rows over one connection, by `pyarrow.flight`, each with a short
pause between a response and the next batch. Prints one line of JSON: for each request its end on
the monotonic clock and its latency, both in seconds, and the errors with their times. A failed
stream is opened again.
"""

from __future__ import annotations

import json
import sys
import threading
import time

from pyarrow import flight

from benchmarks.workloads import TWO_TOWER

STREAMS = 4
ROWS = 128
PAUSE_S = 0.004
TIMEOUT_S = 10.0
OPTIONS = [("grpc.max_reconnect_backoff_ms", 200), ("grpc.initial_reconnect_backoff_ms", 100)]


class Innocent:
    """The client and its measurements.

    Attributes:
        requests: End and latency of each request.
        errors: Time and text of each failure.
    """

    def __init__(self, port: int, seconds: float) -> None:
        self.requests: list[tuple[float, float]] = []
        self.errors: list[tuple[float, str]] = []
        self._client = flight.FlightClient(f"grpc://127.0.0.1:{port}", generic_options=OPTIONS)
        self._batch = TWO_TOWER.batches(ROWS)[0]
        self._until_s = time.monotonic() + seconds

    def run(self) -> None:
        """Send requests until the time is over."""
        threads = [threading.Thread(target=self._send, daemon=True) for _ in range(STREAMS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def stop(self) -> None:
        """Send no more requests."""
        self._until_s = 0.0

    def _send(self) -> None:
        while time.monotonic() < self._until_s:
            started_s = time.monotonic()
            try:
                self._stream()
            except flight.FlightError as error:
                now_s = time.monotonic()
                self.requests.append((now_s, now_s - started_s))
                self.errors.append((now_s, str(error)[:200]))
                time.sleep(0.1)

    def _stream(self) -> None:
        descriptor = flight.FlightDescriptor.for_path(TWO_TOWER.model)
        options = flight.FlightCallOptions(timeout=self._until_s - time.monotonic() + TIMEOUT_S)
        writer, reader = self._client.do_exchange(descriptor, options)
        with writer:
            writer.begin(self._batch.schema)
            while time.monotonic() < self._until_s:
                started_s = time.monotonic()
                writer.write_batch(self._batch)
                reader.read_chunk()
                now_s = time.monotonic()
                self.requests.append((now_s, now_s - started_s))
                time.sleep(PAUSE_S)
            writer.done_writing()


def main() -> None:
    """Run for the time given on the command line."""
    innocent = Innocent(int(sys.argv[1]), float(sys.argv[2]))
    innocent.run()
    print(json.dumps({"requests": innocent.requests, "errors": innocent.errors}))


if __name__ == "__main__":
    main()
