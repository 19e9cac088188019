"""A stop, and clients that have not read their answers yet."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support import http2 as client
from support import models, raw
from support.processes import Gateway, eventually, running

ROWS = 400_000
BUFFER_BYTES = 4096
PAUSED = "1 connections with unread responses"


def serving(folder: Path, drain_s: float) -> Iterator[Gateway]:
    ids = str(models.row_ids(folder / "ids"))
    served = [{"name": "ids", "path": ids, "intra_threads": 1, "max_batch_rows": 500_000}]
    workers = {"groups": ["0"], "reattach_s": 5.0}
    with running(folder, served, workers=workers, server={"drain_s": drain_s}) as ready:
        yield ready


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Gateway]:
    yield from serving(tmp_path, 20.0)


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Gateway]:
    yield from serving(tmp_path, 1.5)


class Slow(client.Wire):
    """A client that has asked for three megabytes, and has not read any of them."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway.address, first=b"", buffer_bytes=BUFFER_BYTES)
        wide = client.window_update(0, client.WINDOW_MAX - 65_535)
        self.say(client.PREFACE, client.settings(window=client.WINDOW_MAX), wide)
        batch = pa.record_batch({"x": np.arange(ROWS)})
        parts = [raw.descriptor("ids") + raw.schema_data(batch.schema), raw.batch_data(batch)]
        body = b"".join(client.message(part) for part in parts)
        self.say(client.headers(1, client.request_fields(raw.EXCHANGE)))
        for at in range(0, len(body), 16_384):
            self.say(client.data(1, body[at : at + 16_384]))
        self.say(client.data(1, b"", client.END_STREAM))
        lanes = gateway.stats
        eventually(lambda: lanes()["lanes"]["ids/1"].get("completed") == 1, what="its results")


def test_a_stop_waits_for_clients_that_read_slowly(patient: Gateway) -> None:
    with Slow(patient) as slow:
        patient.signal(signal.SIGTERM)
        eventually(lambda: PAUSED in patient.text(), what="the second's news of the drain")
        eventually(lambda: patient.text().count(PAUSED) >= 3, what="more than the last grace")
        while slow.read():
            pass
        assert client.answer_in(slow.frames, 1).is_over
        assert sum(len(each.payload) for each in slow.heard(client.DATA)) > ROWS * 8
    assert patient.wait() == 0
    assert "not drained in" not in patient.text()


@pytest.mark.slow
def test_a_stop_does_not_wait_for_ever_for_one_that_does_not_read(hasty: Gateway) -> None:
    with Slow(hasty):
        hasty.signal(signal.SIGTERM)
        assert hasty.wait() == 0
    assert "not drained in" in hasty.text()
