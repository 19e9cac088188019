"""Conformance of the HTTP/2 transport to RFC 9113 and RFC 7541, checked by h2spec.

h2spec sends requests without a message and expects a response with DATA; no method of the gateway
responds like that. It also sends frames on open streams. The cases therefore run against the
gateway's listener with a handler that sends one message after a delay.
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

DEFAULT_PATH = Path(__file__).resolve().parents[3] / "shared" / "tools" / "h2spec"
H2SPEC = os.environ.get("H2SPEC") or shutil.which("h2spec") or str(DEFAULT_PATH)
TIMEOUT_S = 240.0
OPEN_S = 0.05
"""Keeps a call open for the frames after its headers."""
FRAME_SIZE = "http2/4.2/3"
"""Sends HEADERS of 20 kB: above the default frame size and below the gateway's."""
LARGE_HEADERS = "Sends a large size HEADERS frame that exceeds the SETTINGS_MAX_FRAME_SIZE"

pytestmark = pytest.mark.skipif(
    not Path(H2SPEC).exists(), reason="h2spec not found; set H2SPEC to its path"
)


def run(port: int, *arguments: str) -> tuple[int, int, set[str]]:
    """Returns the number of passed and skipped cases, and the titles of failed cases."""
    command = [H2SPEC, "--strict", "--host", "127.0.0.1", "--port", str(port), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    total = re.search(r"(\d+) tests, (\d+) passed, (\d+) skipped, (\d+) failed", result.stdout)
    assert total is not None, result.stdout + result.stderr
    failures = result.stdout.partition("Failures:")[2]
    failed = set(re.findall(r"\u00d7 \d+: (.*)", failures))
    assert (int(total[4]) > 0) == bool(failed), result.stdout
    return int(total[2]), int(total[3]), failed


async def respond(call: Call) -> None:
    """Sends one message on every call."""
    await asyncio.sleep(OPEN_S)
    await call.answer(b"message")


def test_all_cases_pass() -> None:
    with listening(respond) as port:
        passed, skipped, failed = run(port)
        assert failed <= {LARGE_HEADERS}
        assert passed + len(failed) == 147 and skipped == 0
        # The same case with a header block above the server's SETTINGS_MAX_FRAME_SIZE.
        assert run(port, FRAME_SIZE, "--max-header-length", "300000") == (1, 0, set())
