"""KServe's own clients against the Open Inference Protocol.

It wants an older psutil than this server, and so an environment of its own: `make test-kserve`.
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


@pytest.mark.skipif(not PYTHON, reason="KSERVE_PYTHON names no Python that has KServe's client")
def test_kserves_client_gets_what_it_asks_for(tmp_path: Path) -> None:
    path = models.row_ids(tmp_path / "ids")
    model = {"name": "ids", "path": str(path), "intra_threads": 1}
    reference = ReferenceClient(SCRIPT, PYTHON)
    try:
        workers = {"groups": ["0"], "reattach_s": 5.0}
        with running(
            tmp_path, [model], workers=workers, http={"address": "127.0.0.1:0"}
        ) as gateway:
            found = reference.run("everything", address=gateway.address)
            url = f"http://{gateway.stats()['http_address']}"
            told = reference.run("over_rest", base_url=url)
    finally:
        reference.close()
    answer = ["7", [1, 4, 7, 10, 13]]
    assert told == {"live": True, "ready": True, "model_ready": True, "answer": answer[1]}
    assert found == {
        "live": True,
        "ready": True,
        "model_ready": True,
        "raw": answer,
        "typed": answer,
        "unknown": "NOT_FOUND",
    }
