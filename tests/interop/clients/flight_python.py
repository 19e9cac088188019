"""Flight client with pyarrow: requests a model's schema, then exchanges a stream of batches.

Arguments: address, model, a file with an Arrow IPC stream, and a file for the results.
Prints the schema as an IPC message in hexadecimal. On an error, prints its text and exits with 1.
"""

from __future__ import annotations

import sys

import pyarrow as pa
from pyarrow import flight


def main() -> None:
    address, model, source, target = sys.argv[1:]
    descriptor = flight.FlightDescriptor.for_path(model)
    options = flight.FlightCallOptions(timeout=20.0)
    with flight.connect(f"grpc://{address}") as client, pa.OSFile(source) as file:
        schema = client.get_flight_info(descriptor, options).schema
        batches = pa.ipc.open_stream(file)
        writer, reader = client.do_exchange(descriptor, options)
        with writer:
            writer.begin(batches.schema)
            for batch in batches:
                writer.write_batch(batch)
            writer.done_writing()
            results = reader.read_all()
    with pa.OSFile(target, "wb") as file, pa.ipc.new_stream(file, results.schema) as out:
        out.write_table(results)
    sys.stdout.write(schema.serialize().to_pybytes().hex())


if __name__ == "__main__":
    try:
        main()
    except (pa.ArrowException, KeyError) as error:
        sys.stdout.write(f"{type(error).__name__}: {error}")
        sys.exit(1)
