"""Values with which a run fails: the error names the row and the column, and the client's fault."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import flight
from support import models
from support.processes import Gateway, running

from iskander.errors import ExecutionFailed


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("failing")
    served = [{"name": "parsing", "path": str(models.parsing(folder)), "intra_threads": 1}]
    with running(
        folder, served, workers={"groups": ["0"]}, http={"address": "127.0.0.1:0"}
    ) as ready:
        yield ready
        assert ready.wait_idle()["workers"][0]["starts"] == 1


def batch(*texts: str) -> pa.RecordBatch:
    rows = len(texts)
    return pa.record_batch(
        {"a": ["1"] * rows, "b": list(texts), "x": pa.array([1] * rows, pa.float32())}
    )


def test_client_gets_the_row_and_the_column_of_a_value_that_fails(gateway: Gateway) -> None:
    """Also if its batch ran with those of others, which get their results."""
    with gateway.client() as client:
        batches = [batch("2"), batch("3", "4", "many", "5"), batch("6")]
        first, error, last = client.outcomes("parsing", batches)
    assert isinstance(first, pa.RecordBatch) and first["y"].to_pylist() == [4]
    assert isinstance(last, pa.RecordBatch) and last["y"].to_pylist() == [8]
    assert isinstance(error, ExecutionFailed)
    assert error.message.startswith("row 2, column `b`: ")
    assert (error.row, error.column, error.fault) == (2, "b", "client")
    assert not error.retryable


def test_http_and_flight_have_the_status_of_invalid_input(gateway: Gateway) -> None:
    columns = {"a": "1", "b": "many"}
    inputs = [
        {"name": name, "shape": [1], "datatype": "BYTES", "data": [text]}
        for name, text in columns.items()
    ]
    inputs.append({"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]})
    with gateway.client() as client:
        client.score("parsing", batch("1"))
    connection = http.client.HTTPConnection(gateway.stats()["http_address"], timeout=30)
    connection.request("POST", "/v2/models/parsing/infer", json.dumps({"inputs": inputs}))
    response = connection.getresponse()
    error = json.loads(response.read())
    connection.close()
    assert response.status == 400
    assert (error["code"], error["fault"]) == ("execution_failed", "client")
    assert (error["row"], error["column"]) == (0, "b")
    with flight.connect(f"grpc://{gateway.address}") as raw:
        writer, reader = raw.do_exchange(flight.FlightDescriptor.for_path("parsing"))
        with pytest.raises(pa.ArrowInvalid, match="row 0, column `b`"), writer:
            writer.begin(batch("1").schema)
            writer.write_batch(batch("many"))
            writer.done_writing()
            reader.read_chunk()


def test_kernel_ends_workers_before_the_gateway(gateway: Gateway) -> None:
    """If the data of a request make a model ask for too much memory."""

    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    (pid,) = gateway.worker_pids()
    assert score(pid) == max(score(gateway.pid), 500)
