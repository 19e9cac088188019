"""Streams that one client holds without progress: others get their places."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyarrow import flight
from support import models
from support.processes import Gateway, eventually, running

from iskander.foundation.clock import NS_PER_S
from iskander.gateway.auth.shares import IDLE_NS

STREAMS = 6
BATCH = pa.record_batch({"x": [1, 2, 3]})


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("shares")
    served = [{"name": "ids", "path": str(models.row_ids(folder / "ids")), "intra_threads": 1}]
    with running(folder, served, limits={"streams": STREAMS}, workers={"groups": ["0"]}) as ready:
        yield ready


def test_idle_streams_give_way(gateway: Gateway) -> None:
    """The streams of one connection fill the server; another client sends batches after a while."""
    holder = flight.connect(f"grpc://{gateway.address}")
    streams = []
    for _ in range(STREAMS):
        writer, reader = holder.do_exchange(flight.FlightDescriptor.for_path("ids"))
        writer.begin(BATCH.schema)
        writer.write_batch(BATCH)
        assert reader.read_chunk().data.num_rows == 3
        streams.append((writer, reader))
    with gateway.client() as other:
        time.sleep(IDLE_NS / NS_PER_S)
        assert other.score("ids", BATCH).num_rows == 3
    ended = 0
    for writer, reader in streams:
        try:
            writer.write_batch(BATCH)
            reader.read_chunk()
            writer.close()
        except flight.FlightError as error:
            assert "given to another caller" in str(error)
            ended += 1
    assert ended == 1
    eventually(lambda: gateway.stats()["streams"] == 0, what="closed streams")
    holder.close()
