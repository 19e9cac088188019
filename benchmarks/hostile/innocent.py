"""A client without errors: `python -m benchmarks.hostile.innocent PLACE SECONDS [PROBE]`.

Four streams of batches of 128 rows over one connection, by `pyarrow.flight`, each with a short
pause between a response and the next batch. A fifth one is opened for each batch, ten times a
second. PLACE is a port, or `tls:PORT`.

    source        reads the source `few` too
    region PATH   requests a shared-memory region too

Prints `ready` after the first responses, and at the end one line of JSON: for each request its end
on the monotonic clock and its latency, both in seconds, the same for each opened stream and each
probe, and the errors with their times. A failed stream is opened again.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pyarrow import flight

from benchmarks.workloads import TWO_TOWER
from iskander.errors import IskanderError
from iskander.interprocess.control.shared_regions import request_region

STREAMS = 4
ROWS = 128
PAUSE_S = 0.004
TIMEOUT_S = 10.0
SECONDS_MAX = 3600.0
OPEN_PAUSE_S = 0.1
PROBE_PAUSE_S = 0.25
REGION_BYTES = 1 << 16
OPTIONS = [("grpc.max_reconnect_backoff_ms", 200), ("grpc.initial_reconnect_backoff_ms", 100)]


class Innocent:
    """The client and its measurements.

    Args:
        place: Port, or `tls:PORT`.
        probe: `source`, or `region` with a space and the path of the socket.

    Attributes:
        requests: End and latency of each request.
        opened: The same for streams with one request, from their start.
        probes: The same for each probe.
        errors: Time and text of each failure.
    """

    def __init__(self, place: str, probe: str = "") -> None:
        self.requests: list[tuple[float, float]] = []
        self.opened: list[tuple[float, float]] = []
        self.probes: list[tuple[float, float]] = []
        self.errors: list[tuple[float, str]] = []
        scheme, _, port = place.rpartition(":")
        uri = f"grpc{'+tls' if scheme else '+tcp'}://localhost:{port}"
        self._client = flight.FlightClient(
            uri, generic_options=OPTIONS, disable_server_verification=bool(scheme)
        )
        self._batch = TWO_TOWER.batches(ROWS)[0]
        self._until_s = time.monotonic() + SECONDS_MAX
        self._probe = probe

    def run(self) -> None:
        """Send requests until the time is over."""
        threads = [threading.Thread(target=self._send, daemon=True) for _ in range(STREAMS)]
        threads.append(
            threading.Thread(
                target=self._repeat, args=(self._open, self.opened, OPEN_PAUSE_S), daemon=True
            )
        )
        if self._probe:
            arguments = (lambda: self.probe(self._probe), self.probes, PROBE_PAUSE_S)
            threads.append(threading.Thread(target=self._repeat, args=arguments, daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def stop(self, seconds: float = 0.0) -> None:
        """Send no more requests after a time."""
        self._until_s = time.monotonic() + seconds

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

    def _repeat(
        self, call: Callable[[], None], found: list[tuple[float, float]], pause_s: float
    ) -> None:
        while time.monotonic() < self._until_s:
            started_s = time.monotonic()
            try:
                call()
            except (flight.FlightError, IskanderError, OSError) as error:
                self.errors.append((time.monotonic(), f"{type(error).__name__}: {error}"[:200]))
            now_s = time.monotonic()
            found.append((now_s, now_s - started_s))
            time.sleep(pause_s)

    def _open(self) -> None:
        """Send one batch on a new stream."""
        descriptor = flight.FlightDescriptor.for_path(TWO_TOWER.model)
        options = flight.FlightCallOptions(timeout=TIMEOUT_S)
        writer, reader = self._client.do_exchange(descriptor, options)
        with writer:
            writer.begin(self._batch.schema)
            writer.write_batch(self._batch)
            reader.read_chunk()

    def probe(self, probe: str) -> None:
        """Read a source, or request a region and give it back."""
        kind, _, path = probe.partition(" ")
        if kind == "region":
            connection, _, descriptor = request_region(Path(path), REGION_BYTES, TIMEOUT_S)
            os.close(descriptor)
            connection.close()
            return
        options = flight.FlightCallOptions(timeout=TIMEOUT_S)
        descriptor = flight.FlightDescriptor.for_path("few")
        info = self._client.get_flight_info(descriptor, options)
        self._client.do_get(info.endpoints[0].ticket, options).read_all()

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

    def report(self) -> dict[str, object]:
        """The measurements."""
        return {
            "requests": self.requests,
            "opened": self.opened,
            "probes": self.probes,
            "errors": self.errors,
        }


def main() -> None:
    """Run for the time given on the command line, after the first responses."""
    innocent = Innocent(sys.argv[1], *sys.argv[3:])
    thread = threading.Thread(target=innocent.run)
    thread.start()
    while len(innocent.requests) < STREAMS:
        time.sleep(PAUSE_S)
    innocent.stop(float(sys.argv[2]))
    print("ready", flush=True)
    thread.join()
    print(json.dumps(innocent.report()))


if __name__ == "__main__":
    main()
