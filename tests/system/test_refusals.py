"""Each refused request is counted once, by its code, in every protocol and at every step."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

import grpc
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight
from support import models
from support.processes import Gateway, eventually, running
from support.robots import Peer, address_of, observation

from iskander._generated import oip_pb2
from iskander.errors import ContractError, IskanderError, LimitExceeded

ROWS_MAX = 1000
WRONG = pa.record_batch({"x": pa.array([1.5])})
RIGHT = pa.record_batch({"x": pa.array([1])})
TOO_MANY = pa.record_batch({"x": pa.array(range(ROWS_MAX + 1))})


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("refused")
    path = models.row_ids(folder / "ids")
    with running(
        folder,
        [{"name": "ids", "path": str(path), "max_batch_rows": 100}],
        limits={"rows": ROWS_MAX},
        workers={"groups": ["0"], "count": 1},
        http={"address": "127.0.0.1:0"},
        inferential={"address": "tcp://127.0.0.1:0"},
    ) as ready:
        yield ready


def refused(gateway: Gateway) -> dict[str, int]:
    counts: dict[str, int] = gateway.stats()["lanes"]["ids/1"]["refused"]
    return counts


def added(gateway: Gateway, before: dict[str, int]) -> dict[str, int]:
    """Refusals since `before`, by code."""
    counts = {code: count - before.get(code, 0) for code, count in refused(gateway).items()}
    return {code: count for code, count in counts.items() if count}


def test_flight_schemas_and_batches(gateway: Gateway) -> None:
    before = refused(gateway)
    with gateway.client() as client:
        with pytest.raises(ContractError):
            client.score("ids", WRONG)
        with pytest.raises(LimitExceeded):
            client.score("ids", TOO_MANY)
    assert added(gateway, before) == {"contract": 1, "limit": 1}


def test_flight_batches_in_band(gateway: Gateway) -> None:
    before = refused(gateway)
    options = flight.FlightCallOptions(headers=[(b"iskander-errors", b"in-band")])
    with flight.connect(f"grpc://{gateway.address}") as client:
        descriptor = flight.FlightDescriptor.for_path("ids")
        writer, reader = client.do_exchange(descriptor, options)
        with writer:
            writer.begin(RIGHT.schema)
            for batch in (RIGHT, TOO_MANY, RIGHT, TOO_MANY):
                writer.write_batch(batch)
            writer.done_writing()
            assert len(list(reader)) == 4
    assert added(gateway, before) == {"limit": 2}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_open_inference_over_grpc(gateway: Gateway, is_streamed: bool) -> None:
    before = refused(gateway)
    request = oip_pb2.ModelInferRequest(
        model_name="ids",
        inputs=[{"name": "x", "datatype": "INT64", "shape": [3]}],
        raw_input_contents=[np.arange(2).tobytes()],
    ).SerializeToString()
    service = "/inference.GRPCInferenceService"
    with grpc.insecure_channel(gateway.address) as channel:
        if is_streamed:
            responses = list(channel.stream_stream(f"{service}/ModelStreamInfer")(iter([request])))
            assert len(responses) == 1
        else:
            with pytest.raises(grpc.RpcError, match="24 bytes"):
                channel.unary_unary(f"{service}/ModelInfer")(request)
    assert added(gateway, before) == {"malformed": 1}


def test_error_that_ends_a_stream_does_not_end_the_next_one(gateway: Gateway) -> None:
    unknown = oip_pb2.ModelInferRequest(model_name="nope").SerializeToString()
    right = oip_pb2.ModelInferRequest(
        model_name="ids",
        inputs=[{"name": "x", "datatype": "INT64", "shape": [3]}],
        raw_input_contents=[np.arange(3).tobytes()],
    ).SerializeToString()
    with grpc.insecure_channel(gateway.address) as channel:
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        for _ in range(3):
            with pytest.raises(grpc.RpcError, match="there is no model"):
                list(stream(iter([unknown]), metadata=[("triton_grpc_error", "true")]))
            assert len(list(stream(iter([right, right])))) == 2


def test_open_inference_over_http(gateway: Gateway) -> None:
    before = refused(gateway)
    body = {"inputs": [{"name": "x", "datatype": "INT64", "shape": [2], "data": [1, 2, 3]}]}
    connection = http.client.HTTPConnection(gateway.stats()["http_address"], timeout=20)
    connection.request("POST", "/v2/models/ids/infer", json.dumps(body))
    assert connection.getresponse().status == 400
    connection.close()
    assert sum(added(gateway, before).values()) == 1


def test_inferential(gateway: Gateway) -> None:
    before = refused(gateway)
    with Peer(address_of(gateway)) as peer:
        peer.send(b"", *observation("ids", {"x": np.array([1.5])}))
        eventually(lambda: added(gateway, before), what="a counted refusal")
    assert sum(added(gateway, before).values()) == 1


def test_refusal_of_the_lane_is_counted_once(gateway: Gateway) -> None:
    before = refused(gateway)
    with gateway.client() as client, pytest.raises(IskanderError):
        client.score("ids", RIGHT, terms={"ttl_ms": 0.000001})
    assert sum(added(gateway, before).values()) == 1
