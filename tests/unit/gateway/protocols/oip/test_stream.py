"""OIP request streams: rejected requests are answered and freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from support.input_arena import in_loop

from iskander._generated import oip_pb2
from iskander.config.schema import LimitsConfig
from iskander.errors import IskanderError, ModelNotFound
from iskander.gateway.auth.grants import FULL_GRANT
from iskander.gateway.auth.source import UNKNOWN_SOURCE
from iskander.gateway.protocols.oip.infer import Inference
from iskander.gateway.protocols.oip.stream import STATUS_METADATA, InferStream
from iskander.gateway.protocols.submit import RequestSubmitter
from iskander.gateway.repository.models import Models
from iskander.gateway.transport.http2.call import Call, Message

UNKNOWN_MODEL = oip_pb2.ModelInferRequest(model_name="nobody", id="seven").SerializeToString()
TOO_MANY_FIELDS = b"\x2a\x00" * 5000
MALFORMED = b"\x0b" * 100


class NullSubmitter(RequestSubmitter):
    tracer = None
    uses_contexts = False

    def __init__(self) -> None:
        self.limits = LimitsConfig()


class FakeCall(Call):
    """A client that sends one message repeatedly and reads all responses."""

    deadline_ns = None
    grant = FULL_GRANT
    source = UNKNOWN_SOURCE

    def __init__(self, raw: bytes, count: int, *, ends_on_error: bool) -> None:
        self.metadata = (STATUS_METADATA,) if ends_on_error else ()
        self.raw, self.remaining = raw, count
        self.sent: list[weakref.ref[np.ndarray]] = []
        self.written: list[bytes] = []

    async def read(self) -> Message | None:
        if not self.remaining:
            return None
        self.remaining -= 1
        message = np.frombuffer(bytearray(self.raw), np.uint8)
        self.sent.append(weakref.ref(message))
        return message.data

    async def write(self, *parts: Message) -> None:
        self.written.append(b"".join(parts))

    @property
    def kept_messages(self) -> int:
        return sum(each() is not None for each in self.sent)


def stream_of(call: Call) -> InferStream:
    return InferStream(call, Inference(Models(), NullSubmitter()))


@pytest.fixture
def _no_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collections")
@pytest.mark.parametrize(
    ("raw", "code"),
    [(UNKNOWN_MODEL, "model_not_found"), (TOO_MANY_FIELDS, "limit"), (MALFORMED, "malformed")],
)
@in_loop
async def test_rejected_request_is_freed(raw: bytes, code: str) -> None:
    call = FakeCall(raw, 20, ends_on_error=False)
    await stream_of(call).run()

    assert len(call.written) == 20 and call.kept_messages == 0
    response = oip_pb2.ModelStreamInferResponse.FromString(call.written[-1])
    assert response.error_message
    assert response.infer_response.parameters["iskander-code"].string_param == code


@pytest.mark.usefixtures("_no_collections")
@in_loop
async def test_stream_that_ends_with_an_error_frees_its_requests() -> None:
    call = FakeCall(UNKNOWN_MODEL, 20, ends_on_error=True)
    try:
        await stream_of(call).run()
    except IskanderError as error:
        assert isinstance(error, ModelNotFound)
    else:
        pytest.fail("the stream did not end")

    assert not call.written and len(call.sent) > 1 and call.kept_messages == 0
