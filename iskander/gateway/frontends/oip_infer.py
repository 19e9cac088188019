"""One Open Inference Protocol request from its bytes to the bytes of its response.

Runs on: gateway loop. Source: Open Inference Protocol v2.
"""

from __future__ import annotations

from typing import Final

from iskander._generated import oip_pb2
from iskander.contract.tensors import Contract
from iskander.errors import ContractError
from iskander.gateway.access.grants import Grant
from iskander.gateway.asking import Desk
from iskander.gateway.frontends.oip_request import Asked, read_head, tensors_of
from iskander.gateway.frontends.oip_tensors import raw_tensor
from iskander.gateway.frontends.oip_wire import Scanned, response
from iskander.gateway.frontends.terms import StreamTerms
from iskander.gateway.http2.call import Message
from iskander.gateway.lanes.lane import Lane
from iskander.gateway.models import Models
from iskander.gateway.offered import Tensor, give, take

REMEMBERED_MAX: Final = 256
REMEMBERED_BYTES_MAX: Final = 4096
FINAL: Final = "triton_final_response"


class Inference:
    """Answers requests, each by itself.

    Args:
        models: What is served.
        desk: Has the rows computed.
    """

    def __init__(self, models: Models, desk: Desk) -> None:
        self._models = models
        self._desk = desk
        self._asked: dict[bytes, Asked] = {}
        self._heads: dict[tuple[int, int, tuple[str, ...], bool], tuple[Contract, bytes]] = {}

    async def answer(
        self, scanned: Scanned, terms: StreamTerms, grant: Grant, *, is_streamed: bool = False
    ) -> list[Message]:
        """Have a request computed.

        Args:
            scanned: The request.
            terms: Of its call.
            grant: What its caller may ask.
            is_streamed: More requests may come with that call.

        Returns:
            A ModelInferResponse in parts.

        Raises:
            IskanderError: Why there is none.
        """
        asked = self._read(scanned.head)
        grant.require_model(asked.model)
        key = terms.route_key_of(asked.said)
        lane = self._models.find_loaded(asked.model, asked.version, key)
        contract = lane.contract
        assert contract is not None
        if asked.outputs:
            _require_outputs(contract, asked.outputs)
        limits = self._desk.limits
        offered = take(contract, tensors_of(asked, scanned.raw, contract, limits), limits)
        body = await self._desk.ask(
            lane,
            offered,
            terms=terms.with_said(asked.said),
            call_deadline_ns=terms.deadline_ns,
        )
        given = give(contract, offered.rows, body)
        if asked.outputs:
            by_name = {tensor.name: tensor for tensor in given}
            given = [by_name[name] for name in asked.outputs]
        is_final_said = is_streamed and asked.wants_final
        which = (lane.model.key, offered.rows, asked.outputs, is_final_said)
        head = self._head(which, lane, contract, given)
        return response(head, scanned.id, [raw_tensor(tensor) for tensor in given])

    def _read(self, head: bytes) -> Asked:
        """Read a request, or remember it: a client's next one differs in its tensors alone."""
        asked = self._asked.get(head)
        if asked is None:
            asked = read_head(head, self._desk.limits.columns)
            if len(self._asked) >= REMEMBERED_MAX:
                self._asked.clear()
            if len(head) <= REMEMBERED_BYTES_MAX:
                self._asked[head] = asked
        return asked

    def _head(
        self,
        key: tuple[int, int, tuple[str, ...], bool],
        lane: Lane,
        contract: Contract,
        given: list[Tensor],
    ) -> bytes:
        """All of a response but its id and its tensors, made or remembered."""
        of, head = self._heads.get(key, (None, b""))
        if of is not contract:
            head = _head(lane, given, is_final_said=key[-1])
            if len(self._heads) >= REMEMBERED_MAX:
                self._heads.clear()
            self._heads[key] = (contract, head)
        return head


def _require_outputs(contract: Contract, wanted: tuple[str, ...]) -> None:
    known = [spec.tensor for spec in contract.outputs]
    for name in wanted:
        if name not in known:
            raise ContractError(
                f"`{name[:100]}` is no output of the model; it has {', '.join(known)}"
            )


def _head(lane: Lane, given: list[Tensor], *, is_final_said: bool) -> bytes:
    message = oip_pb2.ModelInferResponse(
        model_name=lane.model.name,
        model_version=lane.model.version,
        outputs=[
            oip_pb2.ModelInferResponse.InferOutputTensor(
                name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
            )
            for tensor in given
        ],
    )
    if is_final_said:
        message.parameters[FINAL].bool_param = True
    head: bytes = message.SerializeToString()
    return head
