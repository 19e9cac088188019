"""A bare pyarrow Flight server that sends every batch back: what the ratios are taken against.

It does nothing but receive and send, so it is the cost of Flight itself on the same machine. Its
argument is the port; it ends on SIGTERM.
"""

from __future__ import annotations

import signal
import sys

from pyarrow import flight


class EchoServer(flight.FlightServerBase):
    """DoExchange and nothing else."""

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Send every batch back as it came."""
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
