"""Code blocks of docs/scaling.md: the service config runs here, engines in tests/engines."""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
from pathlib import Path

import grpc
import numpy as np
import pytest
import yaml
from support import models
from support.models import ROOT
from support.processes import Gateway, eventually, running
from support.scaling_page import BLOCKS, block

from iskander._generated import oip_pb2

RUN = {
    "Online clients": "system/test_scaling_page.py",
    "Ray": "engines/ray_page_cases.py",
    "Resume after the driver": "engines/ray_page_cases.py",
    "Files and tables": "engines/ray_page_cases.py",
    "Servers that run already": "engines/ray_page_cases.py",
    "Spark": "engines/test_spark.py",
    "Dask": "engines/test_frames.py",
    "Daft": "engines/test_frames.py",
}
"""Test that runs each block, with other paths and addresses."""
NOT_RUN = {
    "More than one machine": "a diagram",
    "Kubernetes": "needs Docker and a cluster; its files are checked here",
}
"""Reason for each block that does not run."""
INFER = "/inference.GRPCInferenceService/ModelInfer"
CALLS = 60


def test_every_block_runs_or_has_a_reason() -> None:
    assert set(BLOCKS) == {*RUN, *NOT_RUN}
    for name, path in RUN.items():
        text = (ROOT / "tests" / path).read_text("utf-8")
        assert re.search(rf'block\(\s*"{re.escape(name)}"', text), name


def test_service_config_spreads_calls_and_repeats_those_of_a_killed_gateway(
    tmp_path: Path,
) -> None:
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids")), "intra_threads": 1}]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    values = np.arange(3)
    request = oip_pb2.ModelInferRequest(model_name="ids")
    request.inputs.add(name="x", datatype="INT64", shape=values.shape)
    request.raw_input_contents.append(values.tobytes())
    killed = Gateway(tmp_path / "a", served)
    with contextlib.ExitStack() as stack, running(tmp_path / "b", served) as other:
        stack.callback(killed.end)
        gateways = [killed.start(), other]
        target = "ipv4:" + ",".join(each.address for each in gateways)
        options = [("grpc.service_config", block("Online clients"))]
        with grpc.insecure_channel(target, options) as channel:
            infer = channel.unary_unary(
                INFER,
                request_serializer=oip_pb2.ModelInferRequest.SerializeToString,
                response_deserializer=oip_pb2.ModelInferResponse.FromString,
            )

            def call() -> None:
                (answer,) = infer(request, timeout=60.0).raw_output_contents
                assert np.frombuffer(answer, np.int64).tolist() == (3 * values + 1).tolist()

            def counts() -> list[int]:
                call()
                lanes = [each.stats()["lanes"]["ids/1"] for each in gateways]
                return [int(lane.get("requests", 0)) for lane in lanes]

            eventually(lambda: all(counts()), what="calls at both gateways")
            before = counts()
            for _ in range(CALLS):
                call()
            after = counts()
            assert abs((after[0] - before[0]) - (after[1] - before[1])) <= 2
            killed.signal(signal.SIGKILL)
            for _ in range(CALLS):
                call()


def test_commands_for_a_cluster_name_files_of_this_repository() -> None:
    build, apply = (
        shlex.split(line.removeprefix("$ "), comments=True)
        for line in block("Kubernetes").splitlines()
    )
    assert build[:3] == ["docker", "build", "-f"] and build[-1] == "."
    dockerfile = (ROOT / build[3]).read_text("utf-8")
    (target,) = re.findall(r"--target (\w+)", block("Kubernetes"))
    assert re.search(rf"^FROM .+ AS {target}$", dockerfile, re.M | re.I)
    assert apply[:3] == ["kubectl", "apply", "-f"]
    files = sorted((ROOT / apply[3]).glob("*.yaml"))
    kinds = {each["kind"] for file in files for each in yaml.safe_load_all(file.read_text("utf-8"))}
    assert {"Deployment", "Service"} <= kinds


@pytest.mark.parametrize("name", BLOCKS)
def test_python_blocks_compile(name: str) -> None:
    if "import " in BLOCKS[name]:
        compile(BLOCKS[name], name, "exec")
