"""Event loop of a worker: receives messages, runs batches, answers, writes heartbeats.

Its thread runs all batches and is the only user of the channels. Models are loaded on another
thread (`loading`). A batch on a device is launched, and answered when its end is signalled
(`devices.pipeline`); the next one is launched meanwhile.

Runs on: worker main.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from iskander.errors import Cancelled, IskanderError, ManifestError
from iskander.foundation.clock import now_ns
from iskander.interprocess.control.channel import FRAME_BYTES_MAX
from iskander.interprocess.control.messages import (
    Done,
    Drain,
    Execute,
    Failed,
    Load,
    Loaded,
    LoadFailed,
    Notice,
    Probe,
    Probed,
    Stepped,
    ToGateway,
    Unload,
    Unloaded,
    decode_to_worker,
    encode,
)
from iskander_worker.attachments import Attachment, Attachments
from iskander_worker.backends import Run
from iskander_worker.batches.failing_rows import FailingRows, Finding
from iskander_worker.devices.cuda import DeviceLost, DriverError
from iskander_worker.devices.pipeline import Pipeline
from iskander_worker.loading.loader import LoadQueue
from iskander_worker.session import Session

SHARED_ANSWER_NS: Final = 100_000
"""An answer waits for the next one if the last batch took less time than this, and the next batch
has no more rows. Batches of a few microseconds that arrived together thus share one answer frame,
which halves the wake-ups; longer ones are answered one by one."""


class _Launched(NamedTuple):
    """A batch in flight on a device."""

    attachment: Attachment
    message: Execute
    begun_ns: int


class WorkerLoop:
    """Serves one gateway after another; the models stay loaded between two gateways.

    `is_leaving` is set by a stop signal.
    """

    def __init__(self, cores: int) -> None:
        self._loads = LoadQueue(min(cores, len(os.sched_getaffinity(0))))
        self._attachments: Attachments | None = None
        self._pipeline: Pipeline | None = None
        self._launched: deque[_Launched] = deque()
        self._previous_end_ns = 0
        self._failing_rows = FailingRows()
        self.is_leaving = False
        os.register_at_fork(after_in_child=self._after_fork)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def serve(self, attachments: Attachments, *, on_iteration: Callable[[], bool]) -> bool:
        """Run until this worker is drained (True), or all gateway connections are lost (False).

        `on_iteration` is called in every event loop iteration until it returns True.
        """
        self._attachments = attachments
        is_drained = is_stopping = is_iteration_done = False
        loads = self._loads
        loads.keep_unused()
        while attachments.attached:
            if self._launched:
                self._answer_launched()  # Meanwhile the heartbeat names the oldest batch.
            if not self._launched:
                attachments.heartbeat()
            is_iteration_done = is_iteration_done or on_iteration()
            if loads.is_busy:
                self._answer_load(attachments)
            elif loads.kept_until_ns:
                loads.close_unused(self._used_sessions())
            for attachment in attachments.wait(self._wake_fds()):
                drain = self._handle_messages(attachments, attachment)
                if self._launched and (drain is not None or attachment.channel.has_ended):
                    self._finish_launched()
                if drain is not None:
                    is_stopping = is_stopping or drain.is_stopping
                    is_drained = self._on_drain(attachments, attachment, drain) or is_drained
                elif attachment.channel.has_ended:
                    self._drop(attachments, attachment)
            if self.is_leaving or attachments.is_reassigned:
                for attachment in attachments.attached:
                    attachment.send_leaving()
            elif not is_drained:
                attachments.attach_missing()
        attachments.abort_handshakes()
        # Without the first gateway process, the last one that stops ends this worker.
        return is_drained or is_stopping or self.is_leaving or attachments.is_reassigned

    def finish(self) -> bool:
        """Start no more loads; return whether this process can exit in an orderly way."""
        return self._loads.shut_down()

    def _wake_fds(self) -> tuple[int, ...]:
        """Descriptors that are readable after the end of a load, or of a batch on the device."""
        wake_fds: tuple[int, ...] = (self._loads.wake_fd,) if self._loads.is_busy else ()
        if self._launched:
            assert self._pipeline is not None
            wake_fds = (*wake_fds, self._pipeline.wake_fd)
        return wake_fds

    def _handle_messages(self, attachments: Attachments, attachment: Attachment) -> Drain | None:
        """Handle and answer all messages of a gateway process, up to a `Drain`."""
        channel = attachment.channel
        answers: list[ToGateway] = []
        for frame in channel.receive():
            for message in decode_to_worker(frame):
                if type(message) is Execute:
                    if answers and not _is_brief(message, attachment):
                        channel.send(encode(answers))
                        answers = []
                    if self._pipeline is not None and attachment.executor.needs_launch(message):
                        self._launch(message, attachment, answers)
                        continue
                    heartbeat = partial(
                        attachments.heartbeat, attachment, message.batch_id, message.model
                    )
                    heartbeat()
                    self._execute(message, attachment, answers, heartbeat)
                    if self._loads.is_busy:
                        self._answer_load(attachments)
                elif isinstance(message, Load):
                    self._loads.put(attachment, message.model)
                elif isinstance(message, Unload):
                    self._unload(attachment, message.model)
                    answers.append(Unloaded(message.model))
                elif isinstance(message, Probe):
                    run, session = Run(), attachment.executor.sessions.get(message.model)
                    run.heartbeat = attachments.heartbeat
                    reason = session.probe(run) if session is not None else ""
                    answers.append(Probed(message.model, reason))
                else:
                    assert isinstance(message, Drain)
                    channel.send(encode(answers))
                    return message
        if answers:
            channel.send(encode(answers))
        return None

    def _on_drain(self, attachments: Attachments, attachment: Attachment, drain: Drain) -> bool:
        """Detach from a gateway process; return whether it was the first, which ends this worker.

        If the first one stops, its peers stop too and drain by themselves; if it only replaces
        this worker, they receive `Leaving`.
        """
        is_first = attachments.is_first(attachment)
        self._drop(attachments, attachment, is_open_until_exit=is_first)
        if is_first and not drain.is_stopping:
            for peer in attachments.attached:
                peer.send_leaving()
        return is_first

    def _execute(
        self,
        message: Execute,
        attachment: Attachment,
        answers: list[ToGateway],
        heartbeat: Callable[[], None],
    ) -> None:
        # Step 7
        begun_ns = now_ns()
        canceller = attachment.canceller
        run = canceller.begin(message.batch_id)
        run.deadline_ns, run.hops, run.heartbeat = message.deadline_ns, message.hops, heartbeat
        try:
            attachment.executor.execute(message, run)
        except IskanderError as error:
            found = self._failing_rows.find(attachment.executor, message, run, error)
            answers.append(_failed(message, error, found, is_aborted=canceller.end()))
            run.steps = ()
            if self._pipeline is not None:
                self._pipeline.check()
            return
        canceller.end()
        run_ns = now_ns() - begun_ns
        attachment.last_run = (message.model, message.rows, run_ns)
        self._failing_rows.ran.add(message.model)
        answers.append(Done(message.batch_id, run_ns))
        if run.steps:
            answers.append(Stepped(message.model, run.steps))
            run.steps = ()

    def _launch(self, message: Execute, attachment: Attachment, answers: list[ToGateway]) -> None:
        """Enqueue a batch on the device; if two are in flight already, wait for the end of one."""
        pipeline = self._pipeline
        assert pipeline is not None and self._attachments is not None
        while pipeline.is_full:
            self._answer_launched(is_waiting=True)
        begun_ns = now_ns()
        if not self._launched:
            self._attachments.heartbeat(attachment, message.batch_id, message.model)
        canceller = attachment.canceller
        run = canceller.begin(message.batch_id)
        run.deadline_ns, run.hops = message.deadline_ns, message.hops
        try:
            attachment.executor.launch(message, run, pipeline)
        except IskanderError as error:
            answers.append(_failed(message, error, Finding(), is_aborted=canceller.end()))
            return
        # An abort after the launch is without effect: kernels in a stream cannot be withdrawn.
        canceller.end()
        self._launched.append(_Launched(attachment, message, begun_ns))

    def _answer_launched(self, *, is_waiting: bool = False) -> None:
        """Answer the batches that have ended on the device."""
        assert self._pipeline is not None and self._attachments is not None
        flights = self._pipeline.finish(is_waiting=is_waiting)
        if not flights:
            self._pipeline.check()
            return
        for flight in flights:
            attachment, message, begun_ns = self._launched.popleft()
            # Batches overlap: the run time of a batch begins when the previous batch ended.
            run_ns = flight.ended_ns - max(begun_ns, self._previous_end_ns)
            self._previous_end_ns = flight.ended_ns
            attachment.last_run = (message.model, message.rows, run_ns)
            attachment.channel.send(encode([Done(message.batch_id, run_ns), flight.copied]))
        if self._launched:
            attachment, message, _ = self._launched[0]
            self._attachments.heartbeat(attachment, message.batch_id, message.model)

    def _finish_launched(self) -> None:
        """Wait for all batches on the device, before an attachment is closed."""
        while self._launched:
            self._answer_launched(is_waiting=True)

    def _drop(
        self, attachments: Attachments, attachment: Attachment, *, is_open_until_exit: bool = False
    ) -> None:
        """Detach from a gateway process; keep its models for the process that replaces it."""
        attachments.drop(attachment, is_open_until_exit=is_open_until_exit)
        self._loads.keep_unused()

    def _unload(self, attachment: Attachment, model: int) -> None:
        """Remove a model from a gateway process; close it if no other gateway process uses it."""
        session = attachment.executor.sessions.get(model)
        attachment.executor.drop(model)
        if session is not None and session not in self._used_sessions():
            self._loads.close(session)

    def _used_sessions(self) -> set[Session]:
        assert self._attachments is not None
        attached = self._attachments.attached
        return {
            session for attachment in attached for session in attachment.executor.sessions.values()
        }

    def _answer_load(self, attachments: Attachments) -> None:
        """Send the answers of a finished load, if its gateway process is still attached.

        While a load is running, send a report of its progress when one is due.
        """
        report = self._loads.progress()
        if report is not None and report[0] in attachments.attached:
            report[0].channel.send(encode([report[1]]))
        finished = self._loads.finish_load()
        if finished is None or finished[0] not in attachments.attached:
            return
        attachment, answers = finished
        answers = self._prepare_device(attachment, answers)
        frame = encode(answers)
        if len(frame) > FRAME_BYTES_MAX:
            answer = answers[-1]
            assert isinstance(answer, Loaded | LoadFailed)
            self._unload(attachment, answer.model)
            oversized = ManifestError(
                f"the description of its inputs and outputs has {len(frame)} bytes, limit "
                f"{FRAME_BYTES_MAX}: use fewer of them, or shorter names"
            )
            frame = encode([LoadFailed(answer.model, oversized.code, oversized.message)])
        attachment.channel.send(frame)

    def _prepare_device(self, attachment: Attachment, answers: list[ToGateway]) -> list[ToGateway]:
        """Page-lock an attachment's arenas for the device of a loaded model; return the answers."""
        loaded = answers[-1]
        if type(loaded) is not Loaded:
            return answers
        device = attachment.executor.sessions[loaded.model].device
        if device is None:
            return answers
        try:
            pipeline = self._pipeline = self._pipeline or Pipeline(device)
            if pipeline.device is device:
                return [*map(Notice, attachment.executor.page_lock(device)), *answers]
            reason = ManifestError(
                f"this worker computes on device {pipeline.device.number}, and the model "
                f"names device {device.number}: a worker uses one device"
            )
        except DriverError as error:
            if error.is_fatal:
                raise DeviceLost(str(error)) from None
            reason = ManifestError(f"the device cannot run batches: {error}")
        self._unload(attachment, loaded.model)
        return [LoadFailed(loaded.model, reason.code, reason.message)]

    def _after_fork(self) -> None:
        """Close the channels in a child of a model's code, so that they end with this worker."""
        for attachment in self._attachments.attached if self._attachments is not None else ():
            attachment.channel.close()

    def _on_signal(self, number: int, frame: object) -> None:
        self.is_leaving = True


def _failed(message: Execute, error: IskanderError, found: Finding, *, is_aborted: bool) -> Failed:
    reason = Cancelled("batch cancelled: its callers are gone") if is_aborted else error
    code, text, retry_after_ms = reason.code, reason.message, reason.retry_after_ms
    return Failed(message.batch_id, code, text, retry_after_ms, *found)


def _is_brief(message: Execute, attachment: Attachment) -> bool:
    """Whether this batch is so short that the previous answer can wait for its answer."""
    model, rows, run_ns = attachment.last_run
    return message.model == model and message.rows <= rows and run_ns < SHARED_ANSWER_NS
