"""Conformance of the HTTP/2 transport by h2spec, an independent tester (RFC 9113 and RFC 7541).

h2spec sends requests without a message and expects a response with DATA, which no method of the
gateway gives, and frames on streams that are still open; so the cases run against the gateway's
listener with a method that answers a message after a moment.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.grpc_listener import listening

from iskander.transport.http2.call import Call

BESIDE = Path(__file__).resolve().parents[3] / "shared" / "tools" / "h2spec"
H2SPEC = os.environ.get("H2SPEC") or shutil.which("h2spec") or str(BESIDE)
WITHIN_S = 240.0
OPEN_S = 0.05
"""A call stays open for the frames behind its headers."""
FRAME_SIZE = "http2/4.2/3"
"""Sends HEADERS of 20 kB: more than the default frame size, and less than the gateway's."""
LARGE_HEADERS = "Sends a large size HEADERS frame that exceeds the SETTINGS_MAX_FRAME_SIZE"

pytestmark = pytest.mark.skipif(
    not Path(H2SPEC).exists(), reason="h2spec is not there: name it in H2SPEC"
)


def run(port: int, *arguments: str) -> tuple[int, int, set[str]]:
    """Passed and skipped cases, and the titles of those that failed."""
    command = [H2SPEC, "--strict", "--host", "127.0.0.1", "--port", str(port), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    total = re.search(r"(\d+) tests, (\d+) passed, (\d+) skipped, (\d+) failed", done.stdout)
    assert total is not None, done.stdout + done.stderr
    failures = done.stdout.partition("Failures:")[2]
    failed = set(re.findall(r"\u00d7 \d+: (.*)", failures))
    assert (int(total[4]) > 0) == bool(failed), done.stdout
    return int(total[2]), int(total[3]), failed


async def answer(call: Call) -> None:
    """A message for every call, whatever it sends."""
    await asyncio.sleep(OPEN_S)
    await call.answer(b"message")


def test_every_case_passes() -> None:
    with listening(answer) as port:
        passed, skipped, failed = run(port)
        assert failed <= {LARGE_HEADERS}
        assert passed + len(failed) == 147 and skipped == 0
        # The same case with a block larger than the frames that the server announces.
        assert run(port, FRAME_SIZE, "--max-header-length", "300000") == (1, 0, set())
