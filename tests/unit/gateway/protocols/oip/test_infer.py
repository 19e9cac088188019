"""One OIP request, from its message to the response: submission, caches and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.input_arena import in_loop
from support.lanes import lane_of

from iskander._generated import oip_pb2
from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import ColumnType
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.errors import (
    ContractError,
    IskanderError,
    LimitExceeded,
    MalformedInput,
    ModelNotFound,
    Overloaded,
)
from iskander.gateway.auth.grants import FULL_GRANT
from iskander.gateway.protocols.oip import infer as oip_infer
from iskander.gateway.protocols.oip.infer import REMEMBERED_MAX, Inference
from iskander.gateway.protocols.oip.pending import PendingInfer
from iskander.gateway.protocols.stream_terms import StreamTerms
from iskander.gateway.protocols.submit import RequestSubmitter
from iskander.gateway.protocols.tensors import RequestTensors
from iskander.gateway.protocols.traced_call import MODEL_INFER
from iskander.gateway.repository.models import Models
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.request import NEVER_NS, Caller, Request


def spec(name: str, dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(f"column_{name}", name, ColumnType(dtype, shape), shape)


CONTRACT = Contract(
    inputs=(spec("x", "int64"),),
    outputs=(spec("first", "int64"), spec("second", "float32", 2)),
)
FIRST, SECOND = np.arange(3), np.arange(6, dtype=np.float32).reshape(3, 2)


class ScriptedSubmitter(RequestSubmitter):
    """A submitter that records requests and returns the same results for all."""

    tracer = None
    uses_contexts = False

    def __init__(self) -> None:
        self.limits = LimitsConfig()
        self.is_draining = False
        self.submitted: list[dict[str, Any]] = []

    def submit(self, lane: Lane, offered: RequestTensors, caller: Caller, **terms: Any) -> Request:
        self.submitted.append({"lane": lane, "offered": offered, **terms})
        offsets, length = body_layout(CONTRACT.outputs, offered.rows)
        body = bytearray(length)
        for offset, values in zip(offsets, (FIRST, SECOND), strict=True):
            body[offset : offset + values.nbytes] = values.tobytes()
        request = Request(lane, caller, offered.rows, offered.tensors)
        asyncio.get_running_loop().call_soon(caller.deliver, request, bytes(body))
        return request


class AwaitedInfer(PendingInfer):
    """A request whose response can be awaited."""

    def __init__(self, inference: Inference, call: Any, *, is_streamed: bool) -> None:
        super().__init__(inference, call, MODEL_INFER, is_streamed=is_streamed)
        self.parts: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    def answer(self, parts: list[Any]) -> None:
        self.parts.set_result(parts)

    def reject(self, error: Exception) -> None:
        self.parts.set_exception(error)


class OneModel(Models):
    def __init__(self) -> None:
        super().__init__()
        self.serve(lane_of(contract=CONTRACT))


class FakeCall:
    """A call's grant and memory charges.

    Attributes:
        used: Bytes charged now.
        charges: Sizes of all charges.
    """

    grant = FULL_GRANT

    def __init__(self, limit: int) -> None:
        self.used, self.limit = 0, limit
        self.charges: list[int] = []

    def charge_memory(self, size: int) -> None:
        if self.used + size > self.limit:
            raise Overloaded("no memory")
        self.used += size
        self.charges.append(size)

    def release_memory(self, size: int) -> None:
        self.used -= size


class Harness:
    def __init__(self, memory: int = 1 << 30) -> None:
        self.call: Any = FakeCall(memory)
        self.submitter = ScriptedSubmitter()
        self.inference = Inference(OneModel(), self.submitter)

    async def infer_once(
        self, *, deadline_ns: int | None = None, is_streamed: bool = False, **values: Any
    ) -> oip_pb2.ModelInferResponse:
        request = oip_pb2.ModelInferRequest(
            **{
                "model_name": "m0",
                "inputs": [{"name": "x", "datatype": "INT64", "shape": [3]}],
                "raw_input_contents": [FIRST.tobytes()],
                **values,
            }
        )
        terms = StreamTerms((("iskander-urgency", "0.5"),), deadline_ns)
        pending = AwaitedInfer(self.inference, self.call, is_streamed=is_streamed)
        pending.begin(request.SerializeToString(), terms)
        parts = await pending.parts
        return oip_pb2.ModelInferResponse.FromString(b"".join(parts))


@in_loop
async def test_response_has_all_outputs_in_contract_order() -> None:
    response = await Harness().infer_once(id="seven")
    assert (response.model_name, response.model_version, response.id) == ("m0", "1", "seven")
    assert [(each.name, each.datatype, list(each.shape)) for each in response.outputs] == [
        ("first", "INT64", [3]),
        ("second", "FP32", [3, 2]),
    ]
    assert list(response.raw_output_contents) == [FIRST.tobytes(), SECOND.tobytes()]


@pytest.mark.parametrize("names", [["second"], ["second", "first"], ["first"]])
@in_loop
async def test_requested_outputs_are_returned_in_requested_order(names: list[str]) -> None:
    """Also after the same request without outputs, and for a repeated request."""
    harness = Harness()
    await harness.infer_once()
    by_name = {"first": FIRST.tobytes(), "second": SECOND.tobytes()}
    for _ in range(2):
        response = await harness.infer_once(outputs=[{"name": name} for name in names])
        assert [each.name for each in response.outputs] == names
        assert list(response.raw_output_contents) == [by_name[name] for name in names]


@in_loop
async def test_submitter_receives_terms_and_call_deadline() -> None:
    harness = Harness()
    await harness.infer_once(deadline_ns=77, parameters={"timeout": {"int64_param": 5000}})
    await harness.infer_once()
    first, second = harness.submitter.submitted
    assert (first["call_deadline_ns"], first["terms"].budget_ms) == (77, 5.0)
    assert (second["call_deadline_ns"], second["terms"].budget_ms) == (NEVER_NS, None)
    assert first["terms"].urgency == second["terms"].urgency == 0.5


@in_loop
async def test_submitter_receives_tensors_without_a_copy() -> None:
    harness = Harness()
    message = oip_pb2.ModelInferRequest(
        model_name="m0",
        inputs=[{"name": "x", "datatype": "INT64", "shape": [3]}],
        raw_input_contents=[FIRST.tobytes()],
    ).SerializeToString()
    buffer = bytearray(message)
    pending = AwaitedInfer(harness.inference, harness.call, is_streamed=False)
    pending.begin(buffer, StreamTerms((), None))
    buffer[-1] = 1
    (tensor,) = harness.submitter.submitted[0]["offered"].tensors
    assert tensor[-1] == 1


@in_loop
async def test_final_response_flag_is_set_on_request_in_streams() -> None:
    harness = Harness()
    parameters = {"triton_enable_empty_final_response": {"bool_param": True}}
    streamed = await harness.infer_once(is_streamed=True, parameters=parameters)
    assert streamed.parameters["triton_final_response"].bool_param
    assert not (await harness.infer_once(is_streamed=True)).parameters
    assert not (await harness.infer_once(parameters=parameters)).parameters


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"model_name": "m1"}, ModelNotFound),
        ({"model_version": "2"}, ModelNotFound),
        ({"outputs": [{"name": "third"}]}, ContractError),
    ],
)
@in_loop
async def test_unknown_models_and_outputs_are_rejected_before_submission(
    values: dict[str, Any], error: type[IskanderError]
) -> None:
    harness = Harness()
    with pytest.raises(error):
        await harness.infer_once(**values)
    assert not harness.submitter.submitted


@in_loop
async def test_request_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large heads and rejected requests are not cached."""
    harness = Harness()
    for number in range(REMEMBERED_MAX + 10):
        await harness.infer_once(parameters={f"p{number}": {"bool_param": True}})
    cache = harness.inference._requests
    assert len(cache) == 10
    await harness.infer_once(parameters={"p" * 5000: {"bool_param": True}})
    with pytest.raises(IskanderError):
        await harness.infer_once(parameters={"priority": {"string_param": "high"}})
    assert len(cache) == 10

    monkeypatch.setattr(oip_infer, "read_head", lambda *_: pytest.fail("the head was read again"))
    await harness.infer_once(parameters={f"p{REMEMBERED_MAX}": {"bool_param": True}}, id="another")


@in_loop
async def test_repeated_request_is_checked_by_its_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request with other lengths is checked against the contract."""
    harness = Harness()
    await harness.infer_once()
    for length in (16, 32, 0):
        with pytest.raises(MalformedInput, match=f"24 bytes as INT64, got {length}"):
            await harness.infer_once(raw_input_contents=[bytes(length)])
    with pytest.raises(MalformedInput, match="expected one each"):
        await harness.infer_once(raw_input_contents=[FIRST.tobytes()] * 2)
    typed = {"name": "x", "datatype": "INT64", "shape": [3], "contents": {"int64_contents": FIRST}}
    await harness.infer_once(inputs=[typed], raw_input_contents=[])

    monkeypatch.setattr(
        oip_infer, "read_inputs", lambda *_: pytest.fail("the inputs were read again")
    )
    await harness.infer_once(raw_input_contents=[(FIRST + 7).tobytes()], id="another")
    (tensor,) = harness.submitter.submitted[-1]["offered"].tensors
    assert bytes(tensor) == (FIRST + 7).tobytes()


@in_loop
async def test_repeated_request_is_checked_against_a_new_contract() -> None:
    harness = Harness()
    await harness.infer_once()
    lane = harness.inference._models.find_loaded("m0", None, "")
    lane.contract = replace(CONTRACT, inputs=(spec("x", "float64"),))
    with pytest.raises(ContractError, match="wanted FP64"):
        await harness.infer_once()


@in_loop
async def test_reloaded_model_does_not_use_cached_response_layouts() -> None:
    harness = Harness()
    await harness.infer_once()
    lane = harness.inference._models.find_loaded("m0", None, "")
    renamed = tuple(replace(each, tensor=f"new {each.tensor}") for each in CONTRACT.outputs)
    lane.contract = replace(CONTRACT, outputs=renamed)
    response = await harness.infer_once()
    assert [each.name for each in response.outputs] == ["new first", "new second"]


@in_loop
async def test_response_layout_cache_is_bounded() -> None:
    harness = Harness()
    for rows in range(3, REMEMBERED_MAX + 13):
        await harness.infer_once(
            inputs=[{"name": "x", "datatype": "INT64", "shape": [rows]}],
            raw_input_contents=[bytes(8 * rows)],
        )
    assert len(harness.inference._layouts) == 10


@in_loop
async def test_large_typed_contents_are_charged_before_they_are_read() -> None:
    """Eight bytes for each one-byte number, and the same again to join them."""
    count = 300_000
    typed: dict[str, Any] = {
        "inputs": [
            {
                "name": "x",
                "datatype": "INT64",
                "shape": [count],
                "contents": {"int64_contents": [1] * count},
            }
        ],
        "raw_input_contents": [],
    }
    harness = Harness()
    await harness.infer_once(**typed)
    assert harness.call.used == 0 and len(harness.call.charges) == 1
    assert harness.call.charges[0] >= 2 * 8 * count
    small = Harness(memory=8 * count)
    with pytest.raises(Overloaded):
        await small.infer_once(**typed)
    assert not small.submitter.submitted and small.call.used == 0


@in_loop
async def test_small_contents_are_not_charged() -> None:
    harness = Harness(memory=0)
    await harness.infer_once()
    assert harness.submitter.submitted and not harness.call.charges


@in_loop
async def test_limits_of_a_reload_apply_to_a_known_request() -> None:
    harness = Harness()
    await harness.infer_once()
    harness.submitter.limits = LimitsConfig(rows=2)
    with pytest.raises(LimitExceeded, match="rows"):
        await harness.infer_once()
    harness.submitter.limits = LimitsConfig()
    await harness.infer_once()
