"""One Open Inference Protocol request from its bytes to the bytes of its response.

Runs on: gateway loop. Source: Open Inference Protocol v2.
"""

from __future__ import annotations

import asyncio
from typing import Final, TypeAlias

from iskander._generated import oip_pb2
from iskander.auth.grants import Grant
from iskander.config.schema import LimitsConfig
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import ContractError
from iskander.protocols.oip.request import (
    COPIES,
    ParsedRequest,
    copied_bytes,
    is_copied,
    is_for_thread,
    read_head,
    tensors_of,
)
from iskander.protocols.oip.tensors import raw_tensor
from iskander.protocols.oip.wire import Scanned, raw_head, with_id
from iskander.protocols.stream_terms import StreamTerms
from iskander.protocols.submit import RequestSubmitter
from iskander.protocols.tensors import (
    NAME_MAX,
    InputMatch,
    RequestTensors,
    give,
    match_inputs,
    places,
    take,
)
from iskander.repository.models import Models
from iskander.scheduling.lane import Lane
from iskander.transport.http2.call import Call, Message

REMEMBERED_MAX: Final = 256
REMEMBERED_BYTES_MAX: Final = 4096
FINAL: Final = "triton_final_response"

_Key: TypeAlias = tuple[int, int, tuple[str, ...], bool]
"""Of a kind of responses: model, rows, outputs that are wanted, whether it says that it is last."""


class _Shape:
    """A response but for its id and the bytes of its tensors.

    Attributes:
        contract: That it is of.
        wanted: Numbers of the outputs that it has.
        head: Serialized.
        places: What is before each of them on the wire, and where it begins and ends in the
            results; None where it is made of them.
    """

    __slots__ = ("contract", "head", "places", "wanted")

    def __init__(
        self,
        contract: Contract,
        wanted: list[int],
        head: bytes,
        places: list[tuple[bytes, int, int]] | None,
    ) -> None:
        self.contract = contract
        self.wanted = wanted
        self.head = head
        self.places = places


class CachedRequest:
    """Requests that differ in their tensors' bytes alone, as a client's mostly do.

    Attributes:
        asked: What they say.
        fit: How the tensors of the last one fitted its model; None where that is to be found out.
    """

    __slots__ = ("asked", "fit")

    def __init__(self, asked: ParsedRequest) -> None:
        self.asked = asked
        self.fit: InputMatch | None = None


class ResolvedRequest:
    """What a request wants, as far as it is known before its tensors are.

    Attributes:
        known: What it says, and what is known of others that say the same.
        lane: Of the model version.
        contract: By which it is answered, whatever the lane has by then.
        id: Of the request, in UTF-8.
    """

    __slots__ = ("contract", "id", "known", "lane")

    def __init__(
        self, known: CachedRequest, lane: Lane, contract: Contract, request_id: bytes
    ) -> None:
        self.known = known
        self.lane = lane
        self.contract = contract
        self.id = request_id


class Inference:
    """Answers requests, each by itself.

    Args:
        models: What is served.
        desk: Has the rows computed.
    """

    def __init__(self, models: Models, desk: RequestSubmitter) -> None:
        self._models = models
        self._desk = desk
        self._known: dict[bytes, CachedRequest] = {}
        self._shapes: dict[_Key, _Shape] = {}

    async def answer(
        self, scanned: Scanned, terms: StreamTerms, call: Call, *, is_streamed: bool = False
    ) -> list[Message]:
        """Have a request computed.

        Args:
            scanned: The request.
            terms: Of its call.
            call: Of the request: its caller's grant, and its memory.
            is_streamed: More requests may come with that call.

        Returns:
            A ModelInferResponse in parts.

        Raises:
            IskanderError: Why there is none.
        """
        wanted = self.find(scanned, terms, call.grant)
        asked, contract, limits = wanted.known.asked, wanted.contract, self._desk.limits
        taken_bytes = 0
        if is_for_thread(asked, scanned):
            taken_bytes = min(copied_bytes(asked, scanned), COPIES * limits.bytes)
            call.take_memory(taken_bytes)
        try:
            if taken_bytes:
                offered = await asyncio.to_thread(_offered, asked, scanned, contract, limits)
            else:
                offered = self.offered(wanted, scanned)
                if is_copied(asked, scanned):
                    taken_bytes = offered.size
                    call.take_memory(taken_bytes)
            body = await self._desk.ask(
                wanted.lane,
                offered,
                terms=terms.with_said(asked.said),
                call_deadline_ns=terms.deadline_ns,
            )
        finally:
            if taken_bytes:
                call.give_back_memory(taken_bytes)
        return self.response(wanted, offered.rows, body, is_streamed=is_streamed)

    def find(self, scanned: Scanned, terms: StreamTerms, grant: Grant) -> ResolvedRequest:
        """Find what a request wants.

        Raises:
            IskanderError: Why it cannot be had.
        """
        known = self._read(scanned.head)
        asked = known.asked
        grant.require_model(asked.model)
        lane = self._models.find_loaded(asked.model, asked.version, terms.route_key_of(asked.said))
        contract = lane.contract
        assert contract is not None
        if asked.outputs:
            _require_outputs(contract, asked.outputs)
        return ResolvedRequest(known, lane, contract, scanned.id)

    def offered(self, wanted: ResolvedRequest, scanned: Scanned) -> RequestTensors:
        """What a request offers, which is for no thread to read.

        Raises:
            IskanderError: It is not what its model takes.
        """
        known, contract, raw = wanted.known, wanted.contract, scanned.raw
        if known.fit is not None and known.fit.contract is contract:
            offered = known.fit.offered(raw)
            if offered is not None:
                return offered
        limits = self._desk.limits
        offered = _offered(known.asked, scanned, contract, limits)
        if raw:
            known.fit = match_inputs(contract, raw, offered)
        return offered

    def response(
        self,
        wanted: ResolvedRequest,
        rows: int,
        body: bytes | memoryview,
        *,
        is_streamed: bool = False,
    ) -> list[Message]:
        """A ModelInferResponse in parts, with the results in a body."""
        asked, lane, contract = wanted.known.asked, wanted.lane, wanted.contract
        is_final_said = is_streamed and asked.wants_final
        key = (lane.model.key, rows, asked.outputs, is_final_said)
        shape = self._shapes.get(key)
        if shape is None or shape.contract is not contract:
            shape = self._shape(key, lane, contract)
        parts: list[Message] = [with_id(shape.head, wanted.id)]
        if shape.places is None:
            given = give(contract, rows, body)
            for index in shape.wanted:
                tensor = raw_tensor(given[index])
                parts += (raw_head(len(tensor)), tensor)
        else:
            for raw, begin, end in shape.places:
                is_all = end - begin == len(body)
                parts += (raw, body if is_all else memoryview(body)[begin:end])
        return parts

    def _read(self, head: bytes) -> CachedRequest:
        """Read a request, or remember it."""
        known = self._known.get(head)
        if known is None:
            known = CachedRequest(read_head(head, self._desk.limits.columns))
            if len(self._known) >= REMEMBERED_MAX:
                self._known.clear()
            if len(head) <= REMEMBERED_BYTES_MAX:
                self._known[head] = known
        return known

    def _shape(self, key: _Key, lane: Lane, contract: Contract) -> _Shape:
        """Make what is the same in all responses of a kind, and remember it."""
        _, rows, outputs, is_final_said = key
        names = [spec.tensor for spec in contract.outputs]
        wanted = [names.index(name) for name in outputs or names]
        there = places(contract, rows)
        framed: list[tuple[bytes, int, int]] | None = None
        if there is not None:
            spans = [there[index] for index in wanted]
            framed = [(raw_head(end - begin), begin, end) for begin, end in spans]
        head = _head(lane, [contract.outputs[index] for index in wanted], rows, is_final_said)
        shape = _Shape(contract, wanted, head, framed)
        if len(self._shapes) >= REMEMBERED_MAX:
            self._shapes.clear()
        self._shapes[key] = shape
        return shape


def _offered(
    asked: ParsedRequest, scanned: Scanned, contract: Contract, limits: LimitsConfig
) -> RequestTensors:
    """What a request's tensors are to its model; on any thread."""
    return take(contract, tensors_of(asked, scanned, contract, limits), limits)


def _require_outputs(contract: Contract, wanted: tuple[str, ...]) -> None:
    known = [spec.tensor for spec in contract.outputs]
    for name in wanted:
        if name not in known:
            raise ContractError(
                f"`{name[:NAME_MAX]}` is no output of the model; it has {', '.join(known)}"
            )


def _head(lane: Lane, specs: list[TensorSpec], rows: int, is_final_said: bool) -> bytes:
    message = oip_pb2.ModelInferResponse(
        model_name=lane.model.name,
        model_version=lane.model.version,
        outputs=[
            oip_pb2.ModelInferResponse.InferOutputTensor(
                name=spec.tensor, datatype=spec.type.dtype.oip, shape=(rows, *spec.shape)
            )
            for spec in specs
        ],
    )
    if is_final_said:
        message.parameters[FINAL].bool_param = True
    head: bytes = message.SerializeToString()
    return head
