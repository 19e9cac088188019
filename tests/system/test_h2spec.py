"""Conformance of the HTTP/2 transport to RFC 9113 and RFC 7541, checked by h2spec.

All cases run against a gateway. Some need a response with DATA after some time, or calls that stay
open; no method of the gateway answers h2spec's requests like that. So all cases also run against
the gateway's listener with a handler that sends one message after a delay.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import models
from support.grpc_listener import listening
from support.http2_cases import CASES
from support.processes import running

from iskander.gateway.transport.http2.call import Call

DEFAULT_PATH = Path(__file__).resolve().parents[3] / "shared" / "tools" / "h2spec"
H2SPEC = os.environ.get("H2SPEC") or shutil.which("h2spec") or str(DEFAULT_PATH)
TIMEOUT_S = 240.0
OPEN_S = 0.05
"""Keeps a call open for the frames after its headers."""
FRAME_SIZE = "http2/4.2/3"
LARGE_FRAME = "its HEADERS of 20 kB are above the default frame size and below the announced one"
NO_DATA = "a gateway answers its request, which has no message, by an error without DATA"
DEPARTURES = {
    FRAME_SIZE: LARGE_FRAME,
    "generic/2/2": NO_DATA,
    "generic/2/3": NO_DATA,
    "http2/5.1.2/1": "each of its calls ends at once, so the maximum is not exceeded",
    "http2/6.5.3/1": NO_DATA,
    "http2/6.9.1/1": NO_DATA,
    "http2/6.9.2/1": NO_DATA,
    "http2/6.9.2/2": NO_DATA,
}
"""Cases that a gateway does not pass, and why; `docs/conformance.md` lists them."""
RACES = {"http2/5.1/5", "http2/5.1/6", "http2/6.1/2", "http2/6.9/2", "http2/6.9.1/3", "http2/8.1/1"}
RACES |= {"http2/8.1.2.6/1", "http2/8.1.2.6/2"}
"""Cases that a gateway passes if their later frames arrive before the answer to the first one."""

pytestmark = pytest.mark.skipif(
    not Path(H2SPEC).exists(), reason="h2spec not found; set H2SPEC to its path"
)


def run(port: int, report: Path, *arguments: str) -> dict[str, bool]:
    """Whether each case passed, by its name; a skipped case did not."""
    command = [H2SPEC, "--strict", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--junit-report", str(report), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert report.exists(), result.stdout + result.stderr
    return {
        f"{case.get('package')}/{number}": len(case) == 0
        for suite in ET.parse(report).iter("testsuite")
        for number, case in enumerate(suite.iter("testcase"), start=1)
    }


@pytest.fixture(scope="module")
def port_of_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("h2spec")
    ids = {"name": "ids", "path": str(models.row_ids(folder / "ids")), "intra_threads": 1}
    with running(folder, [ids], workers={"groups": ["0"]}) as gateway:
        yield int(gateway.address.rpartition(":")[2])


def test_gateway_passes_all_cases_but_the_departures(port_of_gateway: int, tmp_path: Path) -> None:
    passed = run(port_of_gateway, tmp_path / "report.xml")
    assert passed.keys() == CASES.keys(), "the cases of this repository have the same names"
    failed = {name for name, is_passed in passed.items() if not is_passed}
    assert failed - RACES == set(DEPARTURES)


async def respond(call: Call) -> None:
    """Sends one message on every call."""
    await asyncio.sleep(OPEN_S)
    await call.answer(b"message")


def test_listener_with_a_delayed_message_passes_all_cases(tmp_path: Path) -> None:
    with listening(respond) as port:
        passed = run(port, tmp_path / "report.xml")
        assert passed.keys() == CASES.keys()
        assert [name for name, is_passed in passed.items() if not is_passed] == [FRAME_SIZE]
        # With a header block above the server's SETTINGS_MAX_FRAME_SIZE.
        report, large = tmp_path / "large.xml", ("--max-header-length", "300000")
        assert list(run(port, report, FRAME_SIZE, *large).values()) == [True]
