"""Scenarios of grpcio clients against a server with tokens or TLS; no pyarrow.flight."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support import reference_client

HEALTH = "/grpc.health.v1.Health"
TIMEOUT_S = 20.0


def tensors() -> list[triton.InferInput]:
    tensor = triton.InferInput("x", [3], "INT64")
    tensor.set_data_from_numpy(np.array([1, 2, 3]))
    return [tensor]


def call(address: str, name: str, roots: str = "", certificate: str = "", **arguments: Any) -> Any:
    """Call a method of Triton's client; returns its result, names of a message, or the status."""
    client = triton.InferenceServerClient(
        address,
        ssl=bool(roots),
        root_certificates=roots or None,
        private_key=certificate or None,
        certificate_chain=certificate or None,
    )
    if name == "infer":
        arguments["inputs"] = tensors()
    try:
        found = getattr(client, name)(**arguments)
    except InferenceServerException as error:
        return str(error.status()).removeprefix("StatusCode.")
    finally:
        client.close()
    if name == "infer":
        return found.get_response().model_name
    if name == "get_model_metadata":
        return found.name
    if name == "get_model_repository_index":
        return sorted(model.name for model in found.models)
    if name == "get_inference_statistics":
        return sorted({each.name for each in found.model_stats})
    return found


def stream(address: str, headers: dict[str, str]) -> Any:
    """Send one request on a stream; returns the text of its error, or an empty text."""
    found: list[str] = []
    client = triton.InferenceServerClient(address)
    client.start_stream(lambda result, error: found.append(str(error or "")), headers=headers)
    client.async_stream_infer("ids", tensors())
    client.stop_stream()
    client.close()
    return found


def stay(address: str, headers: dict[str, str]) -> str:
    """Keep a stream open without requests after the first response; returns its final status."""
    method = "/inference.GRPCInferenceService/ModelStreamInfer"
    with grpc.insecure_channel(address) as channel:
        request = triton.service_pb2.ModelInferRequest(model_name="ids")
        request.inputs.add(name="x", datatype="INT64", shape=[3])
        request.raw_input_contents.append(np.array([1, 2, 3]).tobytes())
        sent = [request.SerializeToString()]
        over = grpc.StatusCode.OK
        still = threading.Event()

        def requests() -> Any:
            yield sent[0]
            still.wait(TIMEOUT_S)

        answers = channel.stream_stream(method)(
            requests(), timeout=TIMEOUT_S, metadata=list(headers.items())
        )
        reference_client.send({"facts": len(next(answers)) > 0})
        try:
            next(answers)
        except grpc.RpcError as error:
            over = error.code()
        still.set()
        return str(over.name)


def health(address: str, services: list[str], padding: int = 0) -> list[str]:
    """Health checks of services: responses in hexadecimal, or statuses.

    Args:
        address: Of the server.
        services: Their names.
        padding: Bytes, two to 65,535, of a field that the server ignores.
    """
    found = []
    more = b"\x12" + bytes((padding & 127 | 128, padding >> 7 & 127 | 128, padding >> 14))
    with grpc.insecure_channel(address) as channel:
        check = channel.unary_unary(f"{HEALTH}/Check")
        for service in services:
            message = b"\x0a" + bytes((len(service),)) + service.encode() if service else b""
            try:
                message += (more + bytes(padding)) * bool(padding)
                found.append(check(message, timeout=TIMEOUT_S).hex())
            except grpc.RpcError as error:
                found.append(error.code().name)
    return found


def watch(address: str, headers: list[dict[str, str]]) -> list[str]:
    """First responses to watchers that start one after the other and stay open."""
    found = []
    with grpc.insecure_channel(address) as channel:
        method = channel.unary_stream(f"{HEALTH}/Watch")
        watching = []
        for shown in headers:
            watching.append(method(b"", timeout=TIMEOUT_S, metadata=list(shown.items())))
            try:
                found.append(next(watching[-1]).hex())
            except grpc.RpcError as error:
                found.append(error.code().name)
        for each in watching:
            each.cancel()
    return found


if __name__ == "__main__":
    reference_client.serve(call, stream, stay, health, watch)
