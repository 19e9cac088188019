"""KServe's own clients in their own process; only if they are installed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from kserve import InferInput, InferRequest
from kserve.inference_client import InferenceGRPCClient, InferenceRESTClient, RESTConfig

sys.path.insert(0, str(Path(__file__).parent.parent))
from support import reference_client
from support.reference_client import Facts


def everything(address: str) -> Facts:
    """All calls of the gRPC client, with raw and with typed tensors, and an error."""
    return asyncio.run(asyncio.wait_for(_everything(address), reference_client.TIMEOUT_S))


async def _everything(address: str) -> Facts:
    async with InferenceGRPCClient(address) as client:
        values = np.arange(5, dtype=np.int64)
        raw = InferInput("x", [5], "INT64")
        raw.set_data_from_numpy(values, binary_data=True)
        typed = InferInput("x", [5], "INT64", values.tolist())
        return {
            "live": await client.is_server_live(),
            "ready": await client.is_server_ready(),
            "model_ready": await client.is_model_ready("ids"),
            "raw": await _ask(client, "ids", raw),
            "typed": await _ask(client, "ids", typed),
            "unknown": await _ask(client, "nope", raw),
        }


def over_rest(base_url: str) -> Facts:
    """The same by the REST client."""
    return asyncio.run(asyncio.wait_for(_over_rest(base_url), reference_client.TIMEOUT_S))


async def _over_rest(base_url: str) -> Facts:
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    try:
        tensor = InferInput("x", [5], "INT64", list(range(5)))
        response = await client.infer(base_url, InferRequest("ids", [tensor]), model_name="ids")
        return {
            "live": await client.is_server_live(base_url),
            "ready": await client.is_server_ready(base_url),
            "model_ready": await client.is_model_ready(base_url, "ids"),
            "answer": response.outputs[0].as_numpy().tolist(),
        }
    finally:
        await client.close()


async def _ask(client: InferenceGRPCClient, model: str, tensor: InferInput) -> Any:
    request = InferRequest(model, [tensor], request_id="7", parameters={"priority": 1})
    try:
        response = await client.infer(request)
    except grpc.RpcError as error:
        return error.code().name
    return [response.id, response.outputs[0].as_numpy().tolist()]


if __name__ == "__main__":
    reference_client.serve(everything, over_rest)
