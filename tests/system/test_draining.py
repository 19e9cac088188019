"""Drain with unread responses."""

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


def serve(folder: Path, drain_s: float) -> Iterator[Gateway]:
    ids = str(models.row_ids(folder / "ids"))
    served = [{"name": "ids", "path": ids, "intra_threads": 1, "max_batch_rows": 500_000}]
    workers = {"groups": ["0"], "reattach_s": 5.0}
    with running(folder, served, workers=workers, server={"drain_s": drain_s}) as ready:
        yield ready


@pytest.fixture
def long_drain(tmp_path: Path) -> Iterator[Gateway]:
    yield from serve(tmp_path, 20.0)


@pytest.fixture
def short_drain(tmp_path: Path) -> Iterator[Gateway]:
    yield from serve(tmp_path, 1.5)


class SlowReader(client.Wire):
    """A client with three megabytes of unread results."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway.address, first=b"", buffer_bytes=BUFFER_BYTES)
        wide = client.window_update(0, client.WINDOW_MAX - 65_535)
        self.feed(client.PREFACE, client.settings(window=client.WINDOW_MAX), wide)
        batch = pa.record_batch({"x": np.arange(ROWS)})
        parts = [raw.descriptor("ids") + raw.schema_data(batch.schema), raw.batch_data(batch)]
        body = b"".join(client.message(part) for part in parts)
        self.feed(client.headers(1, client.request_fields(raw.EXCHANGE)))
        for at in range(0, len(body), 16_384):
            self.feed(client.data(1, body[at : at + 16_384]))
        self.feed(client.data(1, b"", client.END_STREAM))
        lanes = gateway.stats
        eventually(lambda: lanes()["lanes"]["ids/1"].get("completed") == 1, what="the results")


@pytest.mark.slow
def test_drain_waits_for_slow_readers(long_drain: Gateway) -> None:
    with SlowReader(long_drain) as slow:
        long_drain.signal(signal.SIGTERM)
        eventually(lambda: PAUSED in long_drain.text(), what="the first drain report")
        eventually(
            lambda: long_drain.text().count(PAUSED) >= 3,
            what="drain reports after the last grace period",
        )
        while slow.read():
            pass
        assert client.answer_in(slow.frames, 1).is_over
        assert sum(len(each.payload) for each in slow.frames_of(client.DATA)) > ROWS * 8
    assert long_drain.wait() == 0
    assert "not drained in" not in long_drain.text()


@pytest.mark.slow
def test_drain_ends_at_its_limit_with_unread_responses(short_drain: Gateway) -> None:
    with SlowReader(short_drain):
        short_drain.signal(signal.SIGTERM)
        assert short_drain.wait() == 0
    assert "not drained in" in short_drain.text()


@pytest.mark.slow
def test_drain_has_the_limit_of_the_last_reload(long_drain: Gateway) -> None:
    with SlowReader(long_drain):
        text = long_drain.config.read_text()
        long_drain.config.write_text(text.replace("drain_s = 20.0", "drain_s = 0.5"))
        long_drain.signal(signal.SIGHUP)
        changed = "reloaded: server.drain_s changed"
        eventually(lambda: changed in long_drain.text(), what="the reload")
        long_drain.signal(signal.SIGTERM)
        assert long_drain.wait() == 0
    assert "not drained in 0.5 s (`server.drain_s`)" in long_drain.text()
