"""grpcio's own balancing over three gateways, with the Open Inference Protocol."""

from __future__ import annotations

import base64
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import http2, models
from support.processes import eventually, running
from support.proxies import HOSTS, SPREAD_MAX, Fleet, fleet
from support.reference_client import Facts, ReferenceClient

from iskander._generated import oip_pb2, orca_pb2

SCRIPT = Path(models.__file__).parent / "balancing_client.py"
THREADS = 6
REQUESTS = 1500
INFER = "/inference.GRPCInferenceService/ModelInfer"
REPORT = "endpoint-load-metrics-bin"
NAME = "gateways.test"
ROUND_ROBIN: dict[str, Any] = {"round_robin": {}}
WEIGHTED: dict[str, Any] = {
    "weighted_round_robin": {"blackoutPeriod": "0.1s", "weightUpdatePeriod": "0.5s"}
}
LAME_DUCK_S = 0.5
"""Health watchers are notified at once, so it need not cover an interval between checks."""
SLOW_TURNS = 1000


class NamedClient(ReferenceClient):
    """A client in a mount namespace whose /etc/hosts has all gateways under one name."""

    def __init__(self, folder: Path) -> None:
        hosts, script = folder / "hosts", folder / "client.sh"
        hosts.write_text("".join(f"{host} {NAME}\n" for host in HOSTS))
        script.write_text(f'mount --bind {hosts} /etc/hosts && exec {sys.executable} "$@"\n')
        script.chmod(0o700)
        check = subprocess.run([*_unshare(), "true"], check=False, capture_output=True)
        if check.returncode:
            pytest.skip(f"no mount namespace: {check.stderr.decode()}")
        self._process = subprocess.Popen(
            [*_unshare(), "sh", str(script), str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


def _unshare() -> list[str]:
    return ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]


@contextmanager
def loading(client: ReferenceClient, **arguments: Any) -> Iterator[list[Facts]]:
    """Load by a client during the block; then the list has its result."""
    facts: list[Facts] = []
    client.begin("load", threads=THREADS, **arguments)
    try:
        yield facts
    finally:
        client.send("stop")
        facts.append(client.result())
        client.close()


def target_of(gateways: Fleet, kind: str) -> str:
    if kind == "dns":
        return f"dns:///{NAME}:{gateways.port}"
    return "ipv4:" + ",".join(gateways.addresses)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ipv4", "dns"])
def test_round_robin_with_health_checks_loses_no_request(kind: str, tmp_path: Path) -> None:
    """One gateway is drained, another one killed while it is away; then both start again."""
    with fleet(tmp_path, lame_duck_s=LAME_DUCK_S) as gateways:
        client = NamedClient(tmp_path) if kind == "dns" else ReferenceClient(str(SCRIPT))
        target = target_of(gateways, kind)
        with loading(client, target=target, policy=ROUND_ROBIN, factor=3, addend=1) as facts:
            for index in range(3):
                gateways.wait_served(index)
            assert gateways.spread(REQUESTS) <= SPREAD_MAX
            gateways.drain(0)
            gateways.wait_served(2)
            gateways.kill(1)
            gateways.wait_served(2)
            for index in (0, 1):
                gateways.restart(index)
            for index in (0, 1):
                gateways.wait_served(index)
            assert gateways.spread(REQUESTS) <= SPREAD_MAX
        (result,) = facts
        assert list(result) == ["right"]
        print(f"{kind}: {result['right']} calls, none lost")  # noqa: T201


@pytest.mark.slow
def test_weighted_round_robin_sends_less_to_a_slow_gateway(tmp_path: Path) -> None:
    """Round robin spreads the same calls evenly; the weights are those of the load reports."""
    paths = [
        models.looping(tmp_path / f"model{index}", SLOW_TURNS if index == 0 else 1, 0)
        for index in range(3)
    ]
    with fleet(tmp_path, paths, load_reports=True) as gateways:
        shares = {}
        for name, policy in (("round robin", ROUND_ROBIN), ("weighted", WEIGHTED)):
            client = ReferenceClient(str(SCRIPT))
            target = target_of(gateways, "ipv4")
            with loading(client, target=target, policy=policy, factor=1, addend=0) as facts:
                # By then the weights are in effect.
                gateways.shares(REQUESTS // 2)
                shares[name] = gateways.shares(REQUESTS // 2)
            (result,) = facts
            assert list(result) == ["right"]
        print(shares)  # noqa: T201
        slow, *others = shares["round robin"]
        assert slow > 0.8 * sum(others) / len(others)
        slow, *others = shares["weighted"]
        assert slow < 0.5 * sum(others) / len(others)


@pytest.mark.parametrize("is_reporting", [True, False])
def test_load_report_is_a_trailer_of_every_call(is_reporting: bool, tmp_path: Path) -> None:
    """Of calls that end well or not; the report covers the calls of the last second."""
    ids = {"name": "ids", "path": str(models.row_ids(tmp_path / "ids")), "intra_threads": 1}
    tensor = {"name": "x", "datatype": "INT64", "shape": [3]}
    raw = [np.arange(3).tobytes()]
    good = oip_pb2.ModelInferRequest(model_name="ids", inputs=[tensor], raw_input_contents=raw)
    bad = oip_pb2.ModelInferRequest(model_name="other", inputs=[tensor], raw_input_contents=raw)
    workers = {"groups": ["0"], "reattach_s": 5.0}
    server = {"load_reports": is_reporting}
    with (
        running(tmp_path, [ids], workers=workers, server=server) as gateway,
        http2.Wire(gateway.address) as wire,
    ):
        streams = itertools.count(1, 2)

        def trailers(request: Any) -> dict[str, str]:
            stream_id, body = next(streams), http2.message(request.SerializeToString())
            wire.feed(http2.headers(stream_id, http2.request_fields(INFER)))
            wire.feed(http2.data(stream_id, body, http2.END_STREAM))
            fields: dict[str, str] = wire.answer(stream_id).blocks[-1]
            return fields

        if not is_reporting:
            assert all(REPORT not in trailers(each) for each in (good, bad))
            return
        encoded = eventually(lambda: trailers(good).get(REPORT), what="a load report")
        report = orca_pb2.OrcaLoadReport.FromString(base64.b64decode(encoded + "=="))
        assert report.rps_fractional > 0 and report.application_utilization > 0
        assert report.named_metrics["iskander.queue_wait_seconds"] >= 0
        rejected = trailers(bad)
        assert rejected["grpc-status"] == "5" and REPORT in rejected
