"""Bare pyarrow Flight server that returns every batch: the baseline of the ratios.

It only receives and sends, so it measures the cost of Flight on the same machine. Its argument is
the port; SIGTERM ends it.
"""

from __future__ import annotations

import signal
import sys

from pyarrow import flight


class EchoServer(flight.FlightServerBase):
    """Implements only DoExchange."""

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Return every batch unchanged."""
        del context, descriptor
        writer.begin(reader.schema)
        for chunk in reader:
            writer.write_batch(chunk.data)


def main() -> None:
    """Serve until SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    server = EchoServer(f"grpc://127.0.0.1:{sys.argv[1]}")
    server.serve()


if __name__ == "__main__":
    main()
