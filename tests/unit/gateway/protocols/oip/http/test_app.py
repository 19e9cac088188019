"""HTTP request targets: accepted forms and their paths."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from iskander.gateway.auth.grants import FULL_GRANT, Grant
from iskander.gateway.auth.origin import UNKNOWN_ORIGIN
from iskander.gateway.protocols.oip.http.app import OipHttp


class Access:
    """Allows every call, and records whether it is a probe."""

    def __init__(self) -> None:
        self.probes: list[bool] = []

    async def authenticate(self, _: Any, *, is_probe: bool = False, origin: Any) -> Grant:
        del origin
        self.probes.append(is_probe)
        return FULL_GRANT


class Infer:
    """Responds with the name of the requested model."""

    async def __call__(self, scope: Any, _: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        name = scope["path_params"]["name"].encode()
        await send({"type": "http.response.body", "body": name})


def request(target: bytes, method: str = "GET") -> tuple[int, bytes, bool]:
    """Returns status, body and whether the call was a probe; `target` is path and query."""
    access, sent = Access(), []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    counts: Counter[tuple[str, str]] = Counter()
    app: Any = OipHttp(None, None, Infer(), access, None, counts).app()  # type: ignore[arg-type]
    scope = {
        "type": "http",
        "origin": UNKNOWN_ORIGIN,
        "is_own_host": True,
        "method": method,
        "raw_path": target,
        "path": target.decode(),
        "query_string": b"",
        "root_path": "",
        "headers": [],
    }
    asyncio.run(app(scope, receive, send))
    (is_probe,) = access.probes
    assert counts == {("http", str(sent[0]["status"])): 1}
    return sent[0]["status"], sent[1]["body"], is_probe


@pytest.mark.parametrize(
    "server", [b"", b"http://host", b"HTTP://127.0.0.1:8000", b"https://u@[::1]:1", b"http://%2f"]
)
def test_absolute_target_is_accepted(server: bytes) -> None:
    assert request(server + b"/v2/health/live") == (200, b'{"live":true}', True)
    assert request(server + b"/v2/models/a/infer", "POST") == (200, b"a", False)


@pytest.mark.parametrize(
    "target",
    [
        b"http://host",
        b"http://host/",
        b"http:///",
        b"http:/v2/health/live",
        b"ftp://host/v2/health/live",
        b"/http://host/v2/health/live",
        b"//host/v2/health/live",
        b"http://host//v2/health/live",
        b"http://host/http://host/v2/health/live",
        b"*",
    ],
)
def test_unknown_target_is_not_found(target: bytes) -> None:
    status, _, is_probe = request(target)
    assert (status, is_probe) == (404, False)
