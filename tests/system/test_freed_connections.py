"""A closed connection is freed at once, without the garbage collector: nothing refers to it.

Otherwise a churn of connections would hold the memory of thousands of them between two collections.
"""

from __future__ import annotations

import http.client
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight
from support.models import row_ids
from support.processes import Gateway, eventually, running
from support.robots import ask, connected

CONNECTIONS = 5
PROTOCOLS = ("http1", "http2", "zmtp")
PROGRAM = """
import collections
import gc
import json
import pathlib
import sys
import threading
import time

from iskander.embed import serve


def watch(path):
    new = path.with_suffix(".new")
    while True:
        kinds = (f"{type(each).__module__}.{type(each).__name__}" for each in gc.get_objects())
        new.write_text(json.dumps(collections.Counter(kinds)))
        new.replace(path)
        time.sleep(0.05)


gc.disable()
threading.Thread(target=watch, args=(pathlib.Path(sys.argv[1]),), daemon=True).start()
serve(sys.argv[-1])
"""


def test_closed_connections_are_freed(tmp_path: Path) -> None:
    program, counts = tmp_path / "program.py", tmp_path / "counts.json"
    program.write_text(PROGRAM)
    with running(
        tmp_path,
        [{"name": "ids", "path": str(row_ids(tmp_path / "ids"))}],
        prefix=(sys.executable, str(program), str(counts)),
        http={"address": "127.0.0.1:0"},
        inferential={"address": "tcp://127.0.0.1:0"},
    ) as gateway:

        def open_connections() -> Counter[str]:
            kinds = json.loads(counts.read_text())
            names = {
                each: f"iskander.gateway.transport.{each}.connection.Connection"
                for each in PROTOCOLS
            }
            return Counter({each: kinds.get(name, 0) for each, name in names.items()})

        stats = gateway.stats()
        for _ in range(CONNECTIONS):
            use_flight(gateway)
            use_http(stats["http_address"])
        with connected(stats["inferential"]["address"]) as robot:
            assert ask(robot.model("ids"), x=np.array(1)) is not None
            eventually(lambda: open_connections()["zmtp"], what="counts with an open connection")
        eventually(lambda: not open_connections().total(), what=f"no connection in {counts}")


def use_flight(gateway: Gateway) -> None:
    """A stream that ends, one with an error, and one that is abandoned."""
    descriptor = flight.FlightDescriptor.for_path
    batch = pa.record_batch({"x": np.arange(3)})
    with flight.FlightClient(f"grpc://{gateway.address}") as client:
        writer, reader = client.do_exchange(descriptor("ids"))
        with writer:
            writer.begin(batch.schema)
            writer.write_batch(batch)
            assert reader.read_chunk().data.num_rows == batch.num_rows
            writer.done_writing()
        writer, reader = client.do_exchange(descriptor("unknown"))
        with pytest.raises(pa.ArrowException):
            writer.begin(batch.schema)
            reader.read_chunk()
        writer, reader = client.do_exchange(descriptor("ids"))
        writer.begin(batch.schema)


def use_http(address: str) -> None:
    """A valid and an invalid request, then one that is abandoned."""
    connection = http.client.HTTPConnection(address, timeout=20)
    connection.request("GET", "/v2/models/ids")
    with connection.getresponse() as response:
        assert json.loads(response.read())["name"] == "ids"
    connection.request("POST", "/v2/models/ids/infer", b"{")
    with connection.getresponse() as response:
        assert response.status == http.HTTPStatus.BAD_REQUEST
        response.read()
    connection.putrequest("POST", "/v2/models/ids/infer")
    connection.putheader("content-length", "100")
    connection.endheaders(b"{")
    connection.close()
