"""Cases of `test_ray.py`: a gateway in front of an application of Ray Serve.

Each application implements ModelInfer only, as a method of a deployment. Ray's proxy selects it by
the header `application`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
from ray import serve
from ray.serve.config import gRPCOptions
from support.processes import Gateway, running
from support.remotes import remote, score, served

from iskander._generated import oip_pb2
from iskander.errors import RemoteFailed, RemoteNotReady

PORT = 9100
FAIL = -1.0


def add_oip(servicer: Any, server: Any) -> None:
    """What generated code does: the methods of the service, for Ray's proxy."""
    import grpc

    handler = grpc.unary_unary_rpc_method_handler(
        servicer.ModelInfer,
        request_deserializer=oip_pb2.ModelInferRequest.FromString,
        response_serializer=oip_pb2.ModelInferResponse.SerializeToString,
    )
    handlers = {"ModelInfer": handler}
    name = "inference.GRPCInferenceService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


@serve.deployment(num_replicas=1, ray_actor_options={"num_cpus": 0.1})
class Scaled:
    """`y = factor * x`; the first value -1 is an error."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def ModelInfer(self, request: Any) -> Any:
        x = np.frombuffer(request.raw_input_contents[0])
        if x[0] == FAIL:
            raise ValueError("the first value is -1")
        response = oip_pb2.ModelInferResponse(model_name=request.model_name)
        response.outputs.add(name="y", datatype="FP64", shape=[len(x)])
        response.raw_output_contents.append((self.factor * x).tobytes())
        return response


@pytest.fixture(scope="module")
def application() -> Iterator[str]:
    """Two running applications; yields their address."""
    # Ray pickles the messages by their module, which generated code names `oip_pb2`.
    folders = [str(Path(__file__).parent), str(Path(oip_pb2.__file__).parent)]
    environment = {"env_vars": {"PYTHONPATH": ":".join([*folders, *sys.path])}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    options = gRPCOptions(port=PORT, grpc_servicer_functions=["ray_serve_cases.add_oip"])
    serve.start(proxy_location="HeadOnly", grpc_options=options, http_options={"port": 9101})
    for name, factor in (("doubler", 2.0), ("tripler", 3.0)):
        serve.run(Scaled.bind(factor), name=name, route_prefix=f"/{name}")
    yield f"127.0.0.1:{PORT}"
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def gateway(application: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("front")
    paths = [
        remote(folder / name, application, metadata={"application": name})
        for name in ("doubler", "tripler", "none")
    ]
    with running(folder, [served(path) for path in paths]) as ready:
        yield ready


def test_header_selects_the_application(gateway: Gateway) -> None:
    batch = pa.record_batch({"x": [1.0, 2.5]})
    assert score(gateway, "doubler", batch) == {"y": [2.0, 5.0]}
    assert score(gateway, "tripler", batch) == {"y": [3.0, 7.5]}
    with pytest.raises(RemoteNotReady, match=f"at 127.0.0.1:{PORT}"):
        score(gateway, "none", batch)


def test_error_of_the_application_is_that_of_the_model(gateway: Gateway) -> None:
    with pytest.raises(RemoteFailed, match="the first value is -1"):
        score(gateway, "doubler", pa.record_batch({"x": [FAIL]}))
    assert score(gateway, "doubler", pa.record_batch({"x": [1.0]})) == {"y": [2.0]}


def test_missing_metadata_is_a_notice(gateway: Gateway) -> None:
    notices = [each["notices"] for each in gateway.stats()["workers"]]
    assert all("its tensors are not compared" in each[0] for each in notices)
