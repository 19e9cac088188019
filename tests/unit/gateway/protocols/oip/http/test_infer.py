"""HTTP inference calls with a scripted submitter."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.lanes import lane_of

from iskander.config.schema import HttpConfig, LimitsConfig
from iskander.errors import Cancelled, DeadlineExceeded, IskanderError, Overloaded
from iskander.gateway.auth.grants import FULL_GRANT
from iskander.gateway.auth.source import Source
from iskander.gateway.protocols.oip.http.body import BodyQuota
from iskander.gateway.protocols.oip.http.infer import HttpInference
from iskander.gateway.protocols.oip.http.messages import ParsedRequest
from iskander.gateway.protocols.tensors import RequestTensors
from iskander.gateway.scheduling.request import Terms
from iskander.gateway.transport.limits.receive_budget import ReceiveBudget

BODY = json.dumps(
    {"inputs": [{"name": "x", "datatype": "INT64", "shape": [2], "data": [1, 2]}]}
).encode()


class ScriptedSubmitter:
    """A submitter that responds as the test scripts it."""

    def __init__(self, respond: Callable[[RequestTensors], Awaitable[bytes]]) -> None:
        self.limits = LimitsConfig()
        self.tracer = None
        self.uses_contexts = False
        self.calls = 0
        self.terms: list[Terms] = []
        self.callers: list[object] = []
        self._respond = respond

    def require_open(self, caller: object) -> None: ...

    @contextlib.contextmanager
    def open_call(self, caller: object = None) -> Iterator[None]:
        self.callers.append(caller)
        self.calls += 1
        yield
        self.calls -= 1

    async def infer(
        self, _: Any, offered: RequestTensors, *, terms: Terms, traced: object
    ) -> bytes:
        self.terms.append(terms)
        return await self._respond(offered)


class Models:
    """Models with one lane for every name."""

    def find_loaded(self, name: str, version: str | None, key: str) -> Any:
        return lane_of()


async def tripled(offered: RequestTensors) -> bytes:
    return (3 * np.frombuffer(offered.tensors[0], np.int64)).tobytes()


class Client:
    """The client of one call.

    Attributes:
        disconnected: Set when the client disconnects.
        sent: Messages that the server sent.
    """

    def __init__(self, body: bytes = BODY, **headers: str) -> None:
        self.disconnected = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.submitter: ScriptedSubmitter | None = None
        self._pieces = [{"type": "http.request", "body": body, "more_body": False}]
        encoded = [
            (name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()
        ]
        self._scope: dict[str, Any] = {
            "type": "http",
            "headers": encoded,
            "path_params": {"name": "m0"},
            "grant": FULL_GRANT,
            "client": ("10.0.0.9", 1234),
        }

    async def send(self, submitter: ScriptedSubmitter, **config: Any) -> bytes:
        """Send the request and return the body of the response."""
        self._scope["is_surplus"] = config.pop("is_surplus", False)
        self.submitter = submitter
        budget = ReceiveBudget(config.pop("receive_bytes", 1 << 30))
        settings = HttpConfig(**config)
        infer = HttpInference(
            Models(),  # type: ignore[arg-type]
            submitter,  # type: ignore[arg-type]
            settings,
            BodyQuota(settings.bodies_bytes, budget, 10.0, [].append),
        )
        try:
            await infer(self._scope, self._receive, self._send)
        finally:
            assert budget.used_bytes == 0
        return b"".join(message["body"] for message in self.sent[1:])

    async def _receive(self) -> Any:
        if self._pieces:
            return self._pieces.pop(0)
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        assert self.submitter is not None and self.submitter.calls == 1, "the call is not open"
        self.sent.append(message)


def test_call_is_open_until_its_response_is_written() -> None:
    async def run() -> None:
        submitter, client = ScriptedSubmitter(tripled), Client()
        assert json.loads(await client.send(submitter))["outputs"][0]["data"] == [3, 6]
        assert submitter.calls == 0

    asyncio.run(run())


def test_parameter_overrides_a_header() -> None:
    async def run() -> list[Terms]:
        submitter = ScriptedSubmitter(tripled)
        headers = {"iskander_client": "a", "iskander_deadline_ms": "30"}
        body = json.loads(BODY) | {"parameters": {"iskander_client": "b"}}
        await Client(json.dumps(body).encode(), **headers).send(submitter)
        await Client(iskander_timestamp_ns="1").send(submitter)
        return submitter.terms

    both, stamped = asyncio.run(run())

    assert (both.client, both.budget_ms) == ("b", 30.0)
    assert stamped.age_ms > 0


@pytest.mark.parametrize(
    ("headers", "parameters", "expected"),
    [
        ({"iskander_priority": "5"}, {"priority": 1}, Terms(client="c", priority=0)),
        ({"iskander_priority": "5"}, {"priority": 0}, Terms(client="c", priority=5)),
        ({"iskander_priority": "5"}, {"iskander_priority": 0}, Terms(client="c", priority=0)),
        ({"iskander_deadline_ms": "30"}, {"timeout": 50_000}, Terms(client="c", budget_ms=50.0)),
        (
            {"iskander_urgency": "1", "iskander_newest_wins": "true", "iskander_ttl_ms": "9"},
            {"iskander_urgency": 0, "iskander_newest_wins": False},
            Terms(client="c", urgency=0.0, is_newest_wins=False, ttl_ms=9.0),
        ),
    ],
)
def test_each_parameter_overrides_its_header(
    headers: dict[str, str], parameters: dict[str, Any], expected: Terms
) -> None:
    submitter = ScriptedSubmitter(tripled)
    body = json.loads(BODY) | {"parameters": parameters}
    asyncio.run(Client(json.dumps(body).encode(), iskander_client="c", **headers).send(submitter))

    (terms,) = submitter.terms
    source = Source(connection="10.0.0.9:1234")
    assert terms == replace(expected, is_named=True, source=source)


def test_connections_of_one_address_are_one_caller() -> None:
    """Otherwise one client could use all calls with many connections."""

    async def respond(_: RequestTensors) -> bytes:
        return bytes(16)

    submitter = ScriptedSubmitter(respond)
    asyncio.run(Client().send(submitter))
    assert submitter.callers == ["10.0.0.9"]


def test_disconnect_cancels_the_request() -> None:
    async def run() -> None:
        started, cancelled = asyncio.Event(), asyncio.Event()

        async def wait_forever(_: RequestTensors) -> bytes:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            return b""

        client = Client()
        task = asyncio.create_task(client.send(ScriptedSubmitter(wait_forever)))
        await started.wait()
        client.disconnected.set()
        with pytest.raises(Cancelled):
            await task
        await cancelled.wait()
        assert client.sent == []

    asyncio.run(asyncio.wait_for(run(), 10))


def test_rejected_request_is_freed_immediately() -> None:
    """Garbage collections are rare, and bodies are large."""

    async def reject(_: RequestTensors) -> bytes:
        await asyncio.sleep(0)
        raise DeadlineExceeded("late")

    async def run() -> None:
        with pytest.raises(IskanderError):
            await Client().send(ScriptedSubmitter(reject))

    with without_gc():
        asyncio.run(run())
        assert not [each for each in gc.get_objects() if type(each) is ParsedRequest]


def test_surplus_connections_and_bodies_above_the_limits_are_rejected() -> None:
    async def run() -> None:
        for config in (
            {"is_surplus": True},
            {"bodies_bytes": len(BODY) - 1},
            {"receive_bytes": 1000},
        ):
            client = Client()
            with pytest.raises(Overloaded):
                await client.send(ScriptedSubmitter(tripled), **config)

    asyncio.run(run())


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
