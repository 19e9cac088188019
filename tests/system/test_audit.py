"""The audit log of a gateway: calls of each protocol, files, signals, start and stop."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.models import row_ids
from support.processes import Gateway, eventually, running
from support.reference_client import ReferenceClient

from iskander.client import Client
from iskander.errors import IskanderError, Unauthenticated
from iskander.gateway.auth.tokens import add_token

CLIENT_SCRIPT = str(Path(__file__).parent.parent / "support" / "access_client.py")


def records(gateway: Gateway) -> list[dict[str, Any]]:
    path = gateway.folder / "audit.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def matching(gateway: Gateway, **wanted: Any) -> list[dict[str, Any]]:
    return [each for each in records(gateway) if wanted.items() <= each.items()]


def found(gateway: Gateway, count: int = 1, **wanted: Any) -> list[dict[str, Any]]:
    """Records, once there are so many: a thread writes them."""
    eventually(lambda: len(matching(gateway, **wanted)) >= count, what=f"the record {wanted}")
    return matching(gateway, **wanted)


def test_every_administrative_action_is_recorded(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    operator = add_token(tokens, "operator", ("*",), manage=True)
    reader = add_token(tokens, "reader", ("*",))
    with running(
        tmp_path,
        [{"name": "ids", "path": str(row_ids(tmp_path / "ids"))}],
        server={"address": ["127.0.0.1:0", f"unix:{tmp_path}/own.sock"]},
        workers={"count": 1},
        http={"address": "127.0.0.1:0"},
        access={"tokens": "tokens.toml", "audit_file": "audit.jsonl"},
        token=operator,
    ) as gateway:
        (start,) = found(gateway, action="start")
        assert start["actor"] == "(server)"
        with Client(gateway.address, token=operator) as client:
            with pytest.raises(IskanderError):
                client.unload("ids")
            client.reload()
        (unload,) = found(gateway, action="unload", target="ids", actor="operator")
        assert unload["outcome"] == "unsupported" and unload["peer"].startswith("127.0.0.1:")
        (reload,) = found(gateway, action="reload", outcome="ok")
        assert reload["actor"] == "operator"

        with Client(f"unix:{tmp_path}/own.sock", token=reader) as client:
            for refused in (lambda: client.load("ids"), client.drain):
                with pytest.raises(IskanderError):
                    refused()
        denied = found(gateway, 2, actor="reader", outcome="permission_denied")
        assert [each["action"] for each in denied] == ["load", "drain"]
        assert denied[0]["peer"] == f"unix:uid={os.getuid()},pid={os.getpid()}"

        reference = ReferenceClient(CLIENT_SCRIPT)
        try:
            reference.run(
                "call", address=gateway.address, name="load_model", model_name="by-grpc",
                headers={"authorization": f"Bearer {reader}"},
            )  # fmt: skip
        finally:
            reference.close()
        url = f"http://{gateway.stats()['http_address']}/v2/repository/models/by-http/unload"
        header = {"authorization": f"Bearer {reader}"}
        request = urllib.request.Request(url, b"", header, method="POST")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=20)
        caught.value.close()
        for action, target in (("load", "by-grpc"), ("unload", "by-http")):
            assert found(gateway, action=action, target=target, outcome="permission_denied")

        with Client(gateway.address, token="wrong") as client, pytest.raises(Unauthenticated):
            client.stats()
        gateway.signal(signal.SIGHUP)
        assert found(gateway, action="reload", target="SIGHUP")
        tokens.write_text(tokens.read_text() + "\n")
        assert found(gateway, action="reload tokens", outcome="ok", tokens=2)
        assert operator not in (tmp_path / "audit.jsonl").read_text()
        with urllib.request.urlopen(
            f"http://{gateway.stats()['admin_address']}/metrics", timeout=20
        ) as answer:
            assert b'iskander_audit_records_total{result="written"}' in answer.read()
    failed = found(gateway, action="authenticate", outcome="unauthenticated")
    assert sum(each["count"] for each in failed) == 1 and failed[0]["peer"] == "127.0.0.1"
    assert records(gateway)[-1]["action"] in ("stop", "authenticate")
    assert found(gateway, action="stop", actor="(server)")
