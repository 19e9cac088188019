"""gRPC client process that sends custom bytes; grpcio, no pyarrow.

Reads one JSON call a line on standard input and responds with one JSON line:

    {"method": "...", "frames": [hex, ...], "deadline_s": 5, "half_close": true,
     "read": N or null, "cancel_after": N or null, "metadata": [[name, text], ...]}
 -> {"frames": [hex, ...], "code": "OK", "details": "...", "trailers": {...}}
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc


def main() -> None:
    channel = grpc.insecure_channel(
        sys.argv[1],
        options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
    )
    for line in sys.stdin:
        sys.stdout.write(json.dumps(call(channel, json.loads(line))) + "\n")
        sys.stdout.flush()
    os._exit(0)  # As in `reference_client.serve`.


def call(channel: grpc.Channel, wanted: dict[str, Any]) -> dict[str, Any]:
    done = threading.Event()

    def frames() -> Iterator[bytes]:
        for frame in wanted["frames"]:
            yield bytes.fromhex(frame)
        if not wanted.get("half_close", True):
            done.wait(wanted.get("deadline_s", 10))

    method = channel.stream_stream(wanted["method"])
    metadata = [tuple(pair) for pair in wanted.get("metadata", ())]
    stream = method(frames(), timeout=wanted.get("deadline_s", 10), metadata=metadata)
    received = []
    try:
        for frame in stream:
            received.append(frame.hex())
            if wanted.get("cancel_after") == len(received):
                stream.cancel()
    except grpc.RpcError:
        pass
    done.set()
    trailers = {
        key: value if isinstance(value, str) else value.decode("utf-8", "replace")
        for key, value in stream.trailing_metadata() or ()
    }
    code = stream.code().name
    return {
        "frames": received,
        "code": code,
        "details": stream.details(),
        "trailers": trailers,
    }


if __name__ == "__main__":
    main()
