"""A grpcio client that balances its calls over several gateways, in its own process.

It calls ModelInfer of the model `ids` until it receives a line on standard input.
"""

from __future__ import annotations

import collections
import json
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

sys.path.insert(0, str(Path(__file__).parent.parent))
from support import reference_client
from support.reference_client import TIMEOUT_S, Facts

RETRY = {
    "name": [{}],
    "retryPolicy": {
        "maxAttempts": 5,
        "initialBackoff": "0.05s",
        "maxBackoff": "1s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    },
}
PAUSE_S = 0.002


def request_of(values: np.ndarray[Any, Any]) -> Any:
    request = service_pb2.ModelInferRequest(model_name="ids")
    request.inputs.add(name="x", datatype="INT64", shape=values.shape)
    request.raw_input_contents.append(values.tobytes())
    return request


def load(target: str, policy: dict[str, Any], threads: int, factor: int, addend: int) -> Facts:
    """Call from several threads over one channel; returns the count of each outcome.

    grpcio keeps load reports to itself. The right result is `factor * x + addend`.
    """
    config = {
        "loadBalancingConfig": [policy],
        "healthCheckConfig": {"serviceName": ""},
        "methodConfig": [RETRY],
    }
    options = [
        ("grpc.service_config", json.dumps(config)),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    outcomes: collections.Counter[str] = collections.Counter()
    stop = threading.Event()

    with grpc.insecure_channel(target, options) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def run(number: int) -> None:
            turn = 0
            while not stop.wait(PAUSE_S):
                turn += 1
                sent = np.arange(number << 40 | turn << 10, (number << 40 | turn << 10) + 3)
                try:
                    answer = stub.ModelInfer(request_of(sent), timeout=TIMEOUT_S)
                except grpc.RpcError as error:
                    outcomes[f"{error.code().name}: {error.details()}"] += 1
                    continue
                received = np.frombuffer(answer.raw_output_contents[0], np.int64)
                is_right = received.tolist() == (factor * sent + addend).tolist()
                outcomes["right" if is_right else "wrong"] += 1

        running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        sys.stdin.readline()
        stop.set()
        for thread in running:
            thread.join()
    return dict(outcomes)


if __name__ == "__main__":
    reference_client.serve(load)
