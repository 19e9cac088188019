"""KServe's own clients against the Open Inference Protocol.

KServe's package requires an older psutil than this server, so it has its own environment:
`make test-kserve`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support import models
from support.processes import running
from support.reference_client import ReferenceClient

SCRIPT = str(Path(models.__file__).with_name("kserve_client.py"))
PYTHON = os.environ.get("KSERVE_PYTHON", "")


@pytest.mark.skipif(not PYTHON, reason="KSERVE_PYTHON is not set to a Python with KServe's client")
def test_kserve_client_gets_results_over_grpc_and_http(tmp_path: Path) -> None:
    path = models.row_ids(tmp_path / "ids")
    model = {"name": "ids", "path": str(path), "intra_threads": 1}
    reference = ReferenceClient(SCRIPT, PYTHON)
    try:
        workers = {"groups": ["0"], "reattach_s": 5.0}
        with running(
            tmp_path, [model], workers=workers, http={"address": "127.0.0.1:0"}
        ) as gateway:
            over_grpc = reference.run("everything", address=gateway.address)
            url = f"http://{gateway.stats()['http_address']}"
            over_http = reference.run("over_rest", base_url=url)
    finally:
        reference.close()
    result = ["7", [1, 4, 7, 10, 13]]
    assert over_http == {"live": True, "ready": True, "model_ready": True, "answer": result[1]}
    assert over_grpc == {
        "live": True,
        "ready": True,
        "model_ready": True,
        "raw": result,
        "typed": result,
        "unknown": "NOT_FOUND",
    }
