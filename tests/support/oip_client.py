"""Triton's own client, sync, asynchronous and streaming, in its own process.

It uses grpcio, which must not share a process with pyarrow.flight. Tensors are
`[datatype, shape, bytes in hexadecimal]` on input and output.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import tritonclient.grpc as triton
from google.protobuf import descriptor_pb2, json_format
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from tritonclient.grpc import aio as triton_aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

sys.path.insert(0, str(Path(__file__).parent.parent))
from support import reference_client
from support.reference_client import TIMEOUT_S, Facts

SERVICE = "inference.GRPCInferenceService"
OURS = (
    "iskander-code", "iskander-fault", "iskander-retryable", "iskander-retry-after-ms",
)  # fmt: skip
TYPED = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


def array_of(datatype: str, shape: list[int], raw: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytes.fromhex(raw), triton_to_np_dtype(datatype)).reshape(shape)


def inputs_of(tensors: dict[str, Any]) -> list[triton.InferInput]:
    inputs = []
    for name, (datatype, shape, raw) in tensors.items():
        tensor = triton.InferInput(name, shape, datatype)
        tensor.set_data_from_numpy(array_of(datatype, shape, raw))
        inputs.append(tensor)
    return inputs


def x_of(*values: int) -> list[triton.InferInput]:
    """The input of `ids` and `slow`."""
    array = np.array(values, np.int64)
    tensor = triton.InferInput("x", list(array.shape), "INT64")
    tensor.set_data_from_numpy(array)
    return [tensor]


def y_of(result: triton.InferResult) -> list[int]:
    values: list[int] = result.as_numpy("y").tolist()
    return values


def facts_of(result: triton.InferResult) -> Facts:
    response = result.get_response()
    outputs = {
        output.name: [output.datatype, list(output.shape), result.as_numpy(output.name)]
        for output in response.outputs
    }
    return {
        "id": response.id,
        "model": f"{response.model_name}/{response.model_version}",
        "outputs": {
            name: [datatype, shape, array.tobytes().hex()]
            for name, (datatype, shape, array) in outputs.items()
        },
        "order": [output.name for output in response.outputs],
    }


def refusal_of(error: InferenceServerException) -> Facts:
    return [str(error.status()).removeprefix("StatusCode."), error.message()]


def described(address: str) -> Facts:
    """All metadata of the server and its models."""
    with triton.InferenceServerClient(address) as client:
        return {
            "live": client.is_server_live(),
            "ready": client.is_server_ready(),
            "model_ready": [
                client.is_model_ready("two-tower"),
                client.is_model_ready("ids", "10"),
            ],
            "server": client.get_server_metadata(as_json=True),
            "metadata": client.get_model_metadata("two-tower", as_json=True),
            "versions": client.get_model_metadata("ids", as_json=True)["versions"],
            "wide": client.get_model_metadata("wide", as_json=True)["inputs"],
            "config": client.get_model_config("wide", as_json=True)["config"],
            "index": client.get_model_repository_index(as_json=True)["models"],
            "memory": [
                client.get_system_shared_memory_status(as_json=True),
                client.get_cuda_shared_memory_status(as_json=True),
            ],
        }


def readiness(address: str, model: str) -> Facts:
    """Readiness of a server and its model, and the model's state in the index."""
    with triton.InferenceServerClient(address) as client:
        (listed,) = client.get_model_repository_index(as_json=True)["models"]
        ready = [client.is_server_live(), client.is_server_ready(), client.is_model_ready(model)]
        return [*ready, listed["state"]]


def managed(address: str) -> Facts:
    """Supported and rejected calls of repository management."""
    with triton.InferenceServerClient(address) as client:
        client.load_model("ids")
        client.unregister_system_shared_memory()
        client.unregister_cuda_shared_memory()

        def refused(call: Any, *arguments: Any, **options: Any) -> Facts:
            try:
                call(*arguments, **options)
            except InferenceServerException as error:
                return refusal_of(error)
            return "done"

        return {
            "load unknown": refused(client.load_model, "nope"),
            "load with a config": refused(client.load_model, "ids", config="{}"),
            "unload": refused(client.unload_model, "ids"),
            "unload unknown": refused(client.unload_model, "nope"),
            "register": refused(client.register_system_shared_memory, "r", "/r", 64),
            "register cuda": refused(client.register_cuda_shared_memory, "r", b"aGk=", 0, 64),
            "unregister one": refused(client.unregister_system_shared_memory, "r"),
            "trace": refused(client.get_trace_settings),
            "log": refused(client.get_log_settings),
            "ready unknown": refused(client.is_model_ready, "nope"),
            "ready version": refused(client.is_model_ready, "ids", "3"),
            "metadata unknown": refused(client.get_model_metadata, "nope"),
            "config unknown": refused(client.get_model_config, "nope"),
            "statistics unknown": refused(client.get_inference_statistics, "nope"),
        }


def other_layout(address: str) -> Facts:
    """Load and unload by clients with the model's name in the first field."""
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def load(name: str) -> Facts:
            request = service_pb2.RepositoryModelLoadRequest(repository_name=name)
            try:
                return stub.RepositoryModelLoad(request).SerializeToString().hex()
            except grpc.RpcError as error:
                return _end(error)

        unload = service_pb2.RepositoryModelUnloadRequest(repository_name="ids")
        try:
            stub.RepositoryModelUnload(unload)
            raise AssertionError("unloaded")
        except grpc.RpcError as error:
            return [load("ids"), load("nope"), _end(error)]


def statistics(address: str, model: str, version: str = "") -> Facts:
    with triton.InferenceServerClient(address) as client:
        return client.get_inference_statistics(model, version, as_json=True)["model_stats"]


def reflected(address: str) -> Facts:
    """Services and messages by reflection, and their differences from Triton's client."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = list(database.get_services())
        ours = database.FindFileContainingSymbol(SERVICE)
        by_method = database.FindFileContainingSymbol(f"{SERVICE}.ModelInfer").name == ours.name
        again = database.FindFileByName(ours.name) == ours
        flight = database.FindFileContainingSymbol("arrow.flight.protocol.FlightService")
        ask = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        kinds = reflection_pb2.ServerReflectionRequest
        questions = [
            kinds(list_services="*"),
            kinds(file_containing_symbol="no.such.Thing"),
            kinds(all_extension_numbers_of_type=SERVICE),
        ]
        answers = [
            reflection_pb2.ServerReflectionResponse.FromString(raw)
            for raw in ask(iter(each.SerializeToString() for each in questions))
        ]
    theirs = descriptor_pb2.FileDescriptorProto()
    service_pb2.DESCRIPTOR.CopyToProto(theirs)
    config = descriptor_pb2.FileDescriptorProto()
    sys.modules["tritonclient.grpc.model_config_pb2"].DESCRIPTOR.CopyToProto(config)
    return {
        "services": services,
        "v1": [service.name for service in answers[0].list_services_response.service],
        "unknown": [answer.error_response.error_code for answer in answers[1:]],
        "consistent": [by_method, again],
        "flight": [method.name for method in flight.service[0].method],
        "wrong": _differences(ours, theirs, config),
    }


def _differences(ours: Any, *theirs: Any) -> list[str]:
    """Messages, fields, numbers, types and methods that differ from the clients' definitions."""
    wanted = {name: number for file in theirs for name, number in _listed(file)}
    # Only other servers fill these two responses.
    known_more = {"RepositoryModelLoadResponse", "RepositoryModelUnloadResponse"}
    return [
        f"{name}: {described}, wanted {wanted.get(name)}"
        for name, described in _listed(ours)
        if wanted.get(name) != described and name.split(".")[0] not in known_more
    ]


def _listed(file: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []

    def walk(message: Any, prefix: str) -> None:
        name = f"{prefix}{message.name}"
        found.append((name, "message"))
        found.extend(
            (f"{name}.{field.name}", [field.number, field.type, field.label, field.type_name])
            for field in message.field
        )
        for nested in message.nested_type:
            walk(nested, f"{name}.")

    for message in file.message_type:
        walk(message, "")
    for enum in file.enum_type:
        found += [(f"{enum.name}.{value.name}", value.number) for value in enum.value]
    for service in file.service:
        found += [
            (f"rpc {method.name}", [method.input_type, method.output_type, method.client_streaming])
            for method in service.method
        ]
    return found


def infer(address: str, model: str, tensors: dict[str, Any], **options: Any) -> Facts:
    """One request by the sync client."""
    outputs = options.pop("outputs", None)
    if outputs is not None:
        options["outputs"] = [triton.InferRequestedOutput(name) for name in outputs]
    with triton.InferenceServerClient(address) as client:
        try:
            return facts_of(client.infer(model, inputs_of(tensors), **options))
        except InferenceServerException as error:
            return {"refused": refusal_of(error)}


def typed(address: str, model: str, tensors: dict[str, Any]) -> Facts:
    """One request with typed contents, by a plain stub."""
    request = service_pb2.ModelInferRequest(model_name=model, id="typed")
    for name, (datatype, shape, raw) in tensors.items():
        tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
        values = array_of(datatype, shape, raw).reshape(-1).tolist()
        getattr(tensor.contents, TYPED[datatype]).extend(values)
    unbounded = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(address, options=unbounded) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return facts_of(triton.InferResult(stub.ModelInfer(request, timeout=TIMEOUT_S)))


def texts(address: str, strings: list[str]) -> Facts:
    """Strings, raw and typed; and bfloat16."""
    words = triton.InferInput("x", [len(strings)], "BYTES")
    words.set_data_from_numpy(np.array([each.encode() for each in strings], np.object_))
    halves = triton.InferInput("x", [3], "BF16")
    halves.set_data_from_numpy(np.array([0.5, -2.0, 1.0], ml_dtypes.bfloat16))
    request = service_pb2.ModelInferRequest(model_name="words")
    tensor = request.inputs.add(name="x", datatype="BYTES", shape=[len(strings)])
    tensor.contents.bytes_contents.extend(each.encode() for each in strings)
    with triton.InferenceServerClient(address) as client, grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        typed = triton.InferResult(stub.ModelInfer(request, timeout=TIMEOUT_S))
        return {
            "raw": [each.decode() for each in client.infer("words", [words]).as_numpy("y")],
            "typed": [each.decode() for each in typed.as_numpy("y")],
            "halves": [float(each) for each in client.infer("halves", [halves]).as_numpy("y")],
            "metadata": client.get_model_metadata("words", as_json=True)["inputs"],
            "config": client.get_model_config("words", as_json=True)["config"]["input"],
        }


def callbacks(address: str, requests: int) -> Facts:
    """Concurrent requests, each with a callback; returns the wrong ones by number."""
    answers: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(address) as client:
        for number in range(requests):
            values = range(1000 * number, 1000 * number + number % 7 + 1)

            def told(result: Any, error: Any, number: int = number, values: Any = values) -> None:
                wanted = [3 * value + 1 for value in values]
                is_right = error is None and y_of(result) == wanted
                is_right = is_right and result.get_response().id == str(number)
                answers.put(None if is_right else [number, str(error)])

            client.async_infer("ids", x_of(*values), told, request_id=str(number))
        return [wrong for _ in range(requests) if (wrong := answers.get(timeout=TIMEOUT_S))]


def by_asyncio(address: str, requests: int) -> Facts:
    """The asyncio client: concurrent requests, then a stream."""

    async def run() -> Facts:
        async with triton_aio.InferenceServerClient(address) as client:
            results = await asyncio.gather(
                *(client.infer("ids", x_of(number, 7)) for number in range(requests))
            )
            unary = [y_of(result) for result in results]

            async def asked() -> Any:
                for number in range(requests):
                    model = "nope" if number == 3 else "ids"
                    yield {
                        "model_name": model,
                        "inputs": x_of(number),
                        "request_id": str(number),
                    }

            streamed = []
            async for result, error in client.stream_infer(asked()):
                streamed.append(y_of(result) if error is None else error.message())
            return {"unary": unary, "streamed": streamed}

    return asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def streamed(address: str, requests: int, *, wants_final: bool = False) -> Facts:
    """A stream in which some requests are rejected; responses by id."""
    answers: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(requests):
            model = "nope" if number % 5 == 3 else "ids"
            client.async_stream_infer(
                model,
                x_of(*range(number, number + number % 4)) if number % 4 else x_of(number),
                request_id=str(number),
                enable_empty_final_response=wants_final,
            )
        client.stop_stream()
        found = []
        for _ in range(requests):
            result, error = answers.get(timeout=TIMEOUT_S)
            if error is not None:
                found.append(["error", error.message()])
            else:
                response = result.get_response()
                final = response.parameters["triton_final_response"].bool_param
                found.append([response.id, y_of(result), final])
        return found


def stream_errors(address: str) -> Facts:
    """Errors of a stream on the wire: their ids and their structured fields."""
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        requests = [_request("nope", "first"), _request("ids", "second"), _request("nope", "")]
        return [
            json_format.MessageToDict(each)
            for each in stub.ModelStreamInfer(iter(requests), timeout=TIMEOUT_S)
        ]


def stream_status(address: str) -> Facts:
    """The same for a client that requests a status."""
    answers: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(address) as client:
        client.start_stream(
            lambda result, error: answers.put((result, error)),
            headers={"triton_grpc_error": "true"},
        )
        client.async_stream_infer("ids", x_of(1))
        client.async_stream_infer("nope", x_of(2))
        result, _ = answers.get(timeout=TIMEOUT_S)
        _, error = answers.get(timeout=TIMEOUT_S)
        client.stop_stream()
        return [y_of(result), refusal_of(error)]


def stream_broken(address: str) -> Facts:
    """A stream with an invalid message: it gets an error, and the next one a response."""
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
        frames = [b"\x0a\xff", _request("ids", "next").SerializeToString()]
        answers = [
            service_pb2.ModelStreamInferResponse.FromString(raw)
            for raw in call(iter(frames), timeout=TIMEOUT_S)
        ]
        return [[each.error_message, each.infer_response.id] for each in answers]


def stream_unread(address: str, requests: int, bytes_each: int) -> Facts:
    """Requests beyond the window without reads; then the responses, and the final status."""
    values = np.zeros((bytes_each // 256, 64), np.float32)

    def asked() -> Any:
        for number in range(requests):
            request = service_pb2.ModelInferRequest(model_name="broad", id=str(number))
            request.inputs.add(name="x", datatype="FP32", shape=values.shape)
            request.raw_input_contents.append(values.tobytes())
            yield request

    unlimited = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(address, options=unlimited) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(asked(), timeout=TIMEOUT_S)
        reference_client.send({"facts": "under way"})
        assert json.loads(sys.stdin.readline()) == "read"
        told: list[str] = []
        with contextlib.suppress(grpc.RpcError):
            for each in call:
                told.append(each.error_message or each.infer_response.id)
        return {"told": told, "end": _end(call)}


def side_by_side() -> Facts:
    """The protobuf modules of the server and of its clients in one process, with the same names."""
    from iskander._generated import oip_pb2, reflection_v1alpha_pb2

    return [
        oip_pb2.ModelInferRequest.DESCRIPTOR.full_name
        == service_pb2.ModelInferRequest.DESCRIPTOR.full_name,
        reflection_v1alpha_pb2.ServerReflectionRequest.DESCRIPTOR.full_name
        == reflection_pb2.ServerReflectionRequest.DESCRIPTOR.full_name,
    ]


def cancelled(address: str) -> Facts:
    """A request that its client cancels during the run; reports when it runs."""
    answers: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(address) as client:
        context = client.async_infer(
            "slow", x_of(100_000), lambda result, error: answers.put(error)
        )
        reference_client.send({"facts": "under way"})
        assert json.loads(sys.stdin.readline()) == "give up"
        context.cancel()
        error = answers.get(timeout=TIMEOUT_S)
        return refusal_of(error)


def stream_cancelled(address: str, requests: int) -> Facts:
    """A stream that its client cancels while its requests are queued."""
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        asked = (_request("ids", str(number)) for number in range(requests))
        call = stub.ModelStreamInfer(asked, timeout=TIMEOUT_S)
        reference_client.send({"facts": "under way"})
        assert json.loads(sys.stdin.readline()) == "give up"
        call.cancel()
        return call.code().name


def in_what_order(address: str, priorities: list[int]) -> Facts:
    """Requests of these priorities while no worker runs; returns the order of their responses.

    Each is sent on a line from the test.
    """
    order: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(address) as client:
        for number, priority in enumerate(priorities):

            def told(result: Any, error: Any, number: int = number) -> None:
                order.put([number, None if error is None else str(error)])

            client.async_infer("ids", x_of(number), told, priority=priority)
            reference_client.send({"facts": "sent"})
            assert json.loads(sys.stdin.readline()) == "next"
        return [order.get(timeout=TIMEOUT_S) for _ in priorities]


def draining(address: str) -> Facts:
    """A stream and a request in progress while the server stops."""
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stopped = threading.Event()

        def asked() -> Any:
            yield _request("ids", "in stream")
            stopped.wait(TIMEOUT_S)

        stream = stub.ModelStreamInfer(asked(), timeout=TIMEOUT_S)
        unary = stub.ModelInfer.future(_request("ids", "alone"), timeout=TIMEOUT_S)
        reference_client.send({"facts": "under way"})
        streamed = []
        with contextlib.suppress(grpc.RpcError):
            for each in stream:
                streamed.append(each.infer_response.id)
        stopped.set()
        return {
            "unary": unary.result().id,
            "streamed": streamed,
            "end": _end(stream),
        }


def raw_call(
    address: str, messages: list[str], method: str = "ModelInfer", metadata: Any = ()
) -> Facts:
    """Each message in its own call; returns the statuses."""
    found = []
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/{method}")
        for message in messages:
            try:
                call(
                    bytes.fromhex(message),
                    timeout=TIMEOUT_S,
                    metadata=[tuple(pair) for pair in metadata],
                )
                found.append(["OK"])
            except grpc.RpcError as error:
                found.append(_end(error))
    return found


def compressed(address: str) -> Facts:
    with triton.InferenceServerClient(address) as client:
        return [
            y_of(client.infer("ids", x_of(*range(500)), compression_algorithm=algorithm))
            == [3 * value + 1 for value in range(500)]
            for algorithm in ("gzip", "deflate")
        ]


def _request(model: str, request_id: str, *values: int) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    array = np.array(values or (1,), np.int64)
    request.inputs.add(name="x", datatype="INT64", shape=array.shape)
    request.raw_input_contents.append(array.tobytes())
    return request


def _end(call: Any) -> Facts:
    trailers = dict(call.trailing_metadata() or ())
    return [call.code().name, call.details(), {k: trailers[k] for k in OURS if k in trailers}]


if __name__ == "__main__":
    reference_client.serve(
        described,
        readiness,
        managed,
        other_layout,
        statistics,
        reflected,
        infer,
        typed,
        texts,
        callbacks,
        by_asyncio,
        streamed,
        stream_errors,
        stream_status,
        stream_broken,
        stream_unread,
        side_by_side,
        cancelled,
        stream_cancelled,
        in_what_order,
        draining,
        raw_call,
        compressed,
    )
