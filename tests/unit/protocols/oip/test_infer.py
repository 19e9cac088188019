"""A request from its bytes to those of its response: what the submitter is asked, what becomes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.input_arena import in_loop
from support.lanes import lane_of

from iskander._generated import oip_pb2
from iskander.auth.grants import FULL_GRANT
from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import ColumnType
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.errors import ContractError, IskanderError, MalformedInput, ModelNotFound, Overloaded
from iskander.protocols.oip import infer as oip_infer
from iskander.protocols.oip.infer import REMEMBERED_MAX, Inference
from iskander.protocols.oip.wire import scan
from iskander.protocols.stream_terms import StreamTerms
from iskander.protocols.submit import RequestSubmitter
from iskander.protocols.tensors import RequestTensors
from iskander.repository.models import Models
from iskander.scheduling.lane import Lane
from iskander.scheduling.request import NEVER_NS


def spec(name: str, dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(f"column_{name}", name, ColumnType(dtype, shape), shape)


CONTRACT = Contract(
    inputs=(spec("x", "int64"),),
    outputs=(spec("first", "int64"), spec("second", "float32", 2)),
)
FIRST, SECOND = np.arange(3), np.arange(6, dtype=np.float32).reshape(3, 2)


class ScriptedSubmitter(RequestSubmitter):
    """Answers everything with the same results, and keeps how it was asked."""

    def __init__(self) -> None:
        self.limits = LimitsConfig()
        self.submitted: list[dict[str, Any]] = []

    async def infer(self, lane: Lane, offered: RequestTensors, **terms: Any) -> bytes:
        self.submitted.append({"lane": lane, "offered": offered, **terms})
        offsets, length = body_layout(CONTRACT.outputs, offered.rows)
        body = bytearray(length)
        for offset, values in zip(offsets, (FIRST, SECOND), strict=True):
            body[offset : offset + values.nbytes] = values.tobytes()
        return bytes(body)


class OneModel(Models):
    def __init__(self) -> None:
        super().__init__()
        self.serve(lane_of(contract=CONTRACT))


class Memory:
    """What a call knows of its caller and its memory.

    Attributes:
        used: Bytes that are taken now.
        taken: Each time that some were.
    """

    grant = FULL_GRANT

    def __init__(self, limit: int) -> None:
        self.used, self.limit = 0, limit
        self.taken: list[int] = []

    def charge_memory(self, size: int) -> None:
        if self.used + size > self.limit:
            raise Overloaded("no memory")
        self.used += size
        self.taken.append(size)

    def release_memory(self, size: int) -> None:
        self.used -= size


class Played:
    def __init__(self, memory: int = 1 << 30) -> None:
        self.call: Any = Memory(memory)
        self.submitter = ScriptedSubmitter()
        self.inference = Inference(OneModel(), self.submitter)

    async def ask(
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
        scanned = scan(request.SerializeToString(), LimitsConfig())
        parts = await self.inference.answer(scanned, terms, self.call, is_streamed=is_streamed)
        return oip_pb2.ModelInferResponse.FromString(b"".join(parts))


@in_loop
async def test_a_response_has_all_outputs_in_the_contracts_order() -> None:
    response = await Played().ask(id="seven")
    assert (response.model_name, response.model_version, response.id) == ("m0", "1", "seven")
    assert [(each.name, each.datatype, list(each.shape)) for each in response.outputs] == [
        ("first", "INT64", [3]),
        ("second", "FP32", [3, 2]),
    ]
    assert list(response.raw_output_contents) == [FIRST.tobytes(), SECOND.tobytes()]


@pytest.mark.parametrize("wanted", [["second"], ["second", "first"], ["first"]])
@in_loop
async def test_outputs_that_are_wanted_come_in_the_order_of_the_wish(wanted: list[str]) -> None:
    """Also when the same was asked without a wish before, and when it is asked again."""
    played = Played()
    await played.ask()
    by_name = {"first": FIRST.tobytes(), "second": SECOND.tobytes()}
    for _ in range(2):
        response = await played.ask(outputs=[{"name": name} for name in wanted])
        assert [each.name for each in response.outputs] == wanted
        assert list(response.raw_output_contents) == [by_name[name] for name in wanted]


@in_loop
async def test_the_desk_is_told_the_terms_and_the_calls_deadline() -> None:
    played = Played()
    await played.ask(deadline_ns=77, parameters={"timeout": {"int64_param": 5000}})
    await played.ask()
    first, second = played.submitter.submitted
    assert (first["call_deadline_ns"], first["terms"].budget_ms) == (77, 5.0)
    assert (second["call_deadline_ns"], second["terms"].budget_ms) == (NEVER_NS, None)
    assert first["terms"].urgency == second["terms"].urgency == 0.5


@in_loop
async def test_tensors_reach_the_desk_without_a_copy() -> None:
    played = Played()
    message = oip_pb2.ModelInferRequest(
        model_name="m0",
        inputs=[{"name": "x", "datatype": "INT64", "shape": [3]}],
        raw_input_contents=[FIRST.tobytes()],
    ).SerializeToString()
    held = bytearray(message)
    await played.inference.answer(scan(held, LimitsConfig()), StreamTerms((), None), played.call)
    held[-1] = 1
    (tensor,) = played.submitter.submitted[0]["offered"].tensors
    assert tensor[-1] == 1


@in_loop
async def test_a_streams_last_response_says_so_where_that_is_wanted() -> None:
    played = Played()
    wish = {"triton_enable_empty_final_response": {"bool_param": True}}
    streamed = await played.ask(is_streamed=True, parameters=wish)
    assert streamed.parameters["triton_final_response"].bool_param
    assert not (await played.ask(is_streamed=True)).parameters
    assert not (await played.ask(parameters=wish)).parameters


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"model_name": "m1"}, ModelNotFound),
        ({"model_version": "2"}, ModelNotFound),
        ({"outputs": [{"name": "third"}]}, ContractError),
    ],
)
@in_loop
async def test_what_is_not_there_is_refused_before_the_desk(
    values: dict[str, Any], error: type[IskanderError]
) -> None:
    played = Played()
    with pytest.raises(error):
        await played.ask(**values)
    assert not played.submitter.submitted


@in_loop
async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """And neither a large head nor one that is refused is kept."""
    played = Played()
    for number in range(REMEMBERED_MAX + 10):
        await played.ask(parameters={f"p{number}": {"bool_param": True}})
    remembered = played.inference._requests
    assert len(remembered) == 10
    await played.ask(parameters={"p" * 5000: {"bool_param": True}})
    with pytest.raises(IskanderError):
        await played.ask(parameters={"priority": {"string_param": "high"}})
    assert len(remembered) == 10

    monkeypatch.setattr(oip_infer, "read_head", lambda *_: pytest.fail("it is read again"))
    await played.ask(parameters={f"p{REMEMBERED_MAX}": {"bool_param": True}}, id="another")


@in_loop
async def test_a_request_like_one_before_is_held_against_its_lengths_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And one with other lengths against the contract, whatever was before it."""
    played = Played()
    await played.ask()
    for length in (16, 32, 0):
        with pytest.raises(MalformedInput, match=f"24 bytes as INT64, got {length}"):
            await played.ask(raw_input_contents=[bytes(length)])
    with pytest.raises(MalformedInput, match="need one each"):
        await played.ask(raw_input_contents=[FIRST.tobytes()] * 2)
    typed = {"name": "x", "datatype": "INT64", "shape": [3], "contents": {"int64_contents": FIRST}}
    await played.ask(inputs=[typed], raw_input_contents=[])

    monkeypatch.setattr(oip_infer, "read_inputs", lambda *_: pytest.fail("it is looked at again"))
    await played.ask(raw_input_contents=[(FIRST + 7).tobytes()], id="another")
    (tensor,) = played.submitter.submitted[-1]["offered"].tensors
    assert bytes(tensor) == (FIRST + 7).tobytes()


@in_loop
async def test_a_request_like_one_before_is_held_against_the_models_new_contract() -> None:
    played = Played()
    await played.ask()
    lane = played.inference._models.find_loaded("m0", None, "")
    lane.contract = replace(CONTRACT, inputs=(spec("x", "float64"),))
    with pytest.raises(ContractError, match="wanted FP64"):
        await played.ask()


@in_loop
async def test_a_model_that_was_loaded_anew_is_not_answered_by_what_is_remembered() -> None:
    played = Played()
    await played.ask()
    lane = played.inference._models.find_loaded("m0", None, "")
    renamed = tuple(replace(each, tensor=f"new {each.tensor}") for each in CONTRACT.outputs)
    lane.contract = replace(CONTRACT, outputs=renamed)
    response = await played.ask()
    assert [each.name for each in response.outputs] == ["new first", "new second"]


@in_loop
async def test_kinds_of_responses_that_are_remembered_are_bounded() -> None:
    played = Played()
    for rows in range(3, REMEMBERED_MAX + 13):
        await played.ask(
            inputs=[{"name": "x", "datatype": "INT64", "shape": [rows]}],
            raw_input_contents=[bytes(8 * rows)],
        )
    assert len(played.inference._layouts) == 10


@in_loop
async def test_large_typed_contents_take_their_memory_before_they_are_read() -> None:
    """8 bytes for each number of one byte, and as much again where they are joined."""
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
    played = Played()
    await played.ask(**typed)
    assert played.call.used == 0 and len(played.call.taken) == 1
    assert played.call.taken[0] >= 2 * 8 * count
    small = Played(memory=8 * count)
    with pytest.raises(Overloaded):
        await small.ask(**typed)
    assert not small.submitter.submitted and small.call.used == 0


@in_loop
async def test_small_contents_take_no_memory() -> None:
    played = Played(memory=0)
    await played.ask()
    assert played.submitter.submitted and not played.call.taken
