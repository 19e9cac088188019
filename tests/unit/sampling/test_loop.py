"""Loop of the observer process: consumers do not affect each other, and reports have a limit."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Mapping
from typing import Any, cast

import pytest

from iskander.config.observation import ObservationConfig
from iskander.foundation.clock import NS_PER_S
from iskander.gateway.observation.messages import (
    FRAME_BYTES_MAX,
    SAMPLES_MAX,
    Copied,
    OutputPart,
    Report,
    SampleRef,
    Samples,
    decode_to_gateway,
    encode,
)
from iskander.sampling import loop as loop_module
from iskander.sampling.loop import (
    DRAIN_NS,
    TRIM_NS,
    TRIM_USED_NS,
    Copy,
    ObserverLoop,
    SampledModels,
)
from iskander.sampling.sample import Consumer, Sample


class Reporting(Consumer):
    """A consumer with a report, or with an error in each call."""

    def __init__(self, report: Mapping[str, Any] | None) -> None:
        self.value = report
        self.is_closed = False

    def consume(self, sample: Sample) -> None:
        raise AssertionError("there are no samples")

    def tick(self, now_ns: int) -> None:
        if self.value is None:
            raise ValueError("no tick")

    def report(self) -> dict[str, Any]:
        if self.value is None:
            raise ValueError("no report")
        return dict(self.value)

    def close(self) -> None:
        if self.value is None:
            raise ValueError("no close")
        self.is_closed = True


def run(**consumers: Reporting) -> Report:
    """Run the loop for one tick; return its report."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(10)
        ours.shutdown(socket.SHUT_WR)
        ObserverLoop(theirs, ObservationConfig(), SampledModels(), consumers).run()
        report = decode_to_gateway(ours.recv(FRAME_BYTES_MAX))
    assert isinstance(report, Report)
    return report


def test_error_of_a_consumer_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    good = Reporting({"counts": {"a": 1}})
    with caplog.at_level(logging.CRITICAL):
        report = run(bad=Reporting(None), good=good)
    assert report.values["good"] == {"counts": {"a": 1}}
    assert "bad" not in report.values and report.values["observer"]["counts"]["failed"] == 1
    assert good.is_closed


def test_slow_consumers_complete_their_files_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits at the stop of the gateway may take longer than the time until it kills."""
    clock = [0]
    monkeypatch.setattr(loop_module, "now_ns", lambda: clock[0])
    good = Reporting({})
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.shutdown(socket.SHUT_WR)
        loop = ObserverLoop(theirs, ObservationConfig(), SampledModels(), {"good": good})
        loop._ready.extend([cast(Copy, None)] * 100)

        def consume(_: Copy) -> None:
            clock[0] += NS_PER_S

        monkeypatch.setattr(loop, "_consume", consume)
        loop.run()
    assert good.is_closed and clock[0] <= DRAIN_NS + 2 * NS_PER_S


def test_longest_report_is_sent() -> None:
    """Its limit is that of a frame, not the default buffer of the system."""
    text = "a" * (FRAME_BYTES_MAX - 200)
    assert run(one=Reporting({"text": text})).values["one"]["text"] == text


def test_report_above_the_limit_is_a_bug() -> None:
    """It is not mistaken for the end of the gateway, which is an exit without a reason."""
    with pytest.raises(OSError) as found:
        run(one=Reporting({"text": "a" * (1 << 20)}))
    assert found.value.errno == errno.EMSGSIZE


def test_samples_have_an_answer_while_more_of_them_arrive() -> None:
    """Their memory is held until then, and the gateway may always be faster."""
    output = OutputPart(1, 0, 1, 0, 1)
    refs = [
        SampleRef(ticket, 1, 0, 1, b"i" * 16, 0, 0, 1, (output,))
        for ticket in range(3 * SAMPLES_MAX)
    ]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for start in range(0, len(refs), SAMPLES_MAX):
            ours.send(encode(Samples(tuple(refs[start : start + SAMPLES_MAX]))))
        ours.shutdown(socket.SHUT_WR)
        ObserverLoop(theirs, ObservationConfig(buffer_bytes=1), SampledModels(), {}).run()
        theirs.close()
        answers: list[list[int]] = []
        while frame := ours.recv(FRAME_BYTES_MAX):
            message = decode_to_gateway(frame)
            if isinstance(message, Copied):
                answers.append(message.refused)
    assert [len(each) for each in answers] == [SAMPLES_MAX] * 3
    assert [ticket for each in answers for ticket in each] == [ref.ticket for ref in refs]


def test_free_memory_is_returned_after_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within seconds after the last sample, and again later, when writers have freed more."""

    class Pool:
        returned = 0

        def release_unused(self) -> None:
            self.returned += 1

    pool = Pool()
    monkeypatch.setattr(loop_module.pa, "default_memory_pool", lambda: pool)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        loop = ObserverLoop(theirs, ObservationConfig(), SampledModels(), {})
        loop._trim(TRIM_NS)
        assert pool.returned == 1
        loop._is_used = True
        for now_ns, returned in (
            (TRIM_NS + TRIM_USED_NS - 1, 1),
            (TRIM_NS + TRIM_USED_NS, 2),
            (2 * TRIM_NS, 2),
            (2 * TRIM_NS + TRIM_USED_NS, 3),
        ):
            loop._trim(now_ns)
            assert pool.returned == returned
