"""Triton's own client for a model repository, in its own process because of grpcio."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

sys.path.insert(0, str(Path(__file__).parent.parent))
from support import reference_client
from support.reference_client import TIMEOUT_S, Facts


def factors(address: str, version: str = "", keys: list[str] | None = None) -> Facts:
    """The factor of the responding version, for each routing key."""
    tensor = triton.InferInput("x", [1], "INT64")
    tensor.set_data_from_numpy(np.array([1], np.int64))
    with triton.InferenceServerClient(address) as client:
        answers: list[Any] = []
        for key in keys or [""]:
            result = client.infer(
                "m",
                [tensor],
                model_version=version,
                parameters={"iskander_route_key": key} if key else None,
                client_timeout=TIMEOUT_S,
            )
            answers.append(int(result.as_numpy("y")[0]))
        return answers


def control(address: str, call: str, name: str) -> Facts:
    """Load or unload; returns the error."""
    with triton.InferenceServerClient(address) as client:
        try:
            getattr(client, f"{call}_model")(name)
        except InferenceServerException as error:
            return str(error)
        return None


def unload_by_first_field(address: str, name: str) -> Facts:
    """Unload as KServe's clients do, with the model's name in Triton's field of the repository."""
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = service_pb2.RepositoryModelUnloadRequest(repository_name=name)
        return stub.RepositoryModelUnload(request, timeout=TIMEOUT_S).SerializeToString().hex()


def index(address: str) -> Facts:
    """State and reason of each version."""
    with triton.InferenceServerClient(address) as client:
        found = client.get_model_repository_index(as_json=True).get("models", [])
        return {f"{m['name']}/{m['version']}": (m["state"], m.get("reason", "")) for m in found}


reference_client.serve(factors, control, unload_by_first_field, index)
